"""The schema of `metrics.jsonl` and how it is read: one value per metric and step, whatever happened to the run.

Each line is {"schema", "step", "epoch", "time_s", metric keys...}. `step` counts optimizer steps from 0 as Lightning's
loggers do; several lines may share a step (training, validation, epoch end). NaN and infinities are null.
"""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from baoc.errors import BadInputError
from baoc.tracking.files import LineFile, explained, read_jsonl, written_aside

METRICS_SCHEMA = 1
METRICS_FILE = "metrics.jsonl"
FIXED_KEYS = ("schema", "step", "epoch", "time_s")


def read_metrics(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """One dict per step, in the order of steps: its lines merged, the later one winning.

    `path` is a metrics.jsonl or the run folder that holds it. Raises BadInputError for a newer schema.
    """
    by_step: dict[int, dict[str, Any]] = {}
    for line in read_jsonl(metrics_path(path)):
        if line["schema"] > METRICS_SCHEMA:
            raise BadInputError(
                f"{path} has schema {line['schema']}, and this version of baoc reads up to {METRICS_SCHEMA}: "
                "upgrade baoc"
            )
        by_step.setdefault(line["step"], {}).update(line)
    return [by_step[step] for step in sorted(by_step)]


def series(path: str | os.PathLike[str], key: str) -> list[tuple[int, float | None]]:
    """(step, value) of one metric, one value per step; None stands for NaN or infinity."""
    return [(line["step"], line[key]) for line in read_metrics(path) if key in line]


def metrics_path(path: str | os.PathLike[str]) -> Path:
    path = Path(path)
    return path / METRICS_FILE if path.is_dir() else path


def supersede(
    path: str | os.PathLike[str], *, from_step: int, also: Callable[[Mapping[str, Any]], bool] = lambda line: False
) -> int:
    """Takes lines of `from_step` and later, and those for which `also` is true, out of `path`, as a resumed run will
    write them again; returns how many.

    They were true of an attempt that is no longer part of the run, so they are kept, in `NAME.superseded`. Both files
    are whole at any moment: a kill in between leaves at worst the same lines in both.
    """
    path = Path(path)
    if not path.is_file():
        return 0
    LineFile(path).close()  # sets a torn last line aside
    lines = [line for line in path.read_bytes().split(b"\n") if line]
    later = [record["step"] >= from_step or also(record) for record in read_jsonl(path)]
    gone = [line for line, is_later in zip(lines, later, strict=True) if is_later]
    if not gone:
        return 0
    aside = path.with_name(path.name + ".superseded")
    with explained(aside), aside.open("ab") as file:
        file.write(b"".join(line + b"\n" for line in gone))
        file.flush()
        os.fsync(file.fileno())
    with written_aside(path) as file:
        file.write(b"".join(line + b"\n" for line, is_later in zip(lines, later, strict=True) if not is_later))
    return len(gone)
