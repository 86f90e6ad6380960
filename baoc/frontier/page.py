"""frontier.html: one page that compares frontiers and opens without a network.

All values are computed here and embedded as JSON; the page's script only filters and draws.
"""

import csv
import html
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from importlib.resources import files
from itertools import chain
from math import inf, isfinite
from os.path import relpath
from pathlib import Path
from typing import Any

from baoc.core.statistics import half_interval
from baoc.errors import BadInputError
from baoc.frontier.comparable_runs import (
    Grouping,
    RunLabels,
    by_family,
    by_study,
    group_by_workload,
    has_several_studies,
    hypervolume_histories,
    hypervolume_shares,
    knee_labels,
    label_runs,
    labels_with_study,
    quality_objective,
    workload_frontier,
)
from baoc.frontier.runs import RunFolder, Workload, failed_run, result_of, varying_settings
from baoc.frontier.summary import ComparedPoint, MemoryLevel, best_at_levels, summary_sentence
from baoc.tracking.files import read_json, read_jsonl, write_text
from baoc.types import FrontierPoint
from baoc.units import MIB

MAX_CURVE_POINTS = 200
MIN_RUNS_FOR_IMPORTANCES = 20  # fewer have a best quarter of under 5
SEED_LEVEL = 0.95  # of the intervals over seeds
_LONG_NUMBER = re.compile(r"(?<![^\[,=])-?\d*\.\d{4,}(e-?\d+)?(?![^,\] ])")  # a value, or an element of a list


