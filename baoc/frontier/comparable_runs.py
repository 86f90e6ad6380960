"""Groups comparable runs (one workload each): their labels, frontiers and hypervolumes, for the table and the page."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from baoc.frontier.pareto import Frontier, Objective, average_seeds, build_frontier, hypervolume_history, knee
from baoc.frontier.runs import AT, RunFolder, Workload, failed_run, frontier_point, result_of, setting_labels
from baoc.types import FailedRun, FrontierPoint

AXES = ("peak_bytes", "state_bytes")  # memory objectives, each against quality
ALL = "all"
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


def failed_jobs(runs: Sequence[RunFolder], *, names: RunLabels) -> tuple[FailedRun, ...]:
    return tuple(job for run in runs if (job := failed_run(run, label=names[run.path])) is not None)


def group_by_workload(runs: Sequence[RunFolder]) -> list[tuple[Workload, list[RunFolder]]]:
    """Finished runs by workload; both keep the given order. A data set's hash is shown where its name is not enough."""
    workloads: dict[Workload, list[RunFolder]] = {}
    for run in runs:
        if run.result is not None:
            workloads.setdefault(run.workload, []).append(run)
    bare = [(task, model, data.rpartition(AT)[0] or data, quality) for task, model, data, quality in workloads]
    shown = [plain if bare.count(plain) == 1 else full for plain, full in zip(bare, workloads, strict=True)]
    return list(zip(shown, workloads.values(), strict=True))


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
    """The hypervolume after each run of one workload, per memory axis and group, in percent of that of all runs. Bytes
    count in doublings. Grouped by family there is also the group `all`. `runs` are positions in the given order, from
    1; seeds are not averaged. All groups of an axis share one reference: the worst value of each objective."""
    points = [frontier_point(run, label=run.name) for run in runs]
    grouped = {ALL: list(range(len(runs)))} if group is by_family else dict[str, list[int]]()
    for at, run in enumerate(runs):
        grouped.setdefault(group(run), []).append(at)
    rows: list[dict[str, Any]] = []
    for axis in AXES:
        objectives = (quality_objective(runs), Objective(name=axis))
        whole = build_frontier(points, objectives=objectives)
        for name, places in grouped.items():
            own = [points[at] for at in places]
            found = hypervolume_history(own, objectives=objectives, reference=whole.reference)
            shares = [100 * value / whole.hypervolume if whole.hypervolume else None for value in found]
            rows.append({"axis": axis, "family": name, "runs": [at + 1 for at in places], "share": shares})
    return rows


def hypervolume_shares(
    points: Sequence[FrontierPoint], *, groups: Sequence[str], quality: Objective
) -> list[dict[str, Any]]:
    """The hypervolume of each group's front in percent of that of all points; bytes count in doublings. All groups of
    an axis share one reference: the worst value of each objective."""
    rows: list[dict[str, Any]] = []
    for axis in AXES:
        objectives = (quality, Objective(name=axis))
        whole = build_frontier(points, objectives=objectives)
        for group in dict.fromkeys(groups):
            own = [entry for entry, name in zip(points, groups, strict=True) if name == group]
            part = build_frontier(own, objectives=objectives, reference=whole.reference)
            share = 100 * part.hypervolume / whole.hypervolume if whole.hypervolume else None
            rows.append({"axis": axis, "family": group, "points": len(own), "share": share})
    return rows


def knee_labels(points: Sequence[FrontierPoint], *, quality: Objective) -> dict[str, str | None]:
    """Memory axis -> label of the knee of quality against it; None if the front has none."""
    found = {axis: knee(points, quality=quality, memory=Objective(name=axis)) for axis in AXES}
    return {axis: None if best is None else best.label for axis, best in found.items()}
