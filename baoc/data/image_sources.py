"""Labelled images as sources of batches: in memory, or encoded on disk and decoded for each batch.

Small images are decoded once and kept; photographs are decoded by worker processes during training.
"""

import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Generator, Tensor

from baoc.data.decode import Augment, augment_batch, augment_image, center_crop, open_image, read_header, to_tensor
from baoc.data.sources import Batch
from baoc.units import MIB

log = logging.getLogger(__name__)
MAX_IN_MEMORY_BYTES = 512 * MIB  # decoded images up to this size are kept in memory
SMALL_SIDE = 64  # pixels per side; random crops of larger images are taken from the original image
SURVEYED_IMAGES = 2000  # images whose headers are read to learn size and colours of a set
MAX_DEFAULT_SIDE = 224  # pixels per side of larger images, unless a size is given


class EncodedItems(Protocol):
    """Numbered encoded images: (content, origin for error messages)."""

    def __len__(self) -> int: ...

    def __getitem__(self, row: int) -> tuple[bytes | Path, str]: ...


class FileItems:
    """Items of files. Paths are kept as str, as up to a million of them are pickled for each worker."""

    def __init__(self, files: Sequence[Path]):
        self._files = [str(file) for file in files]

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, row: int) -> tuple[Path, str]:
        return Path(self._files[row]), self._files[row]


@dataclass(slots=True, kw_only=True)
class MemoryImages:
    """`images`: (N, C, S, S) of any dtype; `labels`: (N,) int64."""

    images: Tensor
    labels: Tensor
    augment: Augment = "none"

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def image_size(self) -> int:
        return self.images.shape[-1]

    @property
    def channels(self) -> int:
        return self.images.shape[1]

    def gather(self, rows: Tensor) -> Batch:
        return {"images": self.images[rows], "labels": self.labels[rows]}

    def gather_random(self, rows: Tensor, *, generator: Generator) -> Batch:
        images = augment_batch(self.images[rows], augment=self.augment, generator=generator)
        return {"images": images, "labels": self.labels[rows]}


@dataclass(slots=True, kw_only=True)
class EncodedImages:
    """Images that are decoded and resized to `image_size` pixels per side for each batch, as uint8."""

    items: EncodedItems
    labels: Tensor
    image_size: int
    channels: int
    augment: Augment = "none"

    def __len__(self) -> int:
        return len(self.labels)

    def gather(self, rows: Tensor) -> Batch:
        return self._stacked(rows, [center_crop(self._open(row), size=self.image_size) for row in rows])

    def gather_random(self, rows: Tensor, *, generator: Generator) -> Batch:
        size, augment = self.image_size, self.augment
        return self._stacked(
            rows, [augment_image(self._open(row), size=size, augment=augment, generator=generator) for row in rows]
        )

    def _stacked(self, rows: Tensor, images: list[Any]) -> Batch:
        stacked = torch.stack([to_tensor(image, channels=self.channels) for image in images])
        return {"images": stacked, "labels": self.labels[rows]}

    def in_memory(self) -> MemoryImages:
        """Decodes all images on four threads, as Pillow releases the interpreter lock."""
        with ThreadPoolExecutor(4) as threads:
            parts = list(threads.map(self.gather, torch.arange(len(self)).split(64)))
        return MemoryImages(
            images=torch.cat([part["images"] for part in parts]), labels=self.labels, augment=self.augment
        )

    def _open(self, row: Tensor):
        content, where = self.items[int(row)]
        return open_image(content, where=where)


ImageSource = MemoryImages | EncodedImages


def image_source(
    items: EncodedItems,
    *,
    labels: Tensor,
    image_size: int | None = None,
    augment: Augment = "none",
    like: ImageSource | None = None,
) -> ImageSource:
    """A source over `items`, decoded into memory if it is small and augmentation does not need the original size.

    `image_size` None takes the median of the images' shorter sides, at most LARGEST pixels, and images are read as grey
    only if all are; of more than SURVEYED that many are looked at. `like`: the training source, whose size and channels
    a validation source shares. Raises TrainingFailedError with the file of a broken image.
    """
    if like is not None:
        size, channels = like.image_size, like.channels
    else:
        size, channels = _survey(items, image_size=image_size)
    source = EncodedImages(items=items, labels=labels, image_size=size, channels=channels, augment=augment)
    fits = len(items) * channels * size * size <= MAX_IN_MEMORY_BYTES
    return source.in_memory() if fits and (size <= SMALL_SIDE or augment != "crop_flip") else source


def _survey(items: EncodedItems, *, image_size: int | None) -> tuple[int, int]:
    """(pixels per side, channels) for a set; says so where its images differ."""
    rows = torch.linspace(0, len(items) - 1, min(len(items), SURVEYED_IMAGES)).long().tolist()
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda row: read_header(items[row][0], where=items[row][1]), rows))
    num_grey, sides = sum(header.grey for header in found), sorted(header.side for header in found)
    size = image_size or min(sides[len(sides) // 2], MAX_DEFAULT_SIDE)
    channels = 1 if num_grey == len(found) else 3
    of = f"of {len(found)} images" + (" that were looked at" if len(found) < len(items) else "")
    if animated := sum(header.animated for header in found):
        log.warning("%s %d have several frames or pages: the first is read", of, animated)
    if 0 < num_grey < len(found):
        log.warning("%s %d are grey and %d in colour: all are read in colour", of, num_grey, len(found) - num_grey)
    if sides[0] != sides[-1] and image_size is None:
        ends = (sides[0], sides[-1])
        log.warning("%s the shorter sides have %d to %d pixels: all become %d x %d", of, *ends, size, size)
    return size, channels
