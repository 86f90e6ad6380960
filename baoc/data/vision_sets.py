"""Builders of the DATASETS with labelled images: each reads its images and returns their DataModule.

`build_images` reads images on disk in any format, and hub sets through `datasets`.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from baoc.data.decode import Augment, check_augment
from baoc.data.folder import find_split_folders, list_images
from baoc.data.idx import SPLIT_PREFIXES, read_fashion_mnist
from baoc.data.image_sources import MAX_DEFAULT_SIDE, FileItems, MemoryImages, image_source
from baoc.data.images import ImageSet, read_digits, read_npz
from baoc.data.splits import files_ending_in, has_ending
from baoc.data.tables import (
    Columns,
    TableItems,
    find_columns,
    image_folders,
    is_unlabelled,
    load_hub,
    load_parquet,
    read_labels,
    training_table,
    validation_table,
    without_decoding,
)
from baoc.data.vision import LabelledImages, VisionDataModule
from baoc.errors import BadInputError

if TYPE_CHECKING:
    from baoc.data.vision_stream import StreamedImages

log = logging.getLogger(__name__)
_KINDS = "a folder with one folder per class, a folder or FILE of .parquet, or a FILE.npz with images and labels"


def build_arrays(path: str | None = None, **settings: Any) -> VisionDataModule:
    """Images of a .npz at `path`, or the embedded digits."""
    return VisionDataModule(_images_from_arrays(read_digits() if path is None else read_npz(path)), **settings)


def build_fashion_mnist(
    path: str | None = None, *, augment: str, judged_on: str = "train", **settings: Any
) -> VisionDataModule:
    """`judged_on`: validation images: `test`, the 10,000 test images; `train`, a held-out part of the 60,000."""
    if judged_on not in SPLIT_PREFIXES:
        raise BadInputError(f"dataset.judged_on={judged_on} is not allowed: choose one of {', '.join(SPLIT_PREFIXES)}")
    images = _images_from_arrays(read_fashion_mnist(path), augment=augment)
    if judged_on == "test":
        images = replace(images, val=_images_from_arrays(read_fashion_mnist(path, split="test")).train)
    return VisionDataModule(images, **settings)


def build_synthetic(
    *, num_samples: int, num_classes: int, image_size: int, channels: int, **settings: Any
) -> VisionDataModule:
    """Random pixels and labels, the same for every seed, to measure throughput and memory."""
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
) -> "VisionDataModule | StreamedImages":
    """Images at `path` (folders, parquet or .npz), or of the hub set `hub`.

    Args:
        image_size: pixels per side; None is 224 when streaming, else it is chosen from the images.
        streaming: read tables during training and store nothing; None streams hub sets only.
    """
    if image_size is not None and image_size < 1:
        raise BadInputError(f"dataset.image_size must be at least 1 pixel, or null, not {image_size}")
    augment = check_augment(augment)
    columns = Columns(image=image_column, label=label_column)
    place = None if path is None else Path(path).expanduser()
    if place is not None and not place.exists():
        raise BadInputError(f"dataset.path={path} does not exist: it must be {_KINDS}")
    is_table = place is None or has_ending(place, ".parquet") or bool(files_ending_in(".parquet", place))
    streaming = place is None if streaming is None else streaming
    if streaming and not is_table:
        raise BadInputError(
            f"dataset.streaming reads parquet and hub sets; {path} is none: set dataset.streaming=false"
        )
    if place is not None and not is_table:
        return VisionDataModule(_images_from_files(place, augment=augment, image_size=image_size), **settings)
    if place is not None:
        name, folders = str(place), image_folders(place)
        tables = load_parquet(place, streaming=streaming)
    elif hub is not None:
        name, folders = hub, []
        tables = load_hub(hub, streaming=streaming)
    else:
        raise BadInputError(f"dataset=images needs dataset.path=PATH ({_KINDS}) or dataset.hub=NAME on the hub")
    if streaming:
        from baoc.data.vision_stream import StreamedImages

        size = image_size or MAX_DEFAULT_SIDE
        settings = {key: value for key, value in settings.items() if key not in StreamedImages.ignored_options}
        return StreamedImages(
            tables, name=name, columns=columns, image_size=size, augment=augment, folders=folders, **settings
        )
    images = _images_from_tables(
        tables, name=name, columns=columns, augment=augment, image_size=image_size, folders=folders
    )
    return VisionDataModule(images, **settings)


def _images_from_arrays(images: ImageSet, *, augment: str = "none") -> LabelledImages:
    """Arrays (N, H, W, C) to images (N, C, H, W) in memory."""
    source = MemoryImages(
        images=torch.from_numpy(images.images.copy()).permute(0, 3, 1, 2).contiguous(),
        labels=torch.from_numpy(images.labels),
        augment=check_augment(augment),
    )
    return LabelledImages(name=images.name, train=source, val=None, num_classes=images.num_classes)


def _images_from_files(path: Path, *, augment: Augment, image_size: int | None) -> LabelledImages:
    """Images of a .npz, or of a folder with one folder per class."""
    if has_ending(path, ".npz"):
        return _images_from_arrays(read_npz(path), augment=augment)
    if not path.is_dir():
        raise BadInputError(f"dataset.path={path} holds no labelled images: it must be {_KINDS}")
    train_folder, val_folder = find_split_folders(path)
    listing = list_images(train_folder)
    labels, val = torch.tensor(listing.labels), None
    train = image_source(FileItems(listing.files), labels=labels, image_size=image_size, augment=augment)
    if val_folder is not None:
        val_listing = list_images(val_folder, classes=listing.classes)
        val = image_source(FileItems(val_listing.files), labels=torch.tensor(val_listing.labels), like=train)
    return LabelledImages(name=path.name, train=train, val=val, num_classes=len(listing.classes))


def _images_from_tables(
    tables: Mapping[str, Any],
    *,
    name: str,
    columns: Columns,
    augment: Augment,
    image_size: int | None,
    folders: Sequence[Path],
) -> LabelledImages:
    """Images of tables of `datasets`. A validation table without labels is ignored, with a warning."""
    train, val = training_table(tables, name=name), validation_table(tables)
    image, label = find_columns(train.features, columns=columns, name=name)
    labels, classes = read_labels(train, column=label, name=name)

    def items(table: Any, *, name: str) -> TableItems:
        return TableItems(without_decoding(table, column=image), column=image, name=name, folders=folders)

    train_source = image_source(items(train, name=name), labels=labels, image_size=image_size, augment=augment)
    val_source = None
    if val is not None and not is_unlabelled(val, column=label):
        val_name = f"the validation part of {name}"
        val_labels, _ = read_labels(val, column=label, name=val_name, classes=classes)
        val_source = image_source(items(val, name=val_name), labels=val_labels, like=train_source)
    elif val is not None:
        log.warning("%s: its held-back part has no labels (-1), so images of the training part are held out", name)
    return LabelledImages(name=name, train=train_source, val=val_source, num_classes=len(classes))
