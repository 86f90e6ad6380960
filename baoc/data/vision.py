"""Labelled images as a Lightning DataModule: split, standardised, resized where a model asks for it.

Batches are `{"images": (B, C, S, S) float32, "labels": (B,) int64}`. Images stay in memory in the dtype of their file;
what depends on values (mean, standard deviation) is taken from the training part alone.
"""

from collections.abc import Mapping
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.nn import functional as F

from baoc.data.images import ImageSet, read_digits, read_npz
from baoc.data.loader import Batch, SequentialLoader, ShuffledLoader
from baoc.errors import BadInputError
from baoc.types import ImageDataSpec


def build_digits(**settings: Any) -> "VisionDataModule":
    return VisionDataModule(read_digits(), **settings)


def build_npz(path: str, **settings: Any) -> "VisionDataModule":
    return VisionDataModule(read_npz(path), **settings)


class VisionDataModule(L.LightningDataModule):
    """`batch_size` is the micro-batch, `accumulate` the number of them in an optimizer step.

    `seed` decides the order of training samples; `split_seed` the split, so that runs of several seeds are judged on
    the same images. The position inside an epoch travels in Lightning's checkpoint twice: with the loader, and here,
    because Lightning drops the loader's where the loader was built before the loops were restored (a schedule that asks
    for the number of steps under max_epochs builds it).
    """

    def __init__(
        self,
        images: ImageSet,
        *,
        batch_size: int,
        seed: int = 0,
        accumulate: int = 1,
        val_fraction: float = 0.2,
        split_seed: int = 0,
    ):
        super().__init__()
        if not 0 < val_fraction < 1:
            raise BadInputError(f"val_fraction must lie between 0 and 1, not {val_fraction}; 0.2 holds back a fifth")
        self.batch_size = batch_size
        self.accumulate = accumulate
        self.seed = seed
        num_val = min(max(1, round(len(images.labels) * val_fraction)), len(images.labels) - 1)
        order = torch.randperm(len(images.labels), generator=torch.Generator().manual_seed(split_seed))
        self._train_rows, self._val_rows = order[num_val:], order[:num_val]
        self._tensors = {
            "images": torch.from_numpy(images.images).permute(0, 3, 1, 2).contiguous(),
            "labels": torch.from_numpy(images.labels),
        }
        self.spec = ImageDataSpec(
            dataset=images.name,
            image_size=images.images.shape[1],
            channels=images.images.shape[3],
            num_classes=images.num_classes,
            num_train=len(self._train_rows),
            num_val=num_val,
        )
        self._mean, self._std = _moments(self._tensors["images"], rows=self._train_rows)
        self._resize: int | None = None
        self._loader: ShuffledLoader | None = None
        self._resume: Mapping[str, Any] | None = None

    def resize_to(self, image_size: int) -> None:
        """Hand out images of `image_size` pixels a side, resized batch by batch; `spec` keeps the original size."""
        self._resize = None if image_size == self.spec.image_size else image_size

    def setup(self, stage: str) -> None:
        """Lightning calls this first in each fit, before it restores a checkpoint: a new fit starts a new pass."""
        if stage == "fit":
            self._loader = self._resume = None

    def train_dataloader(self) -> SequentialLoader:
        """The one loader of this fit; asking again gives the same object, so its position has one owner.

        Under Trainer(overfit_batches=...) the order is fixed instead, so that the same batches come each epoch.
        """
        if getattr(self.trainer, "overfit_batches", 0) > 0:
            return self._sequential(self._train_rows)
        if self._loader is None:
            self._loader = ShuffledLoader(
                self._tensors,
                batch_size=self.batch_size,
                seed=self.seed,
                accumulate=self.accumulate,
                limit=self._limit(),
                indices=self._train_rows,
                transform=self._to_model_input,
            )
            if self._resume is not None:
                self._loader.load_state_dict(self._resume)
        return self._loader

    def val_dataloader(self) -> SequentialLoader:
        return self._sequential(self._val_rows)

    def state_dict(self) -> dict[str, Any]:
        return {} if self._loader is None else {"train_loader": self._loader.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._resume = state_dict.get("train_loader")
        if self._loader is not None and self._resume is not None:
            self._loader.load_state_dict(self._resume)

    def _limit(self) -> int | None:
        """Batches of an epoch that Trainer(limit_train_batches=...) wants; a fraction of them is resolved here."""
        limit = None if self.trainer is None else self.trainer.limit_train_batches
        if isinstance(limit, float):
            per_step = self.batch_size * self.accumulate
            return int(self.spec.num_train // per_step * self.accumulate * limit)
        return limit

    def _sequential(self, rows: Tensor) -> SequentialLoader:
        return SequentialLoader(self._tensors, batch_size=self.batch_size, indices=rows, transform=self._to_model_input)

    def _to_model_input(self, batch: Batch) -> Batch:
        images = batch["images"].float().sub_(self._mean).div_(self._std)
        if self._resize is not None:
            images = F.interpolate(images, size=self._resize, mode="bilinear", antialias=True)
        return {**batch, "images": images}


def _moments(images: Tensor, *, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation per channel, (C, 1, 1), over `rows`; a constant channel gets deviation 1.

    In float64 and by parts, so that a large uint8 set is never held as floats.
    """
    total = torch.zeros(images.shape[1], dtype=torch.float64)
    squares = torch.zeros_like(total)
    for part in rows.split(4096):
        values = images[part].double()
        total += values.sum((0, 2, 3))
        squares += values.square().sum((0, 2, 3))
    count = len(rows) * images.shape[2] * images.shape[3]
    mean = total / count
    std = (squares / count - mean.square()).clamp_min(0).sqrt()
    std[std < 1e-12] = 1.0
    return mean.float().view(-1, 1, 1), std.float().view(-1, 1, 1)
