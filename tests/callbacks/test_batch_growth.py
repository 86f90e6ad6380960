"""Batches that grow under a memory budget: states make room before the larger batch goes through the network."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from baoc import BaocStrategy
from baoc.callbacks.growth import grown, saved_by_forward
from baoc.callbacks.memory import MemoryMonitor
from baoc.config.schema import ReallocationConfig
from baoc.errors import BudgetBreachedError
from baoc.training.budget_control import BudgetControl
from baoc.training.session import SessionSettings
from tests.support.tiny import LIGHTNING_NOISE, TinyBatches, TinyModule, tiny_trainer

pytestmark = LIGHTNING_NOISE
SMALL, LARGE = 4, 512


class Growing:
    """Six batches of SMALL, then six of LARGE."""

    def __len__(self) -> int:
        return 12

    def __iter__(self) -> Iterator[Tensor]:
        generator = torch.Generator().manual_seed(0)
        for step in range(12):
            yield torch.randn(SMALL if step < 6 else LARGE, 8, generator=generator)


class Wide(TinyModule):
    def __init__(self) -> None:
        super().__init__(dropout=0.0)
        self.net = nn.Sequential(nn.Linear(8, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 1))


class Watch(L.Callback):
    def __init__(self) -> None:
        self.state_bytes: list[int] = []

    def on_before_optimizer_step(self, trainer: L.Trainer, *_: Any) -> None:
        reallocator: Any = trainer.strategy.reallocator
        self.state_bytes.append(reallocator.optimizer.state_bytes())


def fit(budget: str | int, **options: Any) -> tuple[L.Trainer, Watch, MemoryMonitor, list[str]]:
    said: list[str] = []
    settings = SessionSettings(reallocation=ReallocationConfig(mode="once"))
    strategy, watch = BaocStrategy(budget, device="cpu", settings=settings), Watch()
    memory = MemoryMonitor(strategy.budget)
    control = BudgetControl(memory=memory, tell=said.append, **options)
    trainer = tiny_trainer(strategy=strategy, max_steps=12, callbacks=[control, memory, watch])
    trainer.fit(Wide(), Growing(), TinyBatches())
    return trainer, watch, memory, said


def reallocator_of(trainer: L.Trainer) -> Any:
    strategy: Any = trainer.strategy
    return strategy.reallocator


def test_states_make_room_for_larger_batches() -> None:
    free, *_ = fit("unlimited")
    planner, state = reallocator_of(free).planner, reallocator_of(free).plan.state_bytes_adamw
    assert planner.footprint.micro_batch == SMALL
    saved, largest = saved_by_forward(free, torch.randn(LARGE, 8), num_samples=SMALL)
    assert saved >= SMALL * 4 * 2 * 128 and largest == SMALL * 4 * 128, "what both ReLUs leave"
    larger = grown(planner.footprint, micro_batch=LARGE, saved_bytes=saved, largest_bytes=largest)
    budget = larger.peak_bytes(state_bytes=state // 3)
    assert planner.footprint.peak_bytes(state_bytes=state, specs=("adamw",)) <= budget, "all of AdamW fits before"
    trainer, watch, memory, said = fit(budget)
    assert all(held > 0.9 * state for held in watch.state_bytes[:6])
    assert all(held <= 0.4 * state for held in watch.state_bytes[6:])
    assert reallocator_of(trainer).planner.footprint.micro_batch == LARGE
    assert 0.8 * budget < memory.peaks["training"] <= memory.peak_bytes <= budget, "tracked anew since step 6"
    name = reallocator_of(trainer).planner.budget.name
    assert said == [
        f"step 6: budget {name} is in force (the budget of the run; batches grew to {LARGE} samples per forward)"
    ]


def test_where_nothing_makes_room_the_run_says_so() -> None:
    free, *_ = fit("unlimited")
    reallocator, said = reallocator_of(free), []
    state = reallocator.plan.state_bytes_adamw
    enough = reallocator.planner.footprint.peak_bytes(state_bytes=state, specs=("adamw",))
    settings = SessionSettings(reallocation=ReallocationConfig(mode="off"))
    strategy = BaocStrategy(int(1.1 * enough), device="cpu", settings=settings)
    memory = MemoryMonitor(strategy.budget, tracked_steps=12)
    callbacks = [BudgetControl(memory=memory, tell=said.append), memory]
    trainer = tiny_trainer(strategy=strategy, max_steps=12, callbacks=callbacks)
    with pytest.raises(BudgetBreachedError, match=r"training at step 7 held .* too much: lower micro_batch"):
        trainer.fit(Wide(), Growing(), TinyBatches())
    assert len(said) == 1 and "step 6: the budget stays" in said[0] and "cannot be met" in said[0]


def test_a_look_leaves_no_trace() -> None:
    """Generators and buffers are as before, and nothing is logged."""
    trainer, *_ = fit("unlimited")
    module = trainer.lightning_module
    module.register_buffer("count", torch.zeros(1))
    batch, before = torch.randn(LARGE, 8), torch.get_rng_state()
    real = module.net.forward

    def forward(batch: Tensor) -> Tensor:
        module.count.add_(1)
        return real(batch + torch.rand(()))

    module.net.forward = forward
    saved_by_forward(trainer, batch, num_samples=SMALL)
    assert torch.equal(torch.get_rng_state(), before) and module.count.item() == 0
    assert all(param.grad is None or torch.isfinite(param.grad).all() for param in module.parameters())


def test_the_folder_tells_without_a_run_of_ours(tmp_path: Path) -> None:
    fit("unlimited", run_dir=tmp_path)
    assert '"name": "unlimited"' in (tmp_path / "budget.json").read_text()
