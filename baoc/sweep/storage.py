"""Where a study is kept: one Optuna storage for all its workers, made once whoever comes first, and never torn.

All trials stand in it from the start, waiting; a worker takes the next one, which the storage gives to one only. So the
total holds without any further agreement between workers.
"""

import fcntl
import random
import sqlite3
import time
import uuid
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import optuna
from optuna.storages import BaseStorage, JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend, JournalFileSymlinkLock
from optuna.study import StudyDirection
from optuna.trial import Trial, TrialState
from sqlalchemy.exc import SQLAlchemyError

from baoc.errors import BadInputError, OutputError
from baoc.frontier.runs import ABOUT, about_study
from baoc.sweep.sampling import make_sampler, queue
from baoc.sweep.study_config import StudyConfig
from baoc.tracking.console import say
from baoc.tracking.files import LineFile, write_json

LOCK = "study.lock"
HOME = "home"  # the study's attribute that names the one folder of its runs


def open_study(config: StudyConfig, *, folder: Path) -> optuna.Study:
    """The study in the storage, new or known, with `n_trials` trials. Several processes may call this at once.

    Raises BadInputError if a known one is of another definition, or the database cannot be reached.
    """
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    url = storage_url(config.storage, folder=folder)
    with setup_lock(folder, url=url):
        _refuse_other_study(config, folder=folder)
        storage = open_storage(url)
        _check_definition(config, storage)
        study = optuna.create_study(
            study_name=config.name,
            storage=storage,
            directions=[StudyDirection[way.upper()] for way in config.objectives.values()],
            load_if_exists=True,
        )
        if "definition" not in study.user_attrs:
            study.set_user_attr("definition", config.definition())
        trials = queue(config)
        _check_queue(study, trials, config=config)
        home = _home(study, config=config, folder=folder)
        for params, attributes in trials[len(study.trials) :]:  # all, or the rest where a start was killed
            study.enqueue_trial(params, user_attrs=attributes)
        about = {"name": config.name, "storage": without_password(url), "n_trials": len(trials)}
        write_json(folder / ABOUT, {"schema": 1, **about, "objectives": dict(config.objectives), "home": home["id"]})
        if HOME not in study.user_attrs:  # after the file: a start that is killed in between knows its own folder again
            study.set_user_attr(HOME, home)
    return study


def next_trial(study: optuna.Study, *, config: StudyConfig, folder: Path) -> Trial | None:
    """The next waiting trial of the first `n_trials`, now this worker's; None where there is none.

    sqlite cannot lock a row, so that two workers could take the same one: they take turns by a lock in `folder`.
    """
    storage = study._storage
    with _turn(folder) if config.storage is None or config.storage.startswith("sqlite") else nullcontext():
        for waiting in storage.get_all_trials(study._study_id, deepcopy=False, states=(TrialState.WAITING,)):
            if waiting.number < config.n_trials and _take(storage, waiting._trial_id):
                return trial_of(study, waiting._trial_id, number=waiting.number, config=config)
    return None


@contextmanager
def _turn(folder: Path) -> Iterator[None]:
    with (folder / LOCK).open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def trial_of(study: optuna.Study, trial_id: int, *, number: int, config: StudyConfig) -> Trial:
    """A trial that suggests as the sampler of its number does."""
    study.sampler = make_sampler(config, number=number)
    study._thread_local.cached_all_trials = None  # as `ask` does: what others have finished since counts
    return Trial(study, trial_id)


def _take(storage: BaseStorage, trial_id: int) -> bool:
    try:
        return storage.set_trial_state_values(trial_id, state=TrialState.RUNNING)
    except optuna.exceptions.UpdateFinishedTrialError:
        return False


def storage_url(asked: str | None, *, folder: Path) -> str:
    """`null` is sqlite in the study's folder, `journal` a journal file there; a URL stays as it is.

    Raises BadInputError where a URL cannot name the folder.
    """
    if asked is None and "?" in str(folder):
        raise BadInputError(
            f"the study's folder {folder} has a '?', at which a database's URL ends: give another one as "
            "hydra.sweep.dir=FOLDER, or hydra.sweeper.storage=journal"
        )
    if asked is None:
        return f"sqlite:///{folder / 'study.db'}"
    return f"journal:///{folder / 'study.journal'}" if asked == "journal" else asked


