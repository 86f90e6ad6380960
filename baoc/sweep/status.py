"""`python -m baoc.sweep.status FOLDER` prints how far a study is, on whichever machine it runs. Changes nothing."""

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from statistics import median

import optuna
from optuna.exceptions import StorageInternalError
from optuna.trial import FrozenTrial, TrialState
from rich.table import Table
from sqlalchemy.exc import SQLAlchemyError

from baoc.errors import BadInputError
from baoc.frontier.commands import Arguments, command
from baoc.frontier.pareto import pareto
from baoc.frontier.runs import STUDY_FILE
from baoc.sweep.early_stopping import violates_constraint
from baoc.sweep.storage import open_storage
from baoc.sweep.workers import WorkerRegistry
from baoc.tracking.console import make_console
from baoc.tracking.files import read_json
from baoc.units import format_bytes

ENDED = (TrialState.COMPLETE, TrialState.FAIL, TrialState.PRUNED)


@dataclass(frozen=True, slots=True, kw_only=True)
class BestTrial:
    """The best feasible trial of one objective."""

    objective: str
    value: float
    number: int

    def __str__(self) -> str:
        value = format_bytes(self.value) if self.objective.endswith("_bytes") else f"{self.value:.4g}"
        return f"{self.objective} {value} (trial {self.number})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """A study's counts at one moment. `violated` counts completed trials that breached their budget or diverged."""

    total: int
    done: int
    violated: int
    pruned: int
    failed: int
    running: int
    remaining_s: float | None
    best: tuple[BestTrial, ...]
    on_front: int

    @property
    def waiting(self) -> int:
        return max(self.total - self.done - self.pruned - self.failed - self.running, 0)

    @property
    def text(self) -> str:
        left = "" if self.remaining_s is None else f", {_duration(self.remaining_s)} left"
        return (
            f"{self.done}/{self.total} done ({self.violated} over budget or diverged), {self.pruned} ended early, "
            f"{self.failed} failed, {self.running} running, {self.waiting} waiting{left}"
        )


def status_of(
    trials: Sequence[FrozenTrial], *, total: int, objectives: Mapping[str, str], workers: int | None = None
) -> Status:
    """Counts, the best trial of each objective, and the remaining time. The remaining time is the number of trials to
    come times the median duration of a trial, divided by the trials that run at once: `workers`, or as many as run now
    if these are more, as those of other machines."""
    ended = [trial for trial in trials if trial.state in ENDED]
    complete = [trial for trial in ended if trial.state is TrialState.COMPLETE]
    good = [trial for trial in complete if not violates_constraint(trial)]
    running = sum(trial.state is TrialState.RUNNING for trial in trials)
    num_parallel = max(workers or 0, running)
    times = [trial.duration.total_seconds() for trial in ended if trial.duration is not None]
    rest = max(total - len(ended), 0)
    return Status(
        total=total,
        done=len(complete),
        violated=len(complete) - len(good),
        pruned=sum(trial.state is TrialState.PRUNED for trial in ended),
        failed=sum(trial.state is TrialState.FAIL for trial in ended),
        running=running,
        remaining_s=median(times) * rest / num_parallel if times and num_parallel else None,
        best=_best(good, objectives=objectives),
        on_front=len(pareto_trials(good, objectives=objectives)),
    )


def pareto_trials(trials: Sequence[FrozenTrial], *, objectives: Mapping[str, str]) -> list[FrozenTrial]:
    """Those of some complete trials that no other one dominates."""
    signs = [-1.0 if direction == "maximize" else 1.0 for direction in objectives.values()]
    costs = [[sign * value for sign, value in zip(signs, trial.values, strict=True)] for trial in trials]
    return [trial for trial, keep in zip(trials, pareto(costs), strict=True) if keep]


