"""Builds the frontier of run folders: frontier.csv, hypervolume.csv, frontier.html, and tables on the terminal."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from baoc.errors import BadInputError
from baoc.frontier.comparable_runs import (
    ALL,
    by_study,
    group_by_workload,
    has_several_studies,
    hypervolume_histories,
    knee_labels,
    label_runs,
    quality_objective,
    workload_frontier,
)
from baoc.frontier.page import basis_text, short_names, shorten_numbers, write_page
from baoc.frontier.pareto import HYPERVOLUME_UNIT, Frontier, frontier_rows
from baoc.frontier.runs import STUDY_FILE, RunFolder, Workload, failed_run, find_runs
from baoc.tracking.console import print_frontier
from baoc.tracking.files import write_csv
from baoc.types import FailedRun

MULTIRUN = "multirun.yaml"  # written by Hydra into a multirun's folder
SINGLE = "single runs"  # study name of runs that were given one by one


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepFrontier:
    """One frontier per workload (task, model, data set, quality metric), and the failed jobs."""

    frontiers: tuple[Frontier, ...]
    failed: tuple[FailedRun, ...]


def write_frontier(sweep_dir: str | Path, *, show: bool = True, page: bool = True) -> SweepFrontier:
    """Writes the frontier of one folder into that folder; see `build_report`."""
    return build_report([Path(sweep_dir)], out=Path(sweep_dir), show=show, page=page)


def build_report(
    folders: Sequence[Path], *, out: Path, show: bool = True, page: bool = True, race: Mapping[str, Any] | None = None
) -> SweepFrontier:
    """Reads every run at or below `folders`, writes the files into `out` and, with `show`, prints a table per workload.

    Writes `frontier.csv`, `hypervolume.csv` (its history along doublings of memory, in percent) and, with `page`,
    `frontier.html`. Runs that differ only in their seed are one point: the mean of their quality, the maximum of their
    bytes. Of several runs with one seed, such as a baseline of two studies, the first counts. A point is dominated if
    another one is at least as good in quality, peak bytes and state bytes, and better in one of them. Failed jobs are
    rows with their exit code and message.

    Args:
        race: the content of a race.json, which is shown at the head of the page.

    Raises BadInputError if a folder holds no run.
    """
    runs = _runs_in(folders)
    names, workloads = label_runs(runs), group_by_workload(runs)
    failed = tuple(job for run in runs if (job := failed_run(run, label=names[run.path])) is not None)
    frontiers = [workload_frontier(members, names=names) for _, members in workloads]
    rows: list[dict[str, Any]] = []
    history: list[dict[str, Any]] = []
    for (workload, members), frontier in zip(workloads, frontiers, strict=True):
        knees = knee_labels(frontier.points, quality=quality_objective(members))
        for row in frontier_rows(frontier):
            row["knee_of"] = " ".join(axis for axis, label in knees.items() if label == row["label"])
            row["quality_name"] = workload[3]
            row["basis"] = basis_text(next(run for run in members if names[run.path] == row["label"]))
            rows.append({**row, "exit_code": 0, "message": ""})
        history += _history_rows(workload, members)
    rows += [
        {"run": job.run, "label": job.label, "exit_code": job.exit_code, "message": " ".join(job.message.split())}
        for job in failed
    ]
    out.mkdir(parents=True, exist_ok=True)
    write_csv(out / "frontier.csv", rows)
    if history:
        write_csv(out / "hypervolume.csv", history)
    if page:
        title = title_of(folders) if race is None else f"Race in {out.absolute().name}"
        write_page(runs, path=out / "frontier.html", title=title, race=race)
    if show:
        for (workload, _), frontier in zip(workloads, frontiers, strict=True):
            order = [row["run"] for row in frontier_rows(frontier)]  # as in frontier.csv
            points = sorted(frontier.points, key=lambda point, order=order: order.index(point.run))
            short = short_names([point.label for point in points], shorten=shorten_numbers)
            points = [replace(point, label=short[point.label]) for point in points]
            name = ", ".join(part for part in workload[:3] if part)
            print_frontier(points, quality=workload[3], title=f"Frontier of {name}")
        if failed:
            short = short_names([job.label for job in failed], shorten=shorten_numbers)
            print_frontier([], failed=[replace(job, label=short[job.label]) for job in failed])
    return SweepFrontier(frontiers=tuple(frontiers), failed=failed)


def title_of(folders: Sequence[Path]) -> str:
    """The title of a page: names of up to four folders, or of three and the number of others."""
    names = [folder.absolute().name for folder in folders]
    if len(names) <= 4:
        return f"Frontier of {', '.join(names)}"
    return f"Frontier of {', '.join(names[:3])} and {len(names) - 3} more"


def _history_rows(workload: Workload, runs: Sequence[RunFolder]) -> list[dict[str, Any]]:
    """Rows of hypervolume.csv: the share after each run, for each memory axis and family, and for each study."""
    common = {"task": workload[0], "model": workload[1], "dataset": workload[2], "measure": HYPERVOLUME_UNIT}
    lines = [("", line["family"], line) for line in hypervolume_histories(runs)]
    if has_several_studies(runs):
        lines += [(line["family"], ALL, line) for line in hypervolume_histories(runs, group=by_study)]
    return [
        {**common, "axis": line["axis"], "study": study, "family": family, "run": runs[number - 1].name, "share": share}
        for study, family, line in lines
        for number, share in zip(line["runs"], line["share"], strict=True)
    ]


def _runs_in(folders: Sequence[Path]) -> list[RunFolder]:
    """The runs of all folders, each once, with their study; for several folders, names start with the folder's name."""
    runs_and_studies: dict[Path, tuple[RunFolder, Path | None]] = {}
    prefixes = _shortest_unique_names(folders)
    for folder in folders:
        runs = [run for run in find_runs(folder) if run.trains or run.error is not None]
        if not runs:
            raise BadInputError(f"there is no run in {folder}: give the folder of a run or of a multirun")
        for run in runs:
            study, path = _study_of(run, folder=folder), run.path.resolve()
            if len(folders) > 1 and run.path != folder:
                run = replace(run, name=f"{prefixes[folder.resolve()]}/{run.name}")
            _, earlier_study = runs_and_studies.get(path, (run, None))
            if path not in runs_and_studies or (earlier_study is None and study is not None):
                runs_and_studies[path] = (run, study)  # a run that is listed alone and in its study is the study's
    names = _shortest_unique_names([study for _, study in runs_and_studies.values() if study is not None])
    return [replace(run, study=SINGLE if study is None else names[study]) for run, study in runs_and_studies.values()]


def _study_of(run: RunFolder, *, folder: Path) -> Path | None:
    """The folder of a run's study or multirun, `folder` at the highest; None if `folder` is the run itself."""
    if run.path == folder:
        return None
    root, parent = folder.resolve(), run.path.resolve().parent
    if not parent.is_relative_to(root):  # reached through a symbolic link
        return root
    while parent != root and not any((parent / name).is_file() for name in (STUDY_FILE, MULTIRUN)):
        parent = parent.parent
    return parent


def _shortest_unique_names(folders: Iterable[Path]) -> dict[Path, str]:
    """Resolved folder -> its name, after as many names of parents as make all of them unique."""
    paths = list(dict.fromkeys(folder.resolve() for folder in folders))
    for depth in range(1, max((len(path.parts) for path in paths), default=1)):
        names = ["/".join(path.parts[-depth:]) for path in paths]
        if len(set(names)) == len(paths):
            return dict(zip(paths, names, strict=True))
    return {path: str(path) for path in paths}
