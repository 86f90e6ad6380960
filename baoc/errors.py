"""The errors that a user can cause or meet, each with the exit code of the command.

A message says what was given, what is allowed and what to do. docs/troubleshooting.md lists the exit codes.
"""

import errno
from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from pathlib import Path

DISK_FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # full disk, quota exceeded, file too large


class BaocError(Exception):
    """Base of every error that is reported as one message, without a traceback."""

    exit_code = 1


class BadInputError(BaocError, ValueError):
    """The request is malformed or contradicts itself: an unknown name, a bad size, a missing path."""

    exit_code = 2


class CalledAloneError(BadInputError):
    """One rank made a call that all ranks make together. The others have parted from it, so training cannot go on."""


class InfeasibleBudgetError(BaocError):
    """No allocation meets the budget.

    Attributes:
        budget_bytes: The limit, in bytes of the device's peak for a memory budget and of state for a state fraction.
        least_feasible_bytes: The smallest limit that some allocation meets, in the same measure.
        advice: What would lower `least_feasible_bytes`.
        least_host_bytes: Host memory that would be enough, if host memory is what is missing.
        least_step_s: Seconds of a whole step of the fastest allocation, if the step time is what is missed.
    """

    exit_code = 3

    def __init__(
        self,
        message: str,
        *,
        budget_bytes: int,
        least_feasible_bytes: int,
        advice: tuple[str, ...] = (),
        least_host_bytes: int | None = None,
        least_step_s: float | None = None,
    ):
        super().__init__(message)
        self.budget_bytes = budget_bytes
        self.least_feasible_bytes = least_feasible_bytes
        self.advice = advice
        self.least_host_bytes = least_host_bytes
        self.least_step_s = least_step_s

    def without_frames(self) -> "InfeasibleBudgetError":
        """Drops traceback and causes, whose frames keep activations alive, and returns itself."""
        self.__cause__ = self.__context__ = None
        return self.with_traceback(None)


class BudgetBreachedError(BaocError):
    """The run used more memory than its budget, or the device ran out of memory."""

    exit_code = 4


class TrainingFailedError(BaocError):
    """Training cannot go on: non-finite loss or gradients under a strict policy, or data that cannot be read."""

    exit_code = 5


class PreemptedError(BaocError):
    """A signal ended the run, after the checkpoint of the step in progress."""

    exit_code = 130


class DivergedError(TrainingFailedError):
    """The loss or a gradient is not finite, because of the run's settings rather than its data or machine."""


class CheckpointError(BadInputError):
    """A checkpoint is corrupt, foreign, or of a schema that this version cannot read."""


class OutputError(BadInputError):
    """The run folder cannot be written: the disk is full, the folder is read-only, or a file is in the way."""


def exception_chain(error: BaseException) -> Iterator[BaseException]:
    """The error, its cause, the cause of that, and so on, each once."""
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        yield cause
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)


def first_line(error: BaseException) -> str:
    """The first non-empty line of the error's text, or the name of its class."""
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)


def disk_full_error(error: OSError, path: str | Path | None) -> OutputError:
    """The error to show for an OSError of `DISK_FULL_ERRNOS`; `path` is the file that was written, if known."""
    file = f"{Path(path).name} in {Path(path).parent}" if path else "a file"
    problem, remedy = f"no space left for {file}", "free space"
    if error.errno == errno.EFBIG:
        problem, remedy = f"{file} would be larger than a file may be", "raise the limit (ulimit -f)"
    elsewhere = "set hydra.run.dir (hydra.sweep.dir for a multirun) to a folder on another disk"
    return OutputError(f"{problem}: {remedy} or {elsewhere}")


def did_you_mean(given: object, allowed: Iterable[str], *, prefix: str = "") -> str:
    """`; did you mean a or b?`, or empty if no name is similar."""
    names = {name.lower(): name for name in allowed}
    near = [names[low] for low in get_close_matches(str(given).lower(), names, n=3)]
    return f"; did you mean {' or '.join(prefix + name for name in near)}?" if near else ""


def unknown_name(given: object, *, what: str, allowed: Iterable[str]) -> BadInputError:
    """The error for a name that is not in a registry; it lists the nearest name and all `allowed` ones."""
    names = list(allowed)
    close = get_close_matches(str(given), names, n=1)
    hint = f" (did you mean {close[0]}?)" if close else ""
    return BadInputError(f"there is no {what} {given!r}{hint}; choose from: {', '.join(names)}")
