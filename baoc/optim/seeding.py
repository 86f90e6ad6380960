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
from baoc.optim.shards import local_shard
from baoc.optim.state import LiveBlock, Slot, State, step_of
from baoc.types import StateKind

ELEMENTS_PER_CHUNK = 2**22  # elements of a gradient that are squared at a time


def temporary_bytes(params: Iterable[Tensor]) -> int:
    """The most that `seed` holds at once beside the states, of the largest parameter: v in full, and what encoding it
    takes, up to 3.6 times as much (4 bits, measured at 6 and 33 million elements)."""
    most = max((local_shard(param).numel() for param in params), default=0)
    return 4 * (5 * most + 3 * min(most, ELEMENTS_PER_CHUNK))


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
        lines, across, some = _means(grad.detach(), slot=slot)
        if bool(some if slot.shard is None else slot.shard.group.all_reduce_(some)):
            _start(slot, state[slot.param], lines, across, betas=slot.betas(param_groups))
            live.unseeded.discard(slot.name)


def _start(slot: Slot, state: State, lines: Tensor, across: Tensor, *, betas: tuple[float, float]) -> None:
    """v from the means of the squares by stored line and across them."""
    ctx = slot.shape_context
    age = step_of(slot, state)
    full = (lines.unsqueeze(1) * (across / across.mean().clamp(min=inherit.TINY))).reshape(slot.param.shape)
    least = inherit.squared_m(slot, state, beta=betas[0], age=age, ctx=ctx)
    torch.maximum(full, least, out=full)
    del least
    for kept in slot.states:
        if kept.decl.kind is StateKind.V:
            bias = inherit.bias(kept.decl, beta=betas[1], at=age)
            kept.encode_(state, inherit.reduce(full, kept.decl, ctx=ctx).mul_(bias))  # a v in full is the only one


def _means(grad: Tensor, *, slot: Slot) -> tuple[Tensor, Tensor, Tensor]:
    """Mean squares of what is usable of a gradient: of each stored line of a matrix, and across all ranks' lines; of
    all of a vector, twice. And whether any is there. A part is squared at a time, as much as fits a few MiB."""
    length = 1 if slot.matrix is None else slot.matrix[0 if slot.info.transposed else 1]
    stored = grad.reshape(-1, length)
    lines = torch.empty(len(stored), dtype=torch.float32, device=grad.device)
    across = torch.zeros(length, dtype=torch.float32, device=grad.device)
    step = max(1, ELEMENTS_PER_CHUNK // length)
    for begin in range(0, len(stored), step):
        part = stored[begin : begin + step].to(torch.float32)
        square = torch.where(usable(part), part, 0.0).square_()
        lines[begin : begin + step] = square.mean(1)
        across += square.sum(0)
    some = across.any().to(torch.float32)
    total, num = across, len(stored)
    if slot.shard is not None:
        total, num = slot.shard.group.all_reduce_(across), slot.shard.param.numel() // length
    across = total / num
    if slot.matrix is None:
        lines = across.expand(len(stored))
    return lines, across, some
