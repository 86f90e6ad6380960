"""Labels, frontiers and hypervolumes of comparable runs, those of one workload, for the table and the page."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from baoc.frontier.pareto import Frontier, Objective, average_seeds, build_frontier, hypervolume_history, knee
from baoc.frontier.runs import HASH_MARK, RunFolder, Workload, frontier_point, result_of, setting_labels
from baoc.types import FrontierPoint

AXES = ("peak_bytes", "state_bytes")  # memory objectives, each against quality
ALL = "all"  # the group of all runs
FAMILIES = {"exact": "BAOC", "lagrangian": "BAOC", "greedy": "BAOC", "random": "random feasible"}
RunLabels = Mapping[Path, str]  # run folder -> label
Grouping = Callable[[RunFolder], str]  # run -> name of its group


def allocator_family(allocator: str) -> str:
    """The family of an allocator: BAOC's own choice, a uniform baseline, or a random feasible allocation."""
    return "uniform" if allocator.startswith("uniform_") else FAMILIES.get(allocator, allocator)


def by_family(run: RunFolder) -> str:
    return allocator_family(result_of(run)["allocator"])


def by_study(run: RunFolder) -> str:
    return run.study


def has_several_studies(runs: Sequence[RunFolder]) -> bool:
    return len({run.study for run in runs}) > 1


def labels_with_study(runs: Sequence[RunFolder], *, names: RunLabels) -> RunLabels:
    """Labels that include the study, so that a setting of two studies is a point of each."""
    return {run.path: f"{run.study}: {names[run.path]}" for run in runs}


def label_runs(runs: Sequence[RunFolder]) -> RunLabels:
    return dict(zip((run.path for run in runs), setting_labels(runs), strict=True))


def group_by_workload(runs: Sequence[RunFolder]) -> list[tuple[Workload, list[RunFolder]]]:
    """Finished runs by workload, both in the order of `runs`. Workloads that differ in their data set's hash only show
    it; others are named without it."""
    workloads: dict[Workload, list[RunFolder]] = {}
    for run in runs:
        if run.result is not None:
            workloads.setdefault(run.workload, []).append(run)
    short = [(task, model, data.rpartition(HASH_MARK)[0] or data, quality) for task, model, data, quality in workloads]
    names = [name if short.count(name) == 1 else full for name, full in zip(short, workloads, strict=True)]
    return list(zip(names, workloads.values(), strict=True))


def quality_objective(runs: Sequence[RunFolder]) -> Objective:
    """The quality of runs of one workload, with its direction."""
    return Objective(name="quality", higher_is_better=bool(result_of(runs[0])["quality"]["higher_is_better"]))


def workload_frontier(runs: Sequence[RunFolder], *, names: RunLabels) -> Frontier:
    """Frontier of quality, peak bytes and state bytes for runs of one workload, averaged over seeds."""
    # Of each label and seed the first run counts. Studies share baselines, and a repeated run is no second seed: its
    # spread of 0 would make any difference look significant.
    first: dict[tuple[str, int], RunFolder] = {}
    for run in runs:
        first.setdefault((names[run.path], result_of(run)["seed"]), run)
    points = average_seeds([frontier_point(run, label=names[run.path]) for run in first.values()])
    return build_frontier(points, objectives=(quality_objective(runs), *(Objective(name=axis) for axis in AXES)))


def hypervolume_histories(runs: Sequence[RunFolder], *, group: Grouping = by_family) -> list[dict[str, Any]]:
    """The hypervolume after each run of one workload, per memory axis and group, in percent of that of all runs.

    Bytes count in doublings. Grouped by family there is also the group `all`. In a row, `runs` are positions in the
    argument of that name, from 1; seeds are not averaged. All groups of an axis share one reference: the worst value of
    each objective.
    """
    points = [frontier_point(run, label=run.name) for run in runs]
    groups: dict[str, list[int]] = {ALL: list(range(len(runs)))} if group is by_family else {}  # name -> indices
    for i, run in enumerate(runs):
        groups.setdefault(group(run), []).append(i)
    rows: list[dict[str, Any]] = []
    for axis in AXES:
        objectives = (quality_objective(runs), Objective(name=axis))
        total = build_frontier(points, objectives=objectives)
        for name, indices in groups.items():
            members = [points[i] for i in indices]
            history = hypervolume_history(members, objectives=objectives, reference=total.reference)
            shares = [100 * value / total.hypervolume if total.hypervolume else None for value in history]
            rows.append({"axis": axis, "family": name, "runs": [i + 1 for i in indices], "share": shares})
    return rows


def hypervolume_shares(
    points: Sequence[FrontierPoint], *, groups: Sequence[str], quality: Objective
) -> list[dict[str, Any]]:
    """The hypervolume of each group's front in percent of that of all points. `groups` has the group of each point.
    Bytes count in doublings. All groups of an axis share one reference: the worst value of each objective."""
    rows: list[dict[str, Any]] = []
    for axis in AXES:
        objectives = (quality, Objective(name=axis))
        total = build_frontier(points, objectives=objectives)
        for group in dict.fromkeys(groups):
            members = [point for point, name in zip(points, groups, strict=True) if name == group]
            front = build_frontier(members, objectives=objectives, reference=total.reference)
            share = 100 * front.hypervolume / total.hypervolume if total.hypervolume else None
            rows.append({"axis": axis, "family": group, "points": len(members), "share": share})
    return rows


def knee_labels(points: Sequence[FrontierPoint], *, quality: Objective) -> dict[str, str | None]:
    """Memory axis -> label of the knee of quality against it; None if the front has none."""
    knees = {axis: knee(points, quality=quality, memory=Objective(name=axis)) for axis in AXES}
    return {axis: None if point is None else point.label for axis, point in knees.items()}
