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
from baoc.data.splits import split_in_name, split_in_path, visible_files
from baoc.errors import BadInputError, first_line

_IMAGES, _LABELS = ("image", "img", "images", "jpg", "png"), ("label", "labels", "fine_label", "cls")


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """Names of the two columns; None searches for the usual names."""

    image: str | None = None
    label: str | None = None


class TableItems:
    """Encoded images of a table that `datasets` maps from disk, or of samples that a stream gave."""

    def __init__(self, table: Any, *, column: str, name: str, folders: Sequence[Path] = ()):
        """`folders`: to which paths in the table may be relative."""
        self._table = table
        self._column = column
        self._name = name
        self._folders = folders

    def __len__(self) -> int:
        return len(self._table)

    def __getitem__(self, row: int) -> tuple[bytes, str]:
        """The encoded image of a cell: bytes, or `datasets`' {bytes, path}. BadInputError names a row without one."""
        value, where = self._table[row][self._column], f"row {row} of {self._name}"
        content = value.get("bytes") if isinstance(value, Mapping) else value
        if content is None and isinstance(value, Mapping) and value.get("path"):
            content = self._read(str(value["path"]), where=where)
        if not isinstance(content, bytes) or not content:
            raise BadInputError(f"{where} holds no encoded image: remove it, or name another dataset.image_column")
        return content, where

    def _read(self, given: str, *, where: str) -> bytes:
        path = Path(given).expanduser()
        candidates = [path] if path.is_absolute() else [*(folder / path for folder in self._folders), path]
        found = next((file for file in candidates if file.is_file()), None)
        if found is None:
            beside = f" beside {self._folders[0]}" if self._folders and not path.is_absolute() else ""
            raise BadInputError(
                f"{where} holds no image but the path {given}, which is no file{beside}: put the images there, or keep "
                "their bytes in the table"
            )
        try:
            return found.read_bytes()
        except OSError as error:
            raise BadInputError(f"{where} names {found}, which cannot be read ({error.strerror})") from error


def without_decoding(table: Any, *, column: str) -> Any:
    """The table with its image column as encoded bytes, so that errors of decoding can name the row."""
    datasets = require_datasets()
    is_image = isinstance(table.features[column], datasets.Image)
    return table.cast_column(column, datasets.Image(decode=False)) if is_image else table


def require_datasets() -> Any:
    import datasets

    datasets.disable_progress_bars()
    return datasets


def shard_stream(stream: Any, *, rank: int, num_ranks: int, skipped: bool = False) -> Any:
    """This rank's part of a stream of `datasets`. Where samples at its start are `skipped`, every rank reads all of it:
    a stream that is split by files skips a part of each, so held-out samples would be trained on."""
    if num_ranks == 1:
        return stream
    if skipped:
        return stream.filter(lambda _, at: at % num_ranks == rank, with_indices=True)
    from datasets.distributed import split_dataset_by_node

    return split_dataset_by_node(stream, rank=rank, world_size=num_ranks)


def parquet_files(path: Path) -> dict[str, list[str]]:
    """Part -> files, by whole words in the names of files and folders; files without one are for training."""
    parts: dict[str, list[str]] = {"train": [], "validation": [], "test": []}
    root, files = _parquet(path)
    for file in files:
        parts["train" if path.is_file() else split_in_path(file.relative_to(root))].append(str(file))
    if not parts["train"]:
        raise BadInputError(f"dataset.path={path} holds no parquet file of training images, such as train-0.parquet")
    return {part: found for part, found in parts.items() if found}


def image_folders(path: Path) -> list[Path]:
    """Where relative paths in parquet files at `path` may lead: beside the files, and the folder that was given."""
    root, files = _parquet(path)
    return list(dict.fromkeys([*(file.parent for file in files), root]))


def _parquet(path: Path) -> tuple[Path, list[Path]]:
    return (path.parent, [path]) if path.is_file() else (path, visible_files(path, path.rglob("*.parquet")))


