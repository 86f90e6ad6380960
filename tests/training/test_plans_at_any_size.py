"""One plan at 1, 2, 4 and 8 ranks, by DDP and by fully_shard: no processes, as torch's fake group sends nothing."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from baoc import BaocOptimizer, parallel
from baoc.types import Plan
from tests.support.layered import Net

SIZES = (1, 2, 4, 8)


class Alike(parallel.Ranks):
    """Ranks that all find what this one finds."""

    def __init__(self, distributed: Any):
        self.rank, self.size = distributed.get_rank(), distributed.get_world_size()


@contextmanager
def fake_group(size: int, *, rank: int) -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def planned(size: int, *, rank: int, budget: str, cut: bool) -> tuple[Plan, int]:
    """The plan, and the bytes of states that come of it on this rank."""
    with fake_group(size, rank=rank):
        torch.manual_seed(0)
        module = Net(width=8, depth=3)
        for layer in module.layers if cut else ():
            fully_shard(layer)
        optimizer = BaocOptimizer(fully_shard(module) if cut else module, budget=budget, verbose=False)
        assert parallel.ranks().size == size
        return optimizer.plan, sum(optimizer.block_state_bytes().values())


@pytest.mark.parametrize("budget", ["state_50", "state_25"])
@pytest.mark.parametrize("cut", [False, True], ids=["ddp", "fsdp"])
def test_the_plan_is_that_of_one_device(cut: bool, budget: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "Group", Alike)
    expected, whole = planned(1, rank=0, budget=budget, cut=cut)
    for size in SIZES[1:]:
        for rank in (0, size - 1):
            plan, held = planned(size, rank=rank, budget=budget, cut=cut)
            assert plan.allocation == expected.allocation, (size, rank)
            assert held < whole if cut else held == whole
