"""frontier.html: one page that compares frontiers and opens without a network.

Everything the page shows is computed here and lies in it as JSON; its script only filters and draws.
"""

import csv
import html
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib.resources import files
from math import isfinite
from pathlib import Path
from typing import Any

from baoc.frontier.kinds import (
    Grouping,
    Names,
    apart,
    by_family,
    by_kind,
    by_study,
    failed_jobs,
    frontier_of_kind,
    histories,
    knees,
    names_of,
    of_several_studies,
    quality_of,
    volumes,
)
from baoc.frontier.runs import Kind, RunFolder, result_of
from baoc.frontier.verdict import Entry, Level, levels, sentence
from baoc.tracking.files import read_json, read_jsonl, write_text
from baoc.types import FrontierPoint

MOST_CURVE_POINTS = 200


def page_data(runs: Sequence[RunFolder], *, title: str) -> dict[str, Any]:
    """What the page shows, as plain values: per kind of run its points, hypervolumes and blocks; the failed jobs."""
    names = names_of(runs)
    jobs = failed_jobs(runs, names=names)
    return {
        "title": title,
        "kinds": [_kind(kind, members, names=names) for kind, members in by_kind(runs)],
        "failed": [{"run": job.run, "label": job.label, "code": job.exit_code, "message": job.message} for job in jobs],
    }


def write_page(runs: Sequence[RunFolder], *, path: Path, title: str) -> None:
    """Writes the page, Plotly's script included (about 4.5 MB)."""
    from plotly.offline import get_plotlyjs

    assets = files("baoc.frontier") / "assets"
    data = json.dumps(page_data(runs, title=title), allow_nan=False).replace("</", "<\\/")
    text = (assets / "page.html").read_text(encoding="utf-8")
    for mark, value in (
        ("%TITLE%", html.escape(title)),
        ("%DATA%", data),
        ("%SCRIPT%", (assets / "page.js").read_text(encoding="utf-8")),
        ("%PLOTLY%", get_plotlyjs()),
    ):
        text = text.replace(mark, value)
    write_text(path, text)


def _kind(kind: Kind, runs: Sequence[RunFolder], *, names: Names) -> dict[str, Any]:
    """Compared by family; `study` has what differs where runs of several studies are compared by these."""
    task, model, dataset, quality = kind
    told = {
        "name": " / ".join(part for part in (task, model, dataset) if part),
        "quality": quality,
        "higher": quality_of(runs).higher_is_better,
        "runs": [run.name for run in runs],
        "study": None,
    }
    told |= _view(runs, names=names, group=by_family, metric=quality)
    if of_several_studies(runs):
        told["study"] = _view(runs, names=names, group=by_study, metric=quality)
    return told


def _view(runs: Sequence[RunFolder], *, names: Names, group: Grouping, metric: str) -> dict[str, Any]:
    objective = quality_of(runs)
    own_names = apart(runs, names=names) if group is by_study else names
    seeds: dict[str, list[RunFolder]] = {}
    for run in runs:
        seeds.setdefault(own_names[run.path], []).append(run)
    points = frontier_of_kind(runs, names=own_names).points
    groups = [group(seeds[entry.label][0]) for entry in points]
    entries = [_entry(entry, seeds[entry.label], family=own) for entry, own in zip(points, groups, strict=True)]
    whole = max(result_of(run)["state_bytes_adamw"] for run in runs)
    found = levels(entries, quality=objective, adamw_bytes=whole)
    plain = {entry.label: names[seeds[entry.label][0].path] for entry in points}
    brief, often = short_names(list(dict.fromkeys(plain.values()))), Counter(plain.values())
    short = {
        entry.label: (f"{own}: " if often[plain[entry.label]] > 1 else "") + brief[plain[entry.label]]
        for entry, own in zip(points, groups, strict=True)
    }
    return {
        "about": _about(runs, points=len(entries)),
        "verdict": _warning(runs) + sentence(entries, found, metric=metric, quality=objective, adamw_bytes=whole),
        "levels": [_level(level, short=short) for level in found],
        "points": [
            _point(entry, seeds[entry.label], family=own, short=short[entry.label])
            for entry, own in zip(points, groups, strict=True)
        ],
        "volumes": volumes(points, groups=groups, quality=objective),
        "histories": histories(runs, group=group),
        "knees": knees(points, quality=objective),
    }


def _entry(point: FrontierPoint, seeds: Sequence[RunFolder], *, family: str) -> Entry:
    result = result_of(seeds[0])
    budget = result["budget"]
    limit = int(budget["limit"]) if budget["kind"] == "memory" and budget["limit"] else None
    return Entry(point=point, family=family, allocator=result["allocator"], memory_limit=limit)


def _level(level: Level, *, short: Mapping[str, str]) -> dict[str, Any]:
    best = {
        family: {
            "quality": entry.point.quality,
            "spread": entry.point.quality_spread,
            "seeds": entry.point.num_seeds,
            "name": short[entry.point.label],
            "of": of,
        }
        for family, (entry, of) in level.best.items()
    }
    return {"name": level.name, "best": best}


