"""The Optuna storage of a study, which all of its workers share: how a trial gets from waiting to finished.

A worker is one process that runs `run_study`, on any machine; its code is `_Worker` in `study.py`. Workers agree
through the storage alone.

1. `open_study` refuses a stored study of other settings (`_check_definition`) or of another folder
   (`_check_home_folder`). Then it adds all `n_trials` trials in state WAITING, so the total needs no agreement between
   workers. If it is killed half-way, the next start adds the missing ones.
2. `next_trial` sets one trial to RUNNING. The storage grants that change to one worker only. sqlite cannot lock a row,
   so its workers take turns by `folder_lock`.
3. `_Worker._choose_overrides` stores two attributes of the trial: the worker's name (OWNER_KEY), then the sampled
   overrides (OVERRIDES_KEY).
4. `_Worker._start_process` starts a process with these overrides in the folder `NNNN`, the trial's number.
5. `_Worker._retry` starts a process that was killed again, up to `retries` times. The run resumes from its newest
   checkpoint; a run that has written its result is not repeated (`trial_process.py`).
6. `_Worker._finish` hands the values and constraints of an ended process to Optuna. Optuna refuses to change a finished
   trial, so each trial is finished once.

What a kill leaves behind:

7. The trials of a dead worker stay RUNNING. `_Worker._take_over` finds them by the missing heartbeat (`workers.py`)
   and, under `setup_lock`, replaces the owner. The trial keeps its number, folder and overrides. If its worker died
   within step 3, it has no overrides; they are sampled again from the seed of the trial's number.
8. A worker whose machine slept through its takeover finds another owner (`_Worker._owns`) and drops the trial.
9. A writer that dies in mid-line leaves a torn last line in a journal file. `RepairedJournal` moves it into `NAME.torn`
   on opening and before each append. sqlite and servers roll back an unfinished transaction themselves.
"""

import fcntl
import random
import sqlite3
import time
import uuid
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit, urlunsplit

import optuna
from optuna.storages import BaseStorage, JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, Trial, TrialState
from sqlalchemy import create_engine, event, text
from sqlalchemy.exc import OperationalError, SQLAlchemyError
from sqlalchemy.pool import NullPool

from baoc.errors import BadInputError, OutputError
from baoc.frontier.runs import STUDY_FILE, quote, read_study_file, unquote
from baoc.sweep.sampling import SearchedTrials, initial_trials, make_sampler, uses_frontier_sampler
from baoc.sweep.study_config import BASELINE_KEY, SECONDS_KEY, StudyConfig
from baoc.tracking.console import say
from baoc.tracking.files import LineFile, write_json

LOCK = "study.lock"
# Attributes of a study in the storage:
DEFINITION_KEY = "definition"  # `StudyConfig.definition()` of the first start
SAMPLING_KEY = "drawn"  # sampler and seed of the first start
HOME_KEY = "home"  # id and path of the one folder that holds the study's runs
STORED_IN_FOLDER = (None, "journal")  # settings of a storage in the study's folder, which only this study has
CONNECT_PATIENCE_S = 60.0


def open_study(config: StudyConfig, *, folder: Path) -> optuna.Study:
    """Creates the study with `n_trials` waiting trials, or loads it and adds those that are missing; writes study.json.

    Several processes may call this at once. Raises BadInputError if the stored study has another definition or another
    folder, or if the database cannot be reached.
    """
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    url = storage_url(config.storage, folder=folder)
    with setup_lock(folder, url=url):
        _check_folder_name(config, folder=folder)
        storage = open_storage(url)
        _check_definition(config, storage, folder=folder)
        study = optuna.create_study(
            study_name=config.name,
            storage=storage,
            directions=[StudyDirection[direction.upper()] for direction in config.objectives.values()],
            load_if_exists=True,
        )
        if DEFINITION_KEY not in study.user_attrs:
            study.set_user_attr(DEFINITION_KEY, config.definition())
            study.set_user_attr(SAMPLING_KEY, {"sampler": config.sampler, "seed": config.seed})
        for key, old in study.user_attrs.get(SAMPLING_KEY, {}).items():
            if (new := getattr(config, key)) != old:
                say(f"study {config.name} was begun with {key} {old}: trials that are left are drawn with {new}")
        trials = initial_trials(config)
        _check_trials(study, trials, config=config, folder=folder)
        home = _check_home_folder(study, config=config, folder=folder)
        for params, attributes in trials[len(study.trials) :]:
            stored = {key: to_original_paths(words, study, folder=folder) for key, words in attributes.items()}
            study.enqueue_trial(params, user_attrs=stored)
        content = {
            "schema": 1,
            "name": config.name,
            "storage": without_password(url),
            "n_trials": len(trials),
            "objectives": dict(config.objectives),
            "home": home["id"],
        }
        write_json(folder / STUDY_FILE, content)
        if HOME_KEY not in study.user_attrs:  # after the file, so that a start killed in between recognises its folder
            study.set_user_attr(HOME_KEY, home)
    return study


