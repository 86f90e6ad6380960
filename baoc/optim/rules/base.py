"""What an update rule is: the arithmetic of one step on one tensor, with its states decoded to fp32.

Rules know nothing of storage, parameter groups, matching or weight decay; those belong to `baoc.optim`.
"""

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from baoc.types import RuleInfo, StateDecl


@dataclass(slots=True, kw_only=True)
class RuleContext:
    """What a rule may know of the step. Not frozen, because one is built per tensor and step.

    `step` is the number of this step, counted from 1, of a rule that counts steps (else 0). `finite` is None when every
    element of the gradient is finite; else True where it is, and the gradient is 0 elsewhere. `matrix` is (fan_out,
    fan_in) where the tensor has one; `transposed` says that it is stored (fan_in, fan_out).
    """

    step: int = 0
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    finite: Tensor | None = None
    matrix: tuple[int, int] | None = None
    transposed: bool = False
    shard: Any = None  # an `optim.shards.Shard` where the rule needs a whole matrix, of which these are some rows


@dataclass(slots=True, kw_only=True)
class Direction:
    """The update as `numerator / denominator / divisor`, to be subtracted times the learning rate.

    Kept apart so that AdamW's last operation can be torch's own `addcdiv_(numerator, denominator, value=-(lr /
    divisor))`, bit for bit. Both have the shape of the gradient; `numerator` may be a state and is never written to.
    """

    numerator: Tensor
    denominator: Tensor | None = None
    divisor: float = 1.0

    def update(self) -> Tensor:
        """`numerator / denominator`, still to be divided by `divisor`. May be a state: do not write to it."""
        return self.numerator if self.denominator is None else self.numerator / self.denominator


@runtime_checkable
class UpdateRule(Protocol):
    """One rule. Objects are stateless and shared; the registry keeps one per name."""

    @property
    def info(self) -> RuleInfo: ...

    def direction(self, grad: Tensor, *, states: dict[str, Tensor], ctx: RuleContext) -> Direction:
        """Update `states` in place with `grad` and return the update.

        `grad` is fp32 and is never written to; `states` maps the names of `info.states` to fp32 tensors of their
        declared shape. Reductions leave out the elements that `ctx.finite` excludes, and an average of which nothing is
        left keeps its value. What stands at an excluded element afterwards does not matter: the caller restores it.
        """
        ...

    def last(self, *, states: dict[str, Tensor], ctx: RuleContext) -> Direction | None:
        """The update of step `ctx.step` again, from the states it left, or None where these do not tell."""
        ...


class Rule:
    """Base of the rules here: holds `info`, and by default cannot tell its last update."""

    def __init__(self, info: RuleInfo):
        self.info = info

    def last(self, *, states: dict[str, Tensor], ctx: RuleContext) -> Direction | None:
        return None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.info.name!r})"


def decl_named(info: RuleInfo, name: str) -> StateDecl:
    """The declaration of the state called `name`."""
    return next(decl for decl in info.states if decl.name == name)
