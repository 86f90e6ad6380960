"""Measures the peak that a memory budget limits, and ends a run that exceeds it.

docs/budgets.md#memory-what-counts defines the peak.
"""

import mmap
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import LambdaCallback

from baoc.callbacks.trainer_state import logs_now
from baoc.callbacks.vote import ranks_of
from baoc.data.batches import tensors_in
from baoc.errors import BudgetBreachedError
from baoc.parallel import SINGLE_PROCESS, Ranks
from baoc.profiling.memory import current_context_bytes
from baoc.profiling.tracker import MemoryTracker
from baoc.types import Budget
from baoc.units import format_bytes, gib

TRACKED_STEPS = 3


class MemoryMonitor(L.Callback):
    """Peak device memory of a run, as docs/budgets.md#memory-what-counts defines it for the device.

    On a CPU the peak is the largest number of live storage bytes that operators see in tracked phases: the first
    `tracked_steps` optimizer steps (all micro-batches; forward, backward, step), the first validation batch, the
    loading of a checkpoint, and whatever runs inside `track` (decisions, migrations, checkpoints, samples, export).
    Tracking slows a step, and `tracked` is True for such a batch. `every_step` tracks all steps and all validation
    batches.

    On CUDA the peak is `context_bytes`, read again as kernels load, plus the allocator's largest reservation over the
    whole run. Nothing is slowed.

    With `enforce`, a peak above `budget`'s memory limit ends the run with BudgetBreachedError (exit code 4). `peaks`
    has the peak of each phase. Of several ranks the largest peak counts; `peak_by_rank` is the largest of each rank in
    this attempt, as gathered last, and empty without ranks.

    Place this callback after StepMonitor, so that its own work is not timed.
    """

    def __init__(
        self,
        budget: Budget | None = None,
        *,
        tracked_steps: int = TRACKED_STEPS,
        every_step: bool = False,
        context_bytes: int = 0,
        predicted_bytes: int | None = None,
        enforce: bool = True,
    ):
        self.budget_bytes = budget.memory_bytes if budget is not None else None
        self.budget_name = budget.name if budget is not None else ""
        self.tracked_steps = sys.maxsize if every_step else tracked_steps
        self.every_step = every_step
        self.context_bytes = context_bytes
        self.predicted_bytes = predicted_bytes
        self.enforce = enforce
        self.extra_tensors: Callable[[], Any] = tuple  # other tensors that are always alive: the profiler's buffers
        self.peaks: dict[str, int] = {}  # bytes by phase
        self.predicted: Callable[[], int] = lambda: 0  # returns the largest peak that a plan of this attempt predicted
        self.probe_peak_bytes = 0  # peak of the measurements before the plan, which is part of the run's peak
        self._noted_bytes = 0  # see `note_peak`
        self._earlier_peak = self._earlier_predicted = 0  # under earlier budgets of this attempt
        self._resumed: dict[str, Any] = {}  # `state_dict` of the attempt that this one resumes
        self._tracker: MemoryTracker | None = None  # on a CPU only
        self._device = torch.device("cpu")
        self._first_step = 0
        self._tracked_validations: set[bool] = set()  # keyed by sanity checking, when there are no gradients yet
        self._phase: str | None = None  # that is being tracked
        self._batch: Any = None  # that is alive now
        self._slowed = False
        self._trainer: L.Trainer | None = None
        self._ranks: Ranks = SINGLE_PROCESS
        self._budget_peaks: tuple[int, ...] = ()  # peak of each rank at the last comparison, under this budget
        self._attempt_peaks: tuple[int, ...] = ()  # the same under any budget

    # -- what others read -----------------------------------------------------------------------------------------

    @property
    def tracked(self) -> bool:
        """True if memory was tracked since the batch began, which slowed it: do not use its time."""
        return self._slowed

    @property
    def peak_bytes(self) -> int:
        """The peak under this budget, including attempts before a resume; 0 before anything was measured."""
        return max(self._own_bytes, self._resumed_peak("peak"), *self._budget_peaks)

    @property
    def _own_bytes(self) -> int:
        """This rank's peak in this attempt, under this budget."""
        if self._device.type == "cuda":
            return max(self._noted_bytes, self.context_bytes + torch.cuda.max_memory_reserved(self._device))
        return max(self._noted_bytes, *self.peaks.values(), 0)

    def note_peak(self, num_bytes: int) -> None:
        """Takes over a peak that others measured, who reset torch's peak statistics on CUDA."""
        self._noted_bytes = max(self._noted_bytes, num_bytes)

    @property
    def peak_by_rank(self) -> tuple[int, ...]:
        own = self._ranks.rank
        return tuple(
            max(peak, self._own_bytes) if rank == own else peak for rank, peak in enumerate(self._attempt_peaks)
        )

    @contextmanager
    def track(self, label: str) -> Iterator[None]:
        """Measures the peak inside as phase `label`; within another tracked phase it counts for that one as well."""
        outer = self._phase
        if self._tracker is None or outer is None:
            self._enter(label, self._batch)
            try:
                yield
            finally:
                self._exit()
            return
        self._note(outer)
        self._tracker.reset_peak()
        self._phase = label
        try:
            yield
        finally:
            self._note(label)
            self._phase = outer

    @property
    def highest_bytes(self) -> int:
        """The peak of the run under all its budgets, including attempts before a resume."""
        return max(self._earlier_peak, self._resumed_peak("highest"), self.peak_bytes)

    @property
    def highest_predicted_bytes(self) -> int:
        """The largest peak that a plan of the run predicted, or that was measured before its first plan."""
        return max(self._earlier_predicted, self._resumed_peak("predicted"), self.predicted(), self.probe_peak_bytes)

    def restart(self, budget: Budget, *, predicted_bytes: int, step: int) -> None:
        """Starts a new budget after `step` steps: resets the peaks, and tracks the next steps again."""
        self._earlier_peak, self._earlier_predicted = self.highest_bytes, self.highest_predicted_bytes
        self.peaks, self._noted_bytes, self._budget_peaks = {}, 0, ()
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        self.budget_bytes, self.budget_name = budget.memory_bytes, budget.name
        self.predicted_bytes = predicted_bytes
        self._first_step = step
        self._tracked_validations = set()

    def check_budget(self, *, during: str, step: int) -> None:
        """Raises BudgetBreachedError, on all ranks, if the peak so far of any is above the memory budget."""
        peak = self.gather_peaks()
        if not self.enforce or self.budget_bytes is None or peak <= self.budget_bytes:
            return
        predicted = "" if self.predicted_bytes is None else f" ({format_bytes(self.predicted_bytes)} were predicted)"
        where = f" on rank {self._budget_peaks.index(peak)}" if peak in self._budget_peaks else ""
        raise BudgetBreachedError(
            f"budget {self.budget_name} allows {format_bytes(self.budget_bytes)} ({self.budget_bytes} bytes), but "
            f"{during} at step {step} held {format_bytes(peak)} ({peak} bytes){where}{predicted}, "
            f"{format_bytes(peak - self.budget_bytes)} too much: lower micro_batch, or give a larger budget"
        )

    def gather_peaks(self) -> int:
        """Gathers the peaks of all ranks, which have to call it together; returns the largest so far."""
        if self._ranks is not SINGLE_PROCESS:
            peaks = tuple(int(peak) for peak in self._ranks.all_gather_number(self._own_bytes))
            self._budget_peaks = peaks
            self._attempt_peaks = tuple(map(max, peaks, self._attempt_peaks or peaks))
        return self.peak_bytes

    def state_dict(self) -> dict[str, Any]:
        return {
            "device": self._device.type,
            "budget": [self.budget_name, self.budget_bytes],
            "peak": self.peak_bytes,
            "highest": self.highest_bytes,
            "predicted": self.highest_predicted_bytes,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._resumed = state_dict

    def _resumed_peak(self, key: str) -> int:
        """A peak of the attempts that this one resumes; 0 if they had another device or budget."""
        same = self._resumed.get("budget") == [self.budget_name, self.budget_bytes]
        return self._resumed[key] if same and self._resumed["device"] == self._device.type else 0

    # -- Lightning ------------------------------------------------------------------------------------------------

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._trainer = trainer
        self._device, self._ranks = trainer.strategy.root_device, ranks_of(trainer)
        self.peaks, self._noted_bytes, self._budget_peaks, self._attempt_peaks = {}, 0, (), ()
        self._earlier_peak, self._earlier_predicted, self._resumed, self.probe_peak_bytes = 0, 0, {}, 0
        self._tracked_validations = set()
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        else:
            self._tracker = MemoryTracker(device=self._device)

    def track_resume(self) -> None:
        """Tracks the loading of a checkpoint, up to the first batch. Call it when a plan is made, before the loading.
        The file's own tensors do not count, because the file is memory-mapped."""
        saved = None if self._trainer is None else self._trainer._checkpoint_connector._loaded_checkpoint
        if saved and self._tracker is not None:
            self._tracker.ignore(*tensors_in(saved))
            self._enter("resume")

    def on_sanity_check_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._exit()

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._exit()
        if "resume" in self.peaks:
            self.check_budget(during="loading a checkpoint", step=trainer.global_step)
        self._first_step = trainer.global_step  # not 0 after a resume

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._slowed, self._batch = False, batch
        if trainer.global_step - self._first_step < self.tracked_steps:
            self._enter("training", batch)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._exit()
        self._batch = None
        logs = logs_now(trainer)
        if self.tracked or logs or trainer.global_step - self._first_step <= self.tracked_steps:
            self._read_context()
            self.check_budget(during="training", step=trainer.global_step)
        if logs:
            pl_module.log_dict(self.values())

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._read_context()
        self.gather_peaks()

    def on_validation_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        if self.every_step or trainer.sanity_checking not in self._tracked_validations:
            self._tracked_validations.add(bool(trainer.sanity_checking))
            self._enter("validation", batch)

    def on_validation_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if self._phase is not None:
            self._exit()
            self.check_budget(during="validation", step=trainer.global_step)

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self._exit()

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._exit()  # ends the phase of a resume without steps left, in which training never started

    def final_validation(self) -> L.Callback:
        """A callback for a Trainer that validates after training: tracks its first batch as a phase of the run."""
        tracked: list[bool] = []

        def begin(trainer: L.Trainer, module: L.LightningModule, batch: Any, *_: int) -> None:
            if self.every_step or not tracked:
                tracked.append(True)
                self._enter("final validation", batch)

        return LambdaCallback(on_validation_batch_start=begin, on_validation_batch_end=lambda *_: self._exit())

    def values(self) -> dict[str, float]:
        values = {"memory/peak_gib": gib(self.peak_bytes)}
        values |= {f"memory/peak_gib_rank_{rank}": gib(peak) for rank, peak in enumerate(self._budget_peaks)}
        if self.budget_bytes is not None:
            values["budget/slack_gib"] = gib(self.budget_bytes - self.peak_bytes)
        rss = resident_bytes()
        if rss is not None:
            values["memory/rss_gib"] = gib(rss)
        return values

    def _read_context(self) -> None:
        """Reads the size of the CUDA context, which grows as kernels load."""
        if self._device.type == "cuda":
            self.context_bytes = max(self.context_bytes, current_context_bytes(self._device))

    # -- tracking -------------------------------------------------------------------------------------------------

    def _enter(self, label: str, *tensors: Any) -> None:
        """Starts a tracked phase with all tensors that are alive: the module, gradients, states, and `tensors`."""
        if self._tracker is None or self._trainer is None:
            return
        self._tracker.count_existing(
            self._trainer.lightning_module, [o.state for o in self._trainer.optimizers], self.extra_tensors(), tensors
        )
        self._tracker.reset_peak()
        self._tracker.__enter__()
        self._phase = label
        self._slowed = True

    def _exit(self) -> None:
        if self._tracker is not None and self._phase is not None:
            self._tracker.exit_out_of_order()
            self._note(self._phase)
            self._phase = None

    def _note(self, label: str) -> None:
        assert self._tracker is not None
        self.peaks[label] = max(self.peaks.get(label, 0), self._tracker.peak_bytes)


def resident_bytes() -> int | None:
    """Bytes of the process's resident set; None on a system without /proc."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE
    except OSError:
        return None
