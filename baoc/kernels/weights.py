"""Weights as bf16 that lose nothing they need: with an 8- or 16-bit correction, or rounded at random.

The formulas and their sources: docs/methods.md#weight-splitting.

8 bits: the correction counts 127ths of half a unit in the last place of the bf16 number, worth about 24 bits together.
16 bits: it is the low half of the fp32 number's bits, so all of it comes back. Kernels do the same arithmetic.
"""

import torch
from torch import Tensor

_LEVELS = 127
_PER_UNIT = 2.0**8 * _LEVELS  # codes in the number's power of two
_BF16_MAX = torch.finfo(torch.bfloat16).max


def _power(near: Tensor) -> Tensor:
    """2^exponent of bf16 numbers as fp32; zero and subnormal ones count as the least normal."""
    bits = (near.view(torch.int16) & 0x7F80).clamp_(0x0080, 0x7F00)
    return bits.view(torch.bfloat16).to(torch.float32)


def split_weights_(near: Tensor, correction: Tensor, *, values: Tensor, thresholds: Tensor | None = None) -> None:
    """Stores fp32 `values` as bf16 `near` and int8 or int16 `correction`, all of one shape.

    An int16 correction keeps every bit. An int8 one is rounded to nearest, halves away from zero: the error is at most
    half a unit / 254, but repeated steps of less are lost. With `thresholds` (the codecs' lanes, fp32 [32], one per
    element index modulo 32) a fraction of at least the threshold rounds up: the error is at most half a unit / 127, and
    its mean over steps is 0; and where `values` are what `near` and `correction` stand for already, these stay as they
    are, for merging has rounded to fp32 and some numbers can be split in two ways.
    """
    if correction.dtype is torch.int16:
        _split_bits_(near, correction, values=values)
        return
    rounded = values.to(torch.bfloat16)
    rest = (values - rounded.to(torch.float32)).div_(_power(rounded)).mul_(_PER_UNIT)
    rest = rest.nan_to_num_(nan=0.0).clamp_(-_LEVELS, _LEVELS).contiguous()
    if thresholds is None:
        near.copy_(rounded)
        correction.copy_((rest.abs() + 0.5).floor_().copysign_(rest))
        return
    codes = _add_pattern_(rest, 1 - thresholds.to(rest.device)).floor_().clamp_(max=_LEVELS).to(torch.int8)
    changed = values != merge_weights(near, correction)
    near.copy_(torch.where(changed, rounded, near))
    correction.copy_(torch.where(changed, codes, correction))


def _split_bits_(near: Tensor, correction: Tensor, *, values: Tensor) -> None:
    bits = values.view(torch.int32)
    near.view(torch.int16).copy_((bits + 0x8000) >> 16)
    correction.copy_((bits << 16) >> 16)  # the low half with its sign


def _add_pattern_(values: Tensor, pattern: Tensor) -> Tensor:
    """Adds `pattern` over and over along the elements of a contiguous tensor."""
    flat, length = values.view(-1), len(pattern)
    whole = flat.numel() // length * length
    flat[:whole].view(-1, length).add_(pattern)
    flat[whole:].add_(pattern[: flat.numel() - whole])
    return values


def merge_weights(near: Tensor, correction: Tensor) -> Tensor:
    """The fp32 numbers that `near` and `correction` stand for."""
    if correction.dtype is torch.int16:
        bits = near.view(torch.int16).to(torch.int32) << 16
        return (bits + correction.to(torch.int32)).view(torch.float32)
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
    h = index.to(torch.int32).mul_(_int32(0x9E3779B1)).add_(start)
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