def _best(trials: Sequence[FrozenTrial], *, objectives: Mapping[str, str]) -> tuple[BestTrial, ...]:
    found = []
    for at, (name, direction) in enumerate(objectives.items()):
        ranked = sorted(trials, key=lambda trial, at=at: trial.values[at], reverse=direction == "maximize")
        if ranked:
            found.append(BestTrial(objective=name, value=ranked[0].values[at], number=ranked[0].number))
    return tuple(found)


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def load_study(folder: Path, *, storage: str | None = None) -> tuple[optuna.Study, Mapping[str, str], int]:
    """(study, objectives, number of trials) of a study's folder; `storage` is needed if its URL has a password."""
    if not (folder / STUDY_FILE).is_file():
        raise BadInputError(f"there is no {STUDY_FILE} in {folder}: give the folder of a study (outputs/studies/NAME)")
    about = read_json(folder / STUDY_FILE)
    keys = {"name": str, "storage": str, "objectives": Mapping, "n_trials": int}
    if not isinstance(about, Mapping) or not all(isinstance(about.get(key), kind) for key, kind in keys.items()):
        raise BadInputError(
            f"{folder / STUDY_FILE} does not describe a study by {', '.join(keys)}: it was damaged; write these "
            "keys into it again, or restore it from a copy"
        )
    url = _present(storage) if storage else _resolve_storage(about["storage"], folder=folder)
    if ":***@" in url:
        raise BadInputError(f"the study is kept in {url}: give its URL with the password as --storage URL")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        study = optuna.load_study(study_name=about["name"], storage=open_storage(url))
    except (KeyError, StorageInternalError, SQLAlchemyError, ValueError) as error:
        raise BadInputError(
            f"{url} holds no study {about['name']!r} ({str(error).splitlines()[0][:200]}): give the URL of the study's "
            "storage as --storage URL, or start the study again"
        ) from error
    return study, about["objectives"], int(about["n_trials"])


def _present(url: str) -> str:
    """`url`; raises BadInputError for a file that is not there, which opening would create."""
    kind, slashes, path = url.partition(":///")
    file = Path(path.partition("?")[0])
    if kind in ("sqlite", "journal") and slashes and not file.is_file():
        raise BadInputError(f"--storage {url}: there is no file {file}")
    return url


def _resolve_storage(url: str, *, folder: Path) -> str:
    """The URL of the storage that the folder's study.json names; of the file in the folder if that was moved or copied.
    Raises BadInputError if the file is gone: opening it would create an empty one."""
    kind, slashes, path = url.partition(":///")
    path, mark, settings = path.partition("?")  # options such as timeout=60
    if kind not in ("sqlite", "journal") or not slashes:
        return url
    own = folder.absolute() / Path(path).name
    if own.is_file():
        return f"{kind}:///{own}{mark}{settings}"
    if not Path(path).is_file():
        raise BadInputError(
            f"the study's storage {path} is gone, and {own} is not there: give its URL as --storage URL"
        )
    return url


def show(study: optuna.Study, *, objectives: Mapping[str, str], total: int) -> None:
    """Prints the counts, the best trials, and a table of the running ones."""
    trials = study.get_trials(deepcopy=False)
    status = status_of(trials, total=total, objectives=objectives)
    console = make_console()
    console.print(f"{study.study_name}: {status.text}", markup=False, soft_wrap=True)
    if status.best:
        best = "; ".join(map(str, status.best))
        console.print(f"best: {best}; {status.on_front} on the front", markup=False, soft_wrap=True)
    table = Table(title="Running", title_justify="left")
    for column in ("trial", "settings", "for", "attempt", "worker"):
        table.add_column(column)
    registry, attributes = WorkerRegistry(study), study.user_attrs
    for trial in trials:
        if trial.state is TrialState.RUNNING:
            worker = trial.user_attrs.get("worker")
            machine = attributes.get(worker or "", {}).get("machine", "none yet").split("/")[0]
            is_dead = registry.is_dead(worker, attributes, trial=trial.number)
            note = " (dead: the next worker takes the trial over)" if is_dead else ""
            began = trial.datetime_start or datetime.now()
            fixed = attributes.get("definition", {}).get("fixed", [])
            words = " ".join(trial.user_attrs.get("words", [])[len(fixed) :])
            attempt = str(int(trial.user_attrs.get("attempts", 0)) + 1)
            table.add_row(
                str(trial.number), words, _duration((datetime.now() - began).total_seconds()), attempt, machine + note
            )
    if table.row_count:
        console.print(table)


@command
def main(argv: Arguments = None) -> int:
    """Returns exit code 0, or 2 if there is no study or its storage does not answer."""
    parser = argparse.ArgumentParser(prog="python -m baoc.sweep.status", description=__doc__)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="the study's folder")
    parser.add_argument("--storage", help="the storage's URL, where it has a password")
    parser.add_argument("--every", type=float, metavar="SECONDS", help="show it again and again, until all has ended")
    given = parser.parse_args(argv)
    try:
        study, objectives, total = load_study(given.folder, storage=given.storage)
        while True:
            show(study, objectives=objectives, total=total)
            trials = study.get_trials(deepcopy=False)
            if given.every is None or sum(trial.state in ENDED for trial in trials) >= total:
                return 0
            time.sleep(given.every)
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
