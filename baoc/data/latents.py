"""Latents of an autoencoder as a DataModule, for diffusion: a user's .npy files, or noise for benchmarks.

Batches are `{"images": (B, C, S, S) float32, "labels": (B,) int64}`, scaled to standard deviation 1. FILE.npy holds an
array (N, C, S, S) of any float type, and FILE.labels.npy (or labels.npy) beside it N integers; a folder may hold
several such files. They are memory mapped, so a set may be larger than memory. Without labels, all latents are of one
class.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from baoc.data.base import MapStyleDataModule, random_split
from baoc.data.sources import Batch
from baoc.data.splits import visible_files
from baoc.errors import BadInputError
from baoc.types import ImageDataSpec

SCALE_SAMPLES = 4096  # latents from which the standard deviation is estimated
_HOW = "dataset.path takes a FILE.npy of shape (N, C, S, S), or a folder of such files"
_LABELS = ".labels.npy"


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentRows:
    """A source of batches: concatenated `shards` of (n, C, S, S), and `labels` (N,) int64."""

    name: str
    shards: tuple[Tensor, ...]
    labels: Tensor
    num_classes: int

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def shape(self) -> tuple[int, int, int]:
        channels, height, width = self.shards[0].shape[1:]
        return channels, height, width

    def gather(self, rows: Tensor) -> Batch:
        if len(self.shards) == 1:
            return {"images": self.shards[0][rows], "labels": self.labels[rows]}
        ends = torch.tensor([len(shard) for shard in self.shards]).cumsum(0)
        images = torch.empty(len(rows), *self.shape, dtype=self.shards[0].dtype)
        which = torch.searchsorted(ends, rows, right=True)
        for index in which.unique().tolist():
            here = which == index
            start = int(ends[index]) - len(self.shards[index])
            images[here] = self.shards[index][rows[here] - start].to(images.dtype)
        return {"images": images, "labels": self.labels[rows]}


def build_latents(path: str, **settings: Any) -> "LatentDataModule":
    return LatentDataModule(read_latents(path), **settings)


def build_random_latents(*, num_samples: int, num_classes: int, **settings: Any) -> "LatentDataModule":
    """Standard normal noise in the shape of Stable Diffusion's latents of 256 x 256 images, for benchmarks."""
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


