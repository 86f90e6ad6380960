"""One run of a trial in its own process: its start, its resumption from a checkpoint, and its outcome."""

import os
import shlex
import signal
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from baoc.cli.failures import BUG_EXIT_CODE
from baoc.config.nodes import with_option_names
from baoc.core.commands import INTERRUPTED
from baoc.errors import BadInputError, BudgetBreachedError, DivergedError, InfeasibleBudgetError
from baoc.frontier.runs import CONFIG, ERROR, NUMBER, RESULT, STUDY_FILE, quote, unquote
from baoc.models import MODELS
from baoc.sweep import forkserver
from baoc.sweep.gpu_slots import count_oom_kills
from baoc.tracking.files import read_record
from baoc.tracking.metrics import METRICS_FILE

COMMAND = "import sys; from baoc.cli.main import main; sys.exit(main(sys.argv[1:], single=True))"
LOCK, LOG = "trial.lock", "trial.log"
# Exit codes that are results about the settings, not failures
INFEASIBLE, BREACHED = InfeasibleBudgetError.exit_code, BudgetBreachedError.exit_code
_HOW_NOT_WHAT = ("hydra", "trainer.devices=")  # beginnings of overrides on which a run's result does not depend
SERVER_LOST = 255  # multiprocessing's exit code if the fork server was killed
_TAIL_BYTES = 2**16  # of a log, in which its last line is looked for
_MAX_MESSAGE_CHARS = 500


def preload(overrides: Iterable[str], *, code: str = COMMAND) -> None:
    """Sets what the fork server imports when it starts: Lightning, and the packages of the networks that the overrides
    name. Otherwise each run would spend some seconds on these imports."""
    named = dict.fromkeys(word.removeprefix("model=") for word in overrides if word.startswith("model="))
    families = [MODELS[name] for name in named if name in MODELS]
    networks = [module for family in families for module in (family.module, *family.imports)]
    forkserver.preload(__name__, *((forkserver.PRELOAD, *networks) if code == COMMAND else ()))


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOutcome:
    """How a run ended. `result` is the content of result.json, of a run that finished; `diverged`: a loss that was not
    finite."""

    exit_code: int
    result: dict[str, Any] | None
    message: str = ""
    diverged: bool = False

    @property
    def violation(self) -> float:
        """1 if the budget was infeasible or breached, or memory ran out; otherwise 0."""
        return float(self.exit_code in (INFEASIBLE, BREACHED))

    @property
    def is_infeasible(self) -> bool:
        """Whether the run ended because of its settings: over its budget, out of memory, or diverged."""
        return self.violation > 0 or self.diverged

    @property
    def is_conclusive(self) -> bool:
        """Whether the outcome is a result about the settings, as a bad input, a bug or a kill is not."""
        return self.result is not None or self.is_infeasible

    @property
    def should_retry(self) -> bool:
        """Whether the run was killed or failed through a bug, so that another attempt may succeed."""
        return not self.is_conclusive and (
            self.exit_code < 0 or self.exit_code in (BUG_EXIT_CODE, INTERRUPTED, SERVER_LOST)
        )


class TrialProcess:
    """A process that runs `python run.py OVERRIDES` into `folder`, or resumes from the folder's newest checkpoint."""

    def __init__(
        self,
        overrides: Sequence[str],
        *,
        folder: Path,
        threads: int,
        code: str = COMMAND,
        variables: Mapping[str, str] | None = None,
    ):
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self._oom_kills_before = count_oom_kills()
        self._file_sizes, self._last_write_s = self._read_file_sizes(), time.monotonic()
        self.process: ForkServerProcess = forkserver.start(
            partial(_trial_main, code, list(overrides), str(folder)),
            log=folder / LOG,
            lock=folder / LOCK,
            arguments=overrides,
            variables={"OMP_NUM_THREADS": str(threads), **(variables or {})},
        )

    @property
    def sentinel(self) -> int:
        """File descriptor that becomes readable when the process has ended."""
        return self.process.sentinel

    def poll(self) -> RunOutcome | None:
        """The outcome, or None while the process runs."""
        code = self.process.exitcode
        if code is None:
            return None
        if code == -signal.SIGKILL and count_oom_kills() > self._oom_kills_before:
            return RunOutcome(
                exit_code=BREACHED, result=None, message="the machine ran out of memory and the trial was killed"
            )
        return read_outcome(self.folder, exit_code=code)

    def silent_s(self) -> float:
        """Seconds since the run last wrote a metric or a line, or started. Time in which the machine slept does not
        count."""
        sizes = self._read_file_sizes()
        if sizes != self._file_sizes:
            self._file_sizes, self._last_write_s = sizes, time.monotonic()
        return time.monotonic() - self._last_write_s

    def _read_file_sizes(self) -> list[int]:
        files = [self.folder / name for name in (METRICS_FILE, LOG)]
        return [file.stat().st_size if file.is_file() else 0 for file in files]

    def ask_to_end(self) -> None:
        """Asks the run to write a checkpoint and end (SIGTERM); does not wait."""
        self.process.terminate()

    def kill(self) -> None:
        """Kills the process and its children, since data loaders and ranks of a hanging run would not end by
        themselves."""
        try:
            os.killpg(self.process.pid or 0, signal.SIGKILL)  # it leads a session, see `forkserver.start`
        except (ProcessLookupError, PermissionError):
            self.process.kill()  # it has not made its session yet

    def stop(self, *, patience_s: float = 30.0) -> None:
        """Waits up to `patience_s` seconds for the end, then kills the process."""
        self.process.join(patience_s)
        if self.process.exitcode is None:
            self.kill()
            self.process.join()


