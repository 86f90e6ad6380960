"""Measures the peak that a memory budget limits, and stops a run that exceeds it.

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
    has the peak of each phase, `peak_phase` names the phase that used most. Of several ranks the largest peak counts;
    `peak_by_rank` is the largest of each rank in this attempt, as of their last comparison, and empty without ranks.

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
        self.extra_tensors: Callable[[], Any] = tuple  # what else is alive all the time: the profiler's buffers
        self.peaks: dict[str, int] = {}
        self.predicted: Callable[[], int] = lambda: 0  # returns the largest peak that a plan of this attempt predicted
        self.probe_peak_bytes = 0  # peak of the measurements before the plan, which is part of the run's peak
        self._noted_bytes = 0  # see `note_peak`
        self._before = self._before_predicted = 0  # the peak under earlier budgets
        self._earlier: dict[str, Any] = {}  # of the attempts that this one goes on from
        self._tracker: MemoryTracker | None = None  # on a CPU only
        self._device = torch.device("cpu")
        self._first_step = 0
        self._seen_validation: set[bool] = set()  # keyed by sanity checking: gradients are there only in training
        self._label: str | None = None
        self._batch: Any = None  # that is alive now
        self._slowed = False
        self._trainer: L.Trainer | None = None
        self._ranks: Ranks = SINGLE_PROCESS
        self._now_by_rank: tuple[int, ...] = ()  # what each held when they last compared, under this budget
        self._by_rank: tuple[int, ...] = ()  # the same, whatever the budget

    # -- what others read -----------------------------------------------------------------------------------------

    @property
    def tracked(self) -> bool:
        """True if memory was tracked since the batch began, which slows it: do not use its seconds."""
        return self._slowed

    @property
    def peak_phase(self) -> str:
        """The stretch of this attempt that held most, "" before anything was measured and on CUDA, where the allocator
        knows of no stretches."""
        return max(reversed(self.peaks), key=self.peaks.__getitem__, default="")  # of equal ones the one inside

    @property
    def peak_bytes(self) -> int:
        """The peak so far under this budget, that of the attempts before a resume included; 0 before anything was
        measured."""
        return max(self._own_bytes, self._of_earlier("peak"), *self._now_by_rank)

    @property
    def _own_bytes(self) -> int:
        """This rank's peak in this attempt, under this budget."""
        if self._device.type == "cuda":
            return max(self._noted_bytes, self.context_bytes + torch.cuda.max_memory_reserved(self._device))
        return max(self._noted_bytes, *self.peaks.values(), 0)

    def note_peak(self, num_bytes: int) -> None:
        """What was held at most while somebody else measured, who has torch's peak on CUDA begin anew."""
        self._noted_bytes = max(self._noted_bytes, num_bytes)

    @property
    def peak_by_rank(self) -> tuple[int, ...]:
        own = self._ranks.rank
        return tuple(max(held, self._own_bytes) if rank == own else held for rank, held in enumerate(self._by_rank))

    @contextmanager
    def track(self, label: str) -> Iterator[None]:
        """Measures what happens inside as `label`; inside another tracked part it counts there as well."""
        outer = self._label
        if self._tracker is None or outer is None:
            self._enter(label, self._batch)
            try:
                yield
            finally:
                self._exit()
            return
        self._note(outer)
        self._tracker.reset_peak()
        self._label = label
        try:
            yield
        finally:
            self._note(label)
            self._label = outer

    @property
    def highest_bytes(self) -> int:
        """The peak of the whole run, whatever budgets it had, and however often it was resumed."""
        return max(self._before, self._of_earlier("highest"), self.peak_bytes)

    @property
    def highest_predicted_bytes(self) -> int:
        """The largest peak that any plan of the run predicted, or that was measured before its first plan."""
        return max(self._before_predicted, self._of_earlier("predicted"), self.predicted(), self.probe_peak_bytes)

    def restart(self, budget: Budget, *, predicted_bytes: int, step: int) -> None:
        """Another budget is in force after `step` steps: peaks are measured anew, the next steps tracked again."""
        self._before, self._before_predicted = self.highest_bytes, self.highest_predicted_bytes
        self.peaks, self._noted_bytes, self._now_by_rank = {}, 0, ()
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        self.budget_bytes, self.budget_name = budget.memory_bytes, budget.name
        self.predicted_bytes = predicted_bytes
        self._first_step = step
        self._seen_validation = set()

    def check_budget(self, *, during: str, step: int) -> None:
        """Raises BudgetBreachedError, on all ranks, if the peak so far of any is above the memory budget."""
        held = self.compare()
        if not self.enforce or self.budget_bytes is None or held <= self.budget_bytes:
            return
        predicted = "" if self.predicted_bytes is None else f" ({format_bytes(self.predicted_bytes)} were predicted)"
        where = f" on rank {self._now_by_rank.index(held)}" if held in self._now_by_rank else ""
        raise BudgetBreachedError(
            f"budget {self.budget_name} allows {format_bytes(self.budget_bytes)} ({self.budget_bytes} bytes), but "
            f"{during} at step {step} held {format_bytes(held)} ({held} bytes){where}{predicted}, "
            f"{format_bytes(held - self.budget_bytes)} too much: lower micro_batch, or give a larger budget"
        )

    def compare(self) -> int:
        """The peak so far of the rank that held most, by all ranks."""
        if self._ranks is not SINGLE_PROCESS:
            now = tuple(int(held) for held in self._ranks.all_gather_number(self._own_bytes))
            self._now_by_rank = now
            self._by_rank = tuple(map(max, now, self._by_rank or now))
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
        self._earlier = state_dict

    def _of_earlier(self, key: str) -> int:
        """Peaks of the attempts that this one resumes; 0 where those had another device or budget."""
        same = self._earlier.get("budget") == [self.budget_name, self.budget_bytes]
        return self._earlier[key] if same and self._earlier["device"] == self._device.type else 0

    # -- Lightning ------------------------------------------------------------------------------------------------

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._trainer = trainer
        self._device, self._ranks = trainer.strategy.root_device, ranks_of(trainer)
        self.peaks, self._noted_bytes, self._now_by_rank, self._by_rank = {}, 0, (), ()
        self._before, self._before_predicted, self._earlier, self.probe_peak_bytes = 0, 0, {}, 0
        self._seen_validation = set()
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        else:
            self._tracker = MemoryTracker(device=self._device)

    def watch_resume(self) -> None:
        """To be called when a plan is made: where a checkpoint is about to be loaded, this is measured, up to the first
        batch. The file is mapped, so that its own pages are not held."""
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
        self.compare()

    def on_validation_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        if self.every_step or trainer.sanity_checking not in self._seen_validation:
            self._seen_validation.add(bool(trainer.sanity_checking))
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
        if self._label is not None:
            self._exit()
            self.check_budget(during="validation", step=trainer.global_step)

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self._exit()

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._exit()  # of the resume, where no step was left and training never started

    def final_validation(self) -> L.Callback:
        """For the Trainer of a validation after training: its first batch is measured, as a stretch of the run."""
        seen: list[bool] = []

        def begin(trainer: L.Trainer, module: L.LightningModule, batch: Any, *_: int) -> None:
            if self.every_step or not seen:
                seen.append(True)
                self._enter("final validation", batch)

        return LambdaCallback(on_validation_batch_start=begin, on_validation_batch_end=lambda *_: self._exit())

    def values(self) -> dict[str, float]:
        """Metric keys and values as they are now."""
        values = {"memory/peak_gib": gib(self.peak_bytes)}
        values |= {f"memory/peak_gib_rank_{rank}": gib(held) for rank, held in enumerate(self._now_by_rank)}
        if self.budget_bytes is not None:
            values["budget/slack_gib"] = gib(self.budget_bytes - self.peak_bytes)
        rss = resident_bytes()
        if rss is not None:
            values["memory/rss_gib"] = gib(rss)
        return values

    def _read_context(self) -> None:
        """The CUDA context grows as kernels load, so the reading from before the first step is not the last word."""
        if self._device.type == "cuda":
            self.context_bytes = max(self.context_bytes, current_context_bytes(self._device))

    # -- tracking -------------------------------------------------------------------------------------------------

    def _enter(self, label: str, *held: Any) -> None:
        """Starts a tracked part with all that is alive by now: the module with its gradients, states, and the batch."""
        if self._tracker is None or self._trainer is None:
            return
        self._tracker.count_existing(
            self._trainer.lightning_module, [o.state for o in self._trainer.optimizers], self.extra_tensors(), held
        )
        self._tracker.reset_peak()
        self._tracker.__enter__()
        self._label = label
        self._slowed = True

    def _exit(self) -> None:
        """Ends the tracked part, if there is one."""
        if self._tracker is not None and self._label is not None:
            self._tracker.exit_out_of_order()
            self._note(self._label)
            self._label = None

    def _note(self, label: str) -> None:
        assert self._tracker is not None
        self.peaks[label] = max(self.peaks.get(label, 0), self._tracker.peak_bytes)


def resident_bytes() -> int | None:
    """The process's resident set; None where there is no /proc to tell it."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE
    except OSError:
        return None
