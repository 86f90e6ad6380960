"""Builders of the DATASETS rows with labelled images: each reads its images and returns their DataModule.

`build_images` reads images on disk in any format, and hub sets through `datasets`.
"""

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from baoc.data.decode import check_augment
from baoc.data.folder import find_split_folders, list_images
from baoc.data.idx import SPLIT_PREFIXES, read_fashion_mnist
from baoc.data.image_sources import FileItems, MemoryImages, image_source
from baoc.data.images import ImageSet, read_digits, read_npz
from baoc.data.splits import visible_files
from baoc.data.tables import (
    Columns,
    TableItems,
    find_columns,
    image_folders,
    is_unlabelled,
    load_hub,
    load_parquet,
    read_labels,
    split_of,
    without_decoding,
)
from baoc.data.vision import LabelledImages, VisionDataModule
from baoc.errors import BadInputError

log = logging.getLogger(__name__)
_KINDS = "a folder with one folder per class, a folder or FILE of .parquet, or a FILE.npz with images and labels"


def build_arrays(path: str | None = None, **settings: Any) -> VisionDataModule:
    """The images of a .npz, or the embedded digits."""
    return VisionDataModule(_of_arrays(read_digits() if path is None else read_npz(path)), **settings)


def build_fashion_mnist(
    path: str | None = None, *, augment: str, judged_on: str = "train", **settings: Any
) -> VisionDataModule:
    """`judged_on`: validation images: `test`, the 10,000 test images; `train`, a held-out part of the 60,000."""
    if judged_on not in SPLIT_PREFIXES:
        raise BadInputError(f"dataset.judged_on={judged_on} is not allowed: choose one of {', '.join(SPLIT_PREFIXES)}")
    images = _of_arrays(read_fashion_mnist(path), augment=augment)
    if judged_on == "test":
        images = replace(images, val=_of_arrays(read_fashion_mnist(path, part="test")).train)
    return VisionDataModule(images, **settings)


def build_synthetic(
    *, num_samples: int, num_classes: int, image_size: int, channels: int, **settings: Any
) -> VisionDataModule:
    """Random pixels and labels, the same for every seed, for measuring throughput and memory."""
    for name, value in (("num_samples", num_samples), ("image_size", image_size), ("channels", channels)):
        if value < 1:
            raise BadInputError(f"dataset.{name} must be at least 1, not {value}")
    if not 2 <= num_classes <= num_samples:
        raise BadInputError(f"dataset.num_classes must lie between 2 and num_samples={num_samples}, not {num_classes}")
    generator = torch.Generator().manual_seed(0)
    shape = (num_samples, channels, image_size, image_size)
    images = MemoryImages(
        images=torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8),
        labels=torch.randint(0, num_classes, (num_samples,), generator=generator),
    )
    data = LabelledImages(name="synthetic_images", train=images, val=None, num_classes=num_classes)
    return VisionDataModule(data, **settings)


def build_images(
    path: str | None = None,
    *,
    hub: str | None = None,
    augment: str = "none",
    image_size: int | None = None,
    image_column: str | None = None,
    label_column: str | None = None,
    streaming: bool | None = None,
    **settings: Any,
) -> Any:
    """Images at `path` (folders, parquet or .npz), or of the hub set `hub`.

    `streaming` reads during training and stores nothing; None streams hub sets only.
    """
    if image_size is not None and image_size < 1:
        raise BadInputError(f"dataset.image_size must be at least 1 pixel, or null, not {image_size}")
    augment = check_augment(augment)
    columns = Columns(image=image_column, label=label_column)
    found = None if path is None else Path(path).expanduser()
    if found is not None and not found.exists():
        raise BadInputError(f"dataset.path={path} does not exist: it must be {_KINDS}")
    is_table = found is None or found.suffix == ".parquet" or bool(visible_files(found, found.rglob("*.parquet")))
    streaming = found is None if streaming is None else streaming
    if streaming and not is_table:
        raise BadInputError(
            f"dataset.streaming reads parquet and hub sets; {path} is none: set dataset.streaming=false"
        )
    if not is_table:
        assert found is not None
        return VisionDataModule(_of_path(found, augment=augment, image_size=image_size), **settings)
    if found is None and hub is None:
        raise BadInputError(f"dataset=images needs dataset.path=PATH ({_KINDS}) or dataset.hub=NAME on the hub")
    tables = load_hub(str(hub), streaming=streaming) if found is None else load_parquet(found, streaming=streaming)
    name, folders = (str(hub), []) if found is None else (str(found), image_folders(found))
    if streaming:
        from baoc.data.vision_stream import StreamedImages

        size = image_size or 224
        return StreamedImages(
            tables, name=name, columns=columns, image_size=size, augment=augment, folders=folders, **settings
        )
    images = _of_tables(tables, name=name, columns=columns, augment=augment, image_size=image_size, folders=folders)
    return VisionDataModule(images, **settings)


def _of_arrays(images: ImageSet, *, augment: str = "none") -> LabelledImages:
    source = MemoryImages(
        images=torch.from_numpy(images.images.copy()).permute(0, 3, 1, 2).contiguous(),
        labels=torch.from_numpy(images.labels),
        augment=check_augment(augment),
    )
    return LabelledImages(name=images.name, train=source, val=None, num_classes=images.num_classes)


def _of_path(path: Path, *, augment: Any, image_size: int | None) -> LabelledImages:
    if path.suffix == ".npz":
        return _of_arrays(read_npz(path), augment=augment)
    if not path.is_dir():
        raise BadInputError(f"dataset.path={path} holds no labelled images: it must be {_KINDS}")
    train_folder, val_folder = find_split_folders(path)
    listing = list_images(train_folder)
    labels, val = torch.tensor(listing.labels), None
    train = image_source(FileItems(listing.files), labels=labels, image_size=image_size, augment=augment)
    if val_folder is not None:
        held = list_images(val_folder, classes=listing.classes)
        val = image_source(FileItems(held.files), labels=torch.tensor(held.labels), like=train)
    return LabelledImages(name=path.name, train=train, val=val, num_classes=len(listing.classes))


def _of_tables(
    tables: Any, *, name: str, columns: Columns, augment: Any, image_size: int | None, folders: Sequence[Path]
) -> LabelledImages:
    train, val = split_of(tables), split_of(tables, validation=True)
    if train is None:
        raise BadInputError(f"{name} has no training part, but {', '.join(tables)}")
    image, label = find_columns(train.features, asked=columns, name=name)
    labels, classes = read_labels(train, column=label, name=name)

    def items(table: Any, *, of: str) -> TableItems:
        return TableItems(without_decoding(table, column=image), column=image, name=of, folders=folders)

    source = image_source(items(train, of=name), labels=labels, image_size=image_size, augment=augment)
    held = None
    if val is not None and not is_unlabelled(val, column=label):
        part = f"the validation part of {name}"
        held_labels, _ = read_labels(val, column=label, name=part, classes=classes)
        held = image_source(items(val, of=part), labels=held_labels, like=source)
    elif val is not None:
        log.warning("%s: its held-back part has no labels (-1), so images of the training part are held out", name)
    return LabelledImages(name=name, train=source, val=held, num_classes=len(classes))
