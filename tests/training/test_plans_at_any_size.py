"""One plan at 1, 2, 4 and 8 ranks, by DDP and by fully_shard: no processes, as torch's fake group sends nothing."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from baoc import BaocOptimizer, parallel
from baoc.types import Plan
from experiments.benchmarks import scaling
from tests.support.layered import Net

pytestmark = pytest.mark.slow  # they plan as several ranks

SIZES = (1, 2, 4, 8)
BUDGET = 58_000


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
    monkeypatch.setattr(parallel, "ProcessGroupRanks", Alike)
    expected, whole = planned(1, rank=0, budget=budget, cut=cut)
    for size in SIZES[1:]:
        for rank in (0, size - 1):
            plan, held = planned(size, rank=rank, budget=budget, cut=cut)
            assert plan.allocation == expected.allocation, (size, rank)
            assert held < whole if cut else held == whole


class Heard(parallel.Ranks):
    """Ranks that run one after another: each hears what others said when they ran last; of none, what it says."""

    def __init__(self, *, rank: int, size: int, said: dict[int, list[Any]]):
        self.rank, self.size, self.said, self.before = rank, size, said, dict(said)
        said[rank] = []

    def all_gather(self, value: Any) -> list[Any]:
        at = len(self.said[self.rank])
        self.said[self.rank].append(value)
        return [
            value if rank == self.rank or rank not in self.before else self.before[rank][at]
            for rank in range(self.size)
        ]

    def all_reduce_max(self, *numbers: float) -> tuple[float, ...]:
        return tuple(map(max, *self.all_gather(numbers)))

    def broadcast(self, value: Any) -> Any:
        return self.all_gather(value)[0]

    def broadcast_result(self, make: Callable[[], Any], *, for_others: Any = None) -> Any:
        return self.broadcast(make() if self.rank == 0 or 0 not in self.before else None)


@pytest.mark.parametrize("size", SIZES[1:])
def test_a_plan_in_memory_is_one_of_all_ranks(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last rank's batch is larger: all plan with its bytes."""

    def probed(rank: int, *, said: dict[int, list[Any]]) -> dict[str, str]:
        heard = Heard(rank=rank, size=size, said=said)
        monkeypatch.setattr(parallel, "ProcessGroupRanks", lambda _: heard)
        with fake_group(size, rank=rank):
            torch.manual_seed(0)
            module, batch = Net(width=8, depth=3), torch.ones(72 if rank else 8, 3)
            return BaocOptimizer(module, budget=BUDGET, verbose=False, probe=lambda: module(batch).sum()).specs

    smallest, said = probed(0, said={}), {}
    largest = probed(size - 1, said=said)
    assert probed(0, said=said) == probed(size - 1, said=said) == largest != smallest


def row(plan: str, *, how: str) -> dict[str, str]:
    texts = dict.fromkeys(("network", "strategy", "optimizer", "excess", "exposed"), "")
    numbers = dict.fromkeys(("samples_per_s", "optimizer_ms", "collectives", "peak_bytes"), "1")
    return {**texts, **numbers, "ranks": "2", "scaling": how, "plan": plan}


def test_the_benchmark_tells_plans_and_updates_that_differ(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    assert scaling.table(path) == scaling.exchanges(path) == 1
    for plans, code in ((("a", "a"), 0), (("b", "a"), 1)):
        rows = [row(plan, how=how) for plan, how in zip(plans, ("weak", "strong"), strict=True)]
        path.write_text("\n".join(map(",".join, [rows[0], *(one.values() for one in rows)])))
        assert scaling.table(path) == code
    for difference, code in (("0.003", 0), ("0.03", 1), ("nan", 1)):
        path.write_text(f"difference\n0.0\n{difference}\n")
        assert scaling.exchanges(path) == code
