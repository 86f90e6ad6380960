"""Codecs: how a state tensor of fp32 numbers is stored between two steps.

Rounding to nearest at every step stops a slowly decaying average, or ratchets it upwards: v at beta2 = .999 moves .1 %
per step, and half a bf16 or 8-bit step is .2 to .4 %. So encoding takes a `phase`, the number of the step. With it, a
low-discrepancy sequence over steps and lanes (elements modulo 32) decides whether to round up or down, and the mean
over steps is the exact value. There is no random state: the same phase gives the same bits.

Below: the base class, fp32 and bf16, the 8-bit codecs, the 4-bit codecs, the table of all, and `StoredState`.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import log

import torch
from torch import Tensor
from torch.nn.functional import pad

from baoc.core.catalogue import CODECS
from baoc.types import CodecInfo, StateDecl, StateKind, StateLayout

BF16_MAX = torch.finfo(torch.bfloat16).max
_TINY = torch.finfo(torch.float32).tiny
LANES = 32  # elements after which the thresholds of one step repeat
# 1/p and 1/p^2 of p = 1.3247..., the plastic number: the two-dimensional additive sequence of least discrepancy known.
_PER_STEP, _PER_LANE = 0.7548776662466927, 0.5698402909980532


class Codec:
    """A storage format of a tensor. Objects are stateless and shared; the registry has one per name.

    `parts` maps "" to the payload, which has the state's shape (flat if two codes share a byte), and ".scale" to the
    scales of codecs that have any. Zero decodes to exactly zero, and a positive v never decodes to zero. NaN is stored
    as 0, and an infinity as the codec's largest number. fp32 stores all numbers as they are.
    """

    in_place = False  # True if `decode` returns the stored tensor itself, so that writing to it is storing
    dtype: torch.dtype  # of the payload

    def __init__(self, info: CodecInfo):
        self.info = info

    def allocate(self, shape: Sequence[int], device: torch.device | str) -> dict[str, Tensor]:
        """Parts that decode to zeros. They take `info.nbytes(numel)` bytes together."""
        return {"": torch.zeros(tuple(shape), dtype=self.dtype, device=device)}

    def encode_(
        self, parts: dict[str, Tensor], values: Tensor, *, phase: int | None = None, new: Tensor | None = None
    ) -> None:
        """Stores `values` (fp32, shape of the state).

        Args:
            phase: The number of the step; None rounds to nearest.
            new: Mask that is False where the stored value must stay. That is rounded to nearest, so its code changes
                only with its group's scale, which follows from the new values but is never too small for those that
                stay.
        """
        raise NotImplementedError

    def decode(self, parts: dict[str, Tensor], shape: Sequence[int]) -> Tensor:
        """The stored numbers as fp32 of `shape`."""
        raise NotImplementedError


def thresholds(phase: int, *, new: Tensor | None, group: int, device: torch.device) -> Tensor:
    """The lanes of a phase for a codec's groups: fp32 [group], or [groups, group] with 1/2 where `new` is False."""
    pattern = lanes(phase, device).repeat(group // LANES)
    if new is None:
        return pattern
    return torch.where(grouped(new.reshape(-1), group), pattern, 0.5)


@lru_cache(maxsize=16)
def lanes(phase: int, device: torch.device) -> Tensor:
    """The thresholds of step `phase`, fp32[32] in (0, 1], by element modulo 32: fractions from there on round up."""
    return lanes_of(phase, 1)[0].to(device, non_blocking=True)


def lanes_of(first: int, count: int) -> Tensor:
    """The lanes of `count` phases from `first` on: fp32[count, 32] on the CPU."""
    phases = torch.arange(first, first + count, dtype=torch.float64, device="cpu")[:, None]
    steps = torch.arange(LANES, dtype=torch.float64, device="cpu") * _PER_LANE + phases * _PER_STEP
    return (1 - torch.frac(steps)).to(torch.float32).clamp_(min=2**-24)


def grouped(flat: Tensor, group: int) -> Tensor:
    """A flat tensor as [groups, group], zero-padded."""
    missing = -flat.numel() % group
    return (pad(flat, (0, missing)) if missing else flat).view(-1, group)


def add_lanes_(flat: Tensor, pattern: Tensor) -> Tensor:
    """Adds `pattern` ([32]) to a flat tensor, repeated along its elements. Returns the tensor."""
    end = flat.numel() // LANES * LANES
    flat[:end].view(-1, LANES).add_(pattern)
    flat[end:].add_(pattern[: flat.numel() - end])
    return flat


# -- fp32 and bf16: one number per element and no scales ----------------------------------------------------------


class Fp32(Codec):
    """The numbers themselves. `decode` returns the stored tensor, and encoding that same tensor does nothing."""

    in_place = True
    dtype = torch.float32

    def encode_(
        self, parts: dict[str, Tensor], values: Tensor, *, phase: int | None = None, new: Tensor | None = None
    ) -> None:
        if values is not parts[""]:
            parts[""].copy_(values)

    def decode(self, parts: dict[str, Tensor], shape: Sequence[int]) -> Tensor:
        return parts[""]


class Bf16(Codec):
    """Rounded to bfloat16: relative error at most 2^-8 to nearest, 2^-7 with a phase."""

    dtype = torch.bfloat16

    def encode_(
        self, parts: dict[str, Tensor], values: Tensor, *, phase: int | None = None, new: Tensor | None = None
    ) -> None:
        finite = values.nan_to_num().clamp_(-BF16_MAX, BF16_MAX)
        if phase is not None:
            # Adding up to one bf16 step to the bits, then cutting the lower half off, rounds up in that share of steps.
            bits = finite.reshape(-1).view(torch.int32)
            add_lanes_(bits, ((1 - lanes(phase, bits.device)) * 2**16).to(torch.int32))
            finite = bits.bitwise_and_(-(2**16)).view(torch.float32).view(values.shape)
        parts[""].copy_(finite)

    def decode(self, parts: dict[str, Tensor], shape: Sequence[int]) -> Tensor:
        return parts[""].to(torch.float32)


# -- groups of consecutive elements that share a scale ------------------------------------------------------------

ELEMENTS_AT_ONCE = 2**20  # encoded or decoded: several fp32 numbers of each are held meanwhile. A multiple of any group


def chunks(numel: int) -> Iterator[tuple[int, int]]:
    """[begin, end) of the parts in which so many elements are encoded and decoded."""
    return ((begin, min(begin + ELEMENTS_AT_ONCE, numel)) for begin in range(0, numel, ELEMENTS_AT_ONCE))


class Grouped(Codec):
    """Base of the codecs with scales: groups, padding, and two 4-bit codes to a byte. A subclass has the codes."""

    scale_dtype = torch.bfloat16

    def allocate(self, shape: Sequence[int], device: torch.device | str) -> dict[str, Tensor]:
        numel = torch.Size(shape).numel()
        scale = torch.zeros(-(-numel // self.info.group), dtype=self.scale_dtype, device=device)
        return super().allocate(shape if self.info.bits == 8 else [-(-numel // 2)], device) | {".scale": scale}

    def encode_(
        self, parts: dict[str, Tensor], values: Tensor, *, phase: int | None = None, new: Tensor | None = None
    ) -> None:
        payload, scale, group = parts[""].view(-1), parts[".scale"], self.info.group
        flat, marks = values.reshape(-1), None if new is None else new.reshape(-1)
        for begin, end in chunks(flat.numel()):
            groups = grouped(flat[begin:end].nan_to_num(), group)
            some = None if marks is None else marks[begin:end]
            threshold = thresholds(phase, new=some, group=group, device=groups.device) if phase is not None else None
            codes = self.quantise(groups, scale[begin // group : -(-end // group)], threshold).view(-1)
            if self.info.bits == 4:
                pairs = codes.to(torch.uint8).view(-1, 2)
                codes = pairs[:, 0] | (pairs[:, 1] << 4)
            target = payload[begin * self.info.bits // 8 : -(-end * self.info.bits // 8)]
            target.copy_(codes[: target.numel()])

    def decode(self, parts: dict[str, Tensor], shape: Sequence[int]) -> Tensor:
        payload, scale, group = parts[""].view(-1), parts[".scale"], self.info.group

        def decoded(begin: int, end: int) -> Tensor:
            codes = payload[begin * self.info.bits // 8 : -(-end * self.info.bits // 8)]
            if self.info.bits == 4:
                codes = torch.stack((codes & 15, codes >> 4), dim=1).view(-1)
            groups = grouped(codes, group).to(torch.float32)
            return self.restore(groups, scale[begin // group : -(-end // group)]).view(-1)[: end - begin]

        numel = torch.Size(shape).numel()
        if numel <= ELEMENTS_AT_ONCE:
            return decoded(0, numel).view(tuple(shape))
        out = torch.empty(tuple(shape), dtype=torch.float32, device=payload.device)
        for begin, end in chunks(numel):
            out.view(-1)[begin:end] = decoded(begin, end)
        return out

    def quantise(self, x: Tensor, scale: Tensor, threshold: Tensor | None) -> Tensor:
        """x, fp32 [groups, elements], as codes in fp32. Writes the groups' scales to `scale`.

        Fractions from `threshold` on round up; None rounds to nearest. May write to x.
        """
        raise NotImplementedError

    def restore(self, codes: Tensor, scale: Tensor) -> Tensor:
        """The inverse of `quantise`; may write to `codes`."""
        raise NotImplementedError


def round_up(values: Tensor, *, largest: float) -> Tensor:
    """Non-negative fp32 numbers, at most `largest`, rounded up to bf16."""
    values = values.clamp(max=largest)
    nearest = values.to(torch.bfloat16)
    bits = nearest.view(torch.int16)
    return torch.where(nearest < values, bits + 1, bits).view(torch.bfloat16)


# -- the 8-bit codecs: groups of 32 elements, each one companded byte ---------------------------------------------
#
# Formulas and their sources: docs/methods.md#codecs. Scales are bf16 because fp16 loses states below 1e-6, and rounded
# up so that |x| / scale is at most 1. Codes of m are companded by softsign, or a fourth root with a sign. Codes of v
# are of s = sqrt(v): linear, or its fourth root. Companding suits groups of narrow spread, roots any (steps of 3 % at
# the largest m, 10 % at one 100 times smaller; half that for s).

# A running average keeps its scale while its largest element is within 13 % of it: a scale that moved by one bf16 step
# at every step would round all 32 elements anew each time, and their errors would pile up.
_KEEP_SCALE = 0.87
_LARGEST_SCALE = 1.83e19  # of v: its square is finite in fp32


def _over_scale_(x: Tensor, scale: Tensor, *, largest: float, keeps: bool) -> Tensor:
    """Divides groups by their scales, in place, and writes the scales to `scale`. Scales are at most `largest`, so that
    every code decodes to a finite number. `keeps`: a running average, which keeps a scale that still fits."""
    new_scale = round_up(torch.maximum(x.amax(1), x.amin(1).neg_()), largest=largest)
    if keeps:
        fits = (new_scale <= scale) & (new_scale >= _KEEP_SCALE * scale.to(torch.float32))
        new_scale = torch.where(fits, scale, new_scale)
    scale.copy_(new_scale)
    return x.div_(new_scale.clamp_(min=_TINY).unsqueeze(1))


class Softsign8(Grouped):
    """m as y = 2x / (1 + |x|), q = round(127 y); back x = y / (2 - |y|) (FlashOptim)."""

    dtype = torch.int8

    def quantise(self, x: Tensor, scale: Tensor, threshold: Tensor | None) -> Tensor:
        x = _over_scale_(x, scale, largest=BF16_MAX, keeps=threshold is not None)
        x = x.mul_(2 * 127).div_(x.abs().div_(2 * 127).add_(1))
        return (x.round_() if threshold is None else x.add_(1 - threshold).floor_()).clamp_(-127, 127)

    def restore(self, codes: Tensor, scale: Tensor) -> Tensor:
        y = codes.div_(127)
        return y.div_(y.abs().neg_().add_(2)).mul_(scale.unsqueeze(1))


class Sqrt8(Grouped):
    """v as q = round(255 s / scale), s = sqrt(v) (FlashOptim). With a phase, v itself keeps its mean, not s.

    A positive v never gets code 0, for the step divides by it.
    """

    dtype = torch.uint8

    def quantise(self, x: Tensor, scale: Tensor, threshold: Tensor | None) -> Tensor:
        x = _over_scale_(x.clamp_(min=0).sqrt_(), scale, largest=_LARGEST_SCALE, keeps=threshold is not None)
        positive = x > 0
        x = x.mul_(255)
        if threshold is None:
            return x.round_().clamp_(1, 255).mul_(positive)
        low = x.floor()
        # Up where v is past that share of the way from low^2 to (low + 1)^2.
        bound = (2 * low).add_(1).mul_(threshold).addcmul_(low, low)
        return low.add_(x.square_() >= bound).clamp_(1, 255).mul_(positive)

    def restore(self, codes: Tensor, scale: Tensor) -> Tensor:
        return codes.div_(255).mul_(scale.unsqueeze(1)).square_()


class Root8M(Grouped):
    """m as a sign and q = round(127 |x|^(1/4)); back |x| = (q / 127)^4, down to 4e-9."""

    dtype = torch.int8

    def quantise(self, x: Tensor, scale: Tensor, threshold: Tensor | None) -> Tensor:
        x = _over_scale_(x, scale, largest=BF16_MAX, keeps=threshold is not None)
        code = x.abs().sqrt_().sqrt_().mul_(127)
        code = code.round_() if threshold is None else code.add_(1 - threshold).floor_()
        return code.clamp_(max=127).copysign_(x)

    def restore(self, codes: Tensor, scale: Tensor) -> Tensor:
        square = codes.div(127).square_()
        return square.square_().copysign_(codes).mul_(scale.unsqueeze(1))


class Root8V(Grouped):
    """v as q = round(255 x^(1/4)), x = s / scale. With a phase, v itself, the eighth power of q, keeps its mean.

    A positive v never gets code 0, as in Sqrt8.
    """

    dtype = torch.uint8

    def quantise(self, x: Tensor, scale: Tensor, threshold: Tensor | None) -> Tensor:
        x = _over_scale_(x.clamp_(min=0).sqrt_(), scale, largest=_LARGEST_SCALE, keeps=threshold is not None)
        positive = x > 0
        place = x.sqrt_().sqrt_().mul_(255)
        if threshold is None:
            return place.round_().clamp_(1, 255).mul_(positive)
        code = place.floor()
        low, high = _eighth(code), _eighth(code + 1)
        return code.add_(_eighth(place) >= torch.lerp(low, high, threshold)).clamp_(1, 255).mul_(positive)

    def restore(self, codes: Tensor, scale: Tensor) -> Tensor:
        s = codes.div_(255).square_().square_().mul_(scale.unsqueeze(1))
        positive = s > 0
        return s.square_().clamp_(min=_TINY).mul_(positive)


def _eighth(x: Tensor) -> Tensor:
    return x.square().square_().square_()


# -- the 4-bit codecs: two codes per byte, groups of 64 consecutive elements that share two bytes ----------------------
#
# Layout and formulas: docs/methods.md#four-bits. `lanes(phase)` decides what rounds up for m as for v: neighbouring
# 4-bit codes are further apart than an average moves in a step, so rounded to nearest it would never fall again.

_LEAST = 0.5  # of y: a smaller |m| becomes 0
_LARGEST_ROOT = 2.0**63  # of v; its square is finite in fp32
_KS = (3, 2, 1, 0)
_LIMIT, _LIMIT_FINER = 18, 16  # units between top and the least element; fewer to change to a finer lattice
# Units. A v that stands still lies on a lattice already, and the last bit of its logarithm must not move the group.
_SLACK = 2.0**-9


class Root4(Grouped):
    """m as a sign and one of seven squares, 1/49 to 1 of the group's largest."""

    dtype = torch.uint8

    def quantise(self, x: Tensor, scale: Tensor, threshold: Tensor | None) -> Tensor:
        size = x.abs()
        scale.copy_(round_up(size.amax(1), largest=BF16_MAX))
        y = size.div_(scale.clamp(min=_TINY).unsqueeze(1)).mul_(49)
        low = y.sqrt().floor_().clamp_(max=6)
        bound = (2 * low).add_(1).mul_(0.5 if threshold is None else threshold).addcmul_(low, low)
        code = (low + (y >= bound)).mul_(y >= _LEAST)
        return torch.where(x < 0, 16 - code, code).remainder_(16)

    def restore(self, codes: Tensor, scale: Tensor) -> Tensor:
        signed = torch.where(codes > 7, codes - 16, codes)
        return signed.mul_(signed.abs()).div_(49).mul_(scale.unsqueeze(1))


class Lattice4(Grouped):
    """v as 15 roots on one logarithmic lattice, whose step each group chooses by its spread."""

    dtype, scale_dtype = torch.uint8, torch.int16

    def quantise(self, x: Tensor, scale: Tensor, threshold: Tensor | None) -> Tensor:
        positive = x > 0
        exponent = x.clamp(min=0).sqrt_().clamp_(max=_LARGEST_ROOT).log2_().mul_(8)
        any_positive = positive.any(1)
        high, low = exponent.amax(1), exponent.masked_fill(~positive, torch.inf).amin(1)
        top, k = _lattice(high, low, old_k=scale.bitwise_and(3) if threshold is not None else None)
        scale.copy_(torch.where(any_positive, 4 * top + k, 0.0))
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


def _lattice(high: Tensor, low: Tensor, *, old_k: Tensor | None) -> tuple[Tensor, Tensor]:
    """(top, k) of each group, from its largest and least exponent and the k that it has now."""
    k = torch.zeros_like(high)
    top = torch.ceil(high / 8 - _SLACK) * 8
    decided = torch.zeros_like(high, dtype=torch.bool)
    for finer in _KS[:-1]:
        unit = 2.0 ** (3 - finer)
        above = torch.ceil(high / unit - _SLACK) * unit
        limit = _LIMIT if old_k is None else torch.where(old_k < finer, _LIMIT_FINER, _LIMIT)
        fits = (above - low <= (limit + _SLACK) * unit) & ~decided
        k, top = torch.where(fits, float(finer), k), torch.where(fits, above, top)
        decided |= fits
    return top, k


CODEC_IMPLS: dict[str, Codec] = {
    name: kind(CODECS[name])
    for name, kind in {
        "fp32": Fp32, "bf16": Bf16, "softsign8": Softsign8, "sqrt8": Sqrt8, "root8m": Root8M, "root8v": Root8V,
        "root4": Root4, "lattice4": Lattice4,
    }.items()
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredState:
    """One declared state of one parameter, and its codec. `keys`: pairs of a codec's part and the key of its tensor."""

    decl: StateDecl
    codec: Codec
    shape: tuple[int, ...]
    keys: tuple[tuple[str, str], ...]
    is_full: bool = field(init=False)  # one number per element of the parameter

    def __post_init__(self) -> None:
        object.__setattr__(self, "is_full", self.decl.layout is StateLayout.FULL)

    def codec_tensors(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {part: state[key] for part, key in self.keys}

    def decode(self, state: Mapping[str, Tensor]) -> Tensor:
        return self.codec.decode(self.codec_tensors(state), self.shape)

    def encode_(
        self, state: Mapping[str, Tensor], values: Tensor, *, phase: int | None = None, new: Tensor | None = None
    ) -> None:
        """As `Codec.encode_`, with `phase` for v, which moves too slowly for rounding to nearest, and for codecs of few
        bits; with `new` for states with one number per element."""
        phase = phase if self.decl.kind is StateKind.V or self.codec.info.phased else None
        self.codec.encode_(self.codec_tensors(state), values, phase=phase, new=new if self.is_full else None)
