"""Weights formats: native, bf16 with a correction, or bf16 alone; and conversion between them.

In formats other than native the parameter's data is bf16, and the model reads that. The step works on the numbers that
`master` returns, and `store_` writes them back.
"""

from collections.abc import Mapping
from hashlib import blake2b

import torch
from torch import Tensor

from baoc.optim.codecs import add_lanes_, lanes
from baoc.types import ParamInfo

_LEVELS = 127
_PER_ELEMENT = 0x9E3779B1  # of the hash that rounds at random
_PER_UNIT = 2.0**8 * _LEVELS  # codes in the number's power of two
_BF16_MAX = torch.finfo(torch.bfloat16).max
CORRECTION = "correction"  # key of the state
SIXTEEN_BIT_DTYPES = (torch.bfloat16, torch.float16)
ELEMENTS_PER_PIECE = 2**20  # elements that are taken in at a time
ELEMENTS_PER_CHECKSUM = 2**17  # that are looked at at a time, in 1 MiB
CONVERSION_BYTES = (
    24 * ELEMENTS_PER_PIECE
)  # what that takes at most beside what stays: fp32 numbers and temporaries of splitting them


def rounding_seed(name: str, *, first: int = 0) -> int:
    """The parameter's own seed for rounding at random, in 32 bits: the same on every rank and after a resume.

    `first`: index of the first element of a part of it, whose bits are those of the whole by this seed.
    """
    seed = int.from_bytes(blake2b(name.encode(), digest_size=4).digest(), "little", signed=True)
    return _int32(seed + first * _PER_ELEMENT)


def dtype_of(weights: str, *, info: ParamInfo) -> torch.dtype:
    """The type of the parameter's data; native weights have the type that the parameter came with."""
    return getattr(torch, info.dtype) if weights == "native" else torch.bfloat16


def master(param: Tensor, state: Mapping[str, Tensor]) -> Tensor:
    """The numbers that the parameter stands for, fp32 or wider; the parameter itself where it holds them."""
    if CORRECTION in state:
        return merge_weights(param.detach(), state[CORRECTION])
    return param.detach().to(torch.float32) if param.dtype in SIXTEEN_BIT_DTYPES else param


