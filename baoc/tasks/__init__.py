"""Tasks by name: a network, its loss and its metric as a LightningModule. They do not know that they are budgeted.

To add one: a file with a subclass of `baoc.tasks.base.Task`, and a row here.
"""

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from baoc.errors import unknown_name
from baoc.tasks.settings import OptimizerSettings

if TYPE_CHECKING:
    from torch import nn

    from baoc.tasks.base import Task

__all__ = ["TASKS", "OptimizerSettings", "TaskRow", "build_task"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskRow:
    """One row; `cls` in `module` is the Task, `options` are its own settings beside the optimizer's."""

    name: str
    description: str
    module: str
    cls: str
    options: tuple[str, ...] = ()


TASKS: dict[str, TaskRow] = {
    row.name: row
    for row in (
        TaskRow(
            name="vision",
            description="classification of images: cross-entropy, judged by val/loss; accuracy beside it",
            module="baoc.tasks.vision",
            cls="VisionTask",
            options=("label_smoothing",),
        ),
    )
}


def build_task(name: str, *, model: "nn.Module", optimizer: OptimizerSettings | None = None, **options: Any) -> "Task":
    """The LightningModule of a row around `model`. BadInputError for an unknown name or option."""
    if name not in TASKS:
        raise unknown_name(name, what="task", allowed=TASKS)
    row = TASKS[name]
    for key in options.keys() - set(row.options):
        raise unknown_name(key, what=f"option of task {name}", allowed=row.options)
    cls = getattr(import_module(row.module), row.cls)
    return cls(model, optimizer=optimizer or OptimizerSettings(), **options)
