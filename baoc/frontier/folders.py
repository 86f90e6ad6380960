"""The frontier of folders of runs: frontier.csv, frontier.html, and a table of what each budget bought."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from baoc.errors import BadInputError
from baoc.frontier.kinds import (
    ALL,
    Names,
    by_kind,
    by_study,
    failed_jobs,
    frontier_of_kind,
    histories,
    knees,
    names_of,
    of_several_studies,
    quality_of,
    study_volumes,
)
from baoc.frontier.page import write_page
from baoc.frontier.pareto import MEASURE, Frontier, frontier_rows
from baoc.frontier.runs import ABOUT, Kind, RunFolder, find_runs
from baoc.tracking.console import print_frontier, print_studies
from baoc.tracking.files import write_csv
from baoc.types import FailedRun

MULTIRUN = "multirun.yaml"  # Hydra's, in the folder of its jobs
SINGLE = "single runs"  # what runs that were given one by one are compared as


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepFrontier:
    """One frontier per kind of run (task, model, data set, quality), and the jobs that ended badly."""

    frontiers: tuple[Frontier, ...]
    failed: tuple[FailedRun, ...]


def frontier_of(sweep_dir: str | Path, *, show: bool = True, page: bool = True) -> SweepFrontier:
    """The frontier of one folder, written there; see `report`."""
    return report([Path(sweep_dir)], out=Path(sweep_dir), show=show, page=page)


def report(folders: Sequence[Path], *, out: Path, show: bool = True, page: bool = True) -> SweepFrontier:
    """Reads every run at or below `folders`, writes `frontier.csv`, `hypervolume.csv` (its history along
    doublings of memory, in percent) and (`page`) `frontier.html` to `out`, and prints a table per kind of run.

    Runs that differ in their seed only are one point: the mean of their quality, the largest of their bytes; of runs of
    one seed, as baselines of two studies, the first counts. A point is dominated if another is at least as good in
    quality, peak bytes and state bytes, and better in one. Failed jobs are rows with their exit code and message.
    Raises BadInputError where there is no run at all.
    """
    runs = _runs_in(folders)
    names, kinds = names_of(runs), by_kind(runs)
    bad = failed_jobs(runs, names=names)
    frontiers = [frontier_of_kind(members, names=names) for _, members in kinds]
    rows: list[dict[str, Any]] = []
    history: list[dict[str, Any]] = []
    for (kind, members), frontier in zip(kinds, frontiers, strict=True):
        best = knees(frontier.points, quality=quality_of(members))
        for row in frontier_rows(frontier):
            knee_of = " ".join(axis for axis, label in best.items() if label == row["label"])
            rows.append({**row, "knee_of": knee_of, "quality_name": kind[3], "exit_code": 0, "message": ""})
        history += _history_rows(kind, members)
    rows += [
        {"run": job.run, "label": job.label, "exit_code": job.exit_code, "message": " ".join(job.message.split())}
        for job in bad
    ]
    out.mkdir(parents=True, exist_ok=True)
    write_csv(out / "frontier.csv", rows)
    if history:
        write_csv(out / "hypervolume.csv", history)
    if page:
        write_page(runs, path=out / "frontier.html", title=title_of(folders))
    if show:
        _show(frontiers, kinds=kinds, names=names, bad=bad)
    return SweepFrontier(frontiers=tuple(frontiers), failed=bad)


def title_of(folders: Sequence[Path]) -> str:
    """Names of up to three folders, and how many more there are."""
    names = [folder.absolute().name for folder in folders]
    rest = len(names) - 3
    return f"Frontier of {', '.join(names if rest < 2 else names[:3])}" + (f" and {rest} more" if rest > 1 else "")


def _history_rows(kind: Kind, runs: Sequence[RunFolder]) -> list[dict[str, Any]]:
    about = {"task": kind[0], "model": kind[1], "dataset": kind[2], "measure": MEASURE}
    lines = [("", line["family"], line) for line in histories(runs)]
    if of_several_studies(runs):
        lines += [(line["family"], ALL, line) for line in histories(runs, group=by_study)]
    return [
        {**about, "axis": line["axis"], "study": study, "family": family, "run": runs[place - 1].name, "share": share}
        for study, family, line in lines
        for place, share in zip(line["runs"], line["share"], strict=True)
    ]


def _runs_in(folders: Sequence[Path]) -> list[RunFolder]:
    """The runs of all folders, each once, with their study; where there are several folders, names begin with the
    folder's."""
    found: dict[Path, tuple[RunFolder, Path | None]] = {}
    prefixes = _names(folders)
    for folder in folders:
        runs = find_runs(folder)
        if not runs:
            raise BadInputError(f"there is no run in {folder}: give the folder of a run or of a multirun")
        for run in runs:
            alone = len(folders) == 1 or run.path == folder
            named = run if alone else replace(run, name=f"{prefixes[folder.resolve()]}/{run.name}")
            study, known = _study_of(run, folder=folder), found.get(run.path.resolve())
            if known is None or (known[1] is None and study is not None):  # given alone, and with its study as well
                found[run.path.resolve()] = (named, study)
    studies = _names([study for _, study in found.values() if study is not None])
    return [replace(run, study=SINGLE if study is None else studies[study]) for run, study in found.values()]


def _study_of(run: RunFolder, *, folder: Path) -> Path | None:
    """The folder of the study or multirun that a run is of, else the one that was searched; None where that is the run
    itself."""
    if run.path == folder:
        return None
    root, at = folder.resolve(), run.path.resolve().parent
    if not at.is_relative_to(root):  # behind a link
        return root
    while at != root and not any((at / mark).is_file() for mark in (ABOUT, MULTIRUN)):
        at = at.parent
    return at


def _names(folders: Iterable[Path]) -> dict[Path, str]:
    """A name for each folder (resolved): its own, with as many of those above it as tell it from the others."""
    paths = list(dict.fromkeys(folder.resolve() for folder in folders))
    for depth in range(1, max((len(path.parts) for path in paths), default=1)):
        names = ["/".join(path.parts[-depth:]) for path in paths]
        if len(set(names)) == len(paths):
            return dict(zip(paths, names, strict=True))
    return {path: str(path) for path in paths}


def _show(
    frontiers: Sequence[Frontier],
    *,
    kinds: Sequence[tuple[Kind, Sequence[RunFolder]]],
    names: Names,
    bad: Sequence[FailedRun],
) -> None:
    """A table per kind, rows in the order of frontier.csv, and one of its studies; then the jobs that ended badly."""
    for (kind, members), frontier in zip(kinds, frontiers, strict=True):
        order = {row["run"]: place for place, row in enumerate(frontier_rows(frontier))}
        ranked = sorted(frontier.points, key=lambda p: order[p.run])
        about = ", ".join(part for part in kind[:3] if part)
        print_frontier(ranked, quality=kind[3], title=f"Frontier of {about}")
        if of_several_studies(members):
            print_studies(study_volumes(members, names=names), title=f"Studies of {about}")
    if bad:
        print_frontier([], failed=bad)
