"""Lightning callbacks that know no plan: what a run measures, what it keeps, what it shows, how it ends.

Order in `Trainer(callbacks=)`: RngState, StepVote, StepMonitor, MemoryMonitor, the rest, progress bar; Lightning puts
SafeCheckpoint last by itself.
"""

from baoc.callbacks.checkpoint import AsideCheckpointIO, SafeCheckpoint
from baoc.callbacks.generators import RngState
from baoc.callbacks.loss_guard import LossGuard
from baoc.callbacks.memory import TRACKED_STEPS, MemoryMonitor
from baoc.callbacks.pictures import FinalPictures
from baoc.callbacks.preemption import Preemption
from baoc.callbacks.progress import RunProgress, progress_bar
from baoc.callbacks.sources import Sources, changed
from baoc.callbacks.steps import StepMonitor
from baoc.callbacks.vote import StepVote

__all__ = [
    "TRACKED_STEPS",
    "AsideCheckpointIO",
    "FinalPictures",
    "LossGuard",
    "MemoryMonitor",
    "Preemption",
    "RngState",
    "RunProgress",
    "SafeCheckpoint",
    "Sources",
    "StepMonitor",
    "StepVote",
    "changed",
    "progress_bar",
]
