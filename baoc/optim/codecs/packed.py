"""The 4-bit codecs: two codes per byte, groups of 64 consecutive elements that share two bytes.

Layout, the same for m and v. The payload is uint8[ceil(numel / 2)]: element 2i is the low nibble of byte i, element
2i + 1 the high one; where numel is odd the last high nibble is 0. ".scale" has one number per 64 elements begun.
What goes up when rounding is told by `lanes(phase)`, indexed by element modulo 32, for m as for v: a step of 4 bits is
more than an average moves in a step, so rounded to nearest it would never fall again.

root4, of m, ".scale" bf16, the group's largest |m| rounded up. A nibble is a signed code q in -7 ... 7 (two's
complement): m = scale q |q| / 49. Encoding, with y = 49 |m| / scale, low = min(floor(sqrt(y)), 6) and the threshold t:
|q| = low + (y - low^2 >= t (2 low + 1)), and 0 where y < 1/2, so that no element is more than doubled. The mean over
steps is the exact m, but for those.

lattice4, of v, ".scale" int16, word = 4 top + k. Roots s = sqrt(v) are kept as powers of two whose exponents, counted
in eighths of an octave, are multiples of the unit u = 8 >> k, k in 0 ... 3. Code 0 is zero, code c in 1 ... 15 is
s = 2^((top - (15 - c) u) / 8). All groups of one k share one lattice, so a group whose top moves does not round anew.
Encoding, with e = 8 log2(s), hi and lo the largest and least e of the group's positive elements: k is the largest in
0 ... 3 for which ceil(hi / u) u - lo <= limit u, else 0; top = ceil(hi / u) u; limit is 18, but 16 for k above the one
that the old word has (none of a codec without history: phase None). c = floor(15 + (e - top) / u + 1 - w(t)) within
1 ... 15, where w(t) = log(1 + t (r - 1)) / log(r), r = 2^(u / 4), keeps the mean of v; without a phase, to nearest.
So the range of a group is 1.75, 3.5, 7 or 14 octaves of s, and what lies below it (by at most 4 units) is kept as its
least code: such weights lag, and never run away. A group without a positive element has word 0.
"""

from collections.abc import Sequence
from math import log

import torch
from torch import Tensor
from torch.nn.functional import pad

from baoc.core.catalogue import CODECS
from baoc.optim.codecs.base import thresholds
from baoc.optim.codecs.grouped import round_up
from baoc.types import CodecInfo

_BF16_MAX = torch.finfo(torch.bfloat16).max
_TINY = torch.finfo(torch.float32).tiny
_LEAST = 0.5  # of one code of m: what is smaller becomes 0
_LARGEST_ROOT = 2.0**63  # of v: one unit more would square to infinity
_KS = (3, 2, 1, 0)
_LIMIT, _LIMIT_FINER = 18, 16  # units between top and the least element; fewer to change to a finer lattice


