"""Weights formats: native, bf16 with a correction, or bf16 alone; and conversion between them.

In formats other than native the parameter's data is bf16, and the model reads that. The step works on fp32 master
weights: `master` returns them, and `store_` writes them back.
"""

from collections.abc import Iterable, Mapping
from hashlib import blake2b

import torch
from torch import Tensor

from baoc.optim.codecs import BF16_MAX, add_lanes_, lanes
from baoc.types import OptimizerSpec, ParamInfo

CORRECTION = "correction"  # key of the state
SIXTEEN_BIT_DTYPES = (torch.bfloat16, torch.float16)
ELEMENTS_PER_PIECE = 2**20  # that are converted at a time
CONVERSION_BYTES = 24 * ELEMENTS_PER_PIECE  # temporaries at most: a piece in fp32, and those of splitting it
ELEMENTS_PER_CHECKSUM = 2**17  # that are summed at a time, as int64 in 1 MiB
_LEVELS = 127  # largest code of a correction
_CODES_PER_POWER = 2.0**8 * _LEVELS  # codes of a correction in 2^exponent of the bf16 number
_HASH_PER_ELEMENT = 0x9E3779B1  # step of the hash for stochastic rounding


def rounding_seed(name: str, *, first: int = 0) -> int:
    """The parameter's 32-bit seed for stochastic rounding: the same on every rank and after a resume.

    `first`: index of the first element of a shard, whose random bits are then those of the unsharded parameter.
    """
    seed = int.from_bytes(blake2b(name.encode(), digest_size=4).digest(), "little", signed=True)
    return _int32(seed + first * _HASH_PER_ELEMENT)


def dtype_of(weights: str, *, info: ParamInfo) -> torch.dtype:
    """The type of the parameter's data; native weights have the type that the parameter came with."""
    return getattr(torch, info.dtype) if weights == "native" else torch.bfloat16


def conversion_bytes(specs: Iterable[OptimizerSpec], *, device: str) -> int:
    """Temporary bytes on a GPU while weights are converted to 16 bits, if some of `specs` keep them so. Elsewhere host
    and device share memory, and the fp32 weights count from the start."""
    converts = device.startswith("cuda") and any(spec.weights != "native" for spec in specs)
    return CONVERSION_BYTES if converts else 0


def master(param: Tensor, state: Mapping[str, Tensor]) -> Tensor:
    """The master weights, fp32 or wider: the parameter itself if it is not kept in 16 bits."""
    if CORRECTION in state:
        return merge_weights(param.detach(), state[CORRECTION])
    return param.detach().to(torch.float32) if param.dtype in SIXTEEN_BIT_DTYPES else param


@torch.no_grad()
def checksum(param: Tensor) -> int:
    """Checksum of a bf16 parameter: the sum of its bits as integers, on any device and with any strides.

    It sums a part at a time, because torch casts to int64 first, which would take 8 bytes per element.
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
    """Stores `values`, the new master weights, in the format `weights`.

    Args:
        phase: The number of the step, from 1; None outside of steps.
        first: Index of the first element of `values` in the parameter.
    """
    if values is param:
        return
    if CORRECTION in state:
        thresholds = lanes(phase, param.device) if phase is not None else None
        split_weights_(param.detach(), state[CORRECTION], values=values, thresholds=thresholds)
    elif weights == "bf16_sr":  # outside of steps too: rounded to nearest, equal weights would have equal errors
        round_at_random_(param.detach(), values=values, seed=rounding_seed(name), phase=phase or 0, first=first)
    else:
        param.copy_(values)


@torch.no_grad()
def replace_data_(param: Tensor, *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Gives `param` unfilled data of this type on `device`, with its strides. Returns the old data.

    Does nothing if type and device are right already. A gradient is moved and cast too.
    """
    old = param.detach()
    if old.dtype is not dtype or old.device != device:
        grad, param.grad = param.grad, None
        param.data = torch.empty_like(old, dtype=dtype, device=device)
        if grad is not None:
            param.grad = grad.to(device=device, dtype=dtype)
    return old