def open_storage(url: str) -> BaseStorage:
    """Raises BadInputError where the database does not answer, or its driver is missing."""
    if url.startswith("journal:///"):
        try:
            return JournalStorage(MendedJournal(url.removeprefix("journal:///")))
        except (ValueError, KeyError) as error:
            raise _damaged(url, error) from error
    sqlite = {"connect_args": {"timeout": 60, "factory": _Wal}}
    server = {"pool_size": 1, "max_overflow": 3, "pool_pre_ping": True}  # see `rest`
    options: dict[str, Any] = sqlite if url.startswith("sqlite") else server
    try:
        storage = RDBStorage(url, engine_kwargs=options)
        be_patient(storage.engine)
        weakref.finalize(storage, storage.engine.dispose)
        return storage
    except Exception as error:
        if url.startswith("sqlite"):
            raise _damaged(url, error) from error
        raise BadInputError(
            f"the study's storage {without_password(url)} cannot be opened ({str(error).splitlines()[0]}): is the "
            "server up, does the database exist, and is its driver installed (pip install 'psycopg[binary]' for "
            "postgresql+psycopg://USER@HOST/NAME)? hydra.sweeper.storage is null (a file in the study's folder), "
            "journal, or such a URL"
        ) from error


def _damaged(url: str, error: Exception) -> BadInputError:
    return BadInputError(
        f"the study's storage {without_password(url)} cannot be opened ({_reason(error)}): make room if the disk is "
        "full, bring the file back if it was damaged, or begin anew in another folder (hydra.sweep.dir=FOLDER)"
    )


@contextmanager
def storage_told(asked: str | None, *, folder: Path) -> Iterator[None]:
    """A storage that fails in between is told as one sentence. Raises OutputError."""
    try:
        yield
    except (optuna.exceptions.StorageInternalError, SQLAlchemyError) as error:
        url = without_password(storage_url(asked, folder=folder))
        raise OutputError(
            f"the study's storage {url} does not take or give records ({_reason(error)}): free its disk, end what "
            "locks it, or start its server; then give the same command again, which goes on from what the storage holds"
        ) from error


def _reason(error: BaseException) -> str:
    """The first line of what is behind it: Optuna wraps what a database says."""
    while error.__cause__ is not None:
        error = error.__cause__
    return (str(error).splitlines() or [type(error).__name__])[0]


def rest(storage: BaseStorage) -> None:
    """Gives a server its connection back until the next question. To be called when a worker goes on to train.

    200 workers that train would hold 200 connections, and a server has 100; one for each of the dozen questions that a
    trial asks would cost the server more than the questions.
    """
    engine = getattr(getattr(storage, "_backend", storage), "engine", None)
    if engine is not None and engine.dialect.name != "sqlite":
        engine.dispose()


def be_patient(engine: Any, *, patience_s: float = 60.0) -> None:
    """A server that has all its connections in use (100 by default), or is being started again, is asked once more:
    with many workers that is what fails first, and it must not end one of them."""
    from sqlalchemy import event

    def connect(dialect: Any, _: Any, arguments: Any, options: Any) -> Any:
        end, pause_s = time.monotonic() + patience_s, 0.05
        while True:
            try:
                return dialect.connect(*arguments, **options)
            except dialect.loaded_dbapi.OperationalError:
                if time.monotonic() + pause_s > end:
                    raise
            time.sleep(pause_s * random.uniform(0.5, 1.5))
            pause_s = min(2 * pause_s, 2.0)

    event.listen(engine, "do_connect", connect)


class _Wal(sqlite3.Connection):
    """Write-ahead: several times faster, and as safe from kills. Losing power may lose the last records; their trials
    are then told again from their folders. For files on this machine: several machines need a journal or a server."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self.execute("pragma journal_mode=wal")
        self.execute("pragma synchronous=normal")


class MendedJournal(JournalFileBackend):
    """A journal whose torn last line, left by a writer that was killed, is set aside before anyone reads or appends.

    Optuna's own refuses to read beyond it, for good.
    """

    def __init__(self, path: str):
        lock = JournalFileSymlinkLock(path)
        super().__init__(path, lock)
        lock.acquire()
        try:
            self._mend()
        finally:
            lock.release()

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        lock = self._lock
        lock.acquire()
        try:
            self._mend()
            with LineFile(self._file_path) as file:
                for log in logs:
                    file.append(log)
        finally:
            lock.release()

    def _mend(self) -> None:
        path = Path(self._file_path)
        if path.stat().st_size and not _ends_whole(path):
            LineFile(path).close()
            say(f"{path} ended in a torn line: set aside in {path.name}.torn")


def _ends_whole(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-1, 2)
        return file.read(1) == b"\n"


@contextmanager
def setup_lock(folder: Path, *, url: str) -> Iterator[None]:
    """One worker at a time, on all machines that share the folder or the PostgreSQL server."""
    with _turn(folder):
        if not url.startswith("postgresql"):
            yield
            return
        import sqlalchemy
        import sqlalchemy.pool
        from sqlalchemy.exc import OperationalError

        try:
            engine = sqlalchemy.create_engine(url, poolclass=sqlalchemy.pool.NullPool)
            with engine.connect() as connection:  # two workers on an empty database would both make its tables
                connection.execute(sqlalchemy.text("select pg_advisory_lock(hashtext('baoc study'))"))
                yield
        except (OperationalError, ImportError) as error:
            raise BadInputError(
                f"the study's storage {without_password(url)} does not answer ({str(error).splitlines()[0]}): is the "
                "server up, does the database exist, and is its driver installed (pip install 'psycopg[binary]')?"
            ) from error


def without_password(url: str) -> str:
    """For files and messages: a password in a URL is nobody else's."""
    parts = urlsplit(url)
    if parts.password is None:
        return url
    host = parts.netloc.rsplit("@", 1)[1]
    return urlunsplit(parts._replace(netloc=f"{parts.username}:***@{host}"))


