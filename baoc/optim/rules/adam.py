"""AdamW, AdamW without momentum, and AdamW whose v is shared along an axis (SlimAdam, Adam-mini).

docs/methods.md#shared-second-moments has the formulas and their sources.
"""

from torch import Tensor

from baoc.core.rule_tags import RULE_INFOS
from baoc.optim.rules.base import Direction, Rule, RuleContext
from baoc.optim.rules.matrix import (
    RankSums,
    SummingRule,
    as_matrix,
    average_,
    column_mean,
    finite_matrix,
    from_matrix,
    mean,
)
from baoc.types import RuleInfo, StateKind, StateLayout


class AdamW(Rule):
    """The operations of torch.optim.AdamW(foreach=False, fused=False) in its order, so that results agree bit for bit.

    With `m` among the states, the numerator is its average, else the gradient itself (RMSprop, beta1 = 0).
    """

    def __init__(self, info: RuleInfo):
        super().__init__(info)
        self._has_m = any(decl.kind is StateKind.M for decl in info.states)

    def direction(self, grad: Tensor, *, states: dict[str, Tensor], ctx: RuleContext) -> Direction:
        if self._has_m:
            states["m"].lerp_(grad, 1 - ctx.beta1)
        states["v"].mul_(ctx.beta2).addcmul_(grad, grad, value=1 - ctx.beta2)
        return self._direction(states["m"] if self._has_m else grad, v=states["v"], ctx=ctx)

    def last(self, *, states: dict[str, Tensor], ctx: RuleContext) -> Direction | None:
        return self._direction(states["m"], v=states["v"], ctx=ctx) if self._has_m and ctx.step else None

    def _direction(self, numerator: Tensor, *, v: Tensor, ctx: RuleContext) -> Direction:
        denominator = v.sqrt().div_((1 - ctx.beta2**ctx.step) ** 0.5).add_(ctx.eps)
        divisor = 1 - ctx.beta1**ctx.step if self._has_m else 1.0
        return Direction(numerator=numerator, denominator=denominator, divisor=divisor)


class SharedAdamW(SummingRule):
    """AdamW with one v per row or per column: the average of the mean of g^2 over it."""

    def __init__(self, info: RuleInfo):
        super().__init__(info)
        self._dim = 1 if info.states[1].layout is StateLayout.PER_ROW else 0

    def steps(self, grad: Tensor, *, states: dict[str, Tensor], ctx: RuleContext) -> RankSums[Direction]:
        m, v = states["m"], states["v"]
        m.lerp_(grad, 1 - ctx.beta1)
        squares, finite = as_matrix(grad, ctx).square(), finite_matrix(ctx)
        if self._dim == 1:
            square, valid = mean(squares, dim=1, finite=finite)
        else:
            square, valid = yield from column_mean(squares, finite=finite, ctx=ctx)
        average_(v, square, weight=1 - ctx.beta2, valid=valid)
        return self._direction(m, v=v, ctx=ctx)

    def last(self, *, states: dict[str, Tensor], ctx: RuleContext) -> Direction | None:
        return self._direction(states["m"], v=states["v"], ctx=ctx) if ctx.step else None

    def _direction(self, m: Tensor, *, v: Tensor, ctx: RuleContext) -> Direction:
        shared = v.sqrt().div_((1 - ctx.beta2**ctx.step) ** 0.5).add_(ctx.eps).unsqueeze(self._dim)
        assert ctx.matrix is not None
        denominator = from_matrix(shared.expand(ctx.matrix), ctx, shape=m.shape)
        return Direction(numerator=m, denominator=denominator, divisor=1 - ctx.beta1**ctx.step)


RULES = (
    AdamW(RULE_INFOS["adamw"]),
    AdamW(RULE_INFOS["rmsprop"]),
    SharedAdamW(RULE_INFOS["adamw_shared_in"]),
    SharedAdamW(RULE_INFOS["adamw_shared_out"]),
)
