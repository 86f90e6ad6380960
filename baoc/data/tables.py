"""Labelled images in tables: the user's parquet files and sets of the Hugging Face hub, both through `datasets`.

`datasets` is an optional dependency and imported only when a table is read.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from baoc.data.images import check_labels
from baoc.data.splits import files_ending_in, split_in_name, split_in_path
from baoc.errors import BadInputError, first_line

_IMAGE_COLUMNS = ("image", "img", "images", "jpg", "png")
_LABEL_COLUMNS = ("label", "labels", "fine_label", "cls")


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """Names of the image and the label column; None searches for _IMAGE_COLUMNS or _LABEL_COLUMNS."""

    image: str | None = None
    label: str | None = None


class TableItems:
    """Encoded images of a table that `datasets` maps from disk, or of a list of samples of a stream."""

    def __init__(self, table: Any, *, column: str, name: str, folders: Sequence[Path] = ()):
        """`folders`: where relative paths in the table are looked up."""
        self._table = table
        self._column = column
        self._name = name
        self._folders = folders

    def __len__(self) -> int:
        return len(self._table)

    def __getitem__(self, row: int) -> tuple[bytes, str]:
        """The encoded image of a row and its origin. Raises BadInputError for a row without an image.

        A cell holds bytes, or a mapping with `bytes` or `path` as `datasets.Image(decode=False)` makes it.
        """
        cell, where = self._table[row][self._column], f"row {row} of {self._name}"
        content = cell.get("bytes") if isinstance(cell, Mapping) else cell
        if content is None and isinstance(cell, Mapping) and cell.get("path"):
            content = self._read_file(str(cell["path"]), where=where)
        if not isinstance(content, bytes) or not content:
            raise BadInputError(f"{where} holds no encoded image: remove it, or name another dataset.image_column")
        return content, where

    def _read_file(self, cell: str, *, where: str) -> bytes:
        path = Path(cell).expanduser()
        candidates = [path] if path.is_absolute() else [*(folder / path for folder in self._folders), path]
        file = next((file for file in candidates if file.is_file()), None)
        if file is None:
            place = f" beside {self._folders[0]}" if self._folders and not path.is_absolute() else ""
            raise BadInputError(
                f"{where} holds no image but the path {cell}, which is no file{place}: put the images there, or keep "
                "their bytes in the table"
            )
        try:
            return file.read_bytes()
        except OSError as error:
            raise BadInputError(f"{where} names {file}, which cannot be read ({error.strerror})") from error


def without_decoding(table: Any, *, column: str) -> Any:
    """Returns the table with its image column as encoded bytes, so that decoding errors can name the row."""
    datasets = require_datasets()
    is_image = isinstance(table.features[column], datasets.Image)
    return table.cast_column(column, datasets.Image(decode=False)) if is_image else table


def require_datasets() -> Any:
    """Imports `datasets` and switches its progress bars off."""
    import datasets

    datasets.disable_progress_bars()
    return datasets


def shard_stream(stream: Any, *, rank: int, num_ranks: int, skipped: bool = False) -> Any:
    """Returns this rank's shard of a stream of `datasets`.

    `skipped`: samples at the start of the stream are skipped because they are held out. Then every rank reads the whole
    stream and takes each `num_ranks`-th sample. `datasets` would split by files and skip a part of each file, so that
    held-out samples were trained on.
    """
    if num_ranks == 1:
        return stream
    if skipped:
        return stream.filter(lambda _, at: at % num_ranks == rank, with_indices=True)
    from datasets.distributed import split_dataset_by_node

    return split_dataset_by_node(stream, rank=rank, world_size=num_ranks)


def parquet_files(path: Path) -> dict[str, list[str]]:
    """Split -> parquet files at `path`, by `split_in_path`; empty splits are left out.

    Raises BadInputError if there are no files for training.
    """
    by_split: dict[str, list[str]] = {"train": [], "validation": [], "test": []}
    root, files = _list_parquet(path)
    for file in files:
        by_split["train" if path.is_file() else split_in_path(file.relative_to(root))].append(str(file))
    if not by_split["train"]:
        raise BadInputError(f"dataset.path={path} holds no parquet file of training images, such as train-0.parquet")
    return {split: files for split, files in by_split.items() if files}


def image_folders(path: Path) -> list[Path]:
    """Folders to which paths in the parquet files at `path` may be relative: those of the files, then the root."""
    root, files = _list_parquet(path)
    return list(dict.fromkeys([*(file.parent for file in files), root]))


def _list_parquet(path: Path) -> tuple[Path, list[Path]]:
    """Returns (root folder, parquet files) at `path`, a file or a folder."""
    return (path.parent, [path]) if path.is_file() else (path, files_ending_in(".parquet", path))


def load_parquet(path: Path, *, streaming: bool = False) -> Mapping[str, Any]:
    """Loads split -> table of the parquet files at `path`. Raises BadInputError if they cannot be read."""
    datasets, files = require_datasets(), parquet_files(path)
    try:
        return datasets.load_dataset("parquet", data_files=files, streaming=streaming)
    except Exception as error:  # pyarrow and datasets raise many kinds
        raise BadInputError(f"dataset.path={path} cannot be read as parquet ({first_line(error)})") from error


def load_hub(name: str, *, streaming: bool = False) -> Mapping[str, Any]:
    """Loads split -> table of a set of the hub or its local cache. Raises BadInputError if it is not available."""
    datasets = require_datasets()
    try:
        return datasets.load_dataset(name, streaming=streaming)
    except Exception as error:  # no network, no such set, no access to a gated one
        raise BadInputError(
            f"data set {name} cannot be loaded from the Hugging Face hub ({first_line(error)}): name a copy with "
            "dataset.path=PATH (a folder per class, or parquet files), or log in with `hf auth login` if it is gated"
        ) from error


def training_table(tables: Mapping[str, Any], *, name: str) -> Any:
    """The training split of `tables`. Raises BadInputError if there is none."""
    table = _table_of_split(tables, "train")
    if table is None:
        raise BadInputError(f"{name} has no training part, but {', '.join(tables)}")
    return table


def validation_table(tables: Mapping[str, Any]) -> Any | None:
    """The validation split of `tables`, else the test split; None if there is neither."""
    table = _table_of_split(tables, "validation")
    return _table_of_split(tables, "test") if table is None else table


def _table_of_split(tables: Mapping[str, Any], split: str) -> Any | None:
    """The table whose name says `split`, the shortest name first: `train` before `train_small`."""
    names = sorted((name for name in tables if split_in_name(name) == split), key=len)
    return tables[names[0]] if names else None


def find_columns(features: Mapping[str, Any], *, columns: Columns, name: str) -> tuple[str, str]:
    """Returns (image column, label column). Raises BadInputError with the existing columns."""
    return (
        _find_column(features, columns.image, usual=_IMAGE_COLUMNS, key="dataset.image_column", name=name),
        _find_column(features, columns.label, usual=_LABEL_COLUMNS, key="dataset.label_column", name=name),
    )


def _find_column(features: Mapping[str, Any], column: str | None, *, usual: Sequence[str], key: str, name: str) -> str:
    if column is not None and column not in features:
        raise BadInputError(f"{key}={column}: {name} has the columns {', '.join(features)}")
    column = column or next((candidate for candidate in usual if candidate in features), None)
    if column is None:
        raise BadInputError(f"{name} has no column {' or '.join(usual)}, but {', '.join(features)}: set {key}=NAME")
    return column


def is_unlabelled(table: Any, *, column: str) -> bool:
    """True if no row has a label (the column is missing, or all are -1 or None), as in many test splits."""
    return column not in table.features or not any(value not in (-1, None) for value in table[column][:])


def read_labels(
    table: Any, *, column: str, name: str, classes: Sequence[str] | None = None
) -> tuple[Tensor, list[str]]:
    """Returns (labels (N,) int64 from 0, class names). Text labels are numbered in alphabetical order.

    `classes`: class names of the training table, for a validation table. Raises BadInputError for a label that is
    missing, of another type, or not a class.
    """
    values = table[column]
    values = values if isinstance(values, list) else values[:]  # datasets 4 and later read columns lazily
    if not values:
        raise BadInputError(f"{name} holds no images")
    if any(value is None for value in values):
        raise BadInputError(f"row {list(values).index(None)} of {name} has no {column}: fill it in, or remove the row")
    label_types = {str if isinstance(value, str) else int if isinstance(value, int) else float for value in values}
    if len(label_types) > 1 or float in label_types:
        example = next(value for value in values if len(label_types) > 1 or not isinstance(value, str | int))
        raise BadInputError(f"labels of {name} must be text or whole numbers from 0, all alike, not {example!r}")
    names = getattr(table.features[column], "names", None) if classes is None else classes
    if str in label_types:
        names = sorted(set(values)) if names is None else names
        index_of = {text: index for index, text in enumerate(names)}
        if unknown := set(values) - index_of.keys():
            raise BadInputError(
                f"{sorted(unknown)[0]!r} in column {column} of {name} is no class of the training images"
            )
        values = [index_of[value] for value in values]
    labels = np.asarray(values, dtype=np.int64)
    labels, num_classes = check_labels(labels, name=name, declared=len(names) if names else None)
    return torch.from_numpy(labels), list(names or map(str, range(num_classes)))