class LatentDataModule(MapStyleDataModule):
    """Latents with a random split by `split_seed`.

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
        if scale is not None and not scale > 0:
            raise BadInputError(f"dataset.scale must be above 0, or null for 1 / deviation of the latents, not {scale}")
        self.train_source = self.val_source = rows
        self.train_rows, self.val_rows = random_split(len(rows), val_fraction=val_fraction, split_seed=split_seed)
        channels, size, _ = rows.shape
        self.spec = ImageDataSpec(
            dataset=rows.name,
            image_size=size,
            channels=channels,
            num_classes=rows.num_classes,
            num_train=len(self.train_rows),
            num_val=len(self.val_rows),
        )
        self.scale = one_over_deviation(rows, self.train_rows[:SCALE_SAMPLES]) if scale is None else float(scale)
        self.transform = self._to_model_input

    def resize_to(self, image_size: int) -> None:
        """Raises BadInputError for another size: resized latents do not belong to their autoencoder."""
        if image_size != self.spec.image_size:
            raise BadInputError(
                f"latents of {self.spec.image_size} x {self.spec.image_size} do not fit a model that takes "
                f"{image_size} x {image_size}: choose a model.size whose patches divide {self.spec.image_size}"
            )

    def _to_model_input(self, batch: Batch) -> Batch:
        return {**batch, "images": batch["images"].float().mul_(self.scale)}


def one_over_deviation(latents: LatentRows, rows: Tensor) -> float:
    deviation = float(latents.gather(rows)["images"].double().std(correction=0))
    if not 0 < deviation < float("inf"):
        raise BadInputError(
            f"the latents of {latents.name} have deviation {deviation}: they are all one number, or some are "
            "nan or infinite"
        )
    return 1 / deviation


# -- files ------------------------------------------------------------------------------------------------------------


def read_latents(path: str | Path) -> LatentRows:
    """Latents and labels at `path`. Raises BadInputError with the file that cannot be used."""
    path = Path(path).expanduser()
    if not path.exists():
        raise BadInputError(f"dataset.path={path} does not exist: {_HOW}")
    files = _files(path)
    parts = [_read_npy(file) for file in files]
    shape = parts[0][0].shape[1:]
    for file, (latents, _) in zip(files, parts, strict=True):
        if latents.shape[1:] != shape:
            raise BadInputError(
                f"latents of {file} have shape {latents.shape[1:]} each, those of {files[0]} {shape}: keep sets of one "
                "shape together"
            )
    labels = np.concatenate([part[1] for part in parts])
    if len(labels) < 2:
        raise BadInputError(f"{path} holds {len(labels)} latent: validation holds some out, so at least 2 are needed")
    return LatentRows(
        name=path.stem,
        shards=tuple(torch.from_numpy(latents) for latents, _ in parts),
        labels=torch.from_numpy(labels),
        num_classes=int(labels.max()) + 1,
    )


def _files(path: Path) -> list[Path]:
    """The files of latents at `path`, sorted by name (numbers by value)."""
    if path.is_file():
        if path.suffix != ".npy":
            raise BadInputError(f"dataset.path={path} is no .npy file: {_HOW}")
        return [path]
    found = [file for file in visible_files(path, path.glob("*.npy")) if not file.name.endswith("labels.npy")]
    if not found:
        raise BadInputError(f"{path} holds no .npy file: {_HOW}")
    return sorted(found, key=lambda file: (len(file.stem) if file.stem.isdigit() else 0, file.stem))


def _read_npy(file: Path) -> tuple[NDArray[Any], NDArray[np.int64]]:
    latents = _checked(_load(file, mapped=True), file=file)
    beside = next((f for f in (file.with_suffix(_LABELS), file.with_name("labels.npy")) if f.exists()), None)
    labels = None if beside is None else _load(beside, mapped=False)
    return latents, _checked_labels(labels, file=beside or file, num_latents=len(latents), of=file)


def _load(file: Path, *, mapped: bool) -> NDArray[Any]:
    try:
        return np.load(file, mmap_mode="c" if mapped else None, allow_pickle=False)  # c: copy on write
    except (OSError, ValueError, EOFError) as error:
        raise BadInputError(f"{file} cannot be read as .npy ({error}): {_HOW}") from error


def _checked(latents: NDArray[Any], *, file: Path) -> NDArray[Any]:
    if latents.ndim != 4 or 0 in latents.shape:
        raise BadInputError(f"{file} has shape {latents.shape}; latents must be (N, C, S, S)")
    if latents.shape[2] != latents.shape[3]:
        raise BadInputError(f"{file} has shape {latents.shape}; latents must be square, (N, C, S, S)")
    if latents.dtype.kind != "f":
        raise BadInputError(f"{file} has dtype {latents.dtype}; latents must be floating-point numbers, best float16")
    return latents


def _checked_labels(labels: NDArray[Any] | None, *, file: Path, num_latents: int, of: Path) -> NDArray[np.int64]:
    """The labels, or one class for all where there are none."""
    labels = np.zeros(num_latents, dtype=np.int64) if labels is None else labels
    labels = labels.reshape(-1) if labels.size == num_latents else labels
    if labels.shape != (num_latents,):
        raise BadInputError(f"{file} holds labels of shape {labels.shape}; {of} holds {num_latents} latents")
    if labels.dtype.kind not in "ui" or int(labels.min()) < 0:
        raise BadInputError(f"labels of {file} must be integers from 0 on, one for each latent of {of}")
    return labels.astype(np.int64)
