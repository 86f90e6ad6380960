"""Update matching: one learning rate serves every rule when each block's update is as large as AdamW's would be.

Which rules are matched is theirs to say (`RuleInfo.matched`): one that averages gradients and divides them by the root
of averaged squares, each element by its own or by one shared with its row, its column or both, has AdamW's size by
itself in every phase of training, which no constant has. The others are scaled to one.

factor = target / own RMS, where own is what the rule's update measured over the block in the step before (no second
pass); before a block's first step and after a migration it is measured exactly. A jump of the rule's RMS would pass
that lag unchecked, so no tensor's update exceeds an RMS of one learning rate, AdamW's own first step.

Averaging gradients removes noise and leaves the way that they go together. So a rule without momentum that is scaled
to the RMS of AdamW's averaged update goes a fraction of AdamW's way. `displacement`, the default, scales it to AdamW's
update without the average instead, whose RMS is 1 because v is the mean of g^2; `rms` scales it to AdamW's own.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from baoc.types import RuleInfo, StateKind

Matching = Literal["rms", "displacement"]
MATCHINGS: tuple[Matching, ...] = ("rms", "displacement")
DEFAULT_TARGET = 0.2  # AdamW's usual update RMS, before any profile
UNAVERAGED_TARGET = 1.0  # and that of g / sqrt(v)
_TINY = 1e-30
_PIECE = 2**16


@dataclass(slots=True, kw_only=True)
class Measure:
    """Sums over the tensors of a block in one step; tensors without dimensions on devices other than the CPU."""

    own: float | Tensor = 0.0  # sum of squares of the rule's own update
    applied: float | Tensor = 0.0  # and after matching
    count: int = 0

    def add(self, norm: float | Tensor, *, factor: float | Tensor, count: int) -> None:
        self.own = self.own + norm * norm
        applied = norm * factor
        self.applied = self.applied + applied * applied
        self.count += count

    def rms(self) -> tuple[float | Tensor, float | Tensor]:
        """Own and applied RMS."""
        count = max(self.count, 1)
        return (self.own / count) ** 0.5, (self.applied / count) ** 0.5


def averages(rule: RuleInfo) -> bool:
    """Whether the rule keeps momentum."""
    return any(decl.kind is StateKind.M for decl in rule.states)


def update_norm(update: Tensor, *, divisor: float, finite: Tensor | None, on_cpu: bool) -> tuple[float | Tensor, int]:
    """Euclidean norm of `update / divisor` over its finite elements, and their number."""
    count = update.numel()
    if finite is not None:
        update = torch.where(finite, update, 0.0)
        count = int(finite.sum())
    if on_cpu:  # in pieces, because the CPU kernel sums in fp32: off by 1 % at 10M equal elements
        pieces = update.reshape(-1).split(_PIECE) if count > _PIECE else (update,)
        norm = sum(torch.linalg.vector_norm(piece).item() ** 2 for piece in pieces) ** 0.5
    else:
        norm = torch.linalg.vector_norm(update)
    return norm / abs(divisor), count


def factor(match: Tensor, *, norm: float | Tensor, count: int) -> float | Tensor:
    """What to multiply a tensor's update by; `match` is (target, own RMS of the block), `norm` is this tensor's own."""
    if isinstance(norm, Tensor):
        return _factor_on_device(match[0], own=match[1], norm=norm, count=count)
    target, own = match.tolist()
    rms = norm / max(count, 1) ** 0.5
    if rms <= _TINY:
        return 0.0  # the update is zero
    if own <= _TINY:
        return target / rms  # the block stood still until now
    return min(target / own, max(1.0, target) / rms)


def _factor_on_device(target: Tensor, *, own: Tensor, norm: Tensor, count: int) -> Tensor:
    """`factor` without a synchronisation."""
    rms = (norm / max(count, 1) ** 0.5).clamp(min=_TINY)
    usual = torch.minimum(target / own.clamp(min=_TINY), target.clamp(min=1.0) / rms)
    return torch.where(own > _TINY, usual, target / rms)
