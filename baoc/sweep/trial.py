"""One trial in a process of its own, so that whatever happens to it leaves the study and its other trials alone."""

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baoc.errors import BudgetBreachedError, InfeasibleBudgetError
from baoc.sweep.runs import CONFIG, ERROR, RESULT
from baoc.tracking.files import read_json

COMMAND = "import sys; from baoc.config.cli import main; sys.exit(main(sys.argv[1:]))"
_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG
INFEASIBLE, BREACHED = InfeasibleBudgetError.exit_code, BudgetBreachedError.exit_code  # answers, not failures


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a trial ended. `violated` is 0, or 1 where a budget was impossible or breached; `result` is result.json."""

    exit_code: int
    result: dict[str, Any] | None
    message: str = ""

    @property
    def violated(self) -> float:
        return float(self.exit_code in (INFEASIBLE, BREACHED))

    @property
    def answered(self) -> bool:
        return self.result is not None or self.violated > 0


class TrialProcess:
    """`python run.py OVERRIDES` into `folder`. A second attempt goes on from the folder's newest checkpoint."""

    def __init__(self, overrides: Sequence[str], *, folder: Path, threads: int, code: str = COMMAND):
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        words = [*overrides, f"hydra.run.dir={folder}"]
        if any(folder.rglob("*.ckpt")):
            words.append(f"resume={folder}")
        else:
            _clear(folder)
        self._log = (folder / "trial.log").open("ab")
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, *words],
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": str(threads)},
            start_new_session=True,  # a Ctrl-C in the terminal is the study's to pass on
            preexec_fn=_die_with_parent if sys.platform == "linux" else None,
        )

    def poll(self) -> Outcome | None:
        """The outcome, or None while the trial runs."""
        code = self.process.poll()
        if code is None:
            return None
        self._log.close()
        return outcome_in(self.folder, exit_code=code)

    def stop(self, *, patience_s: float = 30.0) -> None:
        """Asks for a checkpoint and an end; kills what does not listen."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(timeout=patience_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._log.close()


def outcome_in(folder: Path, *, exit_code: int) -> Outcome:
    """What a folder tells of its trial; a result counts only if the process ended well or breached its budget."""
    result, error = folder / RESULT, folder / ERROR
    told = read_json(result) if result.is_file() and exit_code in (0, BREACHED) else None
    message = read_json(error)["message"] if error.is_file() else ""
    if not message and exit_code:
        lines = (folder / "trial.log").read_text(encoding="utf-8", errors="replace").strip().splitlines()
        message = lines[-1] if lines else f"ended with {exit_code}"
    return Outcome(exit_code=exit_code, result=told, message=message)


def _clear(folder: Path) -> None:
    """A trial that left no checkpoint begins anew: its unfinished records go, its log stays."""
    for name in (RESULT, ERROR, CONFIG, "metrics.jsonl"):
        (folder / name).unlink(missing_ok=True)


def _die_with_parent() -> None:
    """If the study is killed, its trials are asked to end as well: no orphan writes into a folder that is retried."""
    ctypes.CDLL(None).prctl(_DEATH_SIGNAL, signal.SIGTERM)
