"""Initialises v from the first gradient after a migration, if neither the old states nor a profile determine it.

From a v of zeros AdamW's first update would be one learning rate in every coordinate, several times what the block did
before. So v starts as if the gradients so far had been like the first one: by row and column of a matrix, as from a
profile's moments; as its mean over a vector.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from baoc.kernels.usable import usable
from baoc.optim import codecs, inherit
from baoc.optim.registry import BlockRegistry
from baoc.optim.rules.base import TINY
from baoc.optim.shards import local_shard
from baoc.optim.state import LiveBlock, Slot, State, step_of
from baoc.types import StateKind

ELEMENTS_PER_CHUNK = 2**22  # of a gradient, that are squared at a time


def temporary_bytes(params: Iterable[Tensor]) -> int:
    """The most bytes that `seed` takes beside the states: three fp32 numbers per element of the largest parameter, or
    two and what encoding a chunk in 4 bits takes (measured at .5, 7 and 33 million), and means of its lines."""

    def of(numel: int, lines: int) -> int:
        return 4 * (max(3 * numel, 2 * numel + 7 * min(numel, codecs.ELEMENTS_AT_ONCE) // 2) + 3 * lines)

    locals_ = (local_shard(param) for param in params)
    return max((of(param.numel(), sum(param.shape)) for param in locals_), default=0)


def seed(blocks: Iterable[LiveBlock], *, registry: BlockRegistry, param_groups: list[dict[str, Any]]) -> None:
    """Initialises v of `unseeded` parameters that have a gradient now. A gradient of zeros is no estimate yet."""
    for live in blocks:
        if any(slot.name in live.unseeded and slot.param.grad is not None for slot in live.slots):
            with registry.states_on_device(live):
                _seed_block(live, state=registry.state, param_groups=param_groups)


def _seed_block(live: LiveBlock, *, state: Mapping[Tensor, State], param_groups: list[dict[str, Any]]) -> None:
    for slot in live.slots:
        grad = slot.param.grad
        if slot.name not in live.unseeded or grad is None:
            continue
        line_means, column_means, any_nonzero = _mean_squares(grad.detach(), slot=slot)
        if bool(any_nonzero if slot.shard is None else slot.shard.group.all_reduce_(any_nonzero)):
            _initialise(slot, state[slot.param], line_means, column_means, betas=slot.betas(param_groups))
            live.unseeded.discard(slot.name)


def _initialise(
    slot: Slot, state: State, line_means: Tensor, column_means: Tensor, *, betas: tuple[float, float]
) -> None:
    """Stores v as the rank-1 matrix with these means, at least the square of m."""
    ctx = slot.shape_context
    age = step_of(slot, state)
    columns = column_means / column_means.mean().clamp(min=TINY)
    full = (line_means.unsqueeze(1) * columns).reshape(slot.param.shape)
    least = inherit.squared_m(slot, state, beta=betas[0], age=age, ctx=ctx)
    torch.maximum(full, least, out=full)
    del least  # so that one tensor of v's size is held while states are encoded
    for each in slot.states:
        if each.decl.kind is StateKind.V:
            bias = inherit.bias(each.decl, beta=betas[1], num_steps=age)
            each.encode_(state, inherit.reduce(full, each.decl, ctx=ctx).mul_(bias))


def _mean_squares(grad: Tensor, *, slot: Slot) -> tuple[Tensor, Tensor, Tensor]:
    """(mean squares of each stored line of a matrix, those of each stored column over all ranks, any element is not 0),
    of finite elements. Both are the mean of all elements of a vector."""
    length = 1 if slot.matrix is None else slot.matrix[0 if slot.info.transposed else 1]
    stored = grad.reshape(-1, length)
    line_means = torch.empty(len(stored), dtype=torch.float32, device=grad.device)
    total = torch.zeros(length, dtype=torch.float32, device=grad.device)
    step = max(1, ELEMENTS_PER_CHUNK // length)
    for begin in range(0, len(stored), step):
        chunk = stored[begin : begin + step].to(torch.float32)
        square = torch.where(usable(chunk), chunk, 0.0).square_()
        line_means[begin : begin + step] = square.mean(1)
        total += square.sum(0)
    any_nonzero = total.any().to(torch.float32)
    num_lines = len(stored)
    if slot.shard is not None:
        total, num_lines = slot.shard.group.all_reduce_(total), slot.shard.param.numel() // length
    column_means = total / num_lines
    if slot.matrix is None:
        line_means = column_means.expand(len(stored))
    return line_means, column_means, any_nonzero
