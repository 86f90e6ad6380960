"""Finds run folders, and labels runs by the settings in which they differ."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from baoc.core.compared import COMPARED
from baoc.errors import BadInputError
from baoc.tracking.files import read_json, read_record
from baoc.types import RESULT_SCHEMA, FailedRun, FrontierPoint

RESULT, ERROR, CONFIG = "result.json", "error.json", "config.yaml"
STUDY_FILE = "study.json"  # in a study's folder
NUMBER = (int, float, type(None))  # null in JSON is a number that is not finite
_RESULT_FIELDS: dict[str, Any] = {
    **dict.fromkeys(("task", "model", "allocator", "risk", "command", "quality.name", "budget.name"), str),
    **dict.fromkeys(("peak_bytes", "state_bytes", "state_bytes_adamw", "num_steps", "seed"), int),
    **dict.fromkeys(("samples_per_s", "risk_total", "quality.value"), NUMBER),
}
_ERROR_FIELDS = {"message": str, "exit_code": int}
SKIPPED_FOLDERS = {".hydra", "wandb", "race"}  # inside a run; their config.yaml is not a run's
_UNQUOTED = re.compile(  # text that Hydra reads as a string without quotes
    r"(?!(?:true|false|null|[-+]?(?:nan|inf|[\d_.]+(?:e[-+]?[\d_]+)?))\Z)[A-Z0-9_./:+@-]+", re.IGNORECASE | re.ASCII
)
_SETS_BLOCKS = re.compile(r"(?<![\w.])(?:blocks[.=]|experiments=)")
HASH_MARK, HASH_CHARS = "@", 8  # as in digits@1f2e3d4c
Workload = tuple[str, str, str, str]  # task, model, data set, quality metric


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFolder:
    """A run's folder: its flattened settings, its result if it finished, and its error if it failed."""

    path: Path
    name: str  # its path below the folder that was searched
    settings: Mapping[str, Any]
    result: Mapping[str, Any] | None
    error: Mapping[str, Any] | None
    trains: bool = True  # False for a race and a plan, which have no result where all went well
    study: str = ""  # name of its study's folder, set by the report

    @property
    def workload(self) -> Workload:
        """(task, model, data set, quality metric): runs are comparable if these agree.

        The data set is its name and a hash of its content and settings, where the result has that: `digits@1f2e3d4c`.
        """
        result = result_of(self)
        dataset = str(result.get("dataset") or self.settings.get("dataset.name", ""))
        sha = str(result.get("data_sha256") or "")[:HASH_CHARS]
        dataset = f"{dataset}{HASH_MARK}{sha}" if sha else dataset
        return result["task"], result["model"], dataset, result["quality"]["name"]


def result_of(run: RunFolder) -> Mapping[str, Any]:
    """The content of result.json; the run must have finished."""
    assert run.result is not None
    return run.result


def read_study_file(folder: Path) -> Mapping[str, Any]:
    """The content of a study folder's study.json; empty for other folders."""
    return read_json(folder / STUDY_FILE) if (folder / STUDY_FILE).is_file() else {}


def find_runs(folder: Path) -> list[RunFolder]:
    """Every run at or below `folder`, finished or not, ordered by name (leading numbers by value)."""
    folders = {path.parent for name in (RESULT, ERROR, CONFIG) for path in folder.rglob(name)}
    runs = [path for path in folders if not set(path.relative_to(folder).parts) & SKIPPED_FOLDERS]
    return [_read(path, folder=folder) for path in sorted(runs, key=_natural_key)]


def setting_labels(runs: Sequence[RunFolder]) -> list[str]:
    """For each run its `varying_settings` as overrides, such as `budget=state_25 allocator=random`; its name if it has
    none. Risk weights of 1 are not shown."""
    labels = []
    for run, settings in zip(runs, varying_settings(runs), strict=True):
        overrides = [
            f"{key}={_override_text(value)}"
            for key, value in settings.items()
            if not (key.startswith("risk.weights.") and value == 1)
        ]
        labels.append(" ".join(overrides) or run.name)
    return labels


def varying_settings(runs: Sequence[RunFolder]) -> list[dict[str, Any]]:
    """For each run the settings that vary among the runs of its workload; the budget if none does. A budget is one
    setting, its name, unless different budgets share a name. A job that failed before it was configured has none."""
    workloads: dict[tuple[str, ...], list[int]] = {}
    for index, run in enumerate(runs):
        key = tuple(str(run.settings.get(f"{group}.name")) for group in ("task", "model", "dataset"))
        workloads.setdefault(key, []).append(index)
    varying_of_run: list[dict[str, Any]] = [{} for _ in runs]
    for indices in workloads.values():
        all_settings = [dict(runs[index].settings) for index in indices]
        configured = [settings for settings in all_settings if settings]
        budgets = {str(sorted((k, str(v)) for k, v in s.items() if k.startswith("budget."))) for s in configured}
        if len(budgets) == len({settings.get("budget.name") for settings in configured}):
            all_settings = [_budget_as_name(settings) for settings in all_settings]
            configured = [settings for settings in all_settings if settings]
        keys = dict.fromkeys(key for settings in all_settings for key in settings)
        varying = [key for key in keys if len({str(settings.get(key)) for settings in configured}) > 1] or ["budget"]
        for index, settings in zip(indices, all_settings, strict=True):
            varying_of_run[index] = {key.removesuffix(".name"): settings[key] for key in varying if key in settings}
    return varying_of_run


