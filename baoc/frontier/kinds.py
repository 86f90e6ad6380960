"""Runs that may be compared: their names, their kinds, the frontier of one kind. The table and the page share it."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from baoc.frontier.pareto import Frontier, Objective, build_frontier, hypervolume_history, knee, over_seeds
from baoc.frontier.runs import Kind, RunFolder, failed, labels, point, result_of
from baoc.types import FailedRun, FrontierPoint

AXES = ("peak_bytes", "state_bytes")  # what quality is traded for
ALL = "all"
FAMILIES = {"exact": "BAOC", "lagrangian": "BAOC", "greedy": "BAOC", "random": "random feasible"}
Names = Mapping[Path, str]  # folder of a run -> its label
Grouping = Callable[[RunFolder], str]  # what a run is compared as


def family_of(allocator: str) -> str:
    """What a point is compared as: BAOC's own choice, a uniform baseline, or a random feasible allocation."""
    return "uniform" if allocator.startswith("uniform_") else FAMILIES.get(allocator, allocator)


def by_family(run: RunFolder) -> str:
    return family_of(result_of(run)["allocator"])


def by_study(run: RunFolder) -> str:
    return run.study


def of_several_studies(runs: Sequence[RunFolder]) -> bool:
    return len({run.study for run in runs}) > 1


def apart(runs: Sequence[RunFolder], *, names: Names) -> Names:
    """Labels that tell studies apart, so that what two of them tried is a point of each."""
    return {run.path: f"{run.study}: {names[run.path]}" for run in runs}


def names_of(runs: Sequence[RunFolder]) -> Names:
    return dict(zip((run.path for run in runs), labels(runs), strict=True))


def failed_jobs(runs: Sequence[RunFolder], *, names: Names) -> tuple[FailedRun, ...]:
    return tuple(job for run in runs if (job := failed(run, label=names[run.path])) is not None)


def by_kind(runs: Sequence[RunFolder]) -> list[tuple[Kind, list[RunFolder]]]:
    """Finished runs by kind, both in the given order."""
    kinds: dict[Kind, list[RunFolder]] = {}
    for run in runs:
        if run.result is not None:
            kinds.setdefault(run.kind, []).append(run)
    return list(kinds.items())


def quality_of(runs: Sequence[RunFolder]) -> Objective:
    """The quality of runs of one kind, with its direction."""
    return Objective(name="quality", higher_is_better=bool(result_of(runs[0])["quality"]["higher_is_better"]))


def frontier_of_kind(runs: Sequence[RunFolder], *, names: Names) -> Frontier:
    """Quality, peak bytes and state bytes of runs of one kind, seeds joined."""
    points = over_seeds([point(run, label=names[run.path]) for run in _once(runs, names=names)])
    return build_frontier(points, objectives=(quality_of(runs), *(Objective(name=axis) for axis in AXES)))


def _once(runs: Sequence[RunFolder], *, names: Names) -> list[RunFolder]:
    """The first run of each label and seed: studies begin with the same baselines, and a run that was made twice is no
    second seed, whose spread of 0 would make any difference look told from chance."""
    first: dict[tuple[str, int], RunFolder] = {}
    for run in runs:
        first.setdefault((names[run.path], result_of(run)["seed"]), run)
    return list(first.values())


def histories(runs: Sequence[RunFolder], *, group: Grouping = by_family) -> list[dict[str, Any]]:
    """Per memory axis and group (of families also `all`: every run) the hypervolume after each run of one kind, in the
    given order, along doublings of memory, in percent of what all have at the end. `runs` are places in that order,
    from 1; seeds are not joined.

    All lines of an axis share one reference, the worst run of all in each objective.
    """
    points = [point(run, label=run.name) for run in runs]
    grouped = {ALL: list(range(len(runs)))} if group is by_family else dict[str, list[int]]()
    for at, run in enumerate(runs):
        grouped.setdefault(group(run), []).append(at)
    told: list[dict[str, Any]] = []
    for axis in AXES:
        objectives = (quality_of(runs), Objective(name=axis))
        whole = build_frontier(points, objectives=objectives)
        for name, places in grouped.items():
            own = [points[at] for at in places]
            found = hypervolume_history(own, objectives=objectives, reference=whole.reference)
            shares = [100 * value / whole.hypervolume if whole.hypervolume else None for value in found]
            told.append({"axis": axis, "family": name, "runs": [at + 1 for at in places], "share": shares})
    return told


def volumes(points: Sequence[FrontierPoint], *, groups: Sequence[str], quality: Objective) -> list[dict[str, Any]]:
    """Hypervolume of each group's front along doublings of memory, in percent of that of all points; they share one
    reference, the worst."""
    rows: list[dict[str, Any]] = []
    for axis in AXES:
        objectives = (quality, Objective(name=axis))
        whole = build_frontier(points, objectives=objectives)
        for group in dict.fromkeys(groups):
            own = [entry for entry, name in zip(points, groups, strict=True) if name == group]
            part = build_frontier(own, objectives=objectives, reference=whole.reference)
            share = 100 * (part.hypervolume or 0.0) / whole.hypervolume if whole.hypervolume else None
            rows.append({"axis": axis, "family": group, "points": len(own), "share": share})
    return rows


def study_volumes(runs: Sequence[RunFolder], *, names: Names) -> list[dict[str, Any]]:
    """`volumes` of the studies that runs of one kind come from."""
    own = apart(runs, names=names)
    studies = {own[run.path]: run.study for run in runs}
    points = frontier_of_kind(runs, names=own).points
    return volumes(points, groups=[studies[entry.label] for entry in points], quality=quality_of(runs))


def knees(points: Sequence[FrontierPoint], *, quality: Objective) -> dict[str, str | None]:
    """Memory axis -> the label of the knee of quality against it, None where the front has none."""
    found = {axis: knee(points, quality=quality, memory=Objective(name=axis)) for axis in AXES}
    return {axis: None if best is None else best.label for axis, best in found.items()}
