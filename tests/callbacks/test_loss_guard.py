"""A NaN or infinite loss costs a step, the steps back to the last checkpoint, or the run, as the configuration says."""

import math
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from baoc import BaocStrategy
from baoc.callbacks.checkpoint import AsideCheckpointIO, SafeCheckpoint
from baoc.callbacks.loss_guard import LossGuard
from baoc.config.schema import ReallocationConfig
from baoc.errors import CheckpointError, DivergedError, TrainingFailedError
from baoc.tasks.ema import EmaWeights
from baoc.tracking.checkpoints import load_checked
from baoc.training import trainer as training
from baoc.training.resume import check_contents
from baoc.training.session import SessionSettings
from tests.support.tiny import TinyBatches, TinyLoader, TinyModule, tiny_trainer
from tests.support.training_runs import config, run


class Poisoned(TinyModule):
    """Its loss is `value` in the given training batches; weights after each batch are kept in `trace`."""

    def __init__(self, bad: Sequence[int], *, value: float = math.nan):
        super().__init__(dropout=0.0)
        self.bad, self.value, self.count = set(bad), value, 0
        self.trace: list[torch.Tensor] = []

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.count += 1
        return loss + self.value if self.count - 1 in self.bad else loss

    def on_train_start(self) -> None:
        self.count = 0  # the look before training counts for nothing

    def on_train_batch_end(self, *_: Any) -> None:
        self.trace.append(self.net[0].weight.detach().clone())


def fit(module: Poisoned, run_dir: Path, *, every: int | None = None, specs: str = "state_50", **options: Any):
    L.seed_everything(0, verbose=False)
    module.net[0].reset_parameters()
    module.net[2].reset_parameters()
    policy = {key: options.pop(key) for key in ("nonfinite_loss", "patience", "max_rewinds") if key in options}
    checkpoint = SafeCheckpoint(run_dir, every_n_steps=every, keep=options.pop("keep", 1))
    guard = LossGuard(**policy, checkpoint=checkpoint, check=options.pop("check", lambda content: None))
    said: list[str] = []
    guard.tell = said.append
    settings = SessionSettings(reallocation=ReallocationConfig(mode="once", warmup_steps=2))
    strategy = BaocStrategy(specs, device="cpu", settings=settings)
    callbacks = [*options.pop("callbacks", []), guard, checkpoint]
    trainer = tiny_trainer(strategy=strategy, enable_checkpointing=True, callbacks=callbacks, **options)
    trainer.fit(module, TinyLoader(), TinyBatches(), ckpt_path=options.get("resume"))
    return trainer, guard, said


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_skipped_step_changes_no_weight(tmp_path: Path, value: float) -> None:
    """loss + inf has finite gradients: they are left out all the same."""
    module = Poisoned([3], value=value)
    trainer, guard, said = fit(module, tmp_path)
    assert trainer.global_step == 8 and guard.num_bad == 1 and guard.num_in_a_row == 0
    changed = [not torch.equal(a, b) for a, b in zip(module.trace, module.trace[1:], strict=False)]
    assert changed == [True, True, False, True, True, True, True]
    assert said == [f"the loss of step 4 is {value}: the step changes nothing (number 1 of this run)"]


def test_a_bad_micro_batch_costs_its_whole_step(tmp_path: Path) -> None:
    module = Poisoned([5])
    _, guard, _ = fit(module, tmp_path, accumulate_grad_batches=2, max_steps=5)
    assert guard.num_bad == 1
    assert torch.equal(module.trace[3], module.trace[5]) and not torch.equal(module.trace[5], module.trace[7])


def test_too_many_in_a_row_end_the_run(tmp_path: Path) -> None:
    with pytest.raises(DivergedError, match=r"step 6 is nan, as was that of the 2 steps before it .*lower optim.lr"):
        fit(Poisoned([0, 3, 4, 5]), tmp_path, patience=3)


def test_stop(tmp_path: Path) -> None:
    with pytest.raises(DivergedError, match=r"the loss of step 4 is inf, and faults.nonfinite_loss=stop") as error:
        fit(Poisoned([3], value=math.inf), tmp_path, nonfinite_loss="stop")
    assert error.value.exit_code == 5


@pytest.mark.parametrize("budget", ["state_50", "unlimited"])
def test_rewind_goes_back_to_the_checkpoint_and_on_with_other_data(tmp_path: Path, budget: str) -> None:
    """Checkpoints after steps 2 and 4; step 6 is bad, a reallocation came at step 5; the run ends after 8 steps."""
    module = Poisoned([5])
    ema = EmaWeights(0.5)
    trainer, guard, said = fit(module, tmp_path, nonfinite_loss="rewind", every=4, specs=budget, callbacks=[ema])
    assert said == ["the loss of step 6 is nan: back to the weights and states of step 4 (rewind 1)"]
    assert trainer.global_step == 8 and guard.num_rewinds == 1
    assert trainer.strategy.reallocator.step == 8
    saved = torch.load(tmp_path / "checkpoints" / "last.ckpt", weights_only=True)
    assert saved["global_step"] == 8
    lr = trainer.optimizers[0].param_groups[0]["lr"]
    assert lr == pytest.approx(1e-2 / 9), "the schedule went on"
    assert saved["callbacks"]["LossGuard"] == {"bad": 1, "in_a_row": 0, "rewinds": 1}


