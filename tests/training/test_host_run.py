"""Lightning trains with states on the host: the same bits, stepped in backward, and nothing pulled to the device."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
from lightning.fabric.utilities import optimizer as lightning_optimizer

from baoc import BaocStrategy
from baoc.config.schema import ReallocationConfig
from baoc.optim import BlockwiseOptimizer
from baoc.planning.planner import PlannerSettings
from baoc.training.session import SessionSettings
from tests.support.classifier import QUIET, Classifier, fit, loader, same
from tests.support.placing import rings


def strategy(spec: str) -> BaocStrategy:
    off = ReallocationConfig(mode="off")
    settings = SessionSettings(planner=PlannerSettings(specs=(spec,)), reallocation=off)
    return BaocStrategy("8gb", settings=settings)


@pytest.fixture
def ahead(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Blocks that were stepped in backward, by step."""
    seen, build = [], BlockwiseOptimizer.__init__

    def built(self: BlockwiseOptimizer, *args: Any, **kwargs: Any) -> None:
        build(self, *args, **kwargs)
        self.after_step.append(lambda: seen.append(self.overlap.num_stepped))

    monkeypatch.setattr(BlockwiseOptimizer, "__init__", built)
    return seen


@pytest.mark.parametrize(
    ("arguments", "stepped"),
    [({}, 6), ({"accumulate_grad_batches": 2}, 6), ({"gradient_clip_val": 0.1}, 0), ({"precision": "bf16-mixed"}, 6)],
)
def test_training_is_that_of_the_device(ahead: list[int], arguments: dict[str, Any], stepped: int) -> None:
    with rings(piece_bytes=500):
        plain = fit(strategy("adamw"), steps=5, **arguments)
        del ahead[:]
        hosted = fit(strategy("adamw@streamed"), steps=5, **arguments)
    assert same(plain, hosted)
    assert ahead[-5:] == [stepped] * 5  # before are trial steps of the probe


@pytest.mark.parametrize("owner", ["module", "callback"])
def test_who_looks_at_gradients_before_the_step_finds_them_unused(ahead: list[int], owner: str) -> None:
    class Halving(L.Callback):
        def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            for param in pl_module.parameters():
                param.grad.mul_(0.5)

    class Module(Classifier):
        def on_after_backward(self) -> None:
            for param in self.parameters():
                param.grad.mul_(0.5)  # pyright: ignore

    found = []
    for spec in ("adamw", "adamw@streamed"):
        module = Module() if owner == "module" else Classifier()
        found.append(fit(strategy(spec), module=module, steps=3, callbacks=[Halving()] if owner == "callback" else []))
    assert same(*found) and not any(ahead)


def in_two_fits(spec: str, folder: Path) -> tuple[Classifier, BaocStrategy]:
    """Four steps, a checkpoint, and four more by another Trainer in the same process."""
    module, first, second = Classifier(), strategy(spec), strategy(spec)
    trainer = L.Trainer(strategy=first, max_steps=4, **QUIET)
    trainer.fit(module, loader(num=32))
    trainer.save_checkpoint(folder / f"{spec}.ckpt")
    L.Trainer(strategy=second, max_steps=8, **QUIET).fit(module, loader(num=32), ckpt_path=folder / f"{spec}.ckpt")
    return module, second


def test_setup_resume_and_a_second_fit_leave_states_on_the_host(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """P1: every tensor that Lightning moves is noted; on a machine with a GPU those would be on it now."""
    plain, _ = in_two_fits("adamw", tmp_path)
    moved, move = [], lightning_optimizer.move_data_to_device
    monkeypatch.setattr(
        lightning_optimizer, "move_data_to_device", lambda data, device: moved.append(data) or move(data, device)
    )
    hosted, ours = in_two_fits("adamw@streamed", tmp_path)
    assert same(plain, hosted) and not moved
    assert ours.reallocator is not None and ours.reallocator.optimizer.num_steps == 8
    registry = ours.reallocator.optimizer.registry
    assert registry.arena.nbytes == sum(live.slab_bytes for live in registry.live.values()) > 0
