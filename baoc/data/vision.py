"""Labelled images as a Lightning DataModule: split, scaled, and resized for models with a fixed input size.

Batches are `{"images": (B, C, S, S) float32, "labels": (B,) int64}`. The scaling comes from the training images alone.
`vision_sets` reads the images.
"""

import logging
import os
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from baoc.data.base import MapStyleDataModule, random_split
from baoc.data.image_sources import EncodedImages, ImageSource
from baoc.data.scaling import Scaling, standardise, unit_range
from baoc.errors import BadInputError
from baoc.types import ImageDataSpec

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelledImages:
    """A set of images. `val=None`: validation images are held out of `train`."""

    name: str
    train: ImageSource
    val: ImageSource | None
    num_classes: int


class VisionDataModule(MapStyleDataModule):
    """Training and validation loaders of labelled images.

    Args:
        val_fraction: share of images held out, if the set has no validation split.
        split_seed: decides which; independent of the run's seed.
        workers: processes that decode images. None: one less than the cores, at most 8, if images are decoded during
            training, else 0.
        task: "vision" scales values to mean 0 and standard deviation 1, "diffusion" to [-1, 1].
    """

    spec: ImageDataSpec
    train_source: ImageSource
    val_source: ImageSource
    transform: Scaling

    def __init__(
        self,
        images: LabelledImages,
        *,
        val_fraction: float = 0.2,
        split_seed: int = 0,
        workers: int | None = None,
        task: str = "vision",
        **batches: Any,
    ):
        """`batches`: batch_size, accumulate and seed of `DataModule`."""
        super().__init__(**batches)
        require_two_classes(images.train.labels, name=images.name, task=task)
        self.train_source, self.val_source = images.train, images.val or images.train
        self.train_rows, self.val_rows = torch.arange(len(self.train_source)), torch.arange(len(self.val_source))
        if images.val is None:
            split = random_split(len(images.train), val_fraction=val_fraction, split_seed=split_seed)
            self.train_rows, self.val_rows = split
            num_seen = len(images.train.labels[self.train_rows].unique()) if task == "vision" else images.num_classes
            if num_unseen := images.num_classes - num_seen:
                said = "%s: %d of %d classes have no training image, as all of theirs are held out"
                log.warning(said, images.name, num_unseen, images.num_classes)
        self.spec = ImageDataSpec(
            dataset=images.name,
            image_size=images.train.image_size,
            channels=images.train.channels,
            num_classes=images.num_classes,
            num_train=len(self.train_rows),
            num_val=len(self.val_rows),
        )
        decoders = max(1, min(8, (os.cpu_count() or 1) - 1)) if isinstance(images.train, EncodedImages) else 0
        self.workers = require_workers(workers, default=decoders)
        self.transform = (unit_range if task == "diffusion" else standardise)(self.train_source, rows=self.train_rows)

    def resize_to(self, image_size: int) -> None:
        """Makes batches with `image_size` pixels per side from now on. `spec` keeps the original size.

        Encoded images are resized when they are decoded, images in memory in each batch.
        """
        for source in (self.train_source, self.val_source):
            if isinstance(source, EncodedImages):
                source.image_size = image_size
        self.transform = replace(self.transform, size=image_size)


def require_two_classes(labels: Tensor, *, name: str, task: str) -> None:
    """Raises BadInputError if `task` classifies and all labels are equal."""
    if task == "vision" and bool((labels == labels[0]).all()):
        raise BadInputError(
            f"every label of {name} is {int(labels[0])}: there is nothing to tell apart with one class; a folder of "
            "images has one folder per class, such as cats/1.png and dogs/2.png"
        )


def require_workers(setting: int | None, *, default: int) -> int:
    """Number of a loader's worker processes or threads; `default` for None. Raises BadInputError for a negative one."""
    if setting is None:
        return default
    if setting < 0:
        raise BadInputError(f"dataset.workers must be 0 (none) or more, not {setting}")
    return setting
