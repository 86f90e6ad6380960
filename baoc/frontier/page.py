"""frontier.html: one page that compares frontiers and opens without a network.

All values are computed here and embedded as JSON; the page's script only filters and draws.
"""

import csv
import html
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib.resources import files
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
    failed_jobs,
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
from baoc.frontier.runs import RunFolder, Workload, result_of, varying_settings
from baoc.frontier.summary import ComparedPoint, MemoryLevel, best_at_levels, summary_sentence
from baoc.tracking.files import read_json, read_jsonl, write_text
from baoc.types import FrontierPoint
from baoc.units import MIB

MAX_CURVE_POINTS = 200
MIN_RUNS_FOR_IMPORTANCES = 20  # fewer have a best quarter of under 5
SEED_LEVEL = 0.95  # of the intervals over seeds
_LONG_NUMBER = re.compile(r"(?<![^\[,])-?\d*\.\d{4,}(e-?\d+)?(?![^,\]])")  # a whole value or element of a list


def page_data(
    runs: Sequence[RunFolder], *, title: str, beside: Path, race: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The page's JSON: points, hypervolumes and blocks per workload (`kinds`), the failed jobs, and a race. Folders of
    runs are relative to the folder `beside`, as the page may be uploaded."""
    names = label_runs(runs)
    jobs = failed_jobs(runs, names=names)
    kinds = [_workload_data(workload, members, names=names) for workload, members in group_by_workload(runs)]
    for point in [point for kind in kinds for view in (kind, kind["study"]) if view for point in view["points"]]:
        point["folders"] = [Path(relpath(folder, beside)).as_posix() for folder in point["folders"]]
    return {
        "title": title,
        "kinds": kinds,
        "failed": [{"run": job.run, "label": job.label, "code": job.exit_code, "message": job.message} for job in jobs],
        "race": None if race is None else race_table(race),
    }


def race_table(race: Mapping[str, Any]) -> dict[str, Any]:
    """The table of a race.json as text, and its sentences. Recipes are sorted by the number of stages they
    ran, then by their mean in the last one."""
    stages = list(dict.fromkeys(stage for row in race["entrants"] for stage in row["stages"]))

    sign = -1 if race["higher_is_better"] else 1

    def rank(row: Mapping[str, Any]) -> tuple[int, float]:
        means = [stage["mean"] for stage in row["stages"].values()]
        return -len(means), inf if not means or means[-1] is None else sign * means[-1]

    rows = []
    for row in sorted(race["entrants"], key=rank):
        cells = [_score_text(row["stages"].get(stage)) for stage in stages]
        rate = "" if row["rate"] is None else f"{row['rate']:g}"
        left = row["left"] or ("a control, never chosen" if row["control"] else "")
        kind = "chosen" if row["name"] == race["choice"] else left
        rows.append([row["name"], f"{row['state_share']:.1%}", rate, *cells, kind])
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
    data = json.dumps(page_data(runs, title=title, beside=path.parent, race=race), allow_nan=False)
    for mark in "&<>":  # in HTML `</script` would end the script that holds it, and `<!--<script` keep it from ending
        data = data.replace(mark, f"\\u{ord(mark):04x}")
    parts = {
        "TITLE": html.escape(title),
        "DATA": data,
        "SCRIPT": (assets / "page.js").read_text(encoding="utf-8"),
        "PLOTLY": get_plotlyjs(),
    }
    text = (assets / "page.html").read_text(encoding="utf-8")
    write_text(path, re.sub(f"%({'|'.join(parts)})%", lambda mark: parts[mark[1]], text))  # once: values may hold marks


def _workload_data(workload: Workload, runs: Sequence[RunFolder], *, names: RunLabels) -> dict[str, Any]:
    """One workload, grouped by family; `study` has the groups by study if there are several."""
    task, model, dataset, quality = workload
    settings = {run.path: own for run, own in zip(runs, varying_settings(runs), strict=True)}
    data = {
        "name": " / ".join(part for part in (task, model, dataset) if part),
        "quality": quality,
        "higher": quality_objective(runs).higher_is_better,
        "runs": [run.name for run in runs],
        "settings": list(dict.fromkeys(key for own in settings.values() for key in own)),
        "importances": importances(runs, settings=settings),
        "study": None,
    }
    data |= _group_data(runs, names=names, settings=settings, group=by_family, metric=quality)
    if has_several_studies(runs):
        data["study"] = _group_data(runs, names=names, settings=settings, group=by_study, metric=quality)
    return data


def importances(runs: Sequence[RunFolder], *, settings: Mapping[Path, Mapping[str, Any]]) -> dict[str, float]:
    """Setting -> its share in telling the best quarter of runs from the others: PED-ANOVA (arXiv 2304.10255), as Optuna
    has it. Empty for few runs, and without Optuna.

    Settings that some runs lack are left out, as are runs that diverged.
    """
    try:
        import optuna
    except ImportError:
        return {}
    known = [(settings[run.path], result_of(run)["quality"]) for run in runs]
    known = [(own, quality) for own, quality in known if isinstance(quality["value"], int | float)]
    keys = [key for key in dict.fromkeys(key for own, _ in known for key in own) if all(key in own for own, _ in known)]
    if len(known) < MIN_RUNS_FOR_IMPORTANCES or not keys:
        return {}
    space: dict[str, Any] = {}
    for key in keys:
        values = [own[key] for own, _ in known]
        if all(isinstance(value, int | float) and not isinstance(value, bool) for value in values):
            low, high = min(values), max(values)
            space[key] = optuna.distributions.FloatDistribution(low, high, log=low > 0 and high > 20 * low)
        else:
            space[key] = optuna.distributions.CategoricalDistribution(sorted({str(value) for value in values}))
    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)  # it tells of each study that is created
    study = optuna.create_study(direction="maximize" if known[0][1]["higher_is_better"] else "minimize")
    optuna.logging.set_verbosity(verbosity)
    for own, quality in known:
        numeric = {key: isinstance(space[key], optuna.distributions.FloatDistribution) for key in keys}
        params = {key: float(own[key]) if numeric[key] else str(own[key]) for key in keys}
        trial = optuna.trial.create_trial(params=params, distributions=space, value=quality["value"])
        study.add_trial(trial)
    evaluator = optuna.importance.PedAnovaImportanceEvaluator(target_quantile=0.25, region_quantile=1.0)
    return optuna.importance.get_param_importances(study, evaluator=evaluator)


def _group_data(
    runs: Sequence[RunFolder],
    *,
    names: RunLabels,
    settings: Mapping[Path, Mapping[str, Any]],
    group: Grouping,
    metric: str,
) -> dict[str, Any]:
    objective = quality_objective(runs)
    own_names = labels_with_study(runs, names=names) if group is by_study else names
    seeds: dict[str, list[RunFolder]] = {}
    for run in runs:
        seeds.setdefault(own_names[run.path], []).append(run)
    points = workload_frontier(runs, names=own_names).points
    groups = [group(seeds[entry.label][0]) for entry in points]
    entries = []
    for entry, own in zip(points, groups, strict=True):
        result = result_of(seeds[entry.label][0])
        budget = result["budget"]
        limit = int(budget["limit"]) if budget["kind"] == "memory" and budget["limit"] else None
        entries.append(ComparedPoint(point=entry, family=own, allocator=result["allocator"], memory_limit=limit))
    adamw_bytes = max(result_of(run)["state_bytes_adamw"] for run in runs)
    levels = best_at_levels(entries, quality=objective, adamw_bytes=adamw_bytes)
    setting = {entry.label: names[seeds[entry.label][0].path] for entry in points}
    brief, counts = short_names(list(dict.fromkeys(setting.values()))), Counter(setting.values())
    short = {
        entry.label: (f"{own}: " if counts[setting[entry.label]] > 1 else "") + brief[setting[entry.label]]
        for entry, own in zip(points, groups, strict=True)
    }
    summary = summary_sentence(entries, levels, metric=metric, quality=objective, adamw_bytes=adamw_bytes)
    steps = _steps(runs)
    if not steps.isdigit():
        summary = f"Unlike runs: they trained for {steps} steps; give runs of one length. {summary}"
    told = []
    for entry, own in zip(points, groups, strict=True):
        first = seeds[entry.label][0]
        plain = {key: v if isinstance(v, int | float) else str(v) for key, v in settings[first.path].items()}
        about = {"family": own, "short": short[entry.label], "settings": plain}
        told.append(about | _point(entry, seeds[entry.label]))
    return {
        "about": _describe_runs(runs, points=len(entries)),
        "verdict": summary,
        "levels": [_level(level, short=short) for level in levels],
        "points": told,
        "volumes": hypervolume_shares(points, groups=groups, quality=objective),
        "histories": hypervolume_histories(runs, group=group),
        "knees": knee_labels(points, quality=objective),
    }


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
    return (
        f"{len(runs)} finished runs of {result_of(runs[0])['num_params']:,} parameters, {_steps(runs)} steps, "
        f"{seeds} seed{'s' * (seeds > 1)}: {points} point{'s' * (points > 1)}, "
        "as runs that differ in their seed only are one, and of runs of one seed the first counts."
    )


def _steps(runs: Sequence[RunFolder]) -> str:
    steps = sorted({result_of(run)["num_steps"] for run in runs})
    return f"{steps[0]}" if len(steps) == 1 else f"{steps[0]} to {steps[-1]}"


def short_names(labels: Sequence[str]) -> dict[str, str]:
    """Label -> short name for a figure: values whose keys follow from them, or the name alone of a uniform baseline.
    Labels whose short names would be equal stay whole."""
    names = {label: _short_name(label) for label in labels}
    counts = Counter(names.values())
    return {label: name if counts[name] == 1 else label for label, name in names.items()}


def _short_name(label: str) -> str:
    words: dict[str, str] = {}
    for word in re.split(r" (?=[\w.]+=)", label):
        key, _, value = word.partition("=")
        words[key] = _LONG_NUMBER.sub(lambda digits: f"{float(digits[0]):.4g}", value)
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


def _half_interval(point: FrontierPoint) -> float | None:
    """Half of Student's interval at SEED_LEVEL of the mean over seeds; None for one seed."""
    if point.quality_spread is None:
        return None
    return half_interval(point.quality_spread, n=point.num_seeds, level=SEED_LEVEL)


def _point(entry: FrontierPoint, seeds: Sequence[RunFolder]) -> dict[str, Any]:
    result = result_of(seeds[0])
    return {
        "label": entry.label,
        "folders": [run.path for run in seeds],
        "allocator": result["allocator"],
        "budget": result["budget"]["name"],
        "quality": _null_if_not_finite(entry.quality),
        "spread": entry.quality_spread,
        "interval": _half_interval(entry),
        "seeds": entry.num_seeds,
        "ranks": entry.num_ranks,
        "peak_mib": entry.peak_bytes / MIB,
        "state_mib": entry.state_bytes / MIB,
        "state_share": 100 * entry.state_bytes / result["state_bytes_adamw"],
        "samples_per_s": _null_if_not_finite(entry.samples_per_s),
        "risk": _null_if_not_finite(result["risk_total"]),
        "dominated": entry.dominated,
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
    """What a run's last plan was chosen by, with the figures that are known of the choice; empty where a run of an
    earlier version did not say."""
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
    chosen, adamw_bytes, own = _read_choices(run), dict[str, float](), dict[str, float]()
    try:
        with file.open(encoding="utf-8", newline="") as rows:
            for row in csv.DictReader(rows):
                block = row["block"]
                if row["spec"] == "adamw":
                    adamw_bytes[block] = float(row["state_bytes"])
                if row["spec"] == chosen.get(block):
                    own[block] = float(row["state_bytes"])
    except (KeyError, TypeError, ValueError, csv.Error) as error:
        raise BadInputError(f"{file} is no table of candidates ({error}): it was damaged; remove it") from error
    return {block: 100 * kept / adamw_bytes[block] for block, kept in own.items() if adamw_bytes.get(block)}


def _read_curves(run: RunFolder, *, keys: Sequence[str]) -> dict[str, list[list[float]]]:
    """Metric -> (step, value) pairs, evenly thinned to MAX_CURVE_POINTS with the last one kept; absent metrics are left
    out."""
    file = run.path / "metrics.jsonl"
    rows = read_jsonl(file) if file.is_file() else []
    curves: dict[str, list[list[float]]] = {}
    for key in keys:
        found = [
            [row["step"], row[key]] for row in rows if isinstance(row.get(key), int | float) and isfinite(row[key])
        ]
        stride = -(-len(found) // MAX_CURVE_POINTS) or 1
        if found:
            thinned = found[::stride]
            curves[key] = thinned if thinned[-1] is found[-1] else [*thinned, found[-1]]
    return curves


def _null_if_not_finite(value: float | None) -> float | None:
    return value if value is not None and isfinite(value) else None