def _about(runs: Sequence[RunFolder], *, points: int) -> str:
    """What the points are, for who did not start them."""
    seeds = len({result_of(run)["seed"] for run in runs})
    return (
        f"{len(runs)} finished runs of {result_of(runs[0])['num_params']:,} parameters, {_steps(runs)} steps, "
        f"{seeds} seed{'s' * (seeds > 1)}: {points} point{'s' * (points > 1)}, "
        "as runs that differ in their seed only are one, and of runs of one seed the first counts."
    )


def _steps(runs: Sequence[RunFolder]) -> str:
    steps = sorted({result_of(run)["num_steps"] for run in runs})
    return f"{steps[0]}" if len(steps) == 1 else f"{steps[0]} to {steps[-1]}"


def _warning(runs: Sequence[RunFolder]) -> str:
    """Before a verdict on runs of which some trained for longer, which is no merit of theirs."""
    steps = _steps(runs)
    return "" if steps.isdigit() else f"Unlike runs: they trained for {steps} steps; give runs of one length. "


def short_names(labels: Sequence[str]) -> dict[str, str]:
    """Label -> what a figure has room for: values without the keys that are plain from them, and of a uniform baseline
    its name alone. Where two would be alike, both keep the whole label."""
    told = {label: _short(label) for label in labels}
    often = Counter(told.values())
    return {label: name if often[name] == 1 else label for label, name in told.items()}


def _short(label: str) -> str:
    words: dict[str, str] = {}
    for word in label.split(" "):
        key, _, value = word.partition("=")
        words[key] = value
    allocator = words.get("allocator", "")
    uniform = allocator.startswith("uniform_")
    told = [allocator.removeprefix("uniform_")] if allocator else []
    for key, value in words.items():
        if key in ("allocator", "reallocation.mode") or value in ("null", ""):  # whether blocks move follows
            continue
        if (key == "risk" and (uniform or allocator == "random")) or (uniform and value == "unlimited"):
            continue
        if uniform and key == "optim.matching" and value == "displacement":  # as by default
            continue
        told.append(value if key in ("budget", "risk", "optim.matching") else f"{key.rpartition('.')[2]} {value}")
    return " ".join(told) or label


def _point(entry: FrontierPoint, seeds: Sequence[RunFolder], *, family: str, short: str) -> dict[str, Any]:
    result = result_of(seeds[0])
    return {
        "label": entry.label,
        "short": short,
        "family": family,
        "allocator": result["allocator"],
        "budget": result["budget"]["name"],
        "quality": _finite(entry.quality),
        "spread": entry.quality_spread,
        "seeds": entry.num_seeds,
        "peak_mib": entry.peak_bytes / 2**20,
        "state_mib": entry.state_bytes / 2**20,
        "state_share": 100 * entry.state_bytes / result["state_bytes_adamw"],
        "samples_per_s": _finite(entry.samples_per_s),
        "risk": _finite(result["risk_total"]),
        "dominated": entry.dominated,
        "command": result["command"],
        "choices": _choices(seeds[0]),
        "kept": _kept(seeds[0]),
        "curves": _curves(seeds[0], keys=("train/loss", result["quality"]["name"])),
    }


def _choices(run: RunFolder) -> dict[str, str]:
    file = run.path / "allocation.json"
    return dict(read_json(file)["choices"]) if file.is_file() else {}


def _kept(run: RunFolder) -> dict[str, float]:
    """Block -> the share of fp32 AdamW's state that its spec keeps, in percent; without those it is not known of."""
    file = run.path / "candidates.csv"
    if not file.is_file():
        return {}
    chosen, whole, own = _choices(run), dict[str, float](), dict[str, float]()
    with file.open(encoding="utf-8", newline="") as rows:
        for row in csv.DictReader(rows):
            block = row["block"]
            if row["spec"] == "adamw":
                whole[block] = float(row["state_bytes"])
            if row["spec"] == chosen.get(block):
                own[block] = float(row["state_bytes"])
    return {block: 100 * kept / whole[block] for block, kept in own.items() if whole.get(block)}


def _curves(run: RunFolder, *, keys: Sequence[str]) -> dict[str, list[list[float]]]:
    """Metric -> (step, value) pairs, thinned evenly to MOST_CURVE_POINTS, the last one kept; absent ones left out."""
    file = run.path / "metrics.jsonl"
    rows = read_jsonl(file) if file.is_file() else []
    curves: dict[str, list[list[float]]] = {}
    for key in keys:
        found = [
            [row["step"], row[key]] for row in rows if isinstance(row.get(key), int | float) and isfinite(row[key])
        ]
        every = -(-len(found) // MOST_CURVE_POINTS) or 1
        if found:
            thinned = found[::every]
            curves[key] = thinned if thinned[-1] is found[-1] else [*thinned, found[-1]]
    return curves


def _finite(value: float | None) -> float | None:
    return value if value is not None and isfinite(value) else None