@torch.no_grad()
def checksum(param: Tensor) -> int:
    """Checksum of a bf16 parameter: the sum of its bits, on any device and with any strides.

    Summed in parts, because torch casts to the wider type first, which would take 8 bytes per element at once.
    """
    data = param.detach().view(torch.int16)
    data = data.view(-1) if data.is_contiguous() else data
    total = torch.zeros((), dtype=torch.int64, device=data.device)
    for part in data.split(max(1, ELEMENTS_PER_CHECKSUM // max(1, data[:1].numel()))):
        total += part.sum(dtype=torch.int64)
    return int(total)


@torch.no_grad()
def store_(
    param: Tensor,
    state: Mapping[str, Tensor],
    values: Tensor,
    *,
    weights: str,
    name: str,
    phase: int | None = None,
    first: int = 0,
) -> None:
    """Keeps `values`, the new master, as `weights` says. `phase` counts steps from 1; None is outside of any step.

    `first`: index of the first element, where these are a part of a parameter.
    """
    if values is param:
        return
    if CORRECTION in state:
        thresholds = lanes(phase, param.device) if phase is not None else None
        split_weights_(param.detach(), state[CORRECTION], values=values, thresholds=thresholds)
    elif weights == "bf16_sr":  # when it is adopted too: to nearest, weights that are all alike would all be off alike
        round_at_random_(param.detach(), values=values, seed=rounding_seed(name), phase=phase or 0, first=first)
    else:
        param.copy_(values)


@torch.no_grad()
def replace_data_(param: Tensor, *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Gives `param` data of this type on `device`, with its strides, and returns the values to fill it with.

    Data that have type and device already stay. An existing gradient is moved and cast too.
    """
    whole = param.detach()
    if whole.dtype is not dtype or whole.device != device:
        grad, param.grad = param.grad, None
        param.data = torch.empty_like(whole, dtype=dtype, device=device)
        if grad is not None:
            param.grad = grad.to(device=device, dtype=dtype)
    return whole


@torch.no_grad()
def store_in_pieces_(param: Tensor, state: Mapping[str, Tensor], whole: Tensor, *, weights: str, name: str) -> None:
    """Makes `param`, whose data have the type that `weights` asks for, keep `whole`, which may be on another device.

    The numbers are those of `store_`, bit for bit, and come PIECE at a time, so that they are never there in full; of a
    parameter that is not contiguous a row at least.
    """
    flat = param.is_contiguous() and whole.is_contiguous()
    near, values = (param.detach().view(-1), whole.view(-1)) if flat else (param.detach(), whole)
    kept = {key: value.view(near.shape) for key, value in state.items() if key == CORRECTION}
    width = max(1, values[:1].numel())
    for row in range(0, len(values), max(1, ELEMENTS_PER_PIECE // width)):
        part = slice(row, row + max(1, ELEMENTS_PER_PIECE // width))
        piece = master(values[part].to(param.device), {})
        parts = {key: value[part] for key, value in kept.items()}
        store_(near[part], parts, piece, weights=weights, name=name, first=row * width)


# -- the arithmetic of the formats --------------------------------------------------------------------------------
#
# The formulas and their sources: docs/methods.md#weight-splitting.
#
# The correction counts 127ths of half a unit in the last place of the bf16 number, worth about 24 bits together.
# Kernels do the same arithmetic.


def _power(near: Tensor) -> Tensor:
    """2^exponent of bf16 numbers as fp32; zero and subnormal ones count as the least normal."""
    bits = (near.view(torch.int16) & 0x7F80).clamp_(0x0080, 0x7F00)
    return bits.view(torch.bfloat16).to(torch.float32)


def split_weights_(near: Tensor, correction: Tensor, *, values: Tensor, thresholds: Tensor | None = None) -> None:
    """Stores fp32 `values` as bf16 `near` and int8 `correction`, all of one shape.

    The correction is rounded to nearest, halves away from zero: the error is at most
    half a unit / 254, but repeated steps of less are lost. With `thresholds` (the codecs' lanes, fp32 [32], one per
    element index modulo 32) a fraction of at least the threshold rounds up: the error is at most half a unit / 127, and
    its mean over steps is 0; and where `values` are what `near` and `correction` stand for already, these stay as they
    are, for merging has rounded to fp32 and some numbers can be split in two ways.
    """
    rounded = values.to(torch.bfloat16)
    rest = (values - rounded.to(torch.float32)).div_(_power(rounded)).mul_(_PER_UNIT)
    rest = rest.nan_to_num_(nan=0.0).clamp_(-_LEVELS, _LEVELS).contiguous()
    if thresholds is None:
        near.copy_(rounded)
        correction.copy_((rest.abs() + 0.5).floor_().copysign_(rest))
        return
    add_lanes_(rest.view(-1), 1 - thresholds.to(rest.device))
    codes = rest.floor_().clamp_(max=_LEVELS).to(torch.int8)
    changed = values != merge_weights(near, correction)
    near.copy_(torch.where(changed, rounded, near))
    correction.copy_(torch.where(changed, codes, correction))


def merge_weights(near: Tensor, correction: Tensor) -> Tensor:
    """The fp32 numbers that `near` and `correction` stand for."""
    rest = correction.to(torch.float32).mul_(1 / _PER_UNIT).mul_(_power(near))
    return rest.add_(near.to(torch.float32))


def random_bits(numel: int, *, seed: int, phase: int, device: torch.device, first: int = 0) -> Tensor:
    """int32 [numel] in [0, 2^16): a hash of element index, `seed` (of the tensor) and `phase` (the step), nothing else.

    Indices count from `first`, so that parts of a tensor have the bits of the whole.
    A Weyl sequence over steps and elements, then a 32-bit finaliser (multiply and xor-shift); wrapping arithmetic.
    """
    start = _int32(seed + phase * 0x85EBCA77)
    last = first + numel
    index = torch.arange(first, last, dtype=torch.int32 if last < 2**31 else torch.int64, device=device)
    h = index.to(torch.int32).mul_(_int32(_PER_ELEMENT)).add_(start)
    h ^= _shift(h, 16)
    h *= 0x7FEB352D
    h ^= _shift(h, 15)
    h *= _int32(0x846CA68B)
    h ^= _shift(h, 16)
    return h.bitwise_and_(0xFFFF)


def _int32(number: int) -> int:
    """The low 32 bits of an integer, as a signed one."""
    return (number + 2**31) % 2**32 - 2**31


def _shift(h: Tensor, bits: int) -> Tensor:
    """Logical shift to the right."""
    return (h >> bits).bitwise_and_(2 ** (32 - bits) - 1)


def round_at_random_(near: Tensor, *, values: Tensor, seed: int, phase: int, first: int = 0) -> None:
    """Stores fp32 `values` as bf16 `near`, up or down so that the mean over steps is exact; bf16 numbers stay.

    Finite numbers stay finite, others are what rounding to nearest makes of them. `first`: index in the tensor of the
    first of `values`, where they are a part of one.
    """
    bits = values.contiguous().view(torch.int32)
    noise = random_bits(values.numel(), seed=seed, phase=phase, device=values.device, first=first).view(values.shape)
    rounded = (bits + noise).bitwise_and_(-(2**16)).view(torch.float32).clamp_(-_BF16_MAX, _BF16_MAX)
    near.copy_(torch.where(values.isfinite(), rounded, values))