def _override_text(value: Any) -> str:
    """A value as Hydra's command line reads it back."""
    if isinstance(value, list):
        return f"[{','.join(map(_override_text, value))}]"  # without spaces, at which a shell splits
    if isinstance(value, Mapping):
        return f"{{{','.join(f'{key}:{_override_text(item)}' for key, item in value.items())}}}"
    if isinstance(value, str):
        return quote(value)
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def quote(value: str) -> str:
    """A string for Hydra's command line, in quotes if it needs them."""
    if _UNQUOTED.fullmatch(value):
        return value
    # Hydra reads backslashes as escapes before a quote only
    escaped = re.sub(r"(\\*)('|\Z)", lambda match: match[1] * 2 + ("\\'" if match[2] else ""), value)
    return f"'{escaped}'"


def unquote(text: str) -> str:
    """The string that Hydra reads from a value in quotes, as `quote` writes it; other values unchanged."""
    mark = text[:1]
    if len(text) < 2 or mark not in ("'", '"') or text[-1] != mark:
        return text
    return re.sub(rf"(\\+)({mark}|\Z)", lambda match: match[1][: len(match[1]) // 2] + match[2], text[1:-1])


def frontier_point(run: RunFolder, *, label: str) -> FrontierPoint:
    """A finished run as a point. Null in JSON stands for a number that is not finite and becomes NaN."""
    result = result_of(run)
    return FrontierPoint(
        run=run.name,
        task=result["task"],
        model=result["model"],
        label=label,
        quality=_nan_if_null(result["quality"]["value"]),
        peak_bytes=result["peak_bytes"],
        state_bytes=result["state_bytes"],
        samples_per_s=_nan_if_null(result["samples_per_s"]),
        num_ranks=result.get("num_ranks", 1),  # runs of earlier versions had one
    )


def failed_run(run: RunFolder, *, label: str) -> FailedRun | None:
    """Why a run has no result, or failed despite one (a breached budget); None for a good one."""
    if run.error is not None:
        return FailedRun(run=run.name, label=label, exit_code=run.error["exit_code"], message=run.error["message"])
    if run.result is None:
        return FailedRun(run=run.name, label=label, exit_code=None, message="not finished: it still runs or was killed")
    return None


def _read(path: Path, *, folder: Path) -> RunFolder:
    result = read_record(path / RESULT, _RESULT_FIELDS) if (path / RESULT).is_file() else None
    schema = 0 if result is None else result.get("schema")
    if isinstance(schema, int) and schema > RESULT_SCHEMA:
        raise BadInputError(
            f"{path / RESULT} has schema {schema}, and this version of baoc reads up to {RESULT_SCHEMA}: upgrade baoc"
        )
    error = read_record(path / ERROR, _ERROR_FIELDS) if (path / ERROR).is_file() else None
    name = path.name if path == folder else str(path.relative_to(folder))
    config = _read_config(path)
    settings, trains = _settings(config, path=path, result=result), (config or {}).get("mode") not in ("race", "plan")
    return RunFolder(path=path, name=name, settings=settings, result=result, error=error, trains=trains)


def _read_config(path: Path) -> dict[str, Any] | None:
    file = path / CONFIG
    if not file.is_file():
        return None
    try:
        config = yaml.safe_load(file.read_text())
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise BadInputError(f"{file} is not YAML ({str(error).splitlines()[0]}): it was damaged; remove it") from None
    if not isinstance(config or {}, dict):
        raise BadInputError(f"{file} holds no settings but {str(config)[:40]!r}: it was damaged; remove it")
    return config or {}


def _settings(config: Mapping[str, Any] | None, *, path: Path, result: Mapping[str, Any] | None) -> dict[str, Any]:
    """The configuration as dotted keys, of settings that make a point of its own; without it, the result's settings."""
    if config is None:
        if result is None:
            return {}
        settings = {key: result[key] for key in ("model", "allocator", "risk", "num_steps")}
        return settings | {"budget.name": result["budget"]["name"], "budget.limit": result["budget"].get("limit")}
    settings = _flatten({key: value for key, value in config.items() if key not in COMPARED or COMPARED[key].frontier})
    environment = path / "env.json"  # of a run without a result too
    command = (result or (read_record(environment, {}) if environment.is_file() else None) or {}).get("command")
    if command is not None and settings.get("blocks.by") == "layer_role" and not _SETS_BLOCKS.search(str(command)):
        settings["blocks.by"] = "auto"  # what earlier versions called the default
    return settings


def _flatten(value: Mapping[str, Any], *, prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, item in value.items():
        if isinstance(item, Mapping) and item:
            flat |= _flatten(item, prefix=f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = item
    return flat


def _budget_as_name(settings: Mapping[str, Any]) -> dict[str, Any]:
    name = settings.get("budget.name")
    rest = {key: value for key, value in settings.items() if not key.startswith("budget.")}
    return ({"budget": name} if name is not None else {}) | rest


def _natural_key(path: Path) -> list[tuple[bool, int, str]]:
    """Sort key for paths: leading numbers of a folder's name by value, before names without one."""
    numbers = [re.sub(r"[^0-9].*", "", part, flags=re.DOTALL) for part in path.parts]
    return [(not number, int(number or 0), part) for number, part in zip(numbers, path.parts, strict=True)]


def _nan_if_null(value: float | None) -> float:
    return float("nan") if value is None else float(value)