def page_data(
    runs: Sequence[RunFolder], *, title: str, page_folder: Path, race: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The page's JSON: per workload its points, hypervolumes and blocks; the failed jobs; and a race.

    Folders of runs are relative to `page_folder`, so that the page can be sent elsewhere together with them.
    """
    names = label_runs(runs)
    failed = [(run, job) for run in runs if (job := failed_run(run, label=names[run.path])) is not None]
    failed_names = short_names([job.label for _, job in failed], shorten=shorten_numbers)
    return {
        "title": title,
        "workloads": [
            _workload_data(workload, members, names=names, page_folder=page_folder)
            for workload, members in group_by_workload(runs)
        ],
        "failed": [
            {
                "run": job.run,
                "label": failed_names[job.label],
                "code": job.exit_code,
                "message": job.message,
                "folder": _relative_folder(run, page_folder=page_folder),
            }
            for run, job in failed
        ],
        "race": None if race is None else race_table(race),
    }


def race_table(race: Mapping[str, Any]) -> dict[str, Any]:
    """The table of a race.json as text, and its sentences. Recipes are sorted by the number of stages that they ran,
    then by their mean in the last one."""
    stages = list(dict.fromkeys(stage for row in race["entrants"] for stage in row["stages"]))
    sign = -1 if race["higher_is_better"] else 1

    def rank(row: Mapping[str, Any]) -> tuple[int, float]:
        means = [stage["mean"] for stage in row["stages"].values()]
        return -len(means), inf if not means or means[-1] is None else sign * means[-1]

    rows = []
    for row in sorted(race["entrants"], key=rank):
        cells = [_score_text(row["stages"].get(stage)) for stage in stages]
        rate = "" if row["rate"] is None else f"{row['rate']:g}"
        remark = row["left"] or ("a control, never chosen" if row["control"] else "")
        remark = "chosen" if row["name"] == race["choice"] else remark
        rows.append([row["name"], f"{row['state_share']:.1%}", rate, *cells, remark])
    lines = [race["told"], race["verdict"]["reason"], race["claim"]]
    return {"head": ["recipe", "state", "rate", *stages, ""], "rows": rows, "lines": lines}


def _score_text(stage: Mapping[str, Any] | None) -> str:
    if stage is None:
        return ""
    if stage["mean"] is None:
        return "diverged"
    return f"{stage['mean']:.4g}" + ("" if stage["sd"] is None else f" ({stage['sd']:.2g})")


def write_page(runs: Sequence[RunFolder], *, path: Path, title: str, race: Mapping[str, Any] | None = None) -> None:
    """Writes the page with Plotly's script in it (about 4.5 MB)."""
    from plotly.offline import get_plotlyjs

    assets = files("baoc.frontier") / "assets"
    data = json.dumps(page_data(runs, title=title, page_folder=path.parent, race=race), allow_nan=False)
    for character in "&<>":  # in HTML `</script` ends the script that holds it; `<!--<script` keeps it from ending
        data = data.replace(character, f"\\u{ord(character):04x}")
    parts = {
        "TITLE": html.escape(title),
        "DATA": data,
        "SCRIPT": (assets / "page.js").read_text(encoding="utf-8"),
        "PLOTLY": get_plotlyjs(),
    }
    text = (assets / "page.html").read_text(encoding="utf-8")
    # one pass, since values may hold placeholders too
    write_text(path, re.sub(f"%({'|'.join(parts)})%", lambda placeholder: parts[placeholder[1]], text))


def _workload_data(
    workload: Workload, runs: Sequence[RunFolder], *, names: RunLabels, page_folder: Path
) -> dict[str, Any]:
    """One workload with its points grouped by family. `study` has the groups by study, if there are several studies."""
    task, model, dataset, quality = workload
    settings = dict(zip((run.path for run in runs), varying_settings(runs), strict=True))
    data = {
        "name": " / ".join(part for part in (task, model, dataset) if part),
        "quality": quality,
        "higher": quality_objective(runs).higher_is_better,
        "runs": [run.name for run in runs],
        "settings": list(dict.fromkeys(chain.from_iterable(settings.values()))),
        "importances": importances(runs, settings=settings),
        "study": None,
    }
    group_data = partial(_group_data, runs, names=names, settings=settings, metric=quality, page_folder=page_folder)
    data |= group_data(group=by_family)
    if has_several_studies(runs):
        data["study"] = group_data(group=by_study)
    return data


def importances(runs: Sequence[RunFolder], *, settings: Mapping[Path, Mapping[str, Any]]) -> dict[str, float]:
    """Setting -> its share, of a sum of 1, in what separates the best quarter of runs from the others: Optuna's
    PED-ANOVA (arXiv 2304.10255). Empty for fewer than MIN_RUNS_FOR_IMPORTANCES runs, and without Optuna.

    Settings that some runs lack are left out, as are runs that diverged.
    """
    try:
        import optuna
    except ImportError:
        return {}
    runs = [run for run in runs if isinstance(result_of(run)["quality"]["value"], int | float)]
    if len(runs) < MIN_RUNS_FOR_IMPORTANCES:
        return {}
    settings_of_runs = [settings[run.path] for run in runs]
    keys = [key for key in settings_of_runs[0] if all(key in own for own in settings_of_runs)]
    if not keys:
        return {}
    space: dict[str, Any] = {}
    columns: dict[str, list[Any]] = {}
    for key in keys:
        values = [own[key] for own in settings_of_runs]
        if all(isinstance(value, int | float) and not isinstance(value, bool) for value in values):
            low, high = min(values), max(values)
            columns[key] = list(map(float, values))
            space[key] = optuna.distributions.FloatDistribution(low, high, log=low > 0 and high > 20 * low)
        else:
            columns[key] = list(map(str, values))
            space[key] = optuna.distributions.CategoricalDistribution(sorted(set(columns[key])))
    qualities = [result_of(run)["quality"] for run in runs]
    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)  # without a line for the study that is created
    study = optuna.create_study(direction="maximize" if qualities[0]["higher_is_better"] else "minimize")
    optuna.logging.set_verbosity(verbosity)
    for i, quality in enumerate(qualities):
        params = {key: column[i] for key, column in columns.items()}
        study.add_trial(optuna.trial.create_trial(params=params, distributions=space, value=quality["value"]))
    evaluator = optuna.importance.PedAnovaImportanceEvaluator(target_quantile=0.25, region_quantile=1.0)
    return optuna.importance.get_param_importances(study, evaluator=evaluator)


def _group_data(
    runs: Sequence[RunFolder],
    *,
    names: RunLabels,
    settings: Mapping[Path, Mapping[str, Any]],
    group: Grouping,
    metric: str,
    page_folder: Path,
) -> dict[str, Any]:
    """The points of one workload with the group of each, and what compares the groups."""
    quality = quality_objective(runs)
    labels = labels_with_study(runs, names=names) if group is by_study else names
    seeds: dict[str, list[RunFolder]] = {}  # label -> runs that differ in their seed only
    for run in runs:
        seeds.setdefault(labels[run.path], []).append(run)
    points = workload_frontier(runs, names=labels).points
    first_runs = [seeds[point.label][0] for point in points]
    families = [group(run) for run in first_runs]
    short = _point_names([point.label for point in points], families, names=[names[run.path] for run in first_runs])
    compared = [
        ComparedPoint(
            point=point, family=family, allocator=result_of(run)["allocator"], memory_limit=_memory_limit_bytes(run)
        )
        for point, family, run in zip(points, families, first_runs, strict=True)
    ]
    adamw_bytes = max(result_of(run)["state_bytes_adamw"] for run in runs)
    levels = best_at_levels(compared, quality=quality, adamw_bytes=adamw_bytes)
    summary = summary_sentence(compared, levels, metric=metric, quality=quality, adamw_bytes=adamw_bytes)
    steps = _steps(runs)
    if not steps.isdigit():
        summary = f"Unlike runs: they trained for {steps} steps; give runs of one length. {summary}"
    rows = []
    for point, family, run in zip(points, families, first_runs, strict=True):
        plain = {key: v if isinstance(v, int | float) else str(v) for key, v in settings[run.path].items()}
        row = {"family": family, "short": short[point.label], "settings": plain}
        rows.append(row | _point_data(point, seeds[point.label], page_folder=page_folder))
    return {
        "about": _describe_runs(runs, points=len(points)),
        "verdict": summary,
        "levels": [_level(level, short=short) for level in levels],
        "points": rows,
        "volumes": hypervolume_shares(points, groups=families, quality=quality),
        "histories": hypervolume_histories(runs, group=group),
        "knees": knee_labels(points, quality=quality),
    }


