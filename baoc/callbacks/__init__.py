"""Lightning callbacks of a run: what it measures, what it keeps, what it shows.

Order in `Trainer(callbacks=)`: RngState, StepMonitor, MemoryMonitor, the rest, progress bar; Lightning puts
SafeCheckpoint last by itself.
"""

from baoc.callbacks.budget_control import BudgetControl
from baoc.callbacks.checkpoint import AsideCheckpointIO, SafeCheckpoint
from baoc.callbacks.loss_guard import LossGuard
from baoc.callbacks.memory import MemoryMonitor
from baoc.callbacks.pictures import FinalPictures
from baoc.callbacks.preemption import Preemption
from baoc.callbacks.progress import RunProgress, progress_bar
from baoc.callbacks.resume import RngState
from baoc.callbacks.steps import StepMonitor

__all__ = [
    "AsideCheckpointIO",
    "BudgetControl",
    "FinalPictures",
    "LossGuard",
    "MemoryMonitor",
    "Preemption",
    "RngState",
    "RunProgress",
    "SafeCheckpoint",
    "StepMonitor",
    "progress_bar",
]
