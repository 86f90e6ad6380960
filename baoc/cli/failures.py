"""Maps every way a run can fail to one message and one exit code; anything else is a bug, with its traceback."""

import errno
import sys
import traceback
from dataclasses import dataclass

from baoc.cli.hydra_errors import translate_error
from baoc.core import own_code
from baoc.errors import BadInputError, BaocError, BudgetBreachedError, OutputError, causes

INTERRUPTED = 130
BUG = 1
_TERMINATED = "SIGTERMException"  # Lightning's; a SystemExit without a code, which would count as success

_EXTRAS = {  # package that an extra of the installation brings -> that extra
    "omegaconf": "all", "plotly": "all", "pydantic": "all", "safetensors": "all", "transformers": "all",
    "optuna": "studies", "wandb": "wandb", "accelerate": "hf", "datasets": "data", "PIL": "data",
    "diffusers": "diffusion", "peft": "lora",
}  # fmt: skip
_DISK_FULL = {errno.ENOSPC, errno.EDQUOT}
_NOT_WRITABLE = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG}
_OUT_OF_MEMORY = (
    *("out of memory", "can't allocate memory", "not enough memory", "std::bad_alloc", "can't start new thread"),
    *("failed to map segment from shared object",),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """`kind` is the error's class name; `details` is the traceback, for bugs only."""

    kind: str
    message: str
    exit_code: int
    details: str = ""


def failure_of(error: BaseException) -> Failure:
    """The message and the exit code of an error."""
    kind = type(error).__name__
    if kind == _TERMINATED:
        return Failure(kind=kind, message="terminated (SIGTERM)", exit_code=INTERRUPTED)
    if _is_interrupt(error):
        message = str(error) if isinstance(error, KeyboardInterrupt) else ""
        return Failure(kind="KeyboardInterrupt", message=message or "interrupted", exit_code=INTERRUPTED)
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        return Failure(kind=kind, message=error.code if isinstance(error.code, str) else "", exit_code=code)
    expected = error if isinstance(error, BaocError) else translate_error(error) or _system_error(error)
    if expected is not None:
        return Failure(kind=kind, message=str(expected), exit_code=expected.exit_code)
    details = "".join(traceback.format_exception(error))
    if own_code.used():
        return Failure(kind=kind, message=_of_own_code(error), exit_code=BadInputError.exit_code, details=details)
    message = f"{kind}: {error}\nthis is a bug in baoc: please report it with the traceback above and the command"
    return Failure(kind=kind, message=message, exit_code=BUG, details=details)


def _of_own_code(error: BaseException) -> str:
    """What ended a run that trains code of the user: where in it, or which of its classes lacks an attribute."""
    told, names = f"{type(error).__name__}: {error}", ", ".join(own_code.used())
    place, lacking = own_code.place_of(error), own_code.class_name_of(error)
    if lacking is not None:
        return f"{told}\n{lacking} of your own code ({names}) lacks what the traceback above asks it for"
    if place is not None:
        return f"{told}\nraised by your own code at {place} ({names}); the traceback is above"
    return (
        f"{told}\nthe run trains your own code ({names}), of which no line is in the traceback above: mostly what it "
        "returned has another type, shape or device than the task or the data expect"
    )


def report(failure: Failure, *, where: str = "") -> None:
    """Prints a failure on stderr: a bug with its traceback, everything else as one message."""
    text = f"{where}{failure.message}".strip()
    if failure.details:
        print(failure.details, file=sys.stderr)
    if text:
        prefix = "baoc: " if failure.exit_code == INTERRUPTED else "baoc: error: "
        print(f"{prefix}{text}", file=sys.stderr, flush=True)


def _system_error(error: BaseException) -> BaocError | None:
    """A full disk, an unwritable folder, exhausted memory or a package of an extra, anywhere in the chain of causes."""
    for cause in causes(error):
        missing = (cause.name or "").partition(".")[0] if isinstance(cause, ModuleNotFoundError) else ""
        if missing in _EXTRAS:
            extra = _EXTRAS[missing]
            return BadInputError(f"this needs {missing}, which is not installed: pip install 'baoc[{extra}]'")
        if isinstance(cause, OSError) and cause.errno in _DISK_FULL:
            return OutputError(
                f"no space left on the device{_path_suffix(cause)}: "
                "free some, or write elsewhere with hydra.run.dir=PATH"
            )
        if isinstance(cause, OSError) and cause.errno == errno.EFBIG:
            return OutputError(
                f"a file{_path_suffix(cause)} would be larger than files may be: raise the limit (ulimit -f), or write "
                "elsewhere with hydra.run.dir=PATH"
            )
        if isinstance(cause, OSError) and cause.errno in _NOT_WRITABLE:
            return OutputError(
                f"cannot open or write{_path_suffix(cause)}: {cause.strerror}; a run writes into hydra.run.dir=PATH"
            )
        if _is_out_of_memory(cause):
            return BudgetBreachedError(
                f"out of memory: {str(cause).splitlines()[0] if str(cause) else 'the machine has none left'}\n"
                "set a smaller micro_batch, model.size or budget"
            )
    return None


def _is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return True
    return isinstance(error, RuntimeError | ImportError) and any(text in str(error).lower() for text in _OUT_OF_MEMORY)


def _is_interrupt(error: BaseException) -> bool:
    """Whether the error is Ctrl-C, or the SystemExit that Lightning makes of it."""
    return isinstance(error, KeyboardInterrupt) or (
        isinstance(error, SystemExit) and any(isinstance(cause, KeyboardInterrupt) for cause in causes(error))
    )


def _path_suffix(error: OSError) -> str:
    return f" {error.filename}" if error.filename else ""
