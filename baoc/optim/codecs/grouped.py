"""The 8-bit codecs: groups of 32 consecutive elements share a bf16 scale, and each element is one companded byte.

Formulas and their sources: docs/methods.md#codecs. Scales are bf16 because fp16 loses states below 1e-6, and rounded up
so that |x| / scale is at most 1. Codes of m are companded by softsign, a logarithm with a sign, or a fourth root. Codes
of v are of s = sqrt(v): linear, logarithmic, or its fourth root. Companding suits groups of narrow spread, logarithms
wide ones; roots are near the better of the two at any spread (steps of 3 % at the largest m, 10 % at one 100 times
smaller; half that for s).
"""

from collections.abc import Sequence
from functools import lru_cache
from math import log

import torch
from torch import Tensor
from torch.nn.functional import pad

from baoc.core.catalogue import CODECS
from baoc.kernels.triton.kinds import NUM_LANES, lanes_for
from baoc.optim.codecs.base import LANES, lanes_of, thresholds
from baoc.types import CodecInfo

_AHEAD = 64  # phases whose lanes are prepared at once: one at a time would cost a step ten microseconds
_FP32_MAX = torch.finfo(torch.float32).max
_TINY = torch.finfo(torch.float32).tiny
# A running average keeps its scale while its largest element is within 13 % of it: a scale that moved by one bf16 step
# at every step would round all 32 elements anew each time, and their errors would pile up.
_KEEP_SCALE = 0.87


