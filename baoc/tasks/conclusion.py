"""Samples of a finished diffusion run: a grid as PNG, and on digits their Frechet distance from held-out images."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from baoc.models.switches import recomputable_layers, recomputed_layers
from baoc.profiling.tracker import untracked
from baoc.tasks.frechet import frechet_distance
from baoc.tasks.pictures import write_grid
from baoc.tracking.console import say

if TYPE_CHECKING:
    from baoc.tasks.diffusion import DiffusionTask

NUM_SAMPLES = 80
COLUMNS = (8, 10)  # columns if the classes do not fit into a row; the most columns, one per class, if they do
AFFORDABLE_ON_CPU = 5_000_000  # parameters; a larger network takes minutes for one grid on a CPU


@dataclass(frozen=True, slots=True, kw_only=True)
class Pictures:
    """`metrics` to add to the run's; `path` of the PNG, or None and the reason `why` there is none."""

    metrics: dict[str, float] = field(default_factory=dict)
    path: Path | None = None
    why: str = ""


def conclude(task: "DiffusionTask", data: Any, *, folder: Path, num_samples: int | None) -> Pictures:
    """Writes `samples.png` to `folder`, with one column per class if they fit.

    On digits it also draws one sample per held-out image, with the same labels, and returns their Frechet distance.
    `num_samples` None means 80, or none for a large network on a CPU.
    """
    num_params = sum(parameter.numel() for parameter in task.parameters())
    if num_samples is None and task.device.type == "cpu" and num_params > AFFORDABLE_ON_CPU:
        return Pictures(why=f"{num_params / 1e6:.0f}M parameters on a CPU; ask with task.num_samples=16")
    count = NUM_SAMPLES if num_samples is None else num_samples
    if count == 0:
        return Pictures(why="task.num_samples=0")
    held_out = _held_out(data) if data.spec.dataset == "digits" else None
    if held_out is not None and held_out[0].shape[1:] != (1, 8, 8):
        held_out = None
    size = getattr(task.model, "image_size", data.spec.image_size)
    shape = (data.spec.channels, size, size)
    labels, columns = grid_labels(count, num_classes=data.spec.num_classes)
    at_once = samples_at_once(task, micro_batch=data.batch_size)
    num_measured = 0 if held_out is None else len(held_out[1])
    say(f"drawing {count + num_measured} samples, {at_once} at once; task.num_samples=0 leaves them out")
    images = task.sample(labels, shape=shape, batch_size=at_once)
    path = folder / "samples.png"
    write_grid(images, path, columns=columns)
    if held_out is None:
        return Pictures(path=path)
    real, real_labels = held_out
    # Without guidance, which makes images of a class alike: the distance also measures variety.
    made = task.sample(real_labels, shape=shape, batch_size=at_once, guidance=1.0, seed=1)
    return Pictures(path=path, metrics={"val/frechet": frechet_distance(made, real)})


def samples_at_once(task: "DiffusionTask", *, micro_batch: int) -> int:
    """Number of samples that take no more memory at once than a micro-batch in training.

    Sampling keeps the activations of one layer at a time; training keeps those of all layers, unless it recomputes
    them. The temporaries of a running layer are assumed to be as large as what four layers keep for backward.
    """
    units = len(recomputable_layers(task.model))
    return micro_batch * max(1, (units - recomputed_layers(task.model)) // 4)


def grid_labels(count: int, *, num_classes: int) -> tuple[Tensor, int]:
    """(labels (count,), number of columns): one column per class, or labels spread evenly over all classes."""
    least, most = COLUMNS
    if num_classes <= most:
        columns = num_classes * max(1, least // num_classes)
        return torch.arange(count) % num_classes, columns
    return torch.arange(count) * num_classes // count, least


def _held_out(data: Any) -> tuple[Tensor, Tensor]:
    with untracked():
        batches = list(data.val_dataloader())
    return torch.cat([batch["images"] for batch in batches]), torch.cat([batch["labels"] for batch in batches])
