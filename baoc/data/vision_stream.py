"""Labelled images streamed from the hub or from parquet files, for sets that are too large to store.

Validation uses the first `NUM_VAL` images of the validation split; without one, those of the training split, which
training then skips. `datasets` reads the stream; this package decodes, shuffles and resumes.
"""

from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Generator

from baoc.data.base import DataModule, rank_and_size
from baoc.data.decode import Augment
from baoc.data.identity import hash_source
from baoc.data.image_sources import EncodedImages
from baoc.data.images import check_labels
from baoc.data.loader import SequentialLoader, seeded_generator
from baoc.data.scaling import Scaling, standardise, unit_range
from baoc.data.sources import Batch
from baoc.data.stream import StreamLoader
from baoc.data.tables import (
    Columns,
    TableItems,
    find_columns,
    require_datasets,
    shard_stream,
    training_table,
    validation_table,
    without_decoding,
)
from baoc.data.vision import require_two_classes, require_workers
from baoc.errors import BadInputError
from baoc.types import ImageDataSpec

NUM_VAL = 2000
MAX_UNDECLARED_CLASSES = 100_000  # a stream without declared classes must have labels below this
SHUFFLE_BLOCK = 2048  # samples that are shuffled together; their encoded images are held in memory


class StreamedImages(DataModule):
    """Training and validation batches of streamed images, whose labels must be integers.

    The number of classes is what the table declares, else one more than the largest validation label. `spec.num_train`
    is the declared number of images, or 0.
    """

    spec: ImageDataSpec
    ignored_options = ("val_fraction", "split_seed")

    def __init__(
        self,
        tables: Mapping[str, Any],
        *,
        name: str,
        columns: Columns,
        image_size: int,
        augment: Augment,
        folders: Sequence[Path] = (),
        workers: int | None = None,
        task: str = "vision",
        **batches: Any,
    ):
        super().__init__(**batches)
        train, val = training_table(tables, name=name), validation_table(tables)
        if train.features is None:
            raise BadInputError(
                f"{name} does not declare its columns, which streaming needs: set dataset.streaming=false"
            )
        self._image, self._label = find_columns(train.features, columns=columns, name=name)
        self._augment: Augment = augment
        self._name, self._image_size, self._folders = name, image_size, folders
        self._threads = max(require_workers(workers, default=4), 1)  # one decodes beside training in any case
        self._num_skipped = 0 if val is not None else NUM_VAL
        self._train = without_decoding(train, column=self._image)
        val_samples = list(islice(without_decoding(train if val is None else val, column=self._image), NUM_VAL))
        if not val_samples:
            raise BadInputError(f"{name} holds no images")
        if not all(isinstance(sample[self._label], int) for sample in val_samples[:10]):
            raise BadInputError(
                f"a stream needs labels that are whole numbers, and column {self._label} of {name} holds "
                "text: set dataset.streaming=false, which numbers its classes"
            )
        self._val = self._encoded_images(val_samples, name=f"the validation images of {name}")
        labels, val_name = self._val.labels, f"the first {len(self._val)} images of {name}"
        class_names = getattr(train.features[self._label], "names", None)
        num_classes = len(class_names) if class_names else int(labels.max()) + 1
        check_labels(labels.numpy(), name=val_name, declared=num_classes if class_names else MAX_UNDECLARED_CLASSES)
        if not class_names:
            require_two_classes(labels, name=val_name, task=task)
        splits = getattr(train.info, "splits", None) or {}
        self.spec = ImageDataSpec(
            dataset=name,
            image_size=image_size,
            channels=3,
            num_classes=num_classes,
            num_train=int(getattr(splits.get("train"), "num_examples", None) or 0),
            num_val=len(self._val),
        )
        scaling = unit_range if task == "diffusion" else standardise
        self._scaling: Scaling = scaling(self._val, rows=torch.arange(len(self._val)))

    def resize_to(self, image_size: int) -> None:
        self._image_size = self._val.image_size = image_size

    def contents(self) -> tuple[str, ...]:
        """The hash of the validation images. Name and settings identify the training stream."""
        return (hash_source(self._val),)

    def make_train_loader(self, *, limit: int | None) -> StreamLoader:
        return StreamLoader(
            self._open_stream,
            make=self._make_batch,
            batch_size=self.batch_size,
            seed=self.seed,
            accumulate=self.accumulate,
            buffer=SHUFFLE_BLOCK,
            threads=self._threads,
            rank=rank_and_size(self)[0],
        )

    def make_overfit_loader(self) -> SequentialLoader:
        first = list(islice(self._train.skip(self._num_skipped), 64 * self.batch_size))
        source = self._encoded_images(first, name=f"the first images of {self._name}")
        return SequentialLoader(source, batch_size=self.batch_size, transform=self._scaling)

    def val_dataloader(self) -> SequentialLoader:
        return SequentialLoader(self._val, batch_size=self.batch_size, transform=self._scaling)

    def _open_stream(self, epoch: int) -> Any:
        """This rank's stream of an epoch: files in an order drawn from seed and epoch, samples in file order.

        Without a validation split, files keep their order, because the images to skip are at the start.
        """
        if self._num_skipped:
            stream = self._train.skip(self._num_skipped)
        else:
            stream = _shuffle_files(self._train, seed=self.seed, epoch=epoch)
        rank, num_ranks = rank_and_size(self)
        return shard_stream(stream, rank=rank, num_ranks=num_ranks, skipped=bool(self._num_skipped))

    def _make_batch(self, samples: list[Any], generator: Generator) -> Batch:
        source = self._encoded_images(samples, name=f"a batch of {self._name}")
        return self._scaling(source.gather_random(torch.arange(len(samples)), generator=generator))

    def _encoded_images(self, samples: list[Any], *, name: str) -> EncodedImages:
        return EncodedImages(
            items=TableItems(samples, column=self._image, name=name, folders=self._folders),
            labels=torch.tensor([sample[self._label] for sample in samples], dtype=torch.int64),
            image_size=self._image_size,
            channels=3,
            augment=self._augment,
        )


def _shuffle_files(table: Any, *, seed: int, epoch: int) -> Any:
    """Returns the table's files one after the other, in an order drawn from seed and epoch.

    `datasets`' own shuffle, even with the smallest buffer, loses a sample when it resumes at a saved position.
    """
    if table.num_shards < 2:
        return table
    order = torch.randperm(table.num_shards, generator=seeded_generator(seed, epoch)).tolist()
    files = [table.shard(num_shards=table.num_shards, index=file) for file in order]
    return require_datasets().concatenate_datasets(files)
