"""FOAM (arXiv 2512.07112): m and v of the gradient folded by 2^level, the residual of the step alone.

v averages (F(G))^2, the form printed in the paper. Its released code averages F(G^2), which is 2^level times larger
where neighbours' gradients are independent.
"""

from torch import Tensor
from torch.nn.functional import pad

from baoc.core.rule_tags import RULE_INFOS
from baoc.optim.rules.base import Direction, Rule, RuleContext
from baoc.optim.rules.matrix import as_matrix, average_, finite_matrix, from_matrix, mean
from baoc.types import RuleInfo

_ALPHA = 0.25  # cancels out if the update's RMS is matched


class Foam(Rule):
    """alpha (E m + R) / (sqrt(E v + R^2) + eps) with R = G - E F(G), times sqrt(1 - beta2^t) / (1 - beta1^t).

    F is the mean over 2^level neighbours along fan-in, zero-padded up to a multiple; E repeats.
    """

    def __init__(self, info: RuleInfo):
        super().__init__(info)
        self._fold = 2 ** info.states[0].level

    def direction(self, grad: Tensor, *, states: dict[str, Tensor], ctx: RuleContext) -> Direction:
        m, v = states["m"], states["v"]  # [rows, folds]
        parts = self._split(as_matrix(grad, ctx), padding=0.0)  # [rows, folds, 2^level]
        finite = finite_matrix(ctx)
        if finite is not None:
            finite = self._split(finite, padding=True)
        folded, valid = mean(parts, dim=2, finite=finite)
        average_(m, folded, weight=1 - ctx.beta1, valid=valid)
        average_(v, folded.square(), weight=1 - ctx.beta2, valid=valid)
        residual = parts - folded.unsqueeze(2)
        numerator = residual + m.unsqueeze(2)
        denominator = residual.square_().add_(v.unsqueeze(2)).sqrt_().add_(ctx.eps)
        return Direction(
            numerator=self._join(numerator, ctx, shape=grad.shape),
            denominator=self._join(denominator, ctx, shape=grad.shape),
            divisor=(1 - ctx.beta1**ctx.step) / (1 - ctx.beta2**ctx.step) ** 0.5 / _ALPHA,
        )

    def _split(self, matrix: Tensor, *, padding: float | bool) -> Tensor:
        missing = -matrix.shape[1] % self._fold
        return (pad(matrix, (0, missing), value=padding) if missing else matrix).reshape(len(matrix), -1, self._fold)

    def _join(self, parts: Tensor, ctx: RuleContext, *, shape: tuple[int, ...]) -> Tensor:
        assert ctx.matrix is not None
        return from_matrix(parts.reshape(len(parts), -1)[:, : ctx.matrix[1]], ctx, shape=shape)


RULES = tuple(Foam(info) for name, info in RULE_INFOS.items() if name.startswith("foam_"))
