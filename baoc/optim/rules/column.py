"""The gradient with each of its columns made of one length: adaptive between inputs, and stateless.

docs/methods.md#column-norm has the formula.
"""

import torch
from torch import Tensor

from baoc.core.rule_tags import RULE_INFOS
from baoc.optim.rules.base import Direction, Rule, RuleContext
from baoc.optim.rules.matrix import as_matrix, from_matrix

_TINY = 1e-30


class ColumnNorm(Rule):
    """g_j / |g_j| for each column j of a (fan_out, fan_in) matrix, the weights that read input j.

    Columns, not rows, because a column's gradient has its input's size as a factor, and inputs (tokens, features)
    differ in size more than the errors that come back to the outputs do; the norm takes that factor out. Times
    sqrt(fan_out) it is AdamW with v shared along fan-out at betas of 0. Excluded elements are 0 and so add nothing to a
    norm; a column without gradient stays. `eps` of the group plays no part.
    """

    def direction(self, grad: Tensor, *, states: dict[str, Tensor], ctx: RuleContext) -> Direction:
        assert ctx.matrix is not None
        matrix = as_matrix(grad, ctx)
        largest = matrix.abs().amax(0).clamp_(min=_TINY)  # squares of gradients far below 1 would be lost
        norm = torch.linalg.vector_norm(matrix / largest, dim=0).mul_(largest).clamp_(min=_TINY)
        return Direction(numerator=grad, denominator=from_matrix(norm.expand(ctx.matrix), ctx, shape=tuple(grad.shape)))


RULES = (ColumnNorm(RULE_INFOS["column_norm"]),)
