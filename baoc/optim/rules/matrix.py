"""Helpers of rules by row, column or fold: the matrix view of a tensor, and means that leave out excluded elements."""

import torch
from torch import Tensor

from baoc.optim.rules.base import RuleContext


def as_matrix(tensor: Tensor, ctx: RuleContext) -> Tensor:
    """The tensor as [fan_out, fan_in]: a view where strides allow, else a copy."""
    assert ctx.matrix is not None, "this rule needs a matrix; `applies` should have kept it away"
    rows, cols = ctx.matrix
    return tensor.reshape(cols, rows).t() if ctx.transposed else tensor.reshape(rows, cols)


def from_matrix(matrix: Tensor, ctx: RuleContext, *, shape: tuple[int, ...]) -> Tensor:
    """The inverse of `as_matrix`."""
    return (matrix.t() if ctx.transposed else matrix).reshape(shape)


def finite_matrix(ctx: RuleContext) -> Tensor | None:
    """`ctx.finite` as a matrix, None where nothing is excluded."""
    return None if ctx.finite is None else as_matrix(ctx.finite, ctx)


def mean(values: Tensor, *, dim: int, finite: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Mean along `dim` over the finite elements, and where any were left (None: everywhere)."""
    if finite is None:
        return values.mean(dim), None
    count = finite.sum(dim)
    return (values * finite).sum(dim) / count.clamp(min=1), count > 0


def average_(state: Tensor, new: Tensor, *, weight: float, valid: Tensor | None) -> None:
    """state <- state + weight (new - state), in place; elements that are not valid keep their value."""
    if valid is None:
        state.lerp_(new, weight)
    else:
        state.copy_(torch.where(valid, state.lerp(new, weight), state))


def rms(values: Tensor, *, finite: Tensor | None) -> Tensor:
    """Root mean square over the finite elements, as a tensor without dimensions; 0 of nothing."""
    if finite is None:
        return torch.linalg.vector_norm(values) / max(values.numel(), 1) ** 0.5
    kept = torch.where(finite, values, 0.0)
    return torch.linalg.vector_norm(kept) / finite.sum().clamp(min=1).sqrt()
