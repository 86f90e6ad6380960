"""Memory and time as a run measures them: what is covered, what is left out, what stops a run."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from baoc.callbacks import steps as steps_module
from baoc.callbacks.checkpoint import SafeCheckpoint
from baoc.callbacks.memory import MemoryMonitor, resident_bytes
from baoc.callbacks.steps import StepMonitor
from baoc.data.batches import num_samples
from baoc.errors import BudgetBreachedError
from baoc.tracking.jsonl import JsonlLogger
from baoc.tracking.metrics import read_metrics
from baoc.types import Budget
from baoc.units import GIB, MIB
from tests.support.tiny import TinyBatches, TinyLoader, TinyModule, tiny_trainer

WIDE = 65536  # elements; 256 KiB in fp32, far above everything else in the tiny module


class Greedy(TinyModule):
    """Holds `WIDE` floats for a moment, where it is told to: forward, step or validation."""

    def __init__(self, where: str):
        super().__init__()
        self.where = where

    def hold(self, where: str) -> None:
        if self.where == where:
            torch.ones(WIDE).sum()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.hold("forward")
        return super().training_step(batch, batch_idx)

    def on_after_backward(self) -> None:
        self.hold("backward")

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        self.hold("step")

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.hold("validation")
        super().validation_step(batch, batch_idx)


def fit(*callbacks: L.Callback, module: L.LightningModule | None = None, **options: Any) -> L.Trainer:
    trainer = tiny_trainer(callbacks=list(callbacks), **options)
    trainer.fit(module or TinyModule(), TinyLoader(), TinyBatches())
    return trainer


# -- memory -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["forward", "backward", "step"])
def test_the_peak_covers_the_whole_training_batch(where: str) -> None:
    calm, greedy = MemoryMonitor(), MemoryMonitor()
    fit(calm)
    fit(greedy, module=Greedy(where))
    assert calm.peaks["training"] < 4 * WIDE <= greedy.peaks["training"] < calm.peaks["training"] + 4 * WIDE
    assert greedy.peak_bytes == greedy.peaks["training"]


def test_the_first_validation_batch_is_covered() -> None:
    monitor = MemoryMonitor()
    fit(monitor, module=Greedy("validation"))
    assert monitor.peaks["validation"] >= 4 * WIDE > monitor.peaks["training"]


def test_the_peak_of_a_linear_model_is_its_tensors() -> None:
    """Weights, gradients and two moments of 1.3M parameters; activations are small beside them."""

    class Big(TinyModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(8, 131072), nn.Linear(131072, 1, bias=False))

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), foreach=False)

    module, monitor = Big(), MemoryMonitor()
    monitor.probe_peak_bytes = 2**40  # before the plan of an earlier fit
    fit(monitor, module=module)
    assert monitor.highest_predicted_bytes == 0
    numel = sum(p.numel() for p in module.parameters())
    largest = max(p.numel() for p in module.parameters())
    held = 16 * numel
    assert held < monitor.peak_bytes <= held + 4 * (3 * largest), "the step's temporaries are of the largest tensor"


def test_all_micro_batches_of_the_first_steps_are_tracked_and_no_more() -> None:
    seen: list[tuple[int, bool]] = []

    class Spy(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
            seen.append((trainer.global_step, monitor.tracked))

    monitor = MemoryMonitor(tracked_steps=2)
    fit(Spy(), monitor, max_steps=4, accumulate_grad_batches=3)
    assert [tracked for _, tracked in seen] == [True] * 6 + [False] * 6


def test_parts_tracked_by_others_count(tmp_path: Path) -> None:
    class Migrating(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
            if trainer.global_step == 5:
                with monitor.track("migration"):
                    torch.ones(WIDE).sum()
                after.append(monitor.tracked)

    after: list[bool] = []
    monitor = MemoryMonitor()
    fit(monitor, Migrating(), SafeCheckpoint(tmp_path, track=monitor.track), enable_checkpointing=True)
    assert monitor.peaks["migration"] >= 4 * WIDE > monitor.peaks["training"]
    assert monitor.peaks["checkpoint"] > 0
    assert after == [True], "the step is not to be timed"


def test_a_part_inside_a_tracked_part_counts_in_both() -> None:
    class Inside(TinyModule):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            if self.trainer.global_step == 1:
                with monitor.track("migration"):
                    torch.ones(WIDE).sum()
            return super().training_step(batch, batch_idx)

    monitor = MemoryMonitor()
    fit(monitor, module=Inside())
    assert monitor.peaks["migration"] >= 4 * WIDE
    assert monitor.peaks["training"] >= 4 * WIDE


def test_what_a_part_held_before_a_part_inside_it_stays_its_own() -> None:
    class Inside(TinyModule):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            if self.trainer.global_step == 1:
                with monitor.track("decision"):
                    torch.ones(WIDE).sum()
                    with monitor.track("migration"):
                        torch.ones(8).sum()
            return super().training_step(batch, batch_idx)

    monitor = MemoryMonitor()
    fit(monitor, module=Inside())
    assert monitor.peaks["decision"] >= 4 * WIDE > monitor.peaks["migration"]


def test_every_step_is_tracked_where_that_is_asked_for() -> None:
    class Late(TinyModule):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            if self.trainer.global_step == 5:
                torch.ones(WIDE).sum()
            return super().training_step(batch, batch_idx)

    usual, every = MemoryMonitor(), MemoryMonitor(every_step=True)
    fit(usual, module=Late())
    fit(every, module=Late())
    assert usual.peaks["training"] < 4 * WIDE <= every.peaks["training"]


def test_a_run_that_holds_more_than_its_budget_is_stopped() -> None:
    monitor = MemoryMonitor(Budget(name="100kb", memory_bytes=100 * 1024), predicted_bytes=90 * 1024)
    text = (
        r"budget 100kb allows 100 KiB \(102400 bytes\), but training at step 1 held .* \(90\.00 KiB were predicted\), "
        r".* too much: lower micro_batch, or give a larger budget"
    )
    with pytest.raises(BudgetBreachedError, match=text) as caught:
        fit(monitor, module=Greedy("forward"))
    assert caught.value.exit_code == 4
    torch.ones(WIDE).sum()
    assert monitor.peak_bytes < 2 * 4 * WIDE, "tracking ended with the run"


def test_validation_can_breach_the_budget_too() -> None:
    monitor = MemoryMonitor(Budget(name="100kb", memory_bytes=100 * 1024))
    with pytest.raises(BudgetBreachedError, match="but validation at step 6 held"):
        fit(monitor, module=Greedy("validation"))


def test_a_breach_may_be_noted_only() -> None:
    monitor = MemoryMonitor(Budget(name="100kb", memory_bytes=100 * 1024), enforce=False)
    fit(monitor, module=Greedy("forward"))
    assert monitor.peak_bytes > 100 * 1024


def test_tracking_ends_when_a_step_fails() -> None:
    class Failing(TinyModule):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            raise RuntimeError("inside the tracked part")

    monitor = MemoryMonitor()
    with pytest.raises(RuntimeError, match="inside the tracked part"):
        fit(monitor, module=Failing())
    assert not torch._C._len_torch_dispatch_stack()


def test_memory_is_logged_with_its_slack(tmp_path: Path) -> None:
    monitor = MemoryMonitor(Budget(name="1gb", memory_bytes=GIB))
    fit(monitor, logger=[JsonlLogger(tmp_path)], log_every_n_steps=2, max_steps=6)
    lines = [line for line in read_metrics(tmp_path) if "memory/peak_gib" in line]
    assert [line["step"] for line in lines] == [1, 3, 5]
    assert lines[-1]["memory/peak_gib"] == pytest.approx(monitor.peak_bytes / GIB)
    assert lines[-1]["budget/slack_gib"] == pytest.approx(1 - monitor.peak_bytes / GIB)
    assert lines[-1]["memory/rss_gib"] > 0


def test_a_second_fit_starts_from_nothing() -> None:
    monitor = MemoryMonitor()
    fit(monitor, module=Greedy("forward"))
    fit(monitor)
    assert monitor.peak_bytes < 4 * WIDE


def test_resident_bytes_are_those_of_a_python_process() -> None:
    resident = resident_bytes()
    assert resident is not None and 50 * MIB < resident < 64 * GIB


# -- time -------------------------------------------------------------------------------------------------------------


@contextmanager
def fake_clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """A clock that stands still unless a test moves it."""
    now = [0.0]
    monkeypatch.setattr(steps_module.time, "perf_counter", lambda: now[0])
    yield now


class Slow(TinyModule):
    """Lets `seconds[i]` pass in its i-th training batch."""

    def __init__(self, now: list[float], seconds: list[float]):
        super().__init__()
        self.now, self.seconds = now, list(seconds)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.now[0] += self.seconds.pop(0)
        return super().training_step(batch, batch_idx)


class PauseBefore(L.Callback):
    """Lets 100 s pass before each batch, as loading and validation would."""

    def __init__(self, now: list[float]):
        self.now = now

    def on_train_batch_start(self, *_: Any) -> None:
        self.now[0] += 100


class PauseAfter(PauseBefore):
    """And after each, as logging and checkpoints would."""

    def on_train_batch_start(self, *_: Any) -> None:
        pass

    def on_train_batch_end(self, *_: Any) -> None:
        self.now[0] += 100


def test_the_median_of_steps_after_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_clock(monkeypatch) as now:
        steps = StepMonitor(warmup_steps=2)
        fit(PauseBefore(now), steps, PauseAfter(now), module=Slow(now, [50, 50, 1, 2, 9]), max_steps=5)
    assert steps.num_timed == 3
    assert steps.step_ms == pytest.approx(2000)
    assert steps.samples_per_s == pytest.approx(2), "4 samples in 2 s"


def test_a_step_is_all_of_its_micro_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_clock(monkeypatch) as now:
        steps = StepMonitor(warmup_steps=0)
        module = Slow(now, [1, 2, 3, 4])
        fit(PauseBefore(now), steps, PauseAfter(now), module=module, max_steps=2, accumulate_grad_batches=2)
    assert steps.num_timed == 2
    assert steps.step_ms == pytest.approx((3 + 7) / 2 * 1e3)
    assert steps.samples_per_s == pytest.approx(8 / 5)
    assert steps.micro_batch_ms == 0, "none is between the first and the last"


def test_micro_batches_between_the_first_and_the_last_of_counted_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_clock(monkeypatch) as now:
        steps = StepMonitor(warmup_steps=1)
        module = Slow(now, [70, 70, 70, 50, 2, 50, 50, 6, 50])
        fit(PauseBefore(now), steps, PauseAfter(now), module=module, max_steps=3, accumulate_grad_batches=3)
    assert (steps.num_seen, steps.num_timed) == (3, 2)
    assert steps.micro_batch_ms == pytest.approx((2 + 6) / 2 * 1e3)


def test_tracked_steps_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_clock(monkeypatch) as now:
        memory = MemoryMonitor(tracked_steps=3)
        steps = StepMonitor(warmup_steps=0, leave_out=lambda: memory.tracked)
        fit(steps, memory, module=Slow(now, [50, 50, 50, 1, 3]), max_steps=5)
    assert steps.num_timed == 2
    assert steps.step_ms == pytest.approx(2000)


def test_nothing_counted_is_nan_and_not_logged(tmp_path: Path) -> None:
    steps = StepMonitor(warmup_steps=100)
    fit(steps, logger=[JsonlLogger(tmp_path)])
    assert math.isnan(steps.step_ms) and math.isnan(steps.samples_per_s)
    assert not any("time/step_ms" in line for line in read_metrics(tmp_path))


def test_time_is_logged_every_so_many_steps(tmp_path: Path) -> None:
    steps = StepMonitor(warmup_steps=1)
    fit(steps, logger=[JsonlLogger(tmp_path)], log_every_n_steps=3, max_steps=6)
    lines = [line for line in read_metrics(tmp_path) if "time/step_ms" in line]
    assert [line["step"] for line in lines] == [2, 5]
    assert all(line["throughput/samples_per_s"] > 0 and "train/loss" in line for line in lines)


def test_samples_of_a_batch() -> None:
    assert num_samples(torch.zeros(3, 2)) == 3
    assert num_samples({"name": "x", "scale": torch.tensor(1.0), "image": torch.zeros(5, 1)}) == 5
    assert num_samples([("a",), [torch.zeros(2)]]) == 2
    assert num_samples("text") == 0


def test_a_resumed_run_whose_budget_changes_still_knows_what_was_held_and_predicted_before() -> None:
    monitor = MemoryMonitor(Budget(name="8mb", memory_bytes=8 << 20))
    earlier = {"device": "cpu", "budget": ["8mb", 8 << 20], "peak": 5, "highest": 9, "predicted": 10}
    monitor.load_state_dict(earlier)
    monitor.predicted = lambda: 6
    monitor.restart(Budget(name="4mb", memory_bytes=4 << 20), predicted_bytes=6, step=3)
    assert (monitor.peak_bytes, monitor.highest_bytes, monitor.highest_predicted_bytes) == (0, 9, 10)
