"""Labelled images streamed from the hub or from parquet files, for sets that are too large to store.

Validation uses the first `NUM_VAL` images of the validation part; without one, the first images of the stream, which
training then skips. `datasets` reads the stream; this package decodes, shuffles and resumes.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Generator, Tensor

from baoc.data.base import DataModule
from baoc.data.decode import Augment, open_image, random_fit, to_tensor
from baoc.data.identity import content_of
from baoc.data.labels import check_labels
from baoc.data.loader import SequentialLoader, generator_of
from baoc.data.scaling import Scaling, standardise, unit_range
from baoc.data.sources import Batch
from baoc.data.stored import EncodedImages
from baoc.data.stream import StreamLoader
from baoc.data.tables import Columns, find_columns, image_bytes, require_datasets, split_of, undecoded
from baoc.errors import BadInputError
from baoc.types import ImageDataSpec

NUM_VAL = 2000
MOST_CLASSES = 100_000  # that are taken for such where a stream declares none
BLOCK = 2048  # samples that are shuffled together; their encoded images are held in memory


class StreamedImages(DataModule):
    """Batches of a stream whose labels are whole numbers.

    The number of classes is declared by the table, or found in the validation images. `num_train` of the spec is the
    declared number of images, 0 if there is none.
    """

    spec: ImageDataSpec

    def __init__(
        self,
        tables: Mapping[str, Any],
        *,
        name: str,
        columns: Columns,
        image_size: int,
        augment: Augment,
        folders: Sequence[Path] = (),
        val_fraction: float = 0.2,
        split_seed: int = 0,
        workers: int | None = None,
        task: str = "vision",
        **batches: Any,
    ):
        """`val_fraction` and `split_seed` have no effect: a stream is split by order."""
        super().__init__(**batches)
        train, val = split_of(tables), split_of(tables, validation=True)
        if train is None:
            raise BadInputError(f"{name} has no training part, but {', '.join(tables)}")
        self._columns = Columns(**dict(zip(("image", "label"), _columns(train, columns, name), strict=True)))
        self._augment: Augment = augment
        self._name, self._image_size, self._threads, self._folders = name, image_size, workers or 4, folders
        assert self._columns.image is not None and self._columns.label is not None
        self._num_skipped = 0 if val is not None else NUM_VAL
        self._train = undecoded(train, column=self._columns.image)
        held = undecoded(train if val is None else val, column=self._columns.image)
        self._held = self._encoded(list(islice(held, NUM_VAL)))
        splits = getattr(train.info, "splits", None) or {}
        declared = getattr(train.features[self._columns.label], "names", None)
        _, num_classes = check_labels(
            self._held.labels.numpy(),
            of=f"the first {len(self._held)} images of {name}",
            declared=len(declared) if declared else MOST_CLASSES,
            for_training=not declared,
        )
        self.spec = ImageDataSpec(
            dataset=name,
            image_size=image_size,
            channels=3,
            num_classes=num_classes if declared else int(self._held.labels.max()) + 1,
            num_train=int(getattr(splits.get("train"), "num_examples", None) or 0),
            num_val=len(self._held),
        )
        scaling = unit_range if task == "diffusion" else standardise
        self._scaling: Scaling = scaling(self._held, rows=torch.arange(len(self._held)))

    def resize_to(self, image_size: int) -> None:
        self._image_size = image_size
        self._held = self._held.with_size(image_size)

    def contents(self) -> tuple[str, ...]:
        """Of the validation images: the stream is told by its name and settings."""
        return (content_of(self._held),)

    def make_train_loader(self, *, limit: int | None) -> StreamLoader:
        return StreamLoader(
            self._open,
            make=partial(self._make, augment=self._augment),
            batch_size=self.batch_size,
            seed=self.seed,
            accumulate=self.accumulate,
            buffer=BLOCK,
            threads=self._threads,
        )

    def make_overfit_loader(self) -> SequentialLoader:
        first = list(islice(self._train.skip(self._num_skipped), 64 * self.batch_size))
        return SequentialLoader(self._encoded(first), batch_size=self.batch_size, transform=self._scaling)

    def val_dataloader(self) -> SequentialLoader:
        return SequentialLoader(self._held, batch_size=self.batch_size, transform=self._scaling)

    def _open(self, epoch: int) -> Any:
        """The training stream of an epoch: files in an order drawn from seed and epoch, samples in file order."""
        return (
            self._train.skip(self._num_skipped)
            if self._num_skipped
            else _shuffled_files(self._train, seed=self.seed, epoch=epoch)
        )

    def _make(self, samples: list[Any], generator: Generator, *, augment: Augment) -> Batch:
        images = [
            random_fit(self._opened(sample), size=self._image_size, augment=augment, generator=generator)
            for sample in samples
        ]
        batch = {
            "images": torch.stack([to_tensor(image, channels=3) for image in images]),
            "labels": self._labels(samples),
        }
        return self._scaling(batch)

    def _opened(self, sample: Mapping[str, Any]) -> Any:
        where = f"an image of {self._name} (label {sample[str(self._columns.label)]})"
        return open_image(self._content(sample, where=where), where=where)

    def _content(self, sample: Mapping[str, Any], *, where: str) -> bytes:
        return image_bytes(sample[str(self._columns.image)], where=where, folders=self._folders)

    def _labels(self, samples: list[Any]) -> Tensor:
        return torch.tensor([sample[str(self._columns.label)] for sample in samples], dtype=torch.int64)

    def _encoded(self, samples: list[Any]) -> EncodedImages:
        if not samples:
            raise BadInputError(f"{self._name} holds no images")
        if not all(isinstance(sample[str(self._columns.label)], int) for sample in samples[:10]):
            raise BadInputError(
                f"a stream needs labels that are whole numbers, and column {self._columns.label} of {self._name} holds "
                "text: set dataset.streaming=false, which numbers its classes"
            )
        items = _Samples([self._content(sample, where=self._name) for sample in samples], self._name)
        return EncodedImages(items=items, labels=self._labels(samples), image_size=self._image_size, channels=3)


class _Samples:
    """Encoded images in memory, as Items."""

    def __init__(self, contents: list[bytes], name: str):
        self._contents, self._name = contents, name

    def __len__(self) -> int:
        return len(self._contents)

    def __getitem__(self, row: int) -> tuple[bytes, str]:
        return self._contents[row], f"validation image {row} of {self._name}"


def _columns(table: Any, asked: Columns, name: str) -> tuple[str, str]:
    features = table.features
    if features is None:
        raise BadInputError(f"{name} does not declare its columns, which streaming needs: set dataset.streaming=false")
    return find_columns(features, asked=asked, name=name)


def _shuffled_files(table: Any, *, seed: int, epoch: int) -> Any:
    """The table's files one after the other, in an order drawn from seed and epoch.

    `datasets`' own shuffle, even with the smallest buffer, loses a sample when it resumes at a saved position.
    """
    if table.num_shards < 2:
        return table
    order = torch.randperm(table.num_shards, generator=generator_of(seed, epoch)).tolist()
    files = [table.shard(num_shards=table.num_shards, index=file) for file in order]
    return require_datasets().concatenate_datasets(files)
