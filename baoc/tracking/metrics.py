"""The schema of `metrics.jsonl` and its reader.

Each line is {"schema", "step", "epoch", "time_s", metric keys...}. `step` counts optimizer steps from 0, as Lightning's
loggers do; several lines may share a step (training, validation, epoch end). NaN and infinities are null.
"""

import os
from collections.abc import Callable, Mapping
from itertools import compress
from pathlib import Path
from typing import Any

from baoc.errors import BadInputError
from baoc.tracking.files import LineFile, as_output_error, atomic_write, read_jsonl

METRICS_SCHEMA = 1
METRICS_FILE = "metrics.jsonl"
FIXED_KEYS = ("schema", "step", "epoch", "time_s")


def read_metrics(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """One dict per step, ordered by step; of several lines of a step the last value of a key wins. `path` is a
    metrics.jsonl or its run folder. Raises BadInputError for a newer schema."""
    by_step: dict[int, dict[str, Any]] = {}
    for line in read_jsonl(Path(path) / METRICS_FILE if Path(path).is_dir() else path):
        if type(line.get("schema")) is not int or type(line.get("step")) is not int:
            raise BadInputError(f"{path} has a line without schema and step ({line}): it was damaged; remove that line")
        if line["schema"] > METRICS_SCHEMA:
            raise BadInputError(
                f"{path} has schema {line['schema']}, and this version of baoc reads up to {METRICS_SCHEMA}: "
                "upgrade baoc"
            )
        by_step.setdefault(line["step"], {}).update(line)
    return [by_step[step] for step in sorted(by_step)]


def supersede(
    path: str | os.PathLike[str], *, from_step: int, also: Callable[[Mapping[str, Any]], bool] = lambda line: False
) -> int:
    """Moves lines of `from_step` and later, and those for which `also` is true, from `path` into `NAME.superseded`;
    returns their number. A resumed run writes these steps again. A kill in between leaves the lines in both files at
    worst."""
    path = Path(path)
    if not path.is_file():
        return 0
    LineFile(path).close()  # moves a torn last line aside
    lines = [line for line in path.read_bytes().split(b"\n") if line]
    records = read_jsonl(path)
    if damaged := [record for record in records if type(record.get("step", from_step)) is not int]:
        raise BadInputError(
            f"{path} has a line whose step is no number ({damaged[0]}): it was damaged; remove that line"
        )
    is_superseded = [record.get("step", from_step) >= from_step or also(record) for record in records]
    superseded = list(compress(lines, is_superseded))
    if not superseded:
        return 0
    aside = path.with_name(path.name + ".superseded")
    with as_output_error(aside), aside.open("ab") as file:
        file.write(b"".join(line + b"\n" for line in superseded))
        file.flush()
        os.fsync(file.fileno())
    with atomic_write(path) as file:
        file.write(b"".join(line + b"\n" for line, moved in zip(lines, is_superseded, strict=True) if not moved))
    return len(superseded)