def next_trial(study: optuna.Study, *, config: StudyConfig, folder: Path) -> Trial | None:
    """Sets the next waiting trial to RUNNING and returns it; None if none of the first `n_trials` is waiting.

    sqlite cannot lock a row, so that two workers could get the same trial: they take turns by a lock in `folder`.
    """
    storage = study._storage
    with folder_lock(folder) if config.storage is None or config.storage.startswith("sqlite") else nullcontext():
        for waiting in storage.get_all_trials(study._study_id, deepcopy=False, states=(TrialState.WAITING,)):
            if waiting.number >= config.n_trials:
                continue
            with suppress(optuna.exceptions.UpdateFinishedTrialError):  # another worker has finished it by now
                if storage.set_trial_state_values(waiting._trial_id, state=TrialState.RUNNING):
                    return make_trial(study, waiting._trial_id, number=waiting.number, config=config)
    return None


@contextmanager
def folder_lock(folder: Path) -> Iterator[None]:
    """Holds the lock file of the study's folder; waits until other processes of this machine release it."""
    with (folder / LOCK).open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def make_trial(study: optuna.Study, trial_id: int, *, number: int, config: StudyConfig) -> Trial:
    """A Trial whose sampler is seeded by the study's seed and the trial's number. Sets `study.sampler`."""
    study.sampler = make_sampler(config, number=number)
    study._thread_local.cached_all_trials = None  # as `Study.ask` does, so that the sampler sees the newest results
    return Trial(study if uses_frontier_sampler(config) else cast(optuna.Study, SearchedTrials(study)), trial_id)


def storage_url(setting: str | None, *, folder: Path) -> str:
    """The URL that hydra.sweeper.storage stands for.

    Args:
        setting: null is sqlite in the study's folder, `journal` a journal file there; a URL is returned unchanged.

    Raises BadInputError if a URL cannot contain the folder's path.
    """
    if setting is None and "?" in str(folder):
        raise BadInputError(
            f"the study's folder {folder} has a '?', at which a database's URL ends: give another one as "
            "hydra.sweep.dir=FOLDER, or hydra.sweeper.storage=journal"
        )
    if setting is None:
        return f"sqlite:///{folder / 'study.db'}"
    return f"journal:///{folder / 'study.journal'}" if setting == "journal" else setting


def open_storage(url: str) -> BaseStorage:
    """Opens a storage. Raises BadInputError if the database does not answer, is damaged, or lacks its driver."""
    if url.startswith("journal:///"):
        try:
            return JournalStorage(RepairedJournal(url.removeprefix("journal:///")))
        except (ValueError, KeyError) as error:
            raise _unreadable(url, error) from error
    sqlite = {"connect_args": {"timeout": 60, "factory": _WalConnection}}
    server = {"pool_size": 1, "max_overflow": 3, "pool_pre_ping": True}  # few connections: see `release_connections`
    engine_options: dict[str, Any] = sqlite if url.startswith("sqlite") else server
    try:
        storage = RDBStorage(url, engine_kwargs=engine_options)
        retry_connections(storage.engine)
        weakref.finalize(storage, storage.engine.dispose)
        return storage
    except Exception as error:
        if url.startswith("sqlite"):
            raise _unreadable(url, error) from error
        raise _no_server(url, error) from error


