"""Adafactor (Shazeer and Stern 2018, arXiv 1804.04235): v as the outer product of its row and column means.

With momentum, m averages the gradient and is corrected as AdamW's is (the paper averages the update instead), so that m
can be inherited from and by every other rule.
"""

import torch
from torch import Tensor

from baoc.core.rule_tags import RULE_INFOS
from baoc.optim.rules.base import Direction, RuleContext
from baoc.optim.rules.matrix import (
    RankSums,
    SummingRule,
    as_matrix,
    average_,
    column_mean,
    finite_matrix,
    from_matrix,
    mean,
    rms,
    run_alone,
)

_FLOOR = 1e-30  # added to g^2, eps1 of the paper
_DECAY = 0.8  # beta2 of step t is 1 - t^-0.8
_CLIP = 1.0  # largest RMS of the update


class Adafactor(SummingRule):
    """Update g / sqrt(v), v = row col^T / mean(row), divided by max(1, its RMS). `eps` of the group plays no part."""

    def steps(self, grad: Tensor, *, states: dict[str, Tensor], ctx: RuleContext) -> RankSums[Direction]:
        row, col = states["v_row"], states["v_col"]
        finite = finite_matrix(ctx)
        square = as_matrix(grad, ctx).square().add_(_FLOOR)
        weight = ctx.step**-_DECAY
        new, valid = mean(square, dim=1, finite=finite)
        average_(row, new, weight=weight, valid=valid)
        new, valid = yield from column_mean(square, finite=finite, ctx=ctx)
        average_(col, new, weight=weight, valid=valid)
        if "m" in states:
            states["m"].lerp_(grad, 1 - ctx.beta1)
        return (yield from self._direction(grad, states=states, ctx=ctx))

    def last(self, *, states: dict[str, Tensor], ctx: RuleContext) -> Direction | None:
        if "m" not in states or not ctx.step:
            return None
        return run_alone(self._direction(states["m"], states=states, ctx=ctx), ctx)

    @staticmethod
    def _direction(grad: Tensor, *, states: dict[str, Tensor], ctx: RuleContext) -> RankSums[Direction]:
        row, col = states["v_row"], states["v_col"]
        numerator = states["m"] / (1 - ctx.beta1**ctx.step) if "m" in states else grad
        row_mean = row.mean()
        if ctx.shard is not None:
            total, count = yield torch.stack([row.sum(), row.new_tensor(len(row))])
            row_mean = (total / count).to(row.dtype)
        scale = (row / row_mean).sqrt_().unsqueeze(1) * col.sqrt().unsqueeze(0)
        update = numerator / from_matrix(scale, ctx, shape=grad.shape)
        size = yield from rms(update, finite=ctx.finite, ctx=ctx)
        update.div_((size / _CLIP).clamp_(min=1.0))
        return Direction(numerator=update)


RULES = (Adafactor(RULE_INFOS["adafactor"]), Adafactor(RULE_INFOS["adafactor_momentum"]))
