"""Latents of an autoencoder as a DataModule, for diffusion: a user's .npy or parquet files, or noise for benchmarks.

Batches are `{"images": (B, C, S, S) float32, "labels": (B,) int64}`, scaled to standard deviation 1. Files are memory
mapped, so a set may be larger than memory.
"""

from typing import Any

import torch
from torch import Tensor

from baoc.data.base import DataModule
from baoc.data.identity import content_of
from baoc.data.latent_files import LatentRows, read_latents
from baoc.data.loader import Batch, SequentialLoader, ShuffledLoader
from baoc.errors import BadInputError
from baoc.types import ImageDataSpec

SAMPLED = 4096  # latents from which the standard deviation is estimated


def build_latents(path: str, **settings: Any) -> "LatentDataModule":
    return LatentDataModule(read_latents(path), **settings)


def build_random_latents(
    *, num_samples: int, num_classes: int, path: str | None = None, **settings: Any
) -> "LatentDataModule":
    """Standard normal noise in the shape of Stable Diffusion's latents of 256 x 256 images, for benchmarks."""
    if path is not None:
        raise BadInputError(f"dataset random_latents reads no dataset.path={path}: use dataset=latents for your own")
    if num_samples < 2 or num_classes < 1:
        raise BadInputError(
            f"dataset.num_samples={num_samples} and dataset.num_classes={num_classes}: give 2 or more samples, and 1 "
            "or more classes"
        )
    generator = torch.Generator().manual_seed(0)
    latents = torch.randn(num_samples, 4, 32, 32, generator=generator).half()
    labels = torch.randint(num_classes, (num_samples,), generator=generator)
    rows = LatentRows(name="random_latents", shards=(latents,), labels=labels, num_classes=num_classes)
    return LatentDataModule(rows, scale=1.0, **settings)


class LatentDataModule(DataModule):
    """Latents with a random split by `split_seed`, which is independent of the run's seed.

    `scale` multiplies all latents; None takes 1 / standard deviation of at most SAMPLED training latents.
    """

    spec: ImageDataSpec

    def __init__(
        self,
        rows: LatentRows,
        *,
        val_fraction: float = 0.05,
        split_seed: int = 0,
        scale: float | None = None,
        **batches: Any,
    ):
        super().__init__(**batches)
        if not 0 < val_fraction < 1:
            raise BadInputError(f"val_fraction must lie between 0 and 1, not {val_fraction}; 0.05 holds back a 20th")
        if scale is not None and not scale > 0:
            raise BadInputError(f"dataset.scale must be above 0, or null for 1 / deviation of the latents, not {scale}")
        num_val = min(max(1, round(len(rows) * val_fraction)), len(rows) - 1)
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(split_seed))
        self._rows = rows
        self._train_rows, self._val_rows = order[num_val:], order[:num_val]
        channels, size, _ = rows.shape
        self.spec = ImageDataSpec(
            dataset=rows.name,
            image_size=size,
            channels=channels,
            num_classes=rows.num_classes,
            num_train=len(self._train_rows),
            num_val=num_val,
        )
        self.scale = self._one_over_deviation() if scale is None else float(scale)

    def resize_to(self, image_size: int) -> None:
        """Raises BadInputError for another size: resized latents do not belong to their autoencoder."""
        if image_size != self.spec.image_size:
            raise BadInputError(
                f"latents of {self.spec.image_size} x {self.spec.image_size} do not fit a model that takes "
                f"{image_size} x {image_size}: choose a model.size whose patches divide {self.spec.image_size}"
            )

    def contents(self) -> tuple[str, ...]:
        return (content_of(self._rows),)

    def make_train_loader(self, *, limit: int | None) -> ShuffledLoader:
        return self.shuffled(self._rows, limit=limit, indices=self._train_rows, transform=self._to_model_input)

    def make_overfit_loader(self) -> SequentialLoader:
        return self._sequential(self._train_rows)

    def val_dataloader(self) -> SequentialLoader:
        return self._sequential(self._val_rows)

    def _sequential(self, rows: Tensor) -> SequentialLoader:
        return SequentialLoader(self._rows, batch_size=self.batch_size, indices=rows, transform=self._to_model_input)

    def _to_model_input(self, batch: Batch) -> Batch:
        return {**batch, "images": batch["images"].float().mul_(self.scale)}

    def _one_over_deviation(self) -> float:
        sampled = self._rows.gather(self._train_rows[:SAMPLED])["images"].double()
        deviation = float(sampled.std(correction=0))
        if not 0 < deviation < float("inf"):
            raise BadInputError(
                f"the latents of {self._rows.name} have deviation {deviation}: they are all one number, or some are "
                "nan or infinite"
            )
        return 1 / deviation