def _no_server(url: str, error: Exception) -> BadInputError:
    return BadInputError(
        f"the study's storage {without_password(url)} does not answer ({str(error).splitlines()[0]}): is the server "
        "up, does the database exist, and is its driver installed (pip install 'psycopg[binary]' for "
        "postgresql+psycopg://USER@HOST/NAME)? hydra.sweeper.storage is null (a file in the study's folder), journal, "
        "or such a URL"
    )


def _unreadable(url: str, error: Exception) -> BadInputError:
    return BadInputError(
        f"the study's storage {without_password(url)} cannot be opened ({_root_cause(error)}): make room if the disk "
        "is full, bring the file back if it was damaged, or begin anew in another folder (hydra.sweep.dir=FOLDER)"
    )


@contextmanager
def explain_storage_errors(setting: str | None, *, folder: Path) -> Iterator[None]:
    """Raises an error of the storage inside the block as an OutputError with its cause and remedies."""
    try:
        yield
    except (optuna.exceptions.StorageInternalError, SQLAlchemyError) as error:
        url = without_password(storage_url(setting, folder=folder))
        raise OutputError(
            f"the study's storage {url} does not take or give records ({_root_cause(error)}): free its disk, end what "
            "locks it, or start its server; then give the same command again, which goes on from what the storage holds"
        ) from error


def _root_cause(error: BaseException) -> str:
    """The first line of the innermost cause, since Optuna and SQLAlchemy wrap the database's message."""
    while error.__cause__ is not None:
        error = error.__cause__
    return (str(error).splitlines() or [type(error).__name__])[0]


def release_connections(storage: BaseStorage) -> None:
    """Closes a server's idle connections. A worker calls this before it waits for its trials: 200 waiting workers
    would hold 200 connections, and PostgreSQL allows 100 by default. Between such waits connections are reused, since
    opening one for each query would cost the server more than the queries."""
    engine = getattr(getattr(storage, "_backend", storage), "engine", None)
    if engine is not None and engine.dialect.name != "sqlite":
        engine.dispose()


def retry_connections(engine: Any, *, patience_s: float = CONNECT_PATIENCE_S) -> None:
    """Makes `engine` repeat refused connections for up to `patience_s` seconds, with growing random pauses. A server
    refuses connections while it restarts, or when all of them (100 by default) are in use by other workers."""

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


class _WalConnection(sqlite3.Connection):
    """sqlite with a write-ahead log: several times faster and as safe against kills. A power cut may lose the last
    records; their trials are then finished again from their folders. The log needs shared memory, so workers on several
    machines need a journal or a server."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self.execute("pragma journal_mode=wal")
        self.execute("pragma synchronous=normal")


class RepairedJournal(JournalFileBackend):
    """A journal file whose torn last line is moved aside on opening and before each append. A writer that is killed in
    mid-line leaves such a line, and Optuna's backend raises on every read once another record follows it."""

    def __init__(self, path: str):
        # Optuna's default lock is a link to the journal. Where a worker died with it and the folder was moved, the link
        # leads nowhere, and who waits for it spins for ever.
        super().__init__(path, lock_obj=JournalFileOpenLock(path))
        lock = Path(f"{path}.lock")
        if lock.is_symlink() and not lock.exists():
            lock.unlink(missing_ok=True)
        self.append_logs([])  # moves a torn line aside

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        self._lock.acquire()
        try:
            with LineFile(self._file_path) as file:
                if file.was_torn:
                    say(f"{file.path} ended in a torn line: set aside in {file.path.name}.torn")
                for log in logs:
                    file.append(log)
        finally:
            self._lock.release()


@contextmanager
def setup_lock(folder: Path, *, url: str) -> Iterator[None]:
    """Admits one worker at a time among all machines that share the folder or the PostgreSQL server."""
    with folder_lock(folder):
        if not url.startswith("postgresql"):
            yield
            return
        try:
            engine = create_engine(url, poolclass=NullPool)
            with engine.connect() as connection:  # two workers on an empty database would both create its tables
                connection.execute(text("select pg_advisory_lock(hashtext('baoc study'))"))
                yield
        except (OperationalError, ImportError) as error:
            raise _no_server(url, error) from error


