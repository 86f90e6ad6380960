"""Lightning callbacks of a run: what it measures, what it keeps, what it shows.

Order in `Trainer(callbacks=)`: RngState, StepVote, StepMonitor, MemoryMonitor, the rest, progress bar; Lightning puts
SafeCheckpoint last by itself.
"""

from baoc.training.callbacks.budget_control import BudgetControl
from baoc.training.callbacks.checkpoint import AsideCheckpointIO, SafeCheckpoint
from baoc.training.callbacks.loss_guard import LossGuard
from baoc.training.callbacks.memory import TRACKED_STEPS, MemoryMonitor
from baoc.training.callbacks.pictures import FinalPictures
from baoc.training.callbacks.preemption import Preemption
from baoc.training.callbacks.progress import RunProgress, progress_bar
from baoc.training.callbacks.resume import RngState
from baoc.training.callbacks.sources import Sources, changed
from baoc.training.callbacks.steps import StepMonitor
from baoc.training.callbacks.vote import StepVote

__all__ = [
    "TRACKED_STEPS",
    "AsideCheckpointIO",
    "BudgetControl",
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
