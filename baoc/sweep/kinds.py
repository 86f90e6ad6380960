"""Runs that may be compared: their names, their kinds, the frontier of one kind. The table and the page share it."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from baoc.frontier import Frontier, Objective, build_frontier, over_seeds
from baoc.sweep.runs import Kind, RunFolder, failed, labels, point, result_of
from baoc.types import FailedRun

AXES = ("peak_bytes", "state_bytes")  # what quality is traded for
Names = Mapping[Path, str]  # folder of a run -> its label


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
    points = over_seeds([point(run, label=names[run.path]) for run in runs])
    return build_frontier(points, objectives=(quality_of(runs), *(Objective(name=axis) for axis in AXES)))