def without_password(url: str) -> str:
    """The URL with its password masked, for files and messages."""
    parts = urlsplit(url)
    if parts.password is None:
        return url
    host = parts.netloc.rsplit("@", 1)[1]
    return urlunsplit(parts._replace(netloc=f"{parts.username}:***@{host}"))


def _check_folder_name(config: StudyConfig, *, folder: Path) -> None:
    """Raises BadInputError if the folder belongs to another study: folders of trials are named by their number only."""
    owner = read_stored_study_file(folder).get("name", config.name)
    if owner != config.name:
        raise BadInputError(
            f"{folder} is the folder of study {owner}, and study {config.name} was asked for: give it another folder "
            "(hydra.sweep.dir=FOLDER); they may share a storage"
        )


def read_stored_study_file(folder: Path) -> dict[str, str]:
    """Name and home of the folder's study.json, without those that are absent or damaged."""
    try:
        content: Any = read_study_file(folder)
    except BadInputError:
        return {}
    known = content if isinstance(content, Mapping) else {}
    return {key: known[key] for key in ("name", "home") if isinstance(known.get(key), str)}


def stored_name(setting: str | None, *, folder: Path, default: str) -> str:
    """The name of the folder's study, by study.json or, if that is lost, by the storage; `default` if there is none."""
    name = read_stored_study_file(folder).get("name")
    if name is not None or not _trial_folders(folder):
        return name or default
    url = storage_url(setting, folder=folder)
    with setup_lock(folder, url=url):
        studies = optuna.get_all_study_summaries(open_storage(url))
    homes = {study.study_name: study.user_attrs.get(HOME_KEY, {}).get("path") for study in studies}
    is_own = setting in STORED_IN_FOLDER
    return next((name for name, home in homes.items() if is_own or home == str(folder)), default)


def _check_definition(config: StudyConfig, storage: BaseStorage, *, folder: Path) -> None:
    """Raises BadInputError if the storage has a study of this name with another space or other objectives, or has none
    while the folder holds trials."""
    summaries = optuna.get_all_study_summaries(storage)
    definitions = {study.study_name: study.user_attrs.get(DEFINITION_KEY) for study in summaries}
    trial_folders = _trial_folders(folder)
    if config.name not in definitions and trial_folders:
        raise BadInputError(
            f"{folder} holds {len(trial_folders)} trials, and the storage has no study {config.name} to go on with: it "
            "was removed, or is another one. Bring it back, or begin anew in another folder (hydra.sweep.dir=FOLDER)"
        )
    stored = definitions.get(config.name)
    changes = differences(stored, config.definition()) if stored else []
    if changes:
        clauses = [f"{path} {setting_text(old)} and was asked for {setting_text(new)}" for path, old, new in changes]
        raise BadInputError(
            f"study {config.name} has {'; '.join(clauses)}: trials of both cannot be compared. Give it another "
            "hydra.sweeper.name, or the settings it has"
        )


def _trial_folders(folder: Path) -> list[Path]:
    return [path for path in folder.glob("[0-9][0-9][0-9][0-9]") if path.is_dir()]


def _check_home_folder(study: optuna.Study, *, config: StudyConfig, folder: Path) -> dict[str, str]:
    """The id and path of the study's folder, a new id on the first start. The folder's study.json holds the id too, so
    the folder may be moved or mounted elsewhere. Raises BadInputError for another folder: each would hold a part of the
    runs, and neither frontier would be right."""
    stored = study.user_attrs.get(HOME_KEY)
    folder_id = read_stored_study_file(folder).get("home")
    if stored is None:
        return {"id": folder_id or uuid.uuid4().hex, "path": str(folder)}
    is_home = stored["path"] == str(folder) or config.storage in STORED_IN_FOLDER
    file_is_lost = folder_id is None and is_home  # it is written again
    if not file_is_lost and folder_id != stored["id"]:
        raise BadInputError(
            f"study {config.name} has its runs in {stored['path']}, and {folder} is another folder: go on in that one "
            "(hydra.sweep.dir=FOLDER; other machines must see it too), or give the study another hydra.sweeper.name"
        )
    return stored


