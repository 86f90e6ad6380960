"""Labelled images as sources of batches: decoded once and held in memory, or decoded for each batch.

`image_source` chooses: small images are held in memory; photographs are decoded by worker processes during training.
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
MAX_IN_MEMORY_BYTES = 512 * MIB  # of all decoded images of a source
SMALL_SIDE = 64  # pixels; larger images are cropped at random from the original, not from the resized image
SURVEYED_IMAGES = 2000  # whose headers are read to choose the size and the channels of a set
NUM_THREADS = 4  # that decode images in this process
MAX_DEFAULT_SIDE = 224  # pixels; the largest side that is chosen without dataset.image_size


class EncodedItems(Protocol):
    """Numbered encoded images. An item is (bytes or path of the image, its origin for error messages)."""

    def __len__(self) -> int: ...

    def __getitem__(self, row: int) -> tuple[bytes | Path, str]: ...


class FileItems:
    """Image files. Paths are stored as str, because up to a million of them are pickled for each worker."""

    def __init__(self, files: Sequence[Path]):
        self._files = [str(file) for file in files]

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, row: int) -> tuple[Path, str]:
        return Path(self._files[row]), self._files[row]


@dataclass(slots=True, kw_only=True)
class MemoryImages:
    """Decoded images (N, C, S, S) of any dtype, with labels (N,) int64."""

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
    """Images that are decoded for each batch, as uint8 (B, channels, image_size, image_size); labels (N,) int64."""

    items: EncodedItems
    labels: Tensor
    image_size: int
    channels: int
    augment: Augment = "none"

    def __len__(self) -> int:
        return len(self.labels)

    def gather(self, rows: Tensor) -> Batch:
        return self._batch(rows, [center_crop(self._open(row), size=self.image_size) for row in rows])

    def gather_random(self, rows: Tensor, *, generator: Generator) -> Batch:
        size, augment = self.image_size, self.augment
        return self._batch(
            rows, [augment_image(self._open(row), size=size, augment=augment, generator=generator) for row in rows]
        )

    def _batch(self, rows: Tensor, images: list[Any]) -> Batch:
        stacked = torch.stack([to_tensor(image, channels=self.channels) for image in images])
        return {"images": stacked, "labels": self.labels[rows]}

    def in_memory(self) -> MemoryImages:
        """Decodes all images, on several threads because Pillow releases the interpreter lock."""
        with ThreadPoolExecutor(NUM_THREADS) as threads:
            batches = list(threads.map(self.gather, torch.arange(len(self)).split(64)))
        return MemoryImages(
            images=torch.cat([batch["images"] for batch in batches]), labels=self.labels, augment=self.augment
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
    """Makes a source of `items`, in memory if they are small and augmentation does not need the original images.

    Args:
        labels: (N,) int64.
        image_size: pixels per side; None takes the median of the shorter sides, at most MAX_DEFAULT_SIDE.
        like: the training source, whose size and channels a validation source takes over. None: images have one channel
            if all of SURVEYED_IMAGES are grey, else three.

    Raises:
        TrainingFailedError: for an image that cannot be decoded.
    """
    if like is not None:
        size, channels = like.image_size, like.channels
    else:
        size, channels = _survey(items, image_size=image_size)
    source = EncodedImages(items=items, labels=labels, image_size=size, channels=channels, augment=augment)
    fits = len(items) * channels * size * size <= MAX_IN_MEMORY_BYTES
    return source.in_memory() if fits and (size <= SMALL_SIDE or augment != "crop_flip") else source


def _survey(items: EncodedItems, *, image_size: int | None) -> tuple[int, int]:
    """Chooses (pixels per side, channels) for a set from image headers; warns if its images differ."""
    rows = torch.linspace(0, len(items) - 1, min(len(items), SURVEYED_IMAGES)).long().tolist()
    with ThreadPoolExecutor(NUM_THREADS) as threads:
        headers = list(threads.map(lambda row: read_header(items[row][0], where=items[row][1]), rows))
    num_read, num_grey = len(headers), sum(header.grey for header in headers)
    sides = sorted(header.side for header in headers)
    size = image_size or min(sides[num_read // 2], MAX_DEFAULT_SIDE)
    images = f"of {num_read} images" + (" that were looked at" if num_read < len(items) else "")
    if num_animated := sum(header.animated for header in headers):
        log.warning("%s %d have several frames or pages: the first is read", images, num_animated)
    if 0 < num_grey < num_read:
        log.warning("%s %d are grey and %d in colour: all are read in colour", images, num_grey, num_read - num_grey)
    if sides[0] != sides[-1] and image_size is None:
        smallest, largest = sides[0], sides[-1]
        log.warning(
            "%s the shorter sides have %d to %d pixels: all become %d x %d", images, smallest, largest, size, size
        )
    return size, 1 if num_grey == num_read else 3
