"""For rules by row, column or fold: sums over ranks, tensors as matrices, and means without excluded elements."""

from collections.abc import Generator
from typing import Any, TypeVar

import torch
from torch import Tensor

from baoc.optim.rules.base import Direction, Rule, RuleContext

T = TypeVar("T")
RankSums = Generator[Tensor, Tensor, T]  # yields its part of each sum, receives the sum over ranks in fp64


def run_alone(steps: RankSums[T], ctx: RuleContext) -> T:
    """Runs `steps` and returns its result. Each sum over ranks is a message of its own."""
    total: Any = None
    while True:
        try:
            own = steps.send(total)
        except StopIteration as end:
            return end.value
        total = ctx.shard.group.all_reduce_(own.to(torch.float64))


class SummingRule(Rule):
    """Base of rules whose step sums over the rows of a matrix. With `ctx.shard` this rank has some of the rows."""

    def steps(self, grad: Tensor, *, states: dict[str, Tensor], ctx: RuleContext) -> RankSums[Direction]:
        """`direction` as a generator, which yields at each sum over ranks, so that the sums of many tensors can be one
        message. Without `ctx.shard` it never yields."""
        raise NotImplementedError

    def direction(self, grad: Tensor, *, states: dict[str, Tensor], ctx: RuleContext) -> Direction:
        return run_alone(self.steps(grad, states=states, ctx=ctx), ctx)


def as_matrix(tensor: Tensor, ctx: RuleContext) -> Tensor:
    """The tensor as [fan_out, fan_in]: a view where strides allow, else a copy."""
    assert ctx.matrix is not None, "this rule needs a matrix; `why_inapplicable` should have kept it away"
    rows, cols = ctx.matrix
    return tensor.reshape(cols, rows).t() if ctx.transposed else tensor.reshape(rows, cols)


def from_matrix(matrix: Tensor, ctx: RuleContext, *, shape: tuple[int, ...]) -> Tensor:
    """The inverse of `as_matrix`."""
    return (matrix.t() if ctx.transposed else matrix).reshape(shape)


def finite_matrix(ctx: RuleContext) -> Tensor | None:
    """`ctx.finite` as a matrix, None where nothing is excluded."""
    return None if ctx.finite is None else as_matrix(ctx.finite, ctx)


def mean(values: Tensor, *, dim: int, finite: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """(mean along `dim` over the finite elements, mask of means over any element; None: of all)."""
    if finite is None:
        return values.mean(dim), None
    count = finite.sum(dim)
    return (values * finite).sum(dim) / count.clamp(min=1), count > 0


def column_mean(values: Tensor, *, finite: Tensor | None, ctx: RuleContext) -> RankSums[tuple[Tensor, Tensor | None]]:
    """`mean` over the rows of all ranks."""
    if ctx.shard is None:
        return mean(values, dim=0, finite=finite)
    count = values.new_full(values.shape[1:], len(values)) if finite is None else finite.sum(0)
    total = yield torch.cat([(values if finite is None else values * finite).sum(0), count])
    sums, counts = total.chunk(2)
    return (sums / counts.clamp(min=1)).to(torch.float32), counts > 0


def average_(state: Tensor, new: Tensor, *, weight: float, valid: Tensor | None) -> None:
    """state <- state + weight (new - state), in place; elements that are not valid keep their value."""
    if valid is None:
        state.lerp_(new, weight)
    else:
        state.copy_(torch.where(valid, state.lerp(new, weight), state))


def rms(values: Tensor, *, finite: Tensor | None, ctx: RuleContext) -> RankSums[Tensor]:
    """Root mean square over the finite elements of all ranks, as a tensor without dimensions; 0 of nothing."""
    if ctx.shard is not None:
        counted = values if finite is None else torch.where(finite, values, 0.0)
        count = values.new_tensor(values.numel()) if finite is None else finite.sum()
        square, total_count = yield torch.stack([torch.linalg.vector_norm(counted).double().square(), count])
        return (square / total_count.clamp(min=1)).sqrt().to(torch.float32)
    if finite is None:
        return torch.linalg.vector_norm(values) / max(values.numel(), 1) ** 0.5
    counted = torch.where(finite, values, 0.0)
    return torch.linalg.vector_norm(counted) / finite.sum().clamp(min=1).sqrt()
