"""Every failure that a user can cause or meet, each with the exit code its command ends with.

A message says what was given, what is allowed and what to do; docs/troubleshooting.md lists the exit codes.
"""

import errno
from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from pathlib import Path

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # of the disk, of the user's share of it, of one file


class BaocError(Exception):
    """Base of every error that is reported as one message, without a traceback."""

    exit_code = 1


class BadInputError(BaocError, ValueError):
    """The request is malformed or contradicts itself: an unknown name, a bad size, a missing path."""

    exit_code = 2


class InfeasibleBudgetError(BaocError):
    """No allocation meets the budget.

    `least_feasible_bytes` is in the budget's own measure: peak bytes for a memory budget, state bytes for a state
    fraction. `advice` lists what would lower it. `least_host_bytes`: where the host's memory is what is missing, what
    would be enough of it. `least_step_s`: where seconds are, those of the fastest allocation's whole step.
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
        self.least_host_bytes = least_host_bytes
        self.least_step_s = least_step_s
        self.least_feasible_bytes = least_feasible_bytes
        self.advice = advice

    def without_frames(self) -> "InfeasibleBudgetError":
        """Itself, having let go of frames, whose activations the next measurement is not to find."""
        self.__cause__ = self.__context__ = None
        return self.with_traceback(None)


class BudgetBreachedError(BaocError):
    """The run held more than its budget, or the device had no memory left."""

    exit_code = 4


class TrainingFailedError(BaocError):
    """Training cannot go on: non-finite loss or gradients under a strict policy, or data that cannot be read."""

    exit_code = 5


class PreemptedError(BaocError):
    """A signal asked the process to end: it did, after the checkpoint of the step in progress."""

    exit_code = 130


class DivergedError(TrainingFailedError):
    """The loss or a gradient was no finite number: the settings are to blame, not the data or the machine."""


class CheckpointError(BadInputError):
    """A checkpoint is corrupt, foreign, or of a schema that this version cannot read."""


class OutputError(BadInputError):
    """The run folder cannot be written: the disk is full, the folder is read-only, or a file is in the way."""


def causes(error: BaseException) -> Iterator[BaseException]:
    """The error and what it came of, each once."""
    cause: BaseException | None = error
    seen: set[int] = set()
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        yield cause
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)


def first_line(error: BaseException) -> str:
    """The first line of an error's text that is not empty, or its class where there is none."""
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)


def no_room(error: OSError, path: str | Path | None) -> OutputError:
    """What to do about one of `NO_ROOM` at `path`."""
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
    """The error for a name that a registry does not hold: what was given, the nearest one, and all that there are."""
    names = list(allowed)
    close = get_close_matches(str(given), names, n=1)
    hint = f" (did you mean {close[0]}?)" if close else ""
    return BadInputError(f"there is no {what} {given!r}{hint}; choose from: {', '.join(names)}")
