"""SIGTERM, and the signals by which Slurm announces that a job's time is up: write a checkpoint, end, requeue.

Lightning ends on SIGTERM without a checkpoint, and under Slurm writes one inside the signal handler, which may be in
the middle of a step.
"""

import os
import re
import signal
import subprocess
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import lightning as L

from baoc.callbacks.checkpoint import SafeCheckpoint
from baoc.callbacks.trainer_state import forget_sigterm
from baoc.callbacks.vote import StepVote, ranks_of
from baoc.errors import PreemptedError

# USR1 and USR2 come from `#SBATCH --signal=USR1@90`; Windows has neither.
NAMES = ("SIGTERM", "SIGUSR1", "SIGUSR2")
REQUEUING = ("SIGUSR1", "SIGUSR2")


class Preemption(L.Callback):
    """Ends the run after a signal: `checkpoint` is written, then PreemptedError raised (exit code 130).

    The optimizer step in progress ends first, with all its micro-batches, and so does a validation. Inside `listening`
    signals are only recorded, so that one during set-up counts too. In a Slurm job the signals of REQUEUING requeue the
    job, and so does SIGTERM if Slurm reports a preemption, because Slurm counts a job that ends within its GraceTime as
    completed. The job's script should use `resume=auto`. With a `vote`, a signal to one rank ends all.
    """

    def __init__(self, checkpoint: SafeCheckpoint, *, vote: StepVote | None = None):
        self.received: str | None = None
        self._checkpoint = checkpoint
        self._vote = vote or StepVote()
        self._vote.local_values["signal"] = lambda: 0 if self.received is None else 1 + NAMES.index(self.received)
        checkpoint.is_ending = lambda: self.agreed is not None

    @property
    def agreed(self) -> str | None:
        """Name of the signal that ends the run, None without one. The same on all ranks."""
        return (None, *NAMES)[int(self._vote.outcome("signal"))]

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Inside, signals are recorded. Only the main thread may handle signals; in others this does nothing."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self._note) for number in _signals()}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _note(self, number: int, frame: Any) -> None:
        # The first signal counts: after USR1 Slurm also sends SIGTERM, to a job that was requeued already.
        self.received = self.received or signal.Signals(number).name

    # -- Lightning ------------------------------------------------------------------------------------------------

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._vote.ranks = ranks_of(trainer)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Restores our handler, which Lightning has just wrapped in one that ends the run without a checkpoint."""
        if self.received is not None:
            forget_sigterm(trainer)
        for number in _signals() if threading.current_thread() is threading.main_thread() else ():
            if self._note in getattr(signal.getsignal(number), "signal_handlers", ()):  # Lightning's composed handler
                signal.signal(number, self._note)

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Raises PreemptedError once the checkpoint exists: the step before is logged and validated by now."""
        name, ranks = self.agreed, ranks_of(trainer)
        if name is None or not ranks.broadcast(self._checkpoint.has_step(trainer.global_step)):
            return
        queued = ranks.broadcast_result(
            lambda: requeue(os.environ) if name in REQUEUING or is_preempted(os.environ) else ""
        )
        raise PreemptedError(
            f"{name} ended the run after step {trainer.global_step}, whose checkpoint is "
            f"{self._checkpoint.last_path}{queued}"
        )


def requeue(environment: Mapping[str, str]) -> str:
    """Asks Slurm to requeue this job. Returns a phrase about the outcome, "" outside of a Slurm job."""
    job = _job(environment)
    if job is None:
        return ""
    try:
        done = _scontrol("requeue", job)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"; job {job} is not queued again ({error}): submit it again"
    if done.returncode:
        return f"; Slurm did not queue job {job} again ({done.stderr.strip() or done.returncode}): submit it again"
    return f"; Slurm queued job {job} again"


def is_preempted(environment: Mapping[str, str]) -> bool:
    """Whether Slurm preempts this job, as opposed to cancelling it or ending it at its time limit."""
    job = _job(environment)
    if job is None:
        return False
    try:
        description = _scontrol("show", "job", "-o", job).stdout
    except (OSError, subprocess.TimeoutExpired):
        return False
    return re.search(r"\bPreemptTime=\d", description) is not None


def _job(environment: Mapping[str, str]) -> str | None:
    array = environment.get("SLURM_ARRAY_JOB_ID")
    if array is not None:
        return f"{array}_{environment.get('SLURM_ARRAY_TASK_ID', '0')}"
    return environment.get("SLURM_JOB_ID")


def _scontrol(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["scontrol", *words], capture_output=True, text=True, timeout=30)


def _signals() -> list[signal.Signals]:
    return [getattr(signal, name) for name in NAMES if hasattr(signal, name)]
