"""Maps every expected way to fail to one message and one exit code. Other errors are bugs and show their traceback."""

import traceback
from dataclasses import dataclass

from baoc.cli.hydra_errors import translate_error
from baoc.core import own_code
from baoc.core.commands import INTERRUPTED, is_interrupt, silence_broken_pipe, system_error, tell
from baoc.errors import BadInputError, BaocError

BUG_EXIT_CODE = 1
_LIGHTNING_SIGTERM = "SIGTERMException"  # a SystemExit without a code, which would count as success


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """`kind` is the error's class name; `details` is the traceback, of bugs and of errors in the user's code."""

    kind: str
    message: str
    exit_code: int
    details: str = ""


def failure_of(error: BaseException) -> Failure:
    """Returns the message and the exit code for an error that ended a command."""
    kind = type(error).__name__
    if kind == _LIGHTNING_SIGTERM:
        return Failure(kind=kind, message="terminated (SIGTERM)", exit_code=INTERRUPTED)
    if silence_broken_pipe(error):
        return Failure(kind=kind, message="", exit_code=INTERRUPTED)
    if is_interrupt(error):
        message = str(error) if isinstance(error, KeyboardInterrupt) else ""
        return Failure(kind="KeyboardInterrupt", message=message or "interrupted", exit_code=INTERRUPTED)
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        return Failure(kind=kind, message=error.code if isinstance(error.code, str) else "", exit_code=code)
    expected = error if isinstance(error, BaocError) else translate_error(error) or system_error(error)
    if expected is not None:
        return Failure(kind=kind, message=str(expected), exit_code=expected.exit_code)
    details = "".join(traceback.format_exception(error))
    if own_code.used_names():
        return Failure(kind=kind, message=_own_code_message(error), exit_code=BadInputError.exit_code, details=details)
    message = f"{kind}: {error}\nthis is a bug in baoc: please report it with the traceback above and the command"
    return Failure(kind=kind, message=message, exit_code=BUG_EXIT_CODE, details=details)


def _own_code_message(error: BaseException) -> str:
    """The message for an error in a run with the user's own code: its place, or the class that lacks an attribute."""
    text, names = f"{type(error).__name__}: {error}", ", ".join(own_code.used_names())
    place, lacking = own_code.user_location(error), own_code.class_lacking_attribute(error)
    if lacking is not None:
        return f"{text}\n{lacking} of your own code ({names}) lacks what the traceback above asks it for"
    if place is not None:
        return f"{text}\nraised by your own code at {place} ({names}); the traceback is above"
    return (
        f"{text}\nthe run trains your own code ({names}), of which no line is in the traceback above: mostly what it "
        "returned has another type, shape or device than the task or the data expect"
    )


def report(failure: Failure, *, where: str = "") -> None:
    """Prints a failure on stderr: its traceback, if it has one, and its message after `where`."""
    text = f"{where}{failure.message}".strip()
    if failure.details:
        tell(failure.details)
    if text:
        tell(f"{'baoc: ' if failure.exit_code == INTERRUPTED else 'baoc: error: '}{text}")