@torch.no_grad()
def store_in_pieces_(param: Tensor, state: Mapping[str, Tensor], values: Tensor, *, weights: str, name: str) -> None:
    """Stores `values`, which may be on another device, in the format `weights`, whose type `param` has already.

    The result is that of `store_`, bit for bit. It converts ELEMENTS_PER_PIECE at a time, so that fp32 weights are
    never on the device together; of a parameter that is not contiguous at least one row.
    """
    flat = param.is_contiguous() and values.is_contiguous()
    data, values = (param.detach().view(-1), values.view(-1)) if flat else (param.detach(), values)
    corrections = {key: value.view(data.shape) for key, value in state.items() if key == CORRECTION}
    row_numel = max(1, values[:1].numel())
    rows_per_piece = max(1, ELEMENTS_PER_PIECE // row_numel)
    for row in range(0, len(values), rows_per_piece):
        rows = slice(row, row + rows_per_piece)
        piece = master(values[rows].to(param.device), {})
        piece_state = {key: value[rows] for key, value in corrections.items()}
        store_(data[rows], piece_state, piece, weights=weights, name=name, first=row * row_numel)


# -- the arithmetic of the formats --------------------------------------------------------------------------------
#
# The formulas and their sources: docs/methods.md#weight-splitting.
#
# The correction counts 127ths of half a unit in the last place of the bf16 number. Together they have about 24 bits.
# The kernels do the same arithmetic.


def _power(data: Tensor) -> Tensor:
    """2^exponent of bf16 numbers as fp32; zero and subnormal ones count as the least normal."""
    bits = (data.view(torch.int16) & 0x7F80).clamp_(0x0080, 0x7F00)
    return bits.view(torch.bfloat16).to(torch.float32)


def split_weights_(data: Tensor, correction: Tensor, *, values: Tensor, thresholds: Tensor | None = None) -> None:
    """Stores fp32 `values` as bf16 `data` and int8 `correction`, all of one shape.

    Without `thresholds` the correction is rounded to nearest, halves away from zero: the error is at most half a unit /
    254, but repeated steps of less are lost. With `thresholds` (the codecs' lanes, fp32 [32], by element index modulo
    32) a fraction of at least the threshold rounds up: the error is at most half a unit / 127, and its mean over steps
    is 0. Elements whose values are those of `data` and `correction` already stay as they are then, because merging
    rounds to fp32 and some numbers can be split in two ways.
    """
    rounded = values.to(torch.bfloat16)
    rest = (values - rounded.to(torch.float32)).div_(_power(rounded)).mul_(_CODES_PER_POWER)
    rest = rest.nan_to_num_(nan=0.0).clamp_(-_LEVELS, _LEVELS).contiguous()
    if thresholds is None:
        data.copy_(rounded)
        correction.copy_((rest.abs() + 0.5).floor_().copysign_(rest))
        return
    add_lanes_(rest.view(-1), 1 - thresholds.to(rest.device))
    codes = rest.floor_().clamp_(max=_LEVELS).to(torch.int8)
    changed = values != merge_weights(data, correction)
    data.copy_(torch.where(changed, rounded, data))
    correction.copy_(torch.where(changed, codes, correction))


def merge_weights(data: Tensor, correction: Tensor) -> Tensor:
    """The fp32 numbers that were split into `data` and `correction`."""
    rest = correction.to(torch.float32).mul_(1 / _CODES_PER_POWER).mul_(_power(data))
    return rest.add_(data.to(torch.float32))


def random_bits(numel: int, *, seed: int, phase: int, device: torch.device, first: int = 0) -> Tensor:
    """int32 [numel] in [0, 2^16): a hash of element index, `seed` (of the parameter) and `phase` (the step) alone.

    Indices count from `first`, so that a piece of a tensor has the bits that it has in the tensor. The hash is a Weyl
    sequence over steps and elements, then a 32-bit finaliser (multiply and xor-shift), in wrapping arithmetic.
    """
    start = _int32(seed + phase * 0x85EBCA77)
    last = first + numel
    index = torch.arange(first, last, dtype=torch.int32 if last < 2**31 else torch.int64, device=device)
    h = index.to(torch.int32).mul_(_int32(_HASH_PER_ELEMENT)).add_(start)
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


def round_at_random_(data: Tensor, *, values: Tensor, seed: int, phase: int, first: int = 0) -> None:
    """Stores fp32 `values` as bf16 `data`, rounded up or down so that the mean over steps is exact; those that are not
    finite to nearest. `first`: index of the first of `values` in the parameter."""
    bits = values.contiguous().view(torch.int32)
    noise = random_bits(values.numel(), seed=seed, phase=phase, device=values.device, first=first).view(values.shape)
    rounded = (bits + noise).bitwise_and_(-(2**16)).view(torch.float32).clamp_(-BF16_MAX, BF16_MAX)
    data.copy_(torch.where(values.isfinite(), rounded, values))
