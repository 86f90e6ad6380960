"""Times optimizer steps, except those that warm-up, memory tracking or profiling slowed."""

import time
from collections.abc import Callable
from statistics import mean, median
from typing import Any

import lightning as L
import torch

from baoc.callbacks.trainer_state import accumulating, logs_now
from baoc.data.batches import num_samples


class StepMonitor(L.Callback):
    """Median milliseconds of an optimizer step and samples per second.

    The time of a step is that of its micro-batches, each from the start of the batch (on its device) to its end:
    forward, backward, optimizer. Loading data, validation, checkpoints and logging do not count. The first
    `warmup_steps` and steps for which `leave_out()` is True are not counted. On CUDA, events are recorded and read only
    when logging, so that no step synchronizes.

    `batch_size`: samples per micro-batch; by default the first dimension of the batch's first tensor. Place this
    callback before MemoryMonitor.
    """

    def __init__(
        self, *, warmup_steps: int = 5, leave_out: Callable[[], bool] | None = None, batch_size: int | None = None
    ):
        self.warmup_steps = warmup_steps
        self.leave_out = leave_out
        self.batch_size = batch_size
        self.num_seen = 0  # steps since training began, those that are not counted too
        self._steps_ms: list[float] = []
        self._inner_ms: list[float] = []
        self._samples: list[int] = []
        self._reset_step()
        self._unread: list[tuple[list[tuple[torch.cuda.Event, torch.cuda.Event]], int]] = []
        self._cuda = False

    # -- what others read -----------------------------------------------------------------------------------------

    @property
    def num_timed(self) -> int:
        return len(self._steps_ms)

    @property
    def step_ms(self) -> float:
        """Median milliseconds per optimizer step; NaN while nothing was counted."""
        self._read_events()
        return median(self._steps_ms) if self._steps_ms else float("nan")

    @property
    def micro_batch_ms(self) -> float:
        """Median over the counted steps of the mean micro-batch between the first and the last; 0 of fewer than 3."""
        self._read_events()
        return median(self._inner_ms) if self._inner_ms else 0.0

    @property
    def samples_per_s(self) -> float:
        """Median samples per optimizer step over the median time of one; NaN while nothing was counted."""
        step_ms = self.step_ms
        return median(self._samples) / step_ms * 1e3 if self._steps_ms else float("nan")

    # -- Lightning ------------------------------------------------------------------------------------------------

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._cuda = trainer.strategy.root_device.type == "cuda"

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._reset_step()
        self.num_seen = 0
        self._steps_ms, self._inner_ms, self._samples, self._unread = [], [], [], []

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._start = self._now()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._parts.append((self._start, self._now()))
        self._step_samples += self.batch_size or num_samples(batch)
        self._is_slowed = self._is_slowed or (self.leave_out is not None and self.leave_out())
        if accumulating(trainer):
            return
        self.num_seen += 1
        if self.num_seen > self.warmup_steps and not self._is_slowed:
            self._count()
        self._reset_step()
        if logs_now(trainer) and (self._steps_ms or self._unread):
            pl_module.log_dict({"time/step_ms": self.step_ms, "throughput/samples_per_s": self.samples_per_s})

    # -- timing ---------------------------------------------------------------------------------------------------

    def _reset_step(self) -> None:
        self._parts: list[tuple[Any, Any]] = []
        self._step_samples = 0
        self._is_slowed = False

    def _now(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _count(self) -> None:
        if self._cuda:
            self._unread.append((self._parts, self._step_samples))
        else:
            self._add([(end - start) * 1e3 for start, end in self._parts], samples=self._step_samples)

    def _add(self, micro_batches_ms: list[float], *, samples: int) -> None:
        self._steps_ms.append(sum(micro_batches_ms))
        self._samples.append(samples)
        if inner := micro_batches_ms[1:-1]:
            self._inner_ms.append(mean(inner))

    def _read_events(self) -> None:
        """Synchronizes with the last event, then reads all events since the last call."""
        if self._unread:
            self._unread[-1][0][-1][1].synchronize()
        for parts, samples in self._unread:
            self._add([start.elapsed_time(end) for start, end in parts], samples=samples)
        self._unread = []
