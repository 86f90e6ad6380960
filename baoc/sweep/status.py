"""`python -m baoc.sweep.status FOLDER` prints how far a study is, on whichever machine it runs. Changes nothing."""

import argparse
import sys
import time
from collections import Counter
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

from baoc.core.commands import Arguments, command
from baoc.errors import BadInputError, first_line
from baoc.frontier.pareto import pareto
from baoc.frontier.runs import STUDY_FILE
from baoc.sweep.frontier_sampler import is_feasible
from baoc.sweep.storage import open_storage
from baoc.sweep.workers import WorkerRegistry
from baoc.tracking.console import make_console, say
from baoc.tracking.files import read_json
from baoc.units import format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """A study's counts at one moment. `violated` counts completed trials that breached their budget or diverged; `best`
    is one text for each objective."""

    total: int
    done: int
    violated: int
    pruned: int
    failed: int
    running: int
    remaining_s: float | None
    best: tuple[str, ...]
    on_front: int

    @property
    def ended(self) -> int:
        return self.done + self.pruned + self.failed

    @property
    def waiting(self) -> int:
        return max(self.total - self.ended - self.running, 0)

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
    """Counts, the best feasible trial of each objective, and the remaining time. The remaining time is the number of
    trials to come times the median duration of a trial, divided by the trials that run at once: `workers`, or as many
    as run now if these are more, as those of other machines."""
    states = Counter(trial.state for trial in trials)
    ended = [trial for trial in trials if trial.state.is_finished()]
    good = [trial for trial in ended if is_feasible(trial)]
    num_parallel = max(workers or 0, states[TrialState.RUNNING])
    times = [trial.duration.total_seconds() for trial in ended if trial.duration is not None]
    rest = max(total - len(ended), 0)
    signs = [-1.0 if direction == "maximize" else 1.0 for direction in objectives.values()]
    best = []
    for at, (name, sign) in enumerate(zip(objectives if good else (), signs, strict=False)):
        first = min(good, key=lambda trial, at=at, sign=sign: sign * trial.values[at])
        value = first.values[at]
        shown = format_bytes(value) if name.endswith("_bytes") else f"{value:.4g}"
        best.append(f"{name} {shown} (trial {first.number})")
    return Status(
        total=total,
        done=states[TrialState.COMPLETE],
        violated=states[TrialState.COMPLETE] - len(good),
        pruned=states[TrialState.PRUNED],
        failed=states[TrialState.FAIL],
        running=states[TrialState.RUNNING],
        remaining_s=median(times) * rest / num_parallel if times and num_parallel else None,
        best=tuple(best),
        on_front=sum(pareto([[sign * v for sign, v in zip(signs, t.values, strict=True)] for t in good])),
    )


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
    url = _present(storage or about["storage"], folder=None if storage else folder)
    if ":***@" in url:
        raise BadInputError(f"the study is kept in {url}: give its URL with the password as --storage URL")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        study = optuna.load_study(study_name=about["name"], storage=open_storage(url))
    except (KeyError, StorageInternalError, SQLAlchemyError, ValueError) as error:
        raise BadInputError(
            f"{url} holds no study {about['name']!r} ({first_line(error)[:200]}): give the URL of the study's "
            "storage as --storage URL, or start the study again"
        ) from error
    return study, about["objectives"], int(about["n_trials"])


def _present(url: str, *, folder: Path | None) -> str:
    """The URL of a storage whose file is there, or of the file in the study's `folder` if that was moved or copied.
    Raises BadInputError if the file is gone: opening it would create an empty one."""
    kind, slashes, path = url.partition(":///")
    path, mark, settings = path.partition("?")  # options such as timeout=60
    if kind not in ("sqlite", "journal") or not slashes:
        return url
    own = None if folder is None else folder.absolute() / Path(path).name
    if own is not None and own.is_file():
        return f"{kind}:///{own}{mark}{settings}"
    if not Path(path).is_file():
        gone = f"--storage {url}: there is no file {path}"
        raise BadInputError(
            gone
            if own is None
            else f"the study's storage {path} is gone, and {own} is not there: give its URL as --storage URL"
        )
    return url


def show(study: optuna.Study, *, objectives: Mapping[str, str], total: int) -> Status:
    """Prints the counts, the best trials, and a table of the running ones."""
    trials = study.get_trials(deepcopy=False)
    status = status_of(trials, total=total, objectives=objectives)
    say(f"{study.study_name}: {status.text}")
    if status.best:
        say(f"best: {'; '.join(status.best)}; {status.on_front} on the front")
    table = Table("trial", "settings", "for", "attempt", "worker", title="Running", title_justify="left")
    registry, attributes = WorkerRegistry(study), study.user_attrs
    num_fixed = len(attributes.get("definition", {}).get("fixed", []))
    for trial in trials:
        if trial.state is not TrialState.RUNNING:
            continue
        own, worker = trial.user_attrs, trial.user_attrs.get("worker")
        machine = attributes.get(worker or "", {}).get("machine", "none yet").split("/")[0]
        is_dead = registry.is_dead(worker, attributes, trial=trial.number)
        note = " (dead: the next worker takes the trial over)" if is_dead else ""
        now = datetime.now()
        seconds = (now - (trial.datetime_start or now)).total_seconds()
        words, attempt = " ".join(own.get("words", [])[num_fixed:]), int(own.get("attempts", 0)) + 1
        table.add_row(str(trial.number), words, _duration(seconds), str(attempt), machine + note)
    if table.row_count:
        make_console().print(table)
    return status


@command
def main(argv: Arguments = None) -> None:
    """Prints until all has ended where `--every` is given. Raises BadInputError without a study, or where its storage
    does not answer."""
    parser = argparse.ArgumentParser(prog="python -m baoc.sweep.status", description=__doc__)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="the study's folder")
    parser.add_argument("--storage", help="the storage's URL, where it has a password")
    parser.add_argument("--every", type=float, metavar="SECONDS", help="show it again and again, until all has ended")
    given = parser.parse_args(argv)
    study, objectives, total = load_study(given.folder, storage=given.storage)
    try:
        while show(study, objectives=objectives, total=total).ended < total and given.every is not None:
            time.sleep(given.every)
    except (StorageInternalError, SQLAlchemyError) as error:
        raise BadInputError(
            f"the storage of study {study.study_name!r} does not answer ({first_line(error)[:200]}): start its "
            "server, or give its URL as --storage URL"
        ) from error


if __name__ == "__main__":
    sys.exit(main())
