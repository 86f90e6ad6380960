"""Every way a run can end badly, as one message and one exit code; what fits none is a bug, with its traceback."""

import errno
import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass

from baoc.cli.problems import explain
from baoc.errors import BaocError, BudgetBreachedError, OutputError

INTERRUPTED = 130
BUG = 1
_TERMINATED = "SIGTERMException"  # Lightning's, a SystemExit without a code, which would read as success

_DISK_FULL = {errno.ENOSPC, errno.EDQUOT}
_NOT_WRITABLE = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG}
_OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "not enough memory")


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """`kind` is the error's class name; `details` is a traceback, for bugs only."""

    kind: str
    message: str
    exit_code: int
    details: str = ""


def failure_of(error: BaseException) -> Failure:
    """What is said of `error`, and the exit code."""
    kind = type(error).__name__
    if kind == _TERMINATED:
        return Failure(kind=kind, message="terminated (SIGTERM)", exit_code=INTERRUPTED)
    if _is_interrupt(error):
        message = str(error) if isinstance(error, KeyboardInterrupt) else ""
        return Failure(kind="KeyboardInterrupt", message=message or "interrupted", exit_code=INTERRUPTED)
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        return Failure(kind=kind, message=error.code if isinstance(error.code, str) else "", exit_code=code)
    known = error if isinstance(error, BaocError) else explain(error) or _from_system(error)
    if known is not None:
        return Failure(kind=kind, message=str(known), exit_code=known.exit_code)
    details = "".join(traceback.format_exception(error))
    message = f"{kind}: {error}\nthis is a bug in baoc: please report it with the traceback above and the command"
    return Failure(kind=kind, message=message, exit_code=BUG, details=details)


def report(failure: Failure, *, where: str = "") -> None:
    """Say it on stderr: a bug with its traceback, everything else as one message."""
    text = f"{where}{failure.message}".strip()
    if failure.details:
        print(failure.details, file=sys.stderr)
    if text:
        prefix = "baoc: " if failure.exit_code == INTERRUPTED else "baoc: error: "
        print(f"{prefix}{text}", file=sys.stderr, flush=True)


def _from_system(error: BaseException) -> BaocError | None:
    """A full disk, a folder that cannot be written and exhausted memory, wherever in the chain of causes they stand."""
    for link in _chain(error):
        if isinstance(link, OSError) and link.errno in _DISK_FULL:
            return OutputError(
                f"no space left on the device{_file(link)}: free some, or write elsewhere with hydra.run.dir=PATH"
            )
        if isinstance(link, OSError) and link.errno in _NOT_WRITABLE:
            return OutputError(
                f"cannot open or write{_file(link)}: {link.strerror}; a run writes into hydra.run.dir=PATH"
            )
        if _is_out_of_memory(link):
            return BudgetBreachedError(
                f"out of memory: {str(link).splitlines()[0] if str(link) else 'the machine has none left'}\n"
                "set a smaller micro_batch, model.size or budget"
            )
    return None


def _is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and any(text in str(error).lower() for text in _OUT_OF_MEMORY)


def _is_interrupt(error: BaseException) -> bool:
    """Ctrl-C itself, or the SystemExit that Lightning makes of it."""
    return isinstance(error, KeyboardInterrupt) or (
        isinstance(error, SystemExit) and any(isinstance(link, KeyboardInterrupt) for link in _chain(error))
    )


def _chain(error: BaseException) -> Iterator[BaseException]:
    link: BaseException | None = error
    seen: set[int] = set()
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)


def _file(error: OSError) -> str:
    return f" {error.filename}" if error.filename else ""