def _point_names(labels: Sequence[str], families: Sequence[str], *, names: Sequence[str]) -> dict[str, str]:
    """Label -> short name of a point, after its family where several points have the same settings (`names`)."""
    short, counts = short_names(list(dict.fromkeys(names))), Counter(names)
    return {
        label: (f"{family}: " if counts[name] > 1 else "") + short[name]
        for label, family, name in zip(labels, families, names, strict=True)
    }


def _memory_limit_bytes(run: RunFolder) -> int | None:
    """The limit of a run's memory budget; None for another kind of budget."""
    budget = result_of(run)["budget"]
    return int(budget["limit"]) if budget["kind"] == "memory" and budget["limit"] else None


def _level(level: MemoryLevel, *, short: Mapping[str, str]) -> dict[str, Any]:
    best = {
        family: {
            "quality": entry.point.quality,
            "interval": _half_interval(entry.point),
            "seeds": entry.point.num_seeds,
            "name": short[entry.point.label],
            "of": of,
        }
        for family, (entry, of) in level.best.items()
    }
    return {"name": level.name, "best": best}


def _describe_runs(runs: Sequence[RunFolder], *, points: int) -> str:
    """The number of runs, parameters, steps, seeds and points, for readers who did not start them."""
    seeds = len({result_of(run)["seed"] for run in runs})
    text = (
        f"{len(runs)} finished runs of {result_of(runs[0])['num_params']:,} parameters, {_steps(runs)} steps, "
        f"{seeds} seed{'s' * (seeds > 1)}: {points} point{'s' * (points > 1)}"
    )
    if points == len(runs):
        return f"{text}."
    return f"{text}, as runs that differ in their seed only are one, and of runs of one seed the first counts."


def _steps(runs: Sequence[RunFolder]) -> str:
    steps = sorted({result_of(run)["num_steps"] for run in runs})
    return f"{steps[0]}" if len(steps) == 1 else f"{steps[0]} to {steps[-1]}"


def shorten_numbers(text: str) -> str:
    """The text with four digits of each number, or as many as do not make a whole one of it, as of a beta of .99999."""

    def shorten(digits: re.Match[str]) -> str:
        texts = (f"{float(digits[0]):.{count}g}" for count in range(4, 17))
        return next((text for text in texts if set(text) & set(".e")), digits[0])

    return _LONG_NUMBER.sub(shorten, text)


def _short_name(label: str) -> str:
    """A label without keys that the value makes obvious (`budget=8gb` becomes `8gb`); of a baseline its name alone."""
    words: dict[str, str] = {}
    for word in re.split(r" (?=[\w.]+=)", label):
        key, _, value = word.partition("=")
        words[key] = shorten_numbers(value)
    allocator = words.get("allocator", "")
    uniform = allocator.startswith("uniform_")
    parts = [allocator.removeprefix("uniform_")] if allocator else []
    for key, value in words.items():
        if key in ("allocator", "reallocation.mode") or value in ("null", ""):  # the allocator implies the mode
            continue
        if (key == "risk" and (uniform or allocator == "random")) or (uniform and value == "unlimited"):
            continue
        if uniform and key == "optim.matching" and value == "displacement":  # the default
            continue
        parts.append(value if key in ("budget", "risk", "optim.matching") else f"{key.rpartition('.')[2]} {value}")
    return " ".join(parts) or label


def short_names(labels: Iterable[str], *, shorten: Callable[[str], str] = _short_name) -> dict[str, str]:
    """Label -> short name. Labels whose short names would be equal are kept as they are."""
    names = {label: shorten(label) for label in labels}
    counts = Counter(names.values())
    return {label: name if counts[name] == 1 else label for label, name in names.items()}