class Packed:
    """Packing, groups and lanes; a subclass maps [groups, 64] numbers to codes in 0 ... 15 and back."""

    in_place = False
    scale_dtype: torch.dtype

    def __init__(self, info: CodecInfo):
        self.info = info

    def allocate(self, shape: Sequence[int], device: torch.device | str) -> dict[str, Tensor]:
        numel = torch.Size(shape).numel()
        payload = torch.zeros(-(-numel // 2), dtype=torch.uint8, device=device)
        return {"": payload, ".scale": torch.zeros(-(-numel // self.info.group), dtype=self.scale_dtype, device=device)}

    def encode_(
        self, parts: dict[str, Tensor], values: Tensor, *, phase: int | None = None, new: Tensor | None = None
    ) -> None:
        payload, scale = parts[""], parts[".scale"]
        if not payload.numel():
            return
        flat = values.nan_to_num(nan=0.0).reshape(-1)
        missing = -flat.numel() % self.info.group
        groups = (pad(flat, (0, missing)) if missing else flat).view(-1, self.info.group)
        threshold = None
        if phase is not None:
            threshold = thresholds(phase, new=new, group=self.info.group, device=flat.device)
        codes = self.quantise(groups, scale, threshold).to(torch.uint8).view(-1, 2)
        payload.copy_((codes[:, 0] | (codes[:, 1] << 4))[: payload.numel()])

    def decode(self, parts: dict[str, Tensor], shape: Sequence[int]) -> Tensor:
        payload, scale = parts[""], parts[".scale"]
        numel = torch.Size(shape).numel()
        codes = torch.stack((payload & 15, payload >> 4), dim=1).view(-1)
        missing = -codes.numel() % self.info.group
        codes = (pad(codes, (0, missing)) if missing else codes).view(-1, self.info.group)
        return self.restore(codes.to(torch.float32), scale).view(-1)[:numel].view(tuple(shape))

    def quantise(self, values: Tensor, scale: Tensor, threshold: Tensor | None) -> Tensor:
        """[groups, 64] -> codes, the group's numbers written to `scale`; fractions from `threshold` (of each) go up."""
        raise NotImplementedError

    def restore(self, codes: Tensor, scale: Tensor) -> Tensor:
        """The inverse of `quantise`; may write to `codes`."""
        raise NotImplementedError


class Root4(Packed):
    """m as a sign and one of seven squares, 1/49 to 1 of the group's largest."""

    scale_dtype = torch.bfloat16

    def quantise(self, values: Tensor, scale: Tensor, threshold: Tensor | None) -> Tensor:
        size = values.abs()
        scale.copy_(round_up(size.amax(1), largest=_BF16_MAX))
        y = size.div_(scale.to(torch.float32).clamp_(min=_TINY).unsqueeze(1)).clamp_(max=1.0).mul_(49)
        low = y.sqrt().floor_().clamp_(max=6)
        bound = (2 * low).add_(1).mul_(0.5 if threshold is None else threshold).addcmul_(low, low)
        code = (low + (y >= bound)).mul_(y >= _LEAST)
        return torch.where(values < 0, 16 - code, code).remainder_(16)

    def restore(self, codes: Tensor, scale: Tensor) -> Tensor:
        signed = torch.where(codes > 7, codes - 16, codes)
        return signed.mul_(signed.abs()).div_(49).mul_(scale.to(torch.float32).unsqueeze(1))


class Lattice4(Packed):
    """v as 15 roots on one logarithmic lattice, whose step each group chooses by its spread."""

    scale_dtype = torch.int16

    def quantise(self, values: Tensor, scale: Tensor, threshold: Tensor | None) -> Tensor:
        positive = values > 0
        exponent = values.clamp(min=0).sqrt_().clamp_(max=_LARGEST_ROOT).log2_().mul_(8)
        some = positive.any(1)
        high = torch.where(some, exponent.amax(1), 0.0)
        low = torch.where(some, exponent.masked_fill(~positive, torch.inf).amin(1), 0.0)
        top, k = _lattice(high, low, kept=scale.bitwise_and(3) if threshold is not None else None)
        scale.copy_(torch.where(some, 4 * top + k, 0.0))
        unit = torch.exp2(3 - k).unsqueeze(1)
        place = exponent.sub_(top.unsqueeze(1)).div_(unit).add_(15)
        if threshold is None:
            place.round_()
        else:
            octaves = unit / 4
            place.sub_(torch.log1p((torch.exp2(octaves) - 1) * threshold).div_(octaves * log(2))).add_(1).floor_()
        return torch.where(positive, place.clamp_(1, 15), 0.0)

    def restore(self, codes: Tensor, scale: Tensor) -> Tensor:
        word = scale.to(torch.float32).unsqueeze(1)
        top = (word / 4).floor_()
        unit = torch.exp2(3 - (word - 4 * top))
        positive = codes > 0
        exponent = codes.sub_(15).mul_(unit).add_(top)
        return exponent.div_(4).exp2_().clamp_(min=_TINY).mul_(positive)


def _lattice(high: Tensor, low: Tensor, *, kept: Tensor | None) -> tuple[Tensor, Tensor]:
    """Top and k of each group, from its largest and least exponent and the k that it has now."""
    k = torch.zeros_like(high)
    top = torch.ceil(high / 8) * 8
    found = torch.zeros_like(high, dtype=torch.bool)
    for finer in _KS[:-1]:
        unit = float(8 >> finer)
        above = torch.ceil(high / unit) * unit
        limit = _LIMIT if kept is None else torch.where(kept < finer, _LIMIT_FINER, _LIMIT)
        fits = (above - low <= limit * unit) & ~found
        k, top = torch.where(fits, float(finer), k), torch.where(fits, above, top)
        found |= fits
    return top, k


PACKED = (Root4(CODECS["root4"]), Lattice4(CODECS["lattice4"]))
