"""Computes a new state of a block from its old ones, by their tags (docs/methods.md#state-inheritance).

The old rule's decoded states are expanded to one number per element, then reduced to the states of the new rule; so a
new rule needs no code here. A folded v averages the squared mean of 2^level neighbouring gradients. If these are
independent, that is 2^level times less than the mean of their v, and both directions correct for it.
"""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.functional import pad

from baoc.optim.rules.base import TINY, RuleContext
from baoc.optim.rules.matrix import as_matrix, column_mean, from_matrix, run_alone
from baoc.optim.state import Slot
from baoc.types import Moments, StateDecl, StateKind, StateLayout


def expand(values: Mapping[StateDecl, Tensor], *, ctx: RuleContext, shape: tuple[int, ...]) -> Tensor:
    """Expands a rule's states of one kind, m or v, to one number per element, in the parameter's shape."""
    for decl, value in values.items():
        if decl.layout is StateLayout.FULL:
            return value
        if decl.layout is StateLayout.FOLDED:
            return from_matrix(_unfold(value, decl, ctx=ctx), ctx, shape=shape)
    assert ctx.matrix is not None
    lines = {decl.layout: value for decl, value in values.items()}
    if len(lines) == 2:
        return from_matrix(outer(lines[StateLayout.PER_ROW], lines[StateLayout.PER_COLUMN]), ctx, shape=shape)
    ((layout, shared),) = lines.items()
    shared = shared.unsqueeze(1 if layout is StateLayout.PER_ROW else 0)
    return from_matrix(shared.expand(ctx.matrix), ctx, shape=shape)


def reduce(full: Tensor, decl: StateDecl, *, ctx: RuleContext) -> Tensor:
    """Reduces one number per element to the state that `decl` declares. Means over columns are of all ranks' rows."""
    if decl.layout is StateLayout.FULL:
        return full
    matrix = as_matrix(full, ctx)
    if decl.layout is StateLayout.PER_ROW:
        return matrix.mean(1)
    if decl.layout is StateLayout.PER_COLUMN:
        return run_alone(column_mean(matrix, finite=None, ctx=ctx), ctx)[0]
    fold = 2**decl.level
    matrix = pad(matrix, (0, -matrix.shape[1] % fold))
    folded = matrix.reshape(len(matrix), -1, fold).mean(2)
    return folded / fold if decl.kind is StateKind.V else folded


def _unfold(value: Tensor, decl: StateDecl, *, ctx: RuleContext) -> Tensor:
    """Folded state -> matrix. The last fold is padded with zeros, so it is scaled to the mean of its real elements."""
    assert ctx.matrix is not None
    fold = 2**decl.level
    length = ctx.matrix[1]
    sizes = value.new_full((value.shape[1],), fold)
    sizes[-1] = length - (value.shape[1] - 1) * fold
    scale = fold / sizes * (fold if decl.kind is StateKind.V else 1)
    return (value * scale).repeat_interleave(fold, dim=1)[:, :length]


def outer(row: Tensor, col: Tensor) -> Tensor:
    """v as row col^T / mean(row), the rank-1 matrix that has these row and column means."""
    return row.unsqueeze(1) * (col / row.mean().clamp(min=TINY)).unsqueeze(0)


def from_moments(moments: Moments, *, ctx: RuleContext, param: Tensor) -> Tensor:
    """v per element from the profile's row and column second moments, in the parameter's shape."""
    row, col = (mean.to(device=param.device, dtype=torch.float32) for mean in (moments.row, moments.col))
    assert (len(row), len(col)) == ctx.matrix, f"moments are ({len(row)}, {len(col)}), the matrix is {ctx.matrix}"
    return from_matrix(outer(row, col), ctx, shape=tuple(param.shape))


def bias(decl: StateDecl, *, beta: float, num_steps: int) -> float:
    """Share of the true mean in an average that started at zero `num_steps` ago; 1 if the rule corrects no bias."""
    return 1 - beta**num_steps if decl.bias_corrected and num_steps else 1.0


def squared_m(slot: Slot, state: Mapping[str, Tensor], *, beta: float, age: int, ctx: RuleContext) -> Tensor:
    """m^2 per element, without m's bias: a lower bound of v. Zero if the rule has no m.

    An estimated v is raised to it, because m over the root of a v that is too small has no bound.
    """
    states = [each for each in slot.states if each.decl.kind is StateKind.M]
    if not states:
        return slot.param.new_zeros(())
    m = expand({each.decl: each.decode(state) for each in states}, ctx=ctx, shape=tuple(slot.param.shape))
    return (m / bias(states[0].decl, beta=beta, num_steps=age)).square_()