class Grouped:
    """Scales, groups and padding; a subclass maps numbers in [-1, 1] to codes and back."""

    in_place = False
    dtype: torch.dtype
    largest: float  # no scale exceeds it, so that every code decodes to a finite number

    def __init__(self, info: CodecInfo):
        self.info = info

    def allocate(self, shape: Sequence[int], device: torch.device | str) -> dict[str, Tensor]:
        payload = torch.zeros(tuple(shape), dtype=self.dtype, device=device)
        num_groups = -(-payload.numel() // LANES)
        return {"": payload, ".scale": torch.zeros(num_groups, dtype=torch.bfloat16, device=device)}

    def encode_(
        self, parts: dict[str, Tensor], values: Tensor, *, phase: int | None = None, new: Tensor | None = None
    ) -> None:
        payload, kept_scale = parts[""], parts[".scale"]
        if not payload.numel():
            return
        x = _groups(self.compress_(values.nan_to_num(nan=0.0).reshape(-1)))
        scale = round_up(torch.maximum(x.amax(1), x.amin(1).neg_()), largest=self.largest)
        if phase is not None:
            scale = _kept_or_new(scale, kept=kept_scale)
        kept_scale.copy_(scale)
        x = x.div_(scale.to(torch.float32).clamp_(min=_TINY).unsqueeze(1))
        threshold = thresholds(phase, new=new, group=LANES, device=x.device) if phase is not None else None
        codes = self.quantise(x, threshold)
        payload.view(-1).copy_(codes.view(-1)[: payload.numel()])

    def decode(self, parts: dict[str, Tensor], shape: Sequence[int]) -> Tensor:
        payload = parts[""]
        if not payload.numel():
            return torch.zeros(tuple(shape), dtype=torch.float32, device=payload.device)
        x = self.restore(_groups(payload.view(-1)).to(torch.float32))
        x = x.mul_(parts[".scale"].to(torch.float32).unsqueeze(1))
        return self.expand_(x.view(-1)[: payload.numel()]).view(tuple(shape))

    def compress_(self, values: Tensor) -> Tensor:
        """Numbers -> what is scaled and coded, in place."""
        return values

    def expand_(self, values: Tensor) -> Tensor:
        """The inverse of `compress_`, in place."""
        return values

    def quantise(self, x: Tensor, threshold: Tensor | None) -> Tensor:
        """[groups, 32] in [-1, 1] -> codes as fp32; fractions from `threshold` (of each) round up. May write to x."""
        raise NotImplementedError

    def restore(self, codes: Tensor) -> Tensor:
        """The inverse of `quantise`; may write to its argument."""
        raise NotImplementedError


def _groups(flat: Tensor) -> Tensor:
    """A flat tensor as [groups, 32], zero-padded."""
    missing = -flat.numel() % LANES
    return (pad(flat, (0, missing)) if missing else flat).view(-1, LANES)


def _kept_or_new(scale: Tensor, *, kept: Tensor) -> Tensor:
    """The scales that the groups have where those still do, else the new ones (both bf16, not negative)."""
    old, top = kept.to(torch.float32), scale.to(torch.float32)
    return torch.where((top <= old) & (top >= _KEEP_SCALE * old), kept, scale)


def round_up(values: Tensor, *, largest: float) -> Tensor:
    """Non-negative fp32 -> the least bf16 that is not smaller, but at most `largest`."""
    values = values.clamp(max=largest)
    nearest = values.to(torch.bfloat16)
    bits = nearest.view(torch.int16)
    return torch.where(nearest.to(torch.float32) < values, bits + 1, bits).view(torch.bfloat16)


def _stochastic(x: Tensor, threshold: Tensor | None) -> Tensor:
    """Rounds to nearest, or up where the fraction reaches the threshold."""
    return x.round_() if threshold is None else x.add_(1 - threshold).floor_()


class _Momentum(Grouped):
    dtype = torch.int8
    largest = torch.finfo(torch.bfloat16).max


class Softsign8(_Momentum):
    """m as y = 2x / (1 + |x|), q = round(127 y); back x = y / (2 - |y|) (FlashOptim)."""

    def quantise(self, x: Tensor, threshold: Tensor | None) -> Tensor:
        return _stochastic(x.mul_(2 * 127).div_(x.abs().div_(2 * 127).add_(1)), threshold).clamp_(-127, 127)

    def restore(self, codes: Tensor) -> Tensor:
        y = codes.div_(127)
        return y.div_(y.abs().neg_().add_(2))


class Log8M(_Momentum):
    """m as a sign and 127 magnitudes, 2^-16 (4.8 decades) to 1, 9 % apart; what is below half the least becomes 0."""

    octaves = 16.0

    def quantise(self, x: Tensor, threshold: Tensor | None) -> Tensor:
        size = x.abs()
        step = self.octaves / 126
        code = _stochastic(size.clamp(min=_TINY).log2_().div_(step).add_(127), _warp(threshold, step))
        large = size >= 2.0 ** -(self.octaves + 1)
        return code.clamp_(1, 127).mul_(large).copysign_(x)

    def restore(self, codes: Tensor) -> Tensor:
        sign = codes.sign()
        return codes.abs_().sub_(127).mul_(self.octaves / 126).exp2_().mul_(sign)


class Root8M(_Momentum):
    """m as a sign and q = round(127 |x|^(1/4)); back |x| = (q / 127)^4, down to 4e-9."""

    def quantise(self, x: Tensor, threshold: Tensor | None) -> Tensor:
        code = _stochastic(x.abs().sqrt_().sqrt_().mul_(127), threshold)
        return code.clamp_(max=127).copysign_(x)

    def restore(self, codes: Tensor) -> Tensor:
        square = codes.div(127).square_()
        return square.square_().copysign_(codes)


class _SecondMoment(Grouped):
    """v is coded as s = sqrt(v); a positive one never gets code 0, for the step divides by it."""

    dtype = torch.uint8
    largest = 1.83e19  # its square is finite in fp32

    def compress_(self, values: Tensor) -> Tensor:
        return values.clamp_(min=0).sqrt_()

    def expand_(self, values: Tensor) -> Tensor:
        return values.square_()


class Sqrt8(_SecondMoment):
    """v as q = round(255 s / scale) (FlashOptim). With a phase, v itself keeps its mean, not s."""

    def quantise(self, x: Tensor, threshold: Tensor | None) -> Tensor:
        positive = x > 0
        x = x.mul_(255)
        if threshold is None:
            return x.round_().clamp_(1, 255).mul_(positive)
        low = x.floor()
        # Up where v is past that share of the way from low^2 to (low + 1)^2.
        bound = (2 * low).add_(1).mul_(threshold).addcmul_(low, low)
        return low.add_(x.square_() >= bound).clamp_(1, 255).mul_(positive)

    def restore(self, codes: Tensor) -> Tensor:
        return codes.div_(255)


class Log8V(_SecondMoment):
    """v as 255 sizes of s, 2^-20 (6 decades) to 1, 5.6 % apart. With a phase, v itself keeps its mean, not its log."""

    octaves = 20.0

    def quantise(self, x: Tensor, threshold: Tensor | None) -> Tensor:
        step = self.octaves / 254
        positive = x > 0
        code = _stochastic(x.clamp_(min=_TINY).log2_().div_(step).add_(255), _warp(threshold, 2 * step))
        return code.clamp_(1, 255).mul_(positive)

    def restore(self, codes: Tensor) -> Tensor:
        positive = codes > 0
        return codes.sub_(255).mul_(self.octaves / 254).exp2_().mul_(positive)


class Root8V(_SecondMoment):
    """v as q = round(255 x^(1/4)), x = s / scale. With a phase, v itself, the eighth power of q, keeps its mean."""

    def quantise(self, x: Tensor, threshold: Tensor | None) -> Tensor:
        positive = x > 0
        place = x.sqrt_().sqrt_().mul_(255)
        if threshold is None:
            return place.round_().clamp_(1, 255).mul_(positive)
        code = place.floor()
        low, high = _eighth(code), _eighth(code + 1)
        return code.add_(_eighth(place) >= torch.lerp(low, high, threshold)).clamp_(1, 255).mul_(positive)

    def restore(self, codes: Tensor) -> Tensor:
        return codes.div_(255).square_().square_()

    def expand_(self, values: Tensor) -> Tensor:
        positive = values > 0
        return values.square_().clamp_(min=_TINY).mul_(positive)


def _eighth(x: Tensor) -> Tensor:
    return x.square().square_().square_()


def _warp(threshold: Tensor | None, octaves: float) -> Tensor | None:
    """Thresholds on a number between two neighbours `octaves` apart -> thresholds on its logarithm between theirs."""
    if threshold is None:
        return None
    ratio = 2.0**octaves
    return torch.log1p(threshold * (ratio - 1)) / log(ratio)


@lru_cache(maxsize=4)
def _many_kernel_lanes(first: int) -> list[memoryview]:
    flat = lanes_for(lanes_of(first, _AHEAD)).flatten().numpy().data
    return [flat[begin : begin + NUM_LANES] for begin in range(0, len(flat), NUM_LANES)]


def kernel_lanes(phase: int) -> memoryview:
    """The lanes of a step's phase as kernels take them, see `baoc.kernels.triton.kinds.lanes_for`."""
    index = phase % _AHEAD
    return _many_kernel_lanes(phase - index)[index]


GROUPED = (
    Softsign8(CODECS["softsign8"]),
    Sqrt8(CODECS["sqrt8"]),
    Log8M(CODECS["log8m"]),
    Log8V(CODECS["log8v"]),
    Root8M(CODECS["root8m"]),
    Root8V(CODECS["root8v"]),
)
