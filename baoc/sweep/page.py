"""frontier.html: one page that compares frontiers and opens without a network.

Everything the page shows is computed here and lies in it as JSON; its script only filters and draws.
"""

import html
import json
from collections.abc import Sequence
from importlib.resources import files
from math import isfinite
from pathlib import Path
from typing import Any

from baoc.frontier import Objective, build_frontier
from baoc.sweep.kinds import (
    AXES,
    Names,
    by_kind,
    failed_jobs,
    family_of,
    frontier_of_kind,
    histories,
    knees,
    names_of,
    quality_of,
)
from baoc.sweep.runs import Kind, RunFolder, result_of
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

    assets = files("baoc.sweep") / "assets"
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
    task, model, dataset, quality = kind
    objective = quality_of(runs)
    groups: dict[str, list[RunFolder]] = {}
    for run in runs:
        groups.setdefault(names[run.path], []).append(run)
    frontier = frontier_of_kind(runs, names=names)
    families = [family_of(result_of(groups[entry.label][0])["allocator"]) for entry in frontier.points]
    return {
        "name": " / ".join(part for part in (task, model, dataset) if part),
        "quality": quality,
        "higher": objective.higher_is_better,
        "points": [
            _point(entry, groups[entry.label], family=family)
            for entry, family in zip(frontier.points, families, strict=True)
        ],
        "volumes": _volumes(frontier.points, families=families, quality=objective),
        "runs": [run.name for run in runs],
        "histories": histories(runs),
        "knees": knees(frontier.points, quality=objective),
    }


def _point(entry: FrontierPoint, seeds: Sequence[RunFolder], *, family: str) -> dict[str, Any]:
    result = result_of(seeds[0])
    return {
        "label": entry.label,
        "family": family,
        "allocator": result["allocator"],
        "budget": result["budget"]["name"],
        "quality": _finite(entry.quality),
        "spread": entry.quality_spread,
        "seeds": entry.num_seeds,
        "peak_mib": entry.peak_bytes / 2**20,
        "state_mib": entry.state_bytes / 2**20,
        "samples_per_s": _finite(entry.samples_per_s),
        "risk": _finite(result["risk_total"]),
        "dominated": entry.dominated,
        "command": result["command"],
        "choices": _choices(seeds[0]),
        "curves": _curves(seeds[0], keys=("train/loss", result["quality"]["name"])),
    }


def _volumes(points: Sequence[FrontierPoint], *, families: Sequence[str], quality: Objective) -> list[dict[str, Any]]:
    """Hypervolume of each family's front, in percent of that of all points; they share one reference, the worst."""
    rows: list[dict[str, Any]] = []
    for axis in AXES:
        objectives = (quality, Objective(name=axis))
        whole = build_frontier(points, objectives=objectives)
        for family in dict.fromkeys(families):
            own = [entry for entry, name in zip(points, families, strict=True) if name == family]
            part = build_frontier(own, objectives=objectives, reference=whole.reference)
            share = 100 * (part.hypervolume or 0.0) / whole.hypervolume if whole.hypervolume else None
            rows.append({"axis": axis, "family": family, "points": len(own), "share": share})
    return rows


def _choices(run: RunFolder) -> dict[str, str]:
    file = run.path / "allocation.json"
    return dict(read_json(file)["choices"]) if file.is_file() else {}


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
