"""Weights as bf16 with an int8 correction: 3 bytes that are worth about 24 bits (METHODS 3, weight splitting).

The correction counts 127ths of half a unit in the last place of the bf16 number, so it never changes which it is.
"""

import torch
from torch import Tensor

_LEVELS = 127


def half_ulp(near: Tensor) -> Tensor:
    """Half a unit in the last place of bf16 numbers, as fp64; zero and subnormal ones count as the least normal."""
    exponent = (near.view(torch.int16).to(torch.int32) >> 7) & 0xFF
    return torch.exp2(exponent.clamp(1, 253).to(torch.float64) - (127 + 8))


def split_weights_(near: Tensor, correction: Tensor, *, values: Tensor, thresholds: Tensor | None = None) -> None:
    """Stores fp32 `values` as bf16 `near` and int8 `correction`, all contiguous.

    To nearest, halves away from zero, the error is at most half_ulp / 254, but repeated steps of less are lost. With
    `thresholds` (the codecs' lanes, fp32 [32], one per element index modulo 32) a fraction of at least the threshold
    rounds up: the error is at most half_ulp / 127, and its mean over steps is 0.
    """
    near.copy_(values)
    rest = (values.to(torch.float64) - near.to(torch.float64)) / half_ulp(near)
    rest = rest.nan_to_num(nan=0.0).clamp_(-1, 1).mul_(_LEVELS)
    if thresholds is None:
        correction.copy_((rest.abs() + 0.5).floor_().copysign_(rest))
    else:
        index = torch.arange(rest.numel(), device=rest.device) % len(thresholds)
        rest += (1 - thresholds.to(rest.device)).to(torch.float64)[index].view(rest.shape)
        correction.copy_(rest.floor_().clamp_(max=_LEVELS))


def merge_weights(near: Tensor, correction: Tensor) -> Tensor:
    """The fp32 numbers that `near` and `correction` stand for."""
    rest = correction.to(torch.float64) * (half_ulp(near) / _LEVELS)
    return (near.to(torch.float64) + rest).to(torch.float32)