def _refuse_other_study(config: StudyConfig, *, folder: Path) -> None:
    """Two studies in one folder would take each other's results for their own: trials are known by their numbers."""
    about = about_study(folder)
    known = about.get("name") if about else config.name
    if known != config.name:
        raise BadInputError(
            f"{folder} is the folder of study {known}, and study {config.name} was asked for: give it another folder "
            "(hydra.sweep.dir=FOLDER); they may share a storage"
        )


def _check_definition(config: StudyConfig, storage: BaseStorage) -> None:
    """Raises BadInputError if the storage has a study of this name with another space or other objectives."""
    known = {study.study_name: study.user_attrs.get("definition") for study in optuna.get_all_study_summaries(storage)}
    kept, asked = known.get(config.name), config.definition()
    changes = _changes(kept, asked) if kept else []
    if changes:
        told = "; ".join(f"{path} {_told(old)} and was asked for {_told(new)}" for path, old, new in changes)
        raise BadInputError(
            f"study {config.name} has {told}: trials of both cannot be compared. Give it another hydra.sweeper.name, "
            "or the settings it has"
        )


def _home(study: optuna.Study, *, config: StudyConfig, folder: Path) -> dict[str, str]:
    """The id and the path of the study's folder, which a folder keeps where it is moved or mounted elsewhere.

    Raises BadInputError for another folder: each would hold some of the runs, and a frontier of either be wrong.
    """
    known = study.user_attrs.get(HOME)
    own = about_study(folder).get(HOME)
    if known is not None and own != known["id"]:
        raise BadInputError(
            f"study {config.name} has its runs in {known['path']}, and {folder} is another folder: go on in that one "
            "(hydra.sweep.dir=FOLDER; other machines must see it too), or give the study another hydra.sweeper.name"
        )
    return known or {"id": own or uuid.uuid4().hex, "path": str(folder)}


def _check_queue(
    study: optuna.Study, trials: Sequence[tuple[dict[str, Any], dict[str, Any]]], *, config: StudyConfig
) -> None:
    """Raises BadInputError where a grid would lack points, as the study has drawn other trials in their places; says
    which baselines are not tried, as the study has begun without them."""
    kept = study.get_trials(deepcopy=False)
    pairs = list(zip(kept, trials, strict=False))
    if config.sampler == "grid":
        other = [t.number for t, (point, _) in pairs if t.system_attrs.get("fixed_params", {}) != point]
        if other:
            raise BadInputError(
                f"study {config.name} was begun with another sampler or other baselines, so {len(other)} of the "
                f"{len(trials)} trials of its grid would be missing (trial {other[0]} is none of them): give it "
                "another hydra.sweeper.name, or the settings it has"
            )
    have = [trial.user_attrs.get("overrides") for trial in kept]
    late = [own["overrides"] for _, (_, own) in pairs if "overrides" in own and own["overrides"] not in have]
    if late:
        say(
            f"study {config.name} has begun without the baselines {', '.join(' '.join(words) for words in late)}, "
            "which are not tried: give it another hydra.sweeper.name to have them"
        )


def _changes(old: Any, new: Any, *, path: str = "") -> list[tuple[str, Any, Any]]:
    """(dotted path, old, new) of what differs; what one side lacks is None there."""
    if old == new:
        return []
    if isinstance(old, dict) and isinstance(new, dict):
        keys = dict.fromkeys((*old, *new))
        return [
            found for key in keys for found in _changes(old.get(key), new.get(key), path=f"{path}.{key}".strip("."))
        ]
    return [(path, old, new)]


def _told(value: Any) -> str:
    if isinstance(value, dict):  # a setting that only one of them searches, without what it leaves open
        return "{" + ", ".join(f"{key}: {v}" for key, v in value.items() if v not in (None, [], {}, 0.0, False)) + "}"
    return "none" if value is None else str(value)
