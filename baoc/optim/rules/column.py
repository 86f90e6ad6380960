"""Column normalization: the gradient, or its average, with each column scaled to norm 1.

docs/methods.md#column-norm has the formula.
"""

import torch
from torch import Tensor

from baoc.core.rule_tags import RULE_INFOS
from baoc.optim.rules.base import TINY, Direction, RuleContext
from baoc.optim.rules.matrix import RankSums, SummingRule, as_matrix, from_matrix, run_alone


class ColumnNorm(SummingRule):
    """g_j / |g_j| for each column j of a (fan_out, fan_in) matrix, the weights that read input j; or m_j / |m_j|, m the
    average of g, which SCALE (arXiv 2506.16659) runs on the head.

    Columns, not rows, because a column's gradient has its input's size as a factor, and inputs (tokens, features)
    differ in size more than the errors that come back to the outputs do; the norm takes that factor out. Times
    sqrt(fan_out) it is AdamW with v shared along fan-out at betas of 0. Excluded elements are 0 and so add nothing to a
    norm; a column without gradient stays. `eps` of the group plays no part, nor does the length of m, or its bias.
    """

    def steps(self, grad: Tensor, *, states: dict[str, Tensor], ctx: RuleContext) -> RankSums[Direction]:
        if "m" in states:
            m = states["m"].lerp_(grad, 1 - ctx.beta1)
            grad = m if ctx.finite is None else torch.where(ctx.finite, m, 0.0)
        return (yield from _columns_normalized(grad, ctx=ctx))

    def last(self, *, states: dict[str, Tensor], ctx: RuleContext) -> Direction | None:
        return run_alone(_columns_normalized(states["m"], ctx=ctx), ctx) if "m" in states else None


def _columns_normalized(update: Tensor, *, ctx: RuleContext) -> RankSums[Direction]:
    """`update` with each column divided by its norm."""
    assert ctx.matrix is not None
    matrix = as_matrix(update, ctx)
    if len(matrix):
        largest = matrix.abs().amax(0).clamp_(min=TINY)  # squares of gradients far below 1 would be lost
        norm = torch.linalg.vector_norm(matrix / largest, dim=0).mul_(largest)
    else:  # a rank without rows
        norm = matrix.new_zeros(matrix.shape[1])
    if ctx.shard is not None:
        norm = (yield norm.to(torch.float64).square()).sqrt().to(torch.float32)
    norm = norm.clamp_(min=TINY)
    return Direction(numerator=update, denominator=from_matrix(norm.expand(ctx.matrix), ctx, shape=tuple(update.shape)))


RULES = (ColumnNorm(RULE_INFOS["column_norm"]), ColumnNorm(RULE_INFOS["column_norm_momentum"]))
