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
from baoc.sweep.storage import DEFINITION_KEY, open_storage, seconds_of
from baoc.sweep.study_config import ATTEMPTS_KEY, OVERRIDES_KEY, OWNER_KEY
from baoc.sweep.workers import WorkerRegistry
from baoc.tracking.console import make_console, say
from baoc.tracking.files import read_json
from baoc.units import format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """A study's counts at one moment. `violated` counts those of the `done` trials that breached their budget or
    diverged. `best` has one text for each objective."""

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
        remaining = "" if self.remaining_s is None else f", {_duration(self.remaining_s)} left"
        return (
            f"{self.done}/{self.total} done ({self.violated} over budget or diverged), {self.pruned} ended early, "
            f"{self.failed} failed, {self.running} running, {self.waiting} waiting{remaining}"
        )


def status_of(
    trials: Sequence[FrozenTrial], *, total: int, objectives: Mapping[str, str], workers: int | None = None
) -> Status:
    """Counts, the best feasible trial of each objective, and the remaining time.

    The remaining time is the number of trials that have not ended times the median duration of a trial, divided by the
    number that run at once: `workers`, or the number that run now if that is larger (other machines work too).
    """
    states = Counter(trial.state for trial in trials)
    ended = [trial for trial in trials if trial.state.is_finished()]
    feasible = [trial for trial in ended if is_feasible(trial)]
    num_parallel = max(workers or 0, states[TrialState.RUNNING])
    seconds = [taken_s for trial in ended if (taken_s := seconds_of(trial)) is not None]
    num_remaining = max(total - len(ended), 0)
    signs = [-1.0 if direction == "maximize" else 1.0 for direction in objectives.values()]
    best = []
    for i, (name, sign) in enumerate(zip(objectives if feasible else (), signs, strict=False)):
        trial = min(feasible, key=lambda trial, i=i, sign=sign: sign * trial.values[i])
        value = trial.values[i]
        text = format_bytes(value) if name.endswith("_bytes") else f"{value:.4g}"
        best.append(f"{name} {text} (trial {trial.number})")
    return Status(
        total=total,
        done=states[TrialState.COMPLETE],
        violated=states[TrialState.COMPLETE] - len(feasible),
        pruned=states[TrialState.PRUNED],
        failed=states[TrialState.FAIL],
        running=states[TrialState.RUNNING],
        remaining_s=median(seconds) * num_remaining / num_parallel if seconds and num_parallel else None,
        best=tuple(best),
        on_front=sum(pareto([[sign * v for sign, v in zip(signs, t.values, strict=True)] for t in feasible])),
    )


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def load_study(folder: Path, *, storage: str | None = None) -> tuple[optuna.Study, Mapping[str, str], int]:
    """(study, objectives, number of trials) of a study's folder; `storage` is needed if its URL has a password."""
    if not (folder / STUDY_FILE).is_file():
        raise BadInputError(f"there is no {STUDY_FILE} in {folder}: give the folder of a study (outputs/studies/NAME)")
    content = read_json(folder / STUDY_FILE)
    keys = {"name": str, "storage": str, "objectives": Mapping, "n_trials": int}
    if not isinstance(content, Mapping) or not all(isinstance(content.get(key), cls) for key, cls in keys.items()):
        raise BadInputError(
            f"{folder / STUDY_FILE} does not describe a study by {', '.join(keys)}: it was damaged; write these "
            "keys into it again, or restore it from a copy"
        )
    url = _existing_url(storage or content["storage"], folder=None if storage else folder)
    if ":***@" in url:
        raise BadInputError(f"the study is kept in {url}: give its URL with the password as --storage URL")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        study = optuna.load_study(study_name=content["name"], storage=open_storage(url))
    except (KeyError, StorageInternalError, SQLAlchemyError, ValueError) as error:
        raise BadInputError(
            f"{url} holds no study {content['name']!r} ({first_line(error)[:200]}): give the URL of the study's "
            "storage as --storage URL, or start the study again"
        ) from error
    return study, content["objectives"], int(content["n_trials"])


def _existing_url(url: str, *, folder: Path | None) -> str:
    """The URL of a storage file that exists: in the study's `folder`, which may have been moved or copied, or at the
    path of `url`. URLs of servers are returned unchanged. Raises BadInputError for a missing file, since opening it
    would create an empty one."""
    kind, slashes, path = url.partition(":///")
    path, question_mark, options = path.partition("?")  # such as timeout=60
    if kind not in ("sqlite", "journal") or not slashes:
        return url
    in_folder = None if folder is None else folder.absolute() / Path(path).name
    if in_folder is not None and in_folder.is_file():
        return f"{kind}:///{in_folder}{question_mark}{options}"
    if Path(path).is_file():
        return url
    if in_folder is None:
        raise BadInputError(f"--storage {url}: there is no file {path}")
    raise BadInputError(
        f"the study's storage {path} is gone, and {in_folder} is not there: give its URL as --storage URL"
    )


def show(study: optuna.Study, *, objectives: Mapping[str, str], total: int) -> Status:
    """Prints the counts, the best trials, and a table of the running ones."""
    trials = study.get_trials(deepcopy=False)
    status = status_of(trials, total=total, objectives=objectives)
    say(f"{study.study_name}: {status.text}")
    if status.best:
        say(f"best: {'; '.join(status.best)}; {status.on_front} on the front")
    table = Table("trial", "settings", "for", "attempt", "worker", title="Running", title_justify="left")
    registry, attributes = WorkerRegistry(study), study.user_attrs
    num_fixed = len(attributes.get(DEFINITION_KEY, {}).get("fixed", []))
    for trial in trials:
        if trial.state is not TrialState.RUNNING:
            continue
        worker = trial.user_attrs.get(OWNER_KEY)
        machine = attributes.get(worker or "", {}).get("machine", "none yet").split("/")[0]
        is_dead = registry.is_dead(worker, attributes, trial=trial.number)
        note = " (dead: the next worker takes the trial over)" if is_dead else ""
        now = datetime.now()
        seconds = max((now - (trial.datetime_start or now)).total_seconds(), 0.0)
        settings = " ".join(trial.user_attrs.get(OVERRIDES_KEY, [])[num_fixed:])
        attempt = int(trial.user_attrs.get(ATTEMPTS_KEY, 0)) + 1
        table.add_row(str(trial.number), settings, _duration(seconds), str(attempt), machine + note)
    if table.row_count:
        make_console().print(table)
    return status


@command
def main(argv: Arguments = None) -> None:
    """Prints once, or with `--every` until all trials have ended. Raises BadInputError without a study, or if its
    storage does not answer."""
    parser = argparse.ArgumentParser(prog="python -m baoc.sweep.status", description=__doc__)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="the study's folder")
    parser.add_argument("--storage", help="the storage's URL, where it has a password")
    parser.add_argument("--every", type=float, metavar="SECONDS", help="show it again and again, until all has ended")
    args = parser.parse_args(argv)
    study, objectives, total = load_study(args.folder, storage=args.storage)
    try:
        while show(study, objectives=objectives, total=total).ended < total and args.every is not None:
            time.sleep(args.every)
    except (StorageInternalError, SQLAlchemyError) as error:
        raise BadInputError(
            f"the storage of study {study.study_name!r} does not answer ({first_line(error)[:200]}): start its "
            "server, or give its URL as --storage URL"
        ) from error


if __name__ == "__main__":
    sys.exit(main())
