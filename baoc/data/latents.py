"""Latents of an autoencoder as a DataModule, for diffusion: .npy files of the user, or noise for benchmarks.

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
from baoc.data.splits import has_ending, visible_files
from baoc.errors import BadInputError
from baoc.types import ImageDataSpec

SCALE_SAMPLES = 4096  # training latents from which the standard deviation is estimated
_HOW = "dataset.path takes a FILE.npy of shape (N, C, S, S), or a folder of such files"
_LABELS_SUFFIX = ".labels.npy"


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentRows:
    """Latents of one or more files as a source of batches: `files` of (n, C, S, S) each, and `labels` (N,) int64."""

    name: str
    files: tuple[Tensor, ...]
    labels: Tensor
    num_classes: int

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def shape(self) -> tuple[int, int, int]:
        channels, height, width = self.files[0].shape[1:]
        return channels, height, width

    def gather(self, rows: Tensor) -> Batch:
        if len(self.files) == 1:
            return {"images": self.files[0][rows], "labels": self.labels[rows]}
        ends = torch.tensor([len(file) for file in self.files]).cumsum(0)
        images = torch.empty(len(rows), *self.shape, dtype=self.files[0].dtype)
        file_index = torch.searchsorted(ends, rows, right=True)
        for index in file_index.unique().tolist():
            in_file = file_index == index
            start = int(ends[index]) - len(self.files[index])
            images[in_file] = self.files[index][rows[in_file] - start].to(images.dtype)
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
    rows = LatentRows(name="random_latents", files=(latents,), labels=labels, num_classes=num_classes)
    return LatentDataModule(rows, scale=1.0, **settings)


class LatentDataModule(MapStyleDataModule):
    """Latents with a random split by `split_seed`.

    `scale` multiplies all latents; None takes 1 / standard deviation of at most SCALE_SAMPLES training latents.
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
        self.scale = _inverse_deviation(rows, self.train_rows[:SCALE_SAMPLES]) if scale is None else float(scale)
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


def _inverse_deviation(latents: LatentRows, rows: Tensor) -> float:
    """1 / standard deviation of `rows` (n,) of `latents`. Raises BadInputError unless it is finite and above 0."""
    deviation = float(latents.gather(rows)["images"].double().std(correction=0))
    if not 0 < deviation < float("inf"):
        raise BadInputError(
            f"the latents of {latents.name} have deviation {deviation}: they are all one number, or some are "
            "nan or infinite"
        )
    return 1 / deviation


# -- files ------------------------------------------------------------------------------------------------------------


def read_latents(path: str | Path) -> LatentRows:
    """Reads latents and labels at `path`. Raises BadInputError with the file that cannot be used."""
    path = Path(path).expanduser()
    if not path.exists():
        raise BadInputError(f"dataset.path={path} does not exist: {_HOW}")
    files = _list_files(path)
    arrays = [_read_file(file) for file in files]
    shape = arrays[0][0].shape[1:]
    for file, (latents, _) in zip(files, arrays, strict=True):
        if latents.shape[1:] != shape:
            raise BadInputError(
                f"latents of {file} have shape {latents.shape[1:]} each, those of {files[0]} {shape}: keep sets of one "
                "shape together"
            )
    labels = np.concatenate([file_labels for _, file_labels in arrays])
    if len(labels) < 2:
        raise BadInputError(f"{path} holds {len(labels)} latent: validation holds some out, so at least 2 are needed")
    return LatentRows(
        name=path.stem,
        files=tuple(torch.from_numpy(latents) for latents, _ in arrays),
        labels=torch.from_numpy(labels),
        num_classes=int(labels.max()) + 1,
    )


def _list_files(path: Path) -> list[Path]:
    """The files of latents at `path`, sorted by name; names that are numbers are sorted by value."""
    if path.is_file():
        if not has_ending(path, ".npy"):
            raise BadInputError(f"dataset.path={path} is no .npy file: {_HOW}")
        return [path]
    files = [file for file in visible_files(path, path.iterdir()) if has_ending(file, ".npy")]
    files = [file for file in files if not file.name.lower().endswith("labels.npy")]
    if not files:
        raise BadInputError(f"{path} holds no .npy file: {_HOW}")
    return sorted(files, key=lambda file: (len(file.stem) if file.stem.isdigit() else 0, file.stem))


def _read_file(file: Path) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Returns (latents (n, C, S, S), mapped from disk; their labels (n,), all 0 without a file of labels)."""
    latents = _load_npy(file, mapped=True)
    _check_latents(latents, file=file)
    label_files = (file.with_suffix(_LABELS_SUFFIX), file.with_name("labels.npy"))
    label_file = next((candidate for candidate in label_files if candidate.exists()), None)
    if label_file is None:
        return latents, np.zeros(len(latents), dtype=np.int64)
    labels = _load_npy(label_file, mapped=False)
    labels = labels.reshape(-1) if labels.size == len(latents) else labels
    if labels.shape != (len(latents),):
        raise BadInputError(f"{label_file} holds labels of shape {labels.shape}; {file} holds {len(latents)} latents")
    if labels.dtype.kind not in "ui" or int(labels.min()) < 0:
        raise BadInputError(f"labels of {label_file} must be integers from 0 on, one for each latent of {file}")
    return latents, labels.astype(np.int64)


def _load_npy(file: Path, *, mapped: bool) -> NDArray[Any]:
    try:
        return np.load(file, mmap_mode="c" if mapped else None, allow_pickle=False)  # c: copy on write
    except (OSError, ValueError, EOFError) as error:
        raise BadInputError(f"{file} cannot be read as .npy ({error}): {_HOW}") from error


def _check_latents(latents: NDArray[Any], *, file: Path) -> None:
    if latents.ndim != 4 or 0 in latents.shape:
        raise BadInputError(f"{file} has shape {latents.shape}; latents must be (N, C, S, S)")
    if latents.shape[2] != latents.shape[3]:
        raise BadInputError(f"{file} has shape {latents.shape}; latents must be square, (N, C, S, S)")
    if latents.dtype.kind != "f":
        raise BadInputError(f"{file} has dtype {latents.dtype}; latents must be floating-point numbers, best float16")