def load_parquet(path: Path, *, streaming: bool = False) -> Mapping[str, Any]:
    """Split -> table of the parquet files at `path`. Raises BadInputError if they cannot be read."""
    datasets, files = require_datasets(), parquet_files(path)
    try:
        return datasets.load_dataset("parquet", data_files=files, streaming=streaming)
    except Exception as error:  # pyarrow and datasets raise many kinds
        raise BadInputError(f"dataset.path={path} cannot be read as parquet ({first_line(error)})") from error


def load_hub(name: str, *, streaming: bool = False) -> Mapping[str, Any]:
    """Split -> table of a set of the hub or its local cache. Raises BadInputError if it is not available."""
    datasets = require_datasets()
    try:
        return datasets.load_dataset(name, streaming=streaming)
    except Exception as error:  # no network, no such set, no access to a gated one
        raise BadInputError(
            f"data set {name} cannot be loaded from the Hugging Face hub ({first_line(error)}): name a copy with "
            "dataset.path=PATH (a folder per class, or parquet files), or log in with `hf auth login` if it is gated"
        ) from error


def split_of(tables: Mapping[str, Any], *, validation: bool = False) -> Any | None:
    """The training table, or the table to hold back: that of validation, else that of tests. None where there is none.

    Parts are told by whole words, as for files; a name that is such a word alone comes first.
    """
    for role in ("validation", "test") if validation else ("train",):
        named = sorted((name for name in tables if split_in_name(name) == role), key=len)
        if named:
            return tables[named[0]]
    return None


def find_columns(features: Mapping[str, Any], *, asked: Columns, name: str) -> tuple[str, str]:
    """(image column, label column). Raises BadInputError with the existing columns."""
    return (
        _find(features, asked=asked.image, usual=_IMAGES, key="dataset.image_column", name=name),
        _find(features, asked=asked.label, usual=_LABELS, key="dataset.label_column", name=name),
    )


def is_unlabelled(table: Any, *, column: str) -> bool:
    """True for a part whose labels are kept back, as those of tests often are: -1 or nothing in each row."""
    return column not in table.features or not any(value not in (-1, None) for value in table[column][:])


def read_labels(
    table: Any, *, column: str, name: str, classes: Sequence[str] | None = None
) -> tuple[Tensor, list[str]]:
    """(labels (N,) int64 from 0, names of the classes); text labels are numbered in alphabetical order.

    `classes`: of the training table, for a validation table. Raises BadInputError for a label that is not a class.
    """
    values = table[column]
    values = values if isinstance(values, list) else values[:]  # datasets 4 and later read columns lazily
    if not values:
        raise BadInputError(f"{name} holds no images")
    if any(value is None for value in values):
        raise BadInputError(f"row {list(values).index(None)} of {name} has no {column}: fill it in, or remove the row")
    kinds = {str if isinstance(value, str) else int if isinstance(value, int) else float for value in values}
    if len(kinds) > 1 or float in kinds:
        odd = next(value for value in values if len(kinds) > 1 or not isinstance(value, str | int))
        raise BadInputError(f"labels of {name} must be text or whole numbers from 0, all alike, not {odd!r}")
    names = getattr(table.features[column], "names", None) if classes is None else classes
    if names is None and str in kinds:
        names = sorted(set(values))
    if names is not None and str in kinds:
        number_of = {text: number for number, text in enumerate(names)}
        if foreign := set(values) - number_of.keys():
            raise BadInputError(
                f"{sorted(foreign)[0]!r} in column {column} of {name} is no class of the training images"
            )
        values = [number_of[value] for value in values]
    declared = len(names) if names else None
    numbers = np.asarray(values, dtype=np.int64)
    labels, num_classes = check_labels(numbers, of=name, declared=declared)
    return torch.from_numpy(labels), list(names or map(str, range(num_classes)))


def _find(features: Mapping[str, Any], *, asked: str | None, usual: Sequence[str], key: str, name: str) -> str:
    if asked is not None and asked not in features:
        raise BadInputError(f"{key}={asked}: {name} has the columns {', '.join(features)}")
    found = asked or next((column for column in usual if column in features), None)
    if found is None:
        raise BadInputError(f"{name} has no column {' or '.join(usual)}, but {', '.join(features)}: set {key}=NAME")
    return found
