"""Starting v from the first gradient after a move, where neither the old states nor a profile tell it.

A v of zeros at age 1 makes AdamW's first update one learning rate in every coordinate, several times what the block did
before. So v starts as if the gradients so far had been like the first one: by row and column of a matrix (as from a
profile's moments), as its mean over a vector.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from baoc.kernels.usable import usable
from baoc.optim import inherit
from baoc.optim.registry import BlockRegistry
from baoc.optim.rules import RuleContext
from baoc.optim.rules.matrix import as_matrix
from baoc.optim.shards import Shard
from baoc.optim.state import LiveBlock, Slot, State, step_of
from baoc.types import Moments, StateKind


def seed(blocks: Iterable[LiveBlock], *, registry: BlockRegistry, param_groups: list[dict[str, Any]]) -> None:
    """Starts what is `unseeded` and has a gradient now; a gradient of zeros tells nothing yet."""
    for live in blocks:
        if any(slot.name in live.unseeded and slot.param.grad is not None for slot in live.slots):
            with registry.states_on_device(live):
                _seed_block(live, state=registry.state, param_groups=param_groups)


def _seed_block(live: LiveBlock, *, state: Mapping[Tensor, State], param_groups: list[dict[str, Any]]) -> None:
    for slot in live.slots:
        grad = slot.param.grad
        if slot.name not in live.unseeded or grad is None:
            continue
        grad = grad.detach().to(torch.float32)
        square = torch.where(usable(grad), grad, 0.0).square_()
        some = square.any().to(torch.float32)
        if bool(some if slot.shard is None else slot.shard.shards.total_(some)):
            _start(slot, state[slot.param], square, betas=slot.betas(param_groups))
            live.unseeded.discard(slot.name)


def _start(slot: Slot, state: State, square: Tensor, *, betas: tuple[float, float]) -> None:
    ctx = slot.form
    age = step_of(slot, state)
    spread = _spread(square, ctx=ctx) if slot.shard is None else _spread_over(square, slot=slot, shard=slot.shard)
    full = torch.maximum(spread, inherit.m_square(slot, state, beta=betas[0], age=age, ctx=ctx))
    for kept in slot.kept:
        if kept.decl.kind is StateKind.V:
            bias = inherit.bias(kept.decl, beta=betas[1], at=age)
            kept.encode_(state, inherit.reduce(full, kept.decl, ctx=ctx) * bias)


def _spread_over(square: Tensor, *, slot: Slot, shard: Shard) -> Tensor:
    """`_spread` of a tensor of which this rank has some rows."""
    if slot.matrix is None:
        return (shard.shards.total_(square.sum()) / shard.owner.numel()).expand(square.shape)
    lines = square.reshape(-1, slot.matrix[0 if slot.info.transposed else 1])
    col = shard.shards.total_(lines.sum(0)) / (shard.owner.numel() // lines.shape[1])
    return (lines.mean(1, keepdim=True) * (col / col.mean().clamp(min=inherit.TINY))).reshape(square.shape)


def _spread(square: Tensor, *, ctx: RuleContext) -> Tensor:
    """Squares of one gradient -> the v that they are a sample of, in the same shape."""
    if ctx.matrix is None:
        return square.mean().expand(square.shape)
    matrix = as_matrix(square, ctx)
    return inherit.from_moments(Moments(row=matrix.mean(1), col=matrix.mean(0)), ctx=ctx, param=square)