def _trial_main(code: str, overrides: Sequence[str], folder: str) -> None:
    """Body of the trial's process: starts the run or resumes it; if there is a result, exits as that run did."""
    path = Path(folder)
    if (path / RESULT).is_file():  # the study was killed after the result and before it finished the trial
        _exit_as_recorded(path, overrides)
    has_checkpoint = any(path.rglob("*.ckpt"))
    exit_code = _run_command(code, overrides, path, resume=has_checkpoint)
    if has_checkpoint and exit_code == BadInputError.exit_code:  # the checkpoint is of the last step, or damaged
        exit_code = _run_command(code, overrides, path, resume=False)
    sys.exit(exit_code)


def _exit_as_recorded(folder: Path, overrides: Sequence[str]) -> None:
    """Exits with the code of the run that wrote the folder's result. Exits with 2 if that result is damaged or of other
    settings, so that it is neither taken for this trial's nor overwritten."""
    try:
        result = read_record(folder / RESULT, {})
        recorded = shlex.split(str(result.get("command", "")))
    except ValueError as error:  # BadInputError is one
        print(error)
        sys.exit(BadInputError.exit_code)
    relevant = [word for word in overrides if not word.startswith(_HOW_NOT_WHAT)]
    study = next((parent for parent in folder.parents if (parent / STUDY_FILE).is_file()), folder.parent)
    missing = [word for word in relevant if recorded and not _is_recorded(word, recorded, study=study)]
    if missing:
        print(
            f"{folder} holds the result of other settings (without {' '.join(missing)}), perhaps of another study: move"
            " it away, or give the study another hydra.sweep.dir"
        )
        sys.exit(BadInputError.exit_code)
    sys.exit(BREACHED if result.get("budget_met") is False else 0)


def _is_recorded(word: str, recorded: Sequence[str], *, study: Path) -> bool:
    """Whether a run's command has this override, in words as typed or as `with_option_names` replaces them. A path
    below the study's folder may begin with another place, since the folder may have been moved after the run."""
    key, _, value = word.partition("=")
    values = [unquote(other.removeprefix(f"{key}=")) for other in recorded if other.startswith(f"{key}=")]
    (option,) = with_option_names([word])
    path, home = unquote(value), f"{study}/"
    if word in recorded or path in values or unquote(option.removeprefix(f"{key}=")) in values:
        return True
    return path.startswith(home) and any(other.endswith(f"/{path.removeprefix(home)}") for other in values)


def _run_command(code: str, overrides: Sequence[str], folder: Path, *, resume: bool) -> int:
    """Runs the trial's program in this process; returns its exit code. Clears the folder unless `resume`."""
    words = [*overrides, f"hydra.run.dir={quote(str(folder))}"]
    if resume:
        words.append(f"resume={quote(str(folder))}")
    else:
        for name in (RESULT, ERROR, CONFIG, METRICS_FILE):  # the log is kept
            (folder / name).unlink(missing_ok=True)
        for checkpoint in folder.rglob("*.ckpt"):
            checkpoint.unlink()
    sys.argv = ["run.py", *words]
    try:
        exec(compile(code, "<trial>", "exec"), {"__name__": "__main__"})
    except SystemExit as exit_:
        if isinstance(exit_.code, str):
            print(exit_.code, file=sys.stderr)
        return exit_.code if isinstance(exit_.code, int) else int(exit_.code is not None)
    return 0


def read_outcome(folder: Path, *, exit_code: int) -> RunOutcome:
    """The outcome of a run from its folder; a result counts only after exit code 0 or a breached budget."""
    result_file, error_file = folder / RESULT, folder / ERROR
    try:
        has_result = result_file.is_file() and exit_code in (0, BREACHED)
        result = read_record(result_file, {"quality.value": NUMBER}) if has_result else None
        failure = read_record(error_file, {"message": str}) if error_file.is_file() and exit_code else {}
    except BadInputError as error:  # a damaged file fails this trial, not the study
        return RunOutcome(exit_code=exit_code, result=None, message=str(error))
    message = failure.get("message", "")
    if not message and exit_code:
        message = _last_line(folder / LOG) or f"ended with {exit_code}"
    diverged = failure.get("kind") == DivergedError.__name__
    if result is not None and result["quality"]["value"] is None:
        diverged, message = True, message or "its quality is no number"
    return RunOutcome(exit_code=exit_code, result=result, message=message, diverged=diverged)


def _last_line(log: Path) -> str:
    """The last line of a log; empty if the process was killed before it wrote one."""
    if not log.is_file():
        return ""
    with log.open("rb") as file:
        file.seek(max(log.stat().st_size - _TAIL_BYTES, 0))
        lines = file.read().decode("utf-8", errors="replace").strip().splitlines()
    return lines[-1][-_MAX_MESSAGE_CHARS:] if lines else ""
