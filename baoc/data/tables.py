"""Labelled images in tables: the user's parquet files and sets of the Hugging Face hub, both through `datasets`.

`datasets` is an optional dependency and imported only when a table is read.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from baoc.errors import BadInputError, TrainingFailedError

_TRAIN, _VAL = ("train", "training"), ("validation", "val", "valid", "test")
_IMAGES, _LABELS = ("image", "img", "images", "jpg", "png"), ("label", "labels", "fine_label", "cls")


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """Names of the two columns; None searches for the usual names."""

    image: str | None = None
    label: str | None = None


class TableItems:
    """Encoded images of a table with random access, which `datasets` maps from disk."""

    def __init__(self, table: Any, *, column: str, name: str):
        self._table = table
        self._column = column
        self._name = name

    def __len__(self) -> int:
        return len(self._table)

    def __getitem__(self, row: int) -> tuple[bytes, str]:
        where = f"row {row} of {self._name}"
        return image_bytes(self._table[row][self._column], where=where), where


def image_bytes(value: Any, *, where: str) -> bytes:
    """The encoded image of a cell: bytes, or `datasets`' {bytes, path}."""
    content = value.get("bytes") if isinstance(value, Mapping) else value
    if content is None and isinstance(value, Mapping) and value.get("path"):
        return Path(value["path"]).read_bytes()
    if not isinstance(content, bytes) or not content:
        raise TrainingFailedError(f"{where} holds no encoded image: remove it, or name another dataset.image_column")
    return content


def undecoded(table: Any, *, column: str) -> Any:
    """The table with its image column as encoded bytes, so that errors of decoding can name the row."""
    datasets = require_datasets()
    is_image = isinstance(table.features[column], datasets.Image)
    return table.cast_column(column, datasets.Image(decode=False)) if is_image else table


def require_datasets() -> Any:
    try:
        import datasets
    except ImportError as error:
        raise BadInputError("parquet files and hub data sets need `datasets`: pip install 'baoc[data]'") from error
    datasets.disable_progress_bars()
    return datasets


def parquet_files(path: Path) -> dict[str, list[str]]:
    """Split -> files, by names of folders and files (validation*, test*, ...); all others are training files."""
    files = [path] if path.is_file() else sorted(path.rglob("*.parquet"))
    parts: dict[str, list[str]] = {"train": [], "validation": []}
    for file in files:
        words = [part.lower() for part in file.relative_to(path if path.is_dir() else path.parent).parts]
        held_back = any(word.startswith(_VAL) for word in words)
        parts["validation" if held_back else "train"].append(str(file))
    if not parts["train"]:
        raise BadInputError(f"dataset.path={path} holds no parquet file of training images, such as train-0.parquet")
    return {split: found for split, found in parts.items() if found}


def load_parquet(path: Path, *, streaming: bool = False) -> Mapping[str, Any]:
    """Split -> table of the parquet files at `path`. Raises BadInputError if they cannot be read."""
    datasets = require_datasets()
    try:
        return datasets.load_dataset("parquet", data_files=parquet_files(path), streaming=streaming)
    except BadInputError:
        raise
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
    """The training table, or the validation table if there is one."""
    wanted = _VAL if validation else _TRAIN
    return next((tables[name] for name in wanted if name in tables), None)


def find_columns(features: Mapping[str, Any], *, asked: Columns, name: str) -> tuple[str, str]:
    """(image column, label column). Raises BadInputError with the existing columns."""
    return (
        _find(features, asked=asked.image, usual=_IMAGES, key="dataset.image_column", name=name),
        _find(features, asked=asked.label, usual=_LABELS, key="dataset.label_column", name=name),
    )


def labels_of(table: Any, *, column: str, name: str, classes: Sequence[str] | None = None) -> tuple[Tensor, list[str]]:
    """(labels (N,) int64 from 0, names of the classes); text labels are numbered in alphabetical order.

    `classes`: of the training table, for a validation table. Raises BadInputError for a label that is not a class.
    """
    values = table[column]
    values = values if isinstance(values, list) else values[:]  # datasets 4 and later read columns lazily
    if not values:
        raise BadInputError(f"{name} holds no images")
    if any(value is None for value in values):
        raise BadInputError(f"row {list(values).index(None)} of {name} has no {column}: fill it in, or remove the row")
    classes = _classes(table, values, column=column, name=name) if classes is None else classes
    if isinstance(values[0], str):
        numbers = {text: number for number, text in enumerate(classes)}
        if foreign := set(values) - numbers.keys():
            raise BadInputError(
                f"{sorted(foreign)[0]!r} in column {column} of {name} is no class of the training images"
            )
        values = [numbers[value] for value in values]
    labels = torch.tensor(values, dtype=torch.int64)
    if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < len(classes):
        raise BadInputError(f"labels of {name} reach from {labels.min()} to {labels.max()}, for {len(classes)} classes")
    return labels, list(classes)


def _classes(table: Any, values: Sequence[Any], *, column: str, name: str) -> Sequence[str]:
    """The declared names, or the text labels, or the numbers up to the largest label."""
    declared = getattr(table.features[column], "names", None)
    if declared:
        return declared
    found = sorted(set(values))
    if isinstance(values[0], str):
        return [str(value) for value in found]
    if not all(isinstance(value, int) and value >= 0 for value in found):
        raise BadInputError(f"labels of {name} must be text or whole numbers from 0, not {found[0]!r}")
    return [str(number) for number in range(max(found) + 1)]


def _find(features: Mapping[str, Any], *, asked: str | None, usual: Sequence[str], key: str, name: str) -> str:
    if asked is not None and asked not in features:
        raise BadInputError(f"{key}={asked}: {name} has the columns {', '.join(features)}")
    found = asked or next((column for column in usual if column in features), None)
    if found is None:
        raise BadInputError(f"{name} has no column {' or '.join(usual)}, but {', '.join(features)}: set {key}=NAME")
    return found


def first_line(error: Exception) -> str:
    """The first line of an error's text, or its class if it has none."""
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
