"""Tasks by name: LightningModules with a network, a loss and a metric. They do not depend on budgets.

To add a task: a file with a subclass of `baoc.tasks.base.Task`, and an entry in TASKS.
"""

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from baoc.core import own_code
from baoc.tasks.settings import OptimizerSettings

if TYPE_CHECKING:
    from torch import nn

    from baoc.tasks.base import Task

__all__ = ["TASKS", "OptimizerSettings", "TaskInfo", "build_task", "task_info"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskInfo(own_code.Entry):
    """An entry of TASKS: class `cls` of `module`. `seeded`: the option that takes the run's seed if it is null."""

    cls: str = ""
    seeded: str | None = None


TASKS: dict[str, TaskInfo] = {
    info.name: info
    for info in (
        TaskInfo(
            name="vision",
            description="classification of images: cross-entropy, judged by val/loss; accuracy beside it",
            module="baoc.tasks.vision",
            cls="VisionTask",
            options={"label_smoothing": 0.0, "mixup": 0.0, "ema_decay": 0.0},
        ),
        TaskInfo(
            name="diffusion",
            description="denoising of images or latents: squared error, judged by val/mse of the averaged weights",
            module="baoc.tasks.diffusion",
            cls="DiffusionTask",
            options={
                "prediction": "epsilon",
                "noise_schedule": "cosine",
                "label_dropout": 0.1,
                "noise_seed": None,
                "ema_decay": 0.9999,
                "sampler": "ddim",
                "sample_steps": 50,
                "guidance": 1.5,
                "num_samples": None,
            },
            option_types={"num_samples": int | None, "noise_seed": int | None},
            seeded="noise_seed",
        ),
        TaskInfo(
            name="language",
            description="prediction of the next token, judged by val/bpb, bits per byte; perplexity beside it",
            module="baoc.tasks.language",
            cls="LanguageTask",
            options={"loss_chunk": 0, "ema_decay": 0.0},
        ),
        TaskInfo(
            name="masked",
            description="prediction of masked tokens from both sides, judged by val/loss",
            module="baoc.tasks.masked",
            cls="MaskedTask",
            options={"share": 0.15, "mask_seed": None, "ema_decay": 0.0},
            option_types={"mask_seed": int | None},
            seeded="mask_seed",
        ),
    )
}


def build_task(
    name: str,
    *,
    model: "nn.Module",
    spec: Any = None,
    seed: int = 0,
    optimizer: OptimizerSettings | None = None,
    **options: Any,
) -> "Task":
    """Builds the LightningModule `name` around `model`, for the data that `spec` describes (see `Task`).

    `seed` determines the task's randomness. Raises BadInputError for an unknown name.
    """
    info, settings = task_info(name), optimizer or OptimizerSettings()
    if info.is_own:
        from baoc.tasks.own import build_user_task

        return build_user_task(name, model=model, spec=spec, optimizer=settings, options=options)
    arguments = {**info.options, **options}
    if info.seeded is not None and arguments[info.seeded] is None:
        arguments[info.seeded] = seed
    cls = getattr(import_module(info.module), info.cls)
    return cls(model, spec=spec, optimizer=settings, **arguments)


def task_info(name: str) -> TaskInfo:
    """The entry of a name, or one for the user's own code. Raises BadInputError for a name that is neither."""
    return own_code.find_entry(name, group="task", registry=TASKS, own=TaskInfo)
