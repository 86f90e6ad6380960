"""Labelled images as a Lightning DataModule: split, scaled, and resized for models with a fixed input size.

Batches are `{"images": (B, C, S, S) float32, "labels": (B,) int64}`. Mean and standard deviation come from the training
part alone. `vision_sets` reads the images.
"""

import os
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from baoc.data.base import DataModule
from baoc.data.identity import content_of
from baoc.data.loader import SequentialLoader, ShuffledLoader
from baoc.data.scaling import standardise, unit_range
from baoc.data.stored import EncodedImages, ImageSource
from baoc.errors import BadInputError
from baoc.types import ImageDataSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelledImages:
    """A set of images. `val` None: validation images are held out of `train`."""

    name: str
    train: ImageSource
    val: ImageSource | None
    num_classes: int


class VisionDataModule(DataModule):
    """Training and validation loaders of labelled images.

    Args:
        val_fraction: share of images held out, if the set has no validation part.
        split_seed: of that split, independent of the run's seed.
        workers: processes that decode images; None starts some if images are decoded during training.
        task: "vision" scales values to mean 0 and deviation 1, "diffusion" to [-1, 1].
    """

    spec: ImageDataSpec

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
        """`batches`: batch_size, accumulate and seed, as `DataModule` takes them."""
        super().__init__(**batches)
        self._train, self._val = images.train, images.val or replace(images.train, augment="none")
        self._train_rows, self._val_rows = torch.arange(len(images.train)), torch.arange(len(self._val))
        if images.val is None:
            self._train_rows, self._val_rows = _split(len(images.train), val_fraction=val_fraction, seed=split_seed)
        self.spec = ImageDataSpec(
            dataset=images.name,
            image_size=images.train.image_size,
            channels=images.train.channels,
            num_classes=images.num_classes,
            num_train=len(self._train_rows),
            num_val=len(self._val_rows),
        )
        self._workers = _workers(workers, encoded=isinstance(images.train, EncodedImages))
        scaling = unit_range if task == "diffusion" else standardise
        self.scaling = scaling(self._train, rows=self._train_rows)

    def resize_to(self, image_size: int) -> None:
        """Makes batches with `image_size` pixels per side; `spec` keeps the original size.

        Encoded images are resized when they are decoded, others batch by batch.
        """
        if isinstance(self._train, EncodedImages):
            self._train = self._train.with_size(image_size)
        if isinstance(self._val, EncodedImages):
            self._val = self._val.with_size(image_size)
        self.scaling = replace(self.scaling, size=image_size)

    def contents(self) -> tuple[str, ...]:
        held = () if self._val is self._train or self._val.labels is self._train.labels else (content_of(self._val),)
        return (content_of(self._train), *held)

    def make_train_loader(self, *, limit: int | None) -> ShuffledLoader:
        return self.shuffled(
            self._train, limit=limit, indices=self._train_rows, transform=self.scaling, workers=self._workers
        )

    def make_overfit_loader(self) -> SequentialLoader:
        return self._sequential(replace(self._train, augment="none"), self._train_rows)

    def val_dataloader(self) -> SequentialLoader:
        return self._sequential(self._val, self._val_rows)

    def _sequential(self, source: ImageSource, rows: Tensor) -> SequentialLoader:
        return SequentialLoader(
            source, batch_size=self.batch_size, indices=rows, transform=self.scaling, workers=self._workers
        )


def _split(num_images: int, *, val_fraction: float, seed: int) -> tuple[Tensor, Tensor]:
    """(rows of training images, rows of validation images)."""
    if not 0 < val_fraction < 1:
        raise BadInputError(f"val_fraction must lie between 0 and 1, not {val_fraction}; 0.2 holds back a fifth")
    if num_images < 2:
        raise BadInputError(f"{num_images} image cannot be split into training and validation: at least 2 are needed")
    num_val = min(max(1, round(num_images * val_fraction)), num_images - 1)
    order = torch.randperm(num_images, generator=torch.Generator().manual_seed(seed))
    return order[num_val:], order[:num_val]


def _workers(asked: int | None, *, encoded: bool) -> int:
    if asked is None:
        return max(1, min(8, (os.cpu_count() or 1) - 1)) if encoded else 0
    if asked < 0:
        raise BadInputError(f"dataset.workers must be 0 (none) or more, not {asked}")
    return asked
