"""The CUDA side of the monitors, with a stand-in for the device: events are read late, memory is asked for."""

from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from baoc.callbacks import memory as memory_module
from baoc.callbacks.generators import capture_rng, restore_rng
from baoc.callbacks.memory import MemoryMonitor
from baoc.callbacks.steps import StepMonitor
from baoc.errors import BudgetBreachedError
from baoc.types import Budget
from baoc.units import MIB

CUDA = torch.device("cuda", 0)


class FakeEvent:
    """Takes the next of `times` when recorded; may be read only after something was waited for."""

    times: ClassVar[list[float]] = []
    waits = 0

    def __init__(self, *, enable_timing: bool):
        assert enable_timing

    def record(self) -> None:
        self.at = FakeEvent.times.pop(0)

    def synchronize(self) -> None:
        FakeEvent.waits += 1

    def elapsed_time(self, end: "FakeEvent") -> float:
        assert FakeEvent.waits, "read before anything was waited for"
        return end.at - self.at


def fake_trainer(**changes: Any) -> Any:
    """What the monitors ask of a Trainer; `log_every_n_steps=0` never logs."""
    loop = SimpleNamespace(_should_accumulate=lambda: False)
    values = {"strategy": SimpleNamespace(root_device=CUDA), "fit_loop": loop, "log_every_n_steps": 0, "global_step": 0}
    return SimpleNamespace(**(values | changes))


def test_steps_are_timed_by_events_that_are_read_once_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    FakeEvent.times, FakeEvent.waits = [0, 90, 100, 103, 200, 205], 0
    monitor, trainer, module = StepMonitor(warmup_steps=1, batch_size=10), fake_trainer(), SimpleNamespace()
    monitor.setup(trainer, module, "fit")
    monitor.on_train_start(trainer, module)
    for index in range(3):
        monitor.on_train_batch_start(trainer, module, None, index)
        monitor.on_train_batch_end(trainer, module, None, None, index)
    assert FakeEvent.waits == 0, "no step waits for the device"
    assert monitor.step_ms == 4
    assert monitor.samples_per_s == 2500
    assert FakeEvent.waits == 1


def test_memory_is_context_and_reserved_and_nothing_is_tracked(monkeypatch: pytest.MonkeyPatch) -> None:
    readings = iter([5 * MIB, 7 * MIB, 6 * MIB])
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: 20 * MIB)
    monkeypatch.setattr(memory_module, "current_context_bytes", lambda device: next(readings))
    monitor = MemoryMonitor(Budget(name="26mb", memory_bytes=26 * MIB), context_bytes=4 * MIB)
    trainer, module = fake_trainer(global_step=1), SimpleNamespace()
    monitor.setup(trainer, module, "fit")
    assert monitor.peak_bytes == 24 * MIB
    monitor.on_train_batch_start(trainer, module, None, 0)
    assert not monitor.tracked
    with monitor.track("migration"):
        assert not monitor.tracked
    monitor.on_train_batch_end(trainer, module, None, None, 0)
    assert monitor.peak_bytes == 25 * MIB, "kernels have loaded"
    with pytest.raises(BudgetBreachedError, match=r"26mb allows 26\.00 MiB .* training at step 1 held 27\.00 MiB"):
        monitor.on_train_batch_end(trainer, module, None, None, 1)
    monitor.on_train_end(trainer, module)
    assert monitor.peak_bytes == 27 * MIB, "the context does not shrink"


def test_a_peak_that_torch_has_forgotten_counts_until_the_budget_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: 20 * MIB)
    monitor = MemoryMonitor(Budget(name="26mb", memory_bytes=26 * MIB), context_bytes=4 * MIB)
    monitor.setup(fake_trainer(), SimpleNamespace(), "fit")
    monitor.note_peak(25 * MIB)
    monitor.note_peak(23 * MIB)
    assert monitor.peak_bytes == monitor.highest_bytes == 25 * MIB
    monitor.restart(Budget(name="24mb", memory_bytes=24 * MIB), predicted_bytes=0, step=1)
    assert monitor.peak_bytes == 24 * MIB and monitor.highest_bytes == 25 * MIB


def test_the_generator_of_the_device_is_kept_and_left_out_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    state = torch.arange(16, dtype=torch.uint8)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: state)
    saved = capture_rng(CUDA)
    assert saved["cuda"] is state and saved["cuda_device"] == 0
    restored: list[Any] = []
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda value, index: restored.append((value, index)))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    restore_rng(saved)
    assert restored == []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    restore_rng(saved)
    ((value, index),) = restored
    assert torch.equal(value, state) and index == 0
