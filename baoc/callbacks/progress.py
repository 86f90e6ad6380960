"""One bar for the whole run, or a line each tenth of it where the output is no terminal.

Lightning's bars start anew each epoch, which on small data sets is a flicker and in a log file a page per epoch.
"""

import time
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import ProgressBar
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from baoc.callbacks.trainer_state import accumulating, logs_now
from baoc.tracking.console import attach_live, detach_live, make_console, say

SHOWN = ("train/loss", "val/loss", "val/acc", "val/ppl", "val/mse")


class RunProgress(ProgressBar):
    """Shows steps done of all steps, time, and the newest logged values of SHOWN.

    Values are read every `log_every_n_steps` only, because reading one from a GPU waits for it. Without a terminal a
    run prints `plain_lines` lines.
    """

    def __init__(self, *, plain_lines: int = 10):
        super().__init__()
        self.plain_lines = plain_lines
        self._bar: Progress | None = None
        self._task = TaskID(0)
        self._enabled = True
        self._total: int | None = None
        self._next_line_step = 0
        self._start = (0, 0.0)  # step and time at which this attempt began
        self._last_validation = 0  # step of the newest validation

    def disable(self) -> None:
        self._enabled = False

    def enable(self) -> None:
        self._enabled = True

    def print(self, *args: Any, **kwargs: Any) -> None:
        say(" ".join(map(str, args)))

    # -- Lightning ------------------------------------------------------------------------------------------------

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        total = trainer.max_steps if trainer.max_steps > 0 else trainer.estimated_stepping_batches
        self._total = int(total) if total != float("inf") else None
        self._start = (trainer.global_step, time.monotonic())
        self._next_line_step = trainer.global_step + self._interval()
        console = make_console()
        if self._enabled and console.is_terminal:
            self._bar = bar = _bar(console)
            self._task = bar.add_task("training", total=self._total, completed=trainer.global_step, values="")
            bar.start()
            attach_live(console)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if accumulating(trainer):
            return
        step = trainer.global_step
        if self._bar is not None:
            self._bar.update(self._task, completed=step)
            if logs_now(trainer):
                self._bar.update(self._task, values=self._values(trainer))
        elif self._enabled and step >= self._next_line_step:
            self._next_line_step = step + self._interval()
            self._print_line(trainer)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._last_validation = trainer.global_step
        if self._bar is not None:
            self._bar.update(self._task, values=self._values(trainer))

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._stop()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self._stop()

    # -- showing --------------------------------------------------------------------------------------------------

    def _interval(self) -> int:
        """Steps between two plain lines; 1000 if the number of steps is unknown."""
        return max(1, -(-self._total // self.plain_lines)) if self._total else 1000

    def _values(self, trainer: L.Trainer) -> str:
        """The newest logged values, and the step of the last validation if training has gone on since."""
        logged = trainer.callback_metrics
        values = [f"{key} {float(logged[key]):.4g}" for key in SHOWN if key in logged]
        is_old = self._last_validation < trainer.global_step and any(key.startswith("val/") for key in logged)
        return "  ".join(values) + (f" (step {self._last_validation})" if is_old else "")

    def _print_line(self, trainer: L.Trainer) -> None:
        step, (first, start) = trainer.global_step, self._start
        elapsed = time.monotonic() - start
        remaining = ""
        if self._total and step > first:
            remaining = f", {elapsed / (step - first) * (self._total - step):.0f} s left"
        total = f"/{self._total}" if self._total else ""
        say(f"step {step}{total}, {elapsed:.0f} s{remaining}  {self._values(trainer)}".rstrip())

    def _stop(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            detach_live(self._bar.console)
            self._bar = None


def _bar(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[values]}", style="dim"),
        console=console,
        refresh_per_second=4,
    )