def _relative_folder(run: RunFolder, *, page_folder: Path) -> str:
    return Path(relpath(run.path, page_folder)).as_posix()


def _half_interval(point: FrontierPoint) -> float | None:
    """Half of Student's interval at SEED_LEVEL of the mean over seeds; None for one seed."""
    if point.quality_spread is None:
        return None
    return half_interval(point.quality_spread, n=point.num_seeds, level=SEED_LEVEL)


def _point_data(point: FrontierPoint, seeds: Sequence[RunFolder], *, page_folder: Path) -> dict[str, Any]:
    """A point of the page: the mean over `seeds`; command, plan and curves are those of the first seed."""
    result = result_of(seeds[0])
    return {
        "label": point.label,
        "folders": [_relative_folder(run, page_folder=page_folder) for run in seeds],
        "allocator": result["allocator"],
        "budget": result["budget"]["name"],
        "quality": _null_if_not_finite(point.quality),
        "spread": point.quality_spread,
        "interval": _half_interval(point),
        "seeds": point.num_seeds,
        "ranks": point.num_ranks,
        "peak_mib": point.peak_bytes / MIB,
        "state_mib": point.state_bytes / MIB,
        "state_share": 100 * point.state_bytes / result["state_bytes_adamw"],
        "samples_per_s": _null_if_not_finite(point.samples_per_s),
        "risk": _null_if_not_finite(result["risk_total"]),
        "dominated": point.dominated,
        "command": result["command"],
        "choices": _read_choices(seeds[0]),
        "basis": basis_text(seeds[0]),
        "kept": _kept_state_percent(seeds[0]),
        "curves": _read_curves(seeds[0], keys=("train/loss", result["quality"]["name"])),
    }


def _read_choices(run: RunFolder) -> dict[str, str]:
    allocation = _read_allocation(run)
    return {} if allocation is None else dict(allocation["choices"])


def basis_text(run: RunFolder) -> str:
    """What a run's last plan was chosen by, and the measurements behind it; empty for a run of an earlier version that
    does not record them."""
    basis = (_read_allocation(run) or {}).get("basis")
    if not isinstance(basis, dict) or "by" not in basis or "text" not in basis:
        return ""
    return f"{basis['by']}: {str(basis['text']).removeprefix(str(basis['by']) + ': ')}"


def _read_allocation(run: RunFolder) -> dict[str, Any] | None:
    file = run.path / "allocation.json"
    if not file.is_file():
        return None
    content = read_json(file)
    if not isinstance(content, dict) or not isinstance(content.get("choices"), dict):
        raise BadInputError(f"{file} has no choices: it was damaged or is no file of ours; remove it")
    return content


def _kept_state_percent(run: RunFolder) -> dict[str, float]:
    """Block -> state bytes of its spec in percent of fp32 AdamW's; blocks without both numbers are left out."""
    file = run.path / "candidates.csv"
    if not file.is_file():
        return {}
    chosen = _read_choices(run)
    adamw_bytes: dict[str, float] = {}
    chosen_bytes: dict[str, float] = {}
    try:
        with file.open(encoding="utf-8", newline="") as rows:
            for row in csv.DictReader(rows):
                block = row["block"]
                if row["spec"] == "adamw":
                    adamw_bytes[block] = float(row["state_bytes"])
                if row["spec"] == chosen.get(block):
                    chosen_bytes[block] = float(row["state_bytes"])
    except (KeyError, TypeError, ValueError, csv.Error) as error:
        raise BadInputError(f"{file} is no table of candidates ({error}): it was damaged; remove it") from error
    return {block: 100 * size / adamw_bytes[block] for block, size in chosen_bytes.items() if adamw_bytes.get(block)}


def _read_curves(run: RunFolder, *, keys: Sequence[str]) -> dict[str, list[list[float]]]:
    """Metric -> (step, value) pairs, evenly thinned to about MAX_CURVE_POINTS with the last one; without absent
    metrics."""
    file = run.path / "metrics.jsonl"
    rows = read_jsonl(file) if file.is_file() else []
    curves: dict[str, list[list[float]]] = {}
    for key in keys:
        pairs = [
            [row["step"], row[key]] for row in rows if isinstance(row.get(key), int | float) and isfinite(row[key])
        ]
        if pairs:
            stride = -(-len(pairs) // MAX_CURVE_POINTS)
            thinned = pairs[::stride]
            curves[key] = thinned if thinned[-1] is pairs[-1] else [*thinned, pairs[-1]]
    return curves


def _null_if_not_finite(value: float | None) -> float | None:
    return value if value is not None and isfinite(value) else None
