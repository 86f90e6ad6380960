"""The interface of update rules. A rule is the arithmetic of one step on one tensor, with its states decoded to fp32.

Rules know nothing of storage, parameter groups, matching or weight decay; those belong to `baoc.optim`.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from baoc.types import RuleInfo

TINY = 1e-30  # divisors are at least this


@dataclass(slots=True, kw_only=True)
class RuleContext:
    """The current step, as a rule sees it. It is not frozen, because one is made per tensor and step.

    Attributes:
        step: The number of this step, from 1, for a rule that counts steps; else 0.
        finite: Bool mask in the gradient's shape, True where it is finite; it is 0 elsewhere. None: all are finite.
        matrix: (fan_out, fan_in) if the tensor is a matrix. `transposed`: it is stored as (fan_in, fan_out).
        shard: An `optim.shards.Shard` if this rank has some rows of the matrix, and the rule needs all or their sums.
    """

    step: int = 0
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    finite: Tensor | None = None
    matrix: tuple[int, int] | None = None
    transposed: bool = False
    shard: Any = None


@dataclass(slots=True, kw_only=True)
class Direction:
    """The update, `numerator / denominator / divisor`. The weights change by minus the learning rate times it.

    The three are separate so that AdamW's last operation is torch's own `addcdiv_(numerator, denominator, value=-(lr
    / divisor))`, bit for bit. Both tensors have the gradient's shape. `numerator` may be a state and is never written
    to.
    """

    numerator: Tensor
    denominator: Tensor | None = None
    divisor: float = 1.0

    def update(self) -> Tensor:
        """`numerator / denominator`, not yet divided by `divisor`. It may be a state: do not write to it."""
        return self.numerator if self.denominator is None else self.numerator / self.denominator


class Rule:
    """Base of update rules. An object holds no state; the registry keeps one per name, which all optimizers share."""

    def __init__(self, info: RuleInfo):
        self.info = info

    def direction(self, grad: Tensor, *, states: dict[str, Tensor], ctx: RuleContext) -> Direction:
        """Updates `states` in place with `grad` and returns the update.

        `grad` is fp32 and is never written to. `states` maps the names of `info.states` to fp32 tensors of their
        declared shape. Means and sums leave out the elements where `ctx.finite` is False; an average over no elements
        keeps its value. States may be anything at excluded elements, because the caller restores them.
        """
        raise NotImplementedError

    def last(self, *, states: dict[str, Tensor], ctx: RuleContext) -> Direction | None:
        """The update of step `ctx.step`, recomputed from the states after it; None if they do not determine it."""
        return None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.info.name!r})"