def _check_trials(
    study: optuna.Study, trials: Sequence[tuple[dict[str, Any], dict[str, Any]]], *, config: StudyConfig, folder: Path
) -> None:
    """Compares the stored trials with those that the configuration would create. Raises BadInputError if points of a
    grid would be missing, since the study has other trials in their places. Prints the baselines that are not tried,
    since the study was begun without them."""
    stored = study.get_trials(deepcopy=False)
    pairs = list(zip(stored, trials, strict=False))
    if config.sampler == "grid":
        other = [trial.number for trial, (point, _) in pairs if trial.system_attrs.get("fixed_params", {}) != point]
        if other:
            raise BadInputError(
                f"study {config.name} was begun with another sampler or other baselines, so {len(other)} of the "
                f"{len(trials)} trials of its grid would be missing (trial {other[0]} is none of them): give it "
                "another hydra.sweeper.name, or the settings it has"
            )
    stored_baselines = [
        to_current_paths(trial.user_attrs[BASELINE_KEY], study, folder=folder)
        for trial in stored
        if BASELINE_KEY in trial.user_attrs
    ]
    baselines = [attributes[BASELINE_KEY] for _, (_, attributes) in pairs if BASELINE_KEY in attributes]
    missing = [overrides for overrides in baselines if overrides not in stored_baselines]
    if missing:
        texts = ", ".join(" ".join(words) or "(no overrides)" for words in missing)
        say(
            f"study {config.name} has begun without the baselines {texts}, "
            "which are not tried: give it another hydra.sweeper.name to have them"
        )


def to_current_paths(overrides: Sequence[str], study: optuna.Study, *, folder: Path) -> list[str]:
    """Stored overrides, with the study's original folder replaced by its current one."""
    return _with_paths(overrides, old=_first_path(study, folder=folder), new=str(folder))


def to_original_paths(overrides: Sequence[str], study: optuna.Study, *, folder: Path) -> list[str]:
    """The inverse of `to_current_paths`, for what is stored after the folder has moved. Fixed overrides have the
    original folder already (`_check_definition`)."""
    return _with_paths(overrides, old=str(folder), new=_first_path(study, folder=folder))


def _first_path(study: optuna.Study, *, folder: Path) -> str:
    return study.user_attrs.get(HOME_KEY, {}).get("path", str(folder))


def _with_paths(overrides: Sequence[str], *, old: str, new: str) -> list[str]:
    words = []
    for word in overrides:
        key, _, value = word.partition("=")
        path = unquote(value)
        is_below = old != new and path.startswith(f"{old}/")
        words.append(f"{key}={quote(new + path.removeprefix(old))}" if is_below else word)
    return words


def differences(old: Any, new: Any, *, path: str = "") -> list[tuple[str, Any, Any]]:
    """(dotted path, old, new) of each difference between nested settings; a value that one side lacks is None there."""
    if old == new:
        return []
    if not (isinstance(old, dict) and isinstance(new, dict)):
        return [(path, old, new)]
    changes = []
    for key in dict.fromkeys((*old, *new)):
        changes += differences(old.get(key), new.get(key), path=f"{path}.{key}".strip("."))
    return changes


def setting_text(value: Any) -> str:
    """A setting in a message; one that only one of two studies searches, a dict, without its defaults."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {v}" for key, v in value.items() if v not in (None, [], {}, 0.0, False)) + "}"
    return "none" if value is None else str(value)


def seconds_of(trial: FrozenTrial) -> float | None:
    """Seconds that an ended trial took; None for another. Without SECONDS_KEY, as of earlier versions, by the times at
    which it began and ended, between which the machine's clock may have been set."""
    if trial.duration is None:
        return None
    return float(trial.user_attrs.get(SECONDS_KEY, max(trial.duration.total_seconds(), 0.0)))
