"""One run of a trial in a process of its own: how it begins, goes on from its checkpoint, and what it answered."""

import os
import re
import shlex
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from baoc.cli.failures import BUG, INTERRUPTED
from baoc.errors import BadInputError, BudgetBreachedError, DivergedError, InfeasibleBudgetError
from baoc.frontier.runs import CONFIG, ERROR, RESULT
from baoc.sweep import children
from baoc.sweep.memory import num_out_of_memory
from baoc.tracking.files import read_json
from baoc.tracking.metrics import METRICS_FILE

COMMAND = "import sys; from baoc.cli.main import main; sys.exit(main(sys.argv[1:], single=True))"
LOCK, LOG = "trial.lock", "trial.log"
INFEASIBLE, BREACHED = InfeasibleBudgetError.exit_code, BudgetBreachedError.exit_code  # answers, not failures
_PLAIN = re.compile(r"[A-Za-z0-9_./:+@-]+")  # what Hydra reads without quotes
_VANISHED = 255  # what multiprocessing says where its server was killed
_TAIL, _TOLD = 2**16, 500  # bytes of a log that are looked at for its last line, characters of it that are kept


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a run ended. `result` is result.json where it counts; `diverged` where the loss was no number."""

    exit_code: int
    result: dict[str, Any] | None
    message: str = ""
    diverged: bool = False

    @property
    def violated(self) -> float:
        """1 where a budget was impossible or breached, or memory ran out; else 0."""
        return float(self.exit_code in (INFEASIBLE, BREACHED))

    @property
    def answered(self) -> bool:
        """Whether it tells something about its settings; a bad input, a bug and a kill do not."""
        return self.result is not None or self.violated > 0 or self.diverged

    @property
    def killed(self) -> bool:
        """Ended from outside or by a bug: worth another attempt."""
        return not self.answered and (self.exit_code < 0 or self.exit_code in (BUG, INTERRUPTED, _VANISHED))


class TrialProcess:
    """`python run.py OVERRIDES` into `folder`. A second attempt goes on from the folder's newest checkpoint."""

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
        self._out_of_memory = num_out_of_memory()
        self._sizes, self._wrote = self._written(), time.monotonic()
        self.process: ForkServerProcess = children.start(
            partial(_run, code, list(overrides), str(folder)),
            log=folder / LOG,
            lock=folder / LOCK,
            arguments=overrides,
            variables={"OMP_NUM_THREADS": str(threads), **(variables or {})},
        )

    @property
    def sentinel(self) -> int:
        """Becomes readable when the process has ended."""
        return self.process.sentinel

    def poll(self) -> Outcome | None:
        """The outcome, or None while the run goes on."""
        code = self.process.exitcode
        if code is None:
            return None
        if code == -signal.SIGKILL and num_out_of_memory() > self._out_of_memory:
            return Outcome(
                exit_code=BREACHED, result=None, message="the machine ran out of memory and the trial was killed"
            )
        return outcome_in(self.folder, exit_code=code)

    def silent_s(self) -> float:
        """Seconds since it last wrote a metric or a line, or began; a machine that sleeps does not count."""
        sizes = self._written()
        if sizes != self._sizes:
            self._sizes, self._wrote = sizes, time.monotonic()
        return time.monotonic() - self._wrote

    def _written(self) -> list[int]:
        files = [self.folder / name for name in (METRICS_FILE, LOG)]
        return [file.stat().st_size if file.is_file() else 0 for file in files]

    def ask_to_end(self) -> None:
        """A checkpoint and an end; does not wait."""
        self.process.terminate()

    def kill(self) -> None:
        """It and what it has started: ranks and loaders of a run that hangs would hang on."""
        try:
            os.killpg(self.process.pid or 0, signal.SIGKILL)  # a session of its own, see `children`
        except (ProcessLookupError, PermissionError):
            self.process.kill()  # it has not come to that yet

    def stop(self, *, patience_s: float = 30.0) -> None:
        """Waits for the end; kills what does not listen."""
        self.process.join(patience_s)
        if self.process.exitcode is None:
            self.kill()
            self.process.join()


