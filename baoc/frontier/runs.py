"""Finds the runs below a folder, and says by which settings they differ: that is how a frontier names its points."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from baoc.errors import BadInputError
from baoc.tracking.files import read_json
from baoc.types import RESULT_SCHEMA, FailedRun, FrontierPoint

RESULT, ERROR, CONFIG = "result.json", "error.json", "config.yaml"
ABOUT = "study.json"  # in the folder of a study
# Settings that do not change what is trained; runs that differ in these only are seeds of one another.
INCIDENTAL = ("seed", "name", "resume", "logger", "checkpoint", "mode")
FOREIGN = {".hydra", "wandb"}  # folders inside a run that have a config.yaml of their own

Kind = tuple[str, str, str, str]  # task, model, data set, quality metric


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFolder:
    """A run's folder: its result where it has one, its error where it failed, and its settings, flattened."""

    path: Path
    name: str  # relative to the folder that was searched
    settings: Mapping[str, Any]
    result: Mapping[str, Any] | None
    error: Mapping[str, Any] | None
    study: str = ""  # the folder it came from, where several are compared

    @property
    def kind(self) -> Kind:
        """Runs of one kind may be compared."""
        result = result_of(self)
        dataset = str(self.settings.get("dataset.name", ""))
        return result["task"], result["model"], dataset, result["quality"]["name"]


def result_of(run: RunFolder) -> Mapping[str, Any]:
    """`result.json` of a run that is known to be finished."""
    assert run.result is not None
    return run.result


def about_study(folder: Path) -> Mapping[str, Any]:
    """What a study's folder says of it; nothing where it is no study's."""
    return read_json(folder / ABOUT) if (folder / ABOUT).is_file() else {}


def find_runs(folder: Path) -> list[RunFolder]:
    """Every run at or below `folder`, finished or not, in the order of their names (numbers by value)."""
    marked = {path.parent for name in (RESULT, ERROR, CONFIG) for path in folder.rglob(name)}
    runs = [path for path in marked if not set(path.relative_to(folder).parts) & FOREIGN]
    return [_read(path, folder=folder) for path in sorted(runs, key=_natural)]


def labels(runs: Sequence[RunFolder]) -> list[str]:
    """For each run the settings in which not all of its kind agree, as `budget=state_25 allocator=random`; alike for
    seeds. A budget is told by its name, unless two different ones share it; weights of risk that are 1 are not told.
    Where all agree it is the budget alone."""
    kinds: dict[tuple[str, ...], list[int]] = {}
    for place, run in enumerate(runs):
        key = tuple(str(run.settings.get(f"{group}.name")) for group in ("task", "model", "dataset"))
        kinds.setdefault(key, []).append(place)
    told = [run.name for run in runs]
    for places in kinds.values():
        for place, label in zip(places, _labels_of_kind([runs[place] for place in places]), strict=True):
            told[place] = label
    return told


def _labels_of_kind(runs: Sequence[RunFolder]) -> list[str]:
    told = [dict(run.settings) for run in runs]
    known = [settings for settings in told if settings]  # a job that failed early has none
    limits = {str(sorted((k, str(v)) for k, v in settings.items() if k.startswith("budget."))) for settings in known}
    if len(limits) == len({settings.get("budget.name") for settings in known}):
        told = [_short_budget(settings) for settings in told]
        known = [settings for settings in told if settings]
    keys = list(dict.fromkeys(key for settings in known for key in settings))
    varying = [key for key in keys if len({str(settings.get(key)) for settings in known}) > 1]
    shown = varying or ["budget"]
    return [
        " ".join(f"{key.removesuffix('.name')}={_word(settings[key])}" for key in shown if _told(key, settings))
        or run.name
        for settings, run in zip(told, runs, strict=True)
    ]


def _told(key: str, settings: Mapping[str, Any]) -> bool:
    return key in settings and not (key.startswith("risk.weights.") and settings[key] == 1)


def _word(value: Any) -> str:
    """As a command line has it."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def point(run: RunFolder, *, label: str) -> FrontierPoint:
    """A finished run as a frontier sees it; what was not finite (null in JSON) is NaN again."""
    result = result_of(run)
    return FrontierPoint(
        run=run.name,
        task=result["task"],
        model=result["model"],
        label=label,
        quality=_number(result["quality"]["value"]),
        peak_bytes=result["peak_bytes"],
        state_bytes=result["state_bytes"],
        samples_per_s=_number(result["samples_per_s"]),
    )


def failed(run: RunFolder, *, label: str) -> FailedRun | None:
    """Why a run has no result, or, where it has one, why it ended badly all the same (a breached budget)."""
    if run.error is not None:
        return FailedRun(run=run.name, label=label, exit_code=run.error["exit_code"], message=run.error["message"])
    if run.result is None:
        return FailedRun(run=run.name, label=label, exit_code=None, message="not finished: it still runs or was killed")
    return None


def _read(path: Path, *, folder: Path) -> RunFolder:
    result = read_json(path / RESULT) if (path / RESULT).is_file() else None
    if result is not None and result.get("schema", 0) > RESULT_SCHEMA:
        raise BadInputError(
            f"{path / RESULT} has schema {result['schema']}, and this version of baoc reads up to {RESULT_SCHEMA}: "
            "upgrade baoc"
        )
    error = read_json(path / ERROR) if (path / ERROR).is_file() else None
    name = path.name if path == folder else str(path.relative_to(folder))
    return RunFolder(path=path, name=name, settings=_settings(path, result=result), result=result, error=error)


def _settings(path: Path, *, result: Mapping[str, Any] | None) -> dict[str, Any]:
    """`config.yaml` as dotted keys without what is incidental; else what the result itself says of its settings."""
    file = path / CONFIG
    if not file.is_file():
        if result is None:
            return {}
        told = {key: result[key] for key in ("model", "allocator", "risk", "num_steps")}
        return told | {"budget.name": result["budget"]["name"], "budget.limit": result["budget"]["limit"]}
    try:
        config = yaml.safe_load(file.read_text())
    except yaml.YAMLError as error:
        raise BadInputError(f"{file} is not YAML ({str(error).splitlines()[0]}): it was damaged; remove it") from None
    return _flat({key: value for key, value in (config or {}).items() if key not in INCIDENTAL})


def _flat(value: Mapping[str, Any], *, prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, item in value.items():
        if isinstance(item, Mapping) and item:
            flat |= _flat(item, prefix=f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = item
    return flat


def _short_budget(settings: Mapping[str, Any]) -> dict[str, Any]:
    name = settings.get("budget.name")
    rest = {key: value for key, value in settings.items() if not key.startswith("budget.")}
    return ({"budget": name} if name is not None else {}) | rest


def _natural(path: Path) -> list[tuple[bool, int, str]]:
    """Sorts 2 before 10: numbers at the beginning of a folder's name by value, before names without one."""
    keys = []
    for part in path.parts:
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        keys.append((not digits, int(digits or 0), part))
    return keys


def _number(value: float | None) -> float:
    return float("nan") if value is None else float(value)