def test_after_a_rewind_weights_and_states_are_those_of_the_checkpoint(tmp_path: Path) -> None:
    kept: dict[str, Any] = {}

    class Look(L.Callback):
        def on_train_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
            if trainer.global_step == 6:
                kept["model"] = {k: v.clone() for k, v in pl_module.state_dict().items()}
                kept["states"] = deepcopy(trainer.optimizers[0].state_dict()["state"])
                kept["checkpoint"] = load_checked(tmp_path / "checkpoints" / "last.ckpt")

    fit(Poisoned([5]), tmp_path, nonfinite_loss="rewind", every=4, callbacks=[Look()])
    saved = kept["checkpoint"]
    assert saved["global_step"] == 4
    assert all(torch.equal(kept["model"][name], value) for name, value in saved["state_dict"].items())
    for name, state in saved["optimizer_states"][0]["state"].items():
        assert all(torch.equal(kept["states"][name][key], value) for key, value in state.items())


@pytest.mark.parametrize("mode", ["once", "off"])
def test_a_rewind_to_before_the_decision_keeps_the_decision(tmp_path: Path, mode: str) -> None:
    """Checkpoint after step 4, decision after step 5, bad loss in step 7: the profiler may be gone by then."""
    settings = SessionSettings(reallocation=ReallocationConfig(mode=mode, warmup_steps=5))
    strategy = BaocStrategy("state_50", device="cpu", settings=settings)
    checkpoint = SafeCheckpoint(tmp_path, every_n_steps=4)
    guard = LossGuard(nonfinite_loss="rewind", checkpoint=checkpoint)
    said: list[str] = []
    guard.tell = said.append
    trainer = tiny_trainer(strategy=strategy, enable_checkpointing=True, callbacks=[guard, checkpoint], max_steps=12)
    trainer.fit(Poisoned([6]), TinyLoader(), TinyBatches())
    assert said == ["the loss of step 7 is nan: back to the weights and states of step 4 (rewind 1)"]
    assert strategy.reallocator is not None
    assert strategy.reallocator.step == 12
    assert strategy.reallocator.last_decision == (0 if mode == "off" else 5)
    assert strategy.reallocator.optimizer.specs == dict(strategy.reallocator.plan.allocation.choices)


def test_a_checkpoint_that_no_run_goes_on_from_is_passed_over_by_a_rewind(tmp_path: Path, caplog: Any) -> None:
    """Weights of NaN in the newest two files, which are intact as files: the run goes back to step 2."""
    folder = tmp_path / "checkpoints"

    class Spoil(L.Callback):
        def on_train_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
            if trainer.global_step == 5:
                for path in folder.glob("*.ckpt"):
                    content = deepcopy(load_checked(path))
                    if content["global_step"] == 4:
                        next(iter(content["state_dict"].values())).fill_(math.nan)
                        AsideCheckpointIO().save_checkpoint(content, path)

    given = {"nonfinite_loss": "rewind", "every": 2, "keep": 2, "check": _refuses_nan, "callbacks": [Spoil()]}
    module = Poisoned([5])
    _, _, said = fit(module, tmp_path, **given)
    assert said == ["the loss of step 6 is nan: back to the weights and states of step 2 (rewind 1)"]
    assert "has weights of NaN" in caplog.text and all(torch.isfinite(w).all() for w in module.trace)


def _refuses_nan(content: Mapping[str, Any]) -> None:
    if not all(torch.isfinite(tensor).all() for tensor in content["state_dict"].values()):
        raise CheckpointError("has weights of NaN")


def test_a_run_rewinds_by_the_check_that_it_resumes_by(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: dict[str, Any] = {}
    monkeypatch.setattr(training, "LossGuard", lambda **given: made.update(given) or LossGuard(**given))
    run(tmp_path / "run", trainer=replace(config().trainer, max_steps=1))
    assert made["check"] is check_contents


def test_rewinding_has_an_end_and_needs_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(DivergedError, match=r"step 7 is nan after 2 rewinds \(faults.max_rewinds=2\)"):
        fit(Poisoned([4, 5, 6]), tmp_path / "a", nonfinite_loss="rewind", every=4, max_rewinds=2)
    with pytest.raises(TrainingFailedError, match=r"no checkpoint to rewind to: set checkpoint.every_n_steps"):
        fit(Poisoned([1]), tmp_path / "b", nonfinite_loss="rewind")