def _run(code: str, overrides: Sequence[str], folder: str) -> None:
    """In the trial's process: begins, goes on, or finds that an earlier attempt has finished."""
    path = Path(folder)
    if (path / RESULT).is_file():  # the study was killed between this result and its record
        _end_with_result(path, overrides)
    checkpoints = any(path.rglob("*.ckpt"))
    status = _execute(code, overrides, path, resume=checkpoints)
    if checkpoints and status == BadInputError.exit_code:  # a checkpoint of the last step, or a damaged one
        status = _execute(code, overrides, path, resume=False)
    sys.exit(status)


def _end_with_result(folder: Path, overrides: Sequence[str]) -> None:
    """Ends as the run did that has written the folder's result. Ends with 2 where that is damaged, or of other
    settings: taking it would be wrong, and so would losing it."""
    try:
        result = read_json(folder / RESULT)
    except BadInputError as error:
        print(error)
        sys.exit(error.exit_code)
    told = shlex.split(result.get("command", ""))
    missing = [word for word in overrides if told and word not in told and not word.startswith("hydra")]
    if missing:
        print(
            f"{folder} holds the result of other settings (without {' '.join(missing)}), perhaps of another study: move"
            " it away, or give the study another hydra.sweep.dir"
        )
        sys.exit(BadInputError.exit_code)
    sys.exit(BREACHED if result.get("budget_met") is False else 0)


def quoted(value: str) -> str:
    """A value as Hydra's command line takes it, spaces and all."""
    if _PLAIN.fullmatch(value):
        return value
    # a backslash is one unless it stands before a quote
    escaped = re.sub(r"(\\*)('|\Z)", lambda found: found[1] * 2 + ("\\'" if found[2] else ""), value)
    return f"'{escaped}'"


def _execute(code: str, overrides: Sequence[str], folder: Path, *, resume: bool) -> int:
    words = [*overrides, f"hydra.run.dir={quoted(str(folder))}"]
    if resume:
        words.append(f"resume={quoted(str(folder))}")
    else:
        _clear(folder)
    sys.argv = ["run.py", *words]
    try:
        exec(compile(code, "<trial>", "exec"), {"__name__": "__main__"})
    except SystemExit as ended:
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    return 0


def outcome_in(folder: Path, *, exit_code: int) -> Outcome:
    """What a folder tells of its run; a result counts only if the process ended well or breached its budget."""
    result, error = folder / RESULT, folder / ERROR
    try:
        told = read_json(result) if result.is_file() and exit_code in (0, BREACHED) else None
        kept = read_json(error) if error.is_file() and exit_code else {}
    except BadInputError as damaged:  # this trial's failure, not the study's
        return Outcome(exit_code=exit_code, result=None, message=str(damaged))
    message = kept.get("message", "")
    if not message and exit_code:
        message = _last_line(folder / LOG) or f"ended with {exit_code}"
    diverged = kept.get("kind") == DivergedError.__name__
    if told is not None and told["quality"]["value"] is None:
        diverged, message = True, message or "its quality is no number"
    return Outcome(exit_code=exit_code, result=told, message=message, diverged=diverged)


def _last_line(log: Path) -> str:
    """Its end; empty where the process was killed before it could open the file, or wrote nothing."""
    if not log.is_file():
        return ""
    with log.open("rb") as file:
        file.seek(max(log.stat().st_size - _TAIL, 0))
        lines = file.read().decode("utf-8", errors="replace").strip().splitlines()
    return lines[-1][-_TOLD:] if lines else ""


def _clear(folder: Path) -> None:
    """A run that begins anew: unfinished records and checkpoints go, its log stays."""
    for name in (RESULT, ERROR, CONFIG, "metrics.jsonl"):
        (folder / name).unlink(missing_ok=True)
    for checkpoint in folder.rglob("*.ckpt"):
        os.unlink(checkpoint)
