"""Muon (Jordan et al. 2024), for hidden matrices: momentum whose singular values are all replaced by about 1.

Five Newton-Schulz steps approximate the polar factor, see `baoc.kernels.polar`.
"""

from dataclasses import replace

import torch
from torch import Tensor

from baoc.core.rule_tags import RULE_INFOS
from baoc.kernels.polar import STEPS, A, B, C
from baoc.optim.rules.base import TINY, Direction, Rule, RuleContext
from baoc.optim.rules.matrix import as_matrix, from_matrix


def orthogonalized(matrices: Tensor, *, dtype: torch.dtype = torch.float32) -> Tensor:
    """The polar factor U V^T of each matrix U S V^T, approximated, in fp32; that of zeros is zeros. `matrices` are
    [..., rows, cols] and are not written to; stacking saves launches.

    `dtype` is that of the products. bf16 uses tensor cores and is off by 2 to 4 % in norm where singular values lie
    within two decades; those below 1 % of the largest are lost in rounding and come out smaller than 1.
    """
    wide = matrices.shape[-2] <= matrices.shape[-1]
    x = (matrices if wide else matrices.mT).to(torch.float32)
    # The largest element divides first, because squares of tiny gradients would underflow in the norm.
    x = x / x.abs().amax((-2, -1), keepdim=True).clamp_(min=TINY)
    x = (x / torch.linalg.matrix_norm(x, keepdim=True).clamp_(min=TINY)).to(dtype)
    stack = x.reshape(-1, *x.shape[-2:])
    long = dtype is torch.float32 and stack.shape[-1] >= 2 * stack.shape[-2]
    x = (_steps_on_gram if long else _steps)(stack).view(x.shape)
    return (x if wide else x.mT).to(torch.float32)


def _steps(x: Tensor) -> Tensor:
    for _ in range(STEPS):
        gram = torch.bmm(x, x.mT)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=B, alpha=C), x, beta=A)
    return x


def _steps_on_gram(x: Tensor) -> Tensor:
    """`_steps` by the smaller matrix G = X X^T: X <- P X makes it P G P, and `q` is the product of all P."""
    gram, q = torch.bmm(x, x.mT), None
    for step in range(STEPS):
        p = torch.baddbmm(gram, gram, gram, beta=B, alpha=C)
        p.diagonal(dim1=-2, dim2=-1).add_(A)
        q = p if q is None else torch.bmm(p, q)
        if step < STEPS - 1:
            gram = torch.bmm(torch.bmm(p, gram), p)
    assert q is not None
    return torch.bmm(q, x)


class Muon(Rule):
    """The update is sqrt(max(1, rows / cols)) NS((1 - beta1) g + beta1 m), with m the average of g (Nesterov momentum).

    The published beta1 is .95. Excluded elements are 0 in the matrix that is orthogonalized.
    """

    def direction(self, grad: Tensor, *, states: dict[str, Tensor], ctx: RuleContext) -> Direction:
        m = states["m"].lerp_(grad, 1 - ctx.beta1)
        ahead = grad.lerp(m, ctx.beta1)
        if ctx.finite is not None:
            ahead = torch.where(ctx.finite, ahead, 0.0)
        if ctx.shard is None:
            return Direction(numerator=_update(ahead, ctx))
        assert ctx.matrix is not None
        ahead = ctx.shard.all_gather(ahead)
        length = ctx.matrix[0 if ctx.transposed else 1]
        lines = ahead.numel() // length
        all_rows = replace(ctx, matrix=(length, lines) if ctx.transposed else (lines, length))
        return Direction(numerator=ctx.shard.local_part(_update(ahead, all_rows), shape=grad.shape))


def _update(ahead: Tensor, ctx: RuleContext) -> Tensor:
    matrix = as_matrix(ahead, ctx)
    rows, cols = matrix.shape
    dtype = torch.bfloat16 if matrix.is_cuda else torch.float32
    update = orthogonalized(matrix, dtype=dtype).mul_(max(1.0, rows / cols) ** 0.5)
    return from_matrix(update, ctx, shape=tuple(ahead.shape))


RULES = (Muon(RULE_INFOS["muon"]),)
