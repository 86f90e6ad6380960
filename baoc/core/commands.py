"""How a command ends: one message and one exit code for each error that the user or the system can cause.

Used by the `python -m baoc.FOLDER.NAME` commands, which run without Hydra; `baoc.cli.failures` adds Hydra's errors.
"""

import errno
import os
import stat
import sys
import traceback
from collections.abc import Callable, Sequence
from functools import wraps

from baoc.errors import (
    DISK_FULL_ERRNOS,
    BadInputError,
    BaocError,
    BudgetBreachedError,
    OutputError,
    TrainingFailedError,
    disk_full_error,
    exception_chain,
)

Arguments = Sequence[str] | None  # None: sys.argv[1:]
INTERRUPTED = 130

_EXTRAS = {  # package -> the extra of this package that installs it
    "omegaconf": "all", "plotly": "all", "pydantic": "all", "safetensors": "all", "transformers": "all",
    "optuna": "studies", "wandb": "wandb", "accelerate": "hf", "datasets": "data", "PIL": "data",
    "pyarrow": "data", "diffusers": "diffusion", "peft": "lora",
}  # fmt: skip
_NOT_WRITABLE = {
    *(errno.EACCES, errno.EPERM, errno.EROFS),
    *(errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ELOOP, errno.ENAMETOOLONG),
}
_STORAGE_FAILED = {errno.EIO, errno.ENODATA, errno.ESTALE}
_OUT_OF_MEMORY = (
    *("out of memory", "can't allocate memory", "not enough memory", "std::bad_alloc", "can't start new thread"),
    *("failed to map segment from shared object",),
)


def command(main: Callable[[Arguments], int | None]) -> Callable[..., int]:
    """Decorates `main(argv)` to return an exit code: its own or 0, or that of an expected error, which it prints. An
    OSError that `system_error` does not know counts as bad input (2). Other errors are raised."""

    @wraps(main)
    def run(argv: Arguments = None) -> int:
        open_missing_streams()
        try:
            code = main(argv) or 0
            sys.stdout.flush()
            return code
        except (Exception, KeyboardInterrupt) as error:
            if silence_broken_pipe(error):
                return INTERRUPTED
            if is_interrupt(error):
                tell("baoc: interrupted")
                return INTERRUPTED
            expected = error if isinstance(error, BaocError) else system_error(error)
            if expected is None and not isinstance(error, OSError):
                raise
            tell(f"baoc: error: {expected or error}")
            return (expected or BadInputError).exit_code

    return run


def open_missing_streams() -> None:
    """Opens the null device for each standard stream that the process was started without. Otherwise the next opened
    file would get the stream's descriptor, and output of compilers and workers would go into that file."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            null = open(os.devnull, mode, encoding="utf-8")  # noqa: SIM115  # gets the lowest free descriptor
            os.set_inheritable(null.fileno(), True)
            setattr(sys, name, null)


def silence_broken_pipe(error: BaseException) -> bool:
    """Whether stdout's reader has closed it, as in `--list specs | head`. Then stdout becomes the null device."""
    if isinstance(error, BrokenPipeError):
        _silence(1)
        return True
    return False


def _silence(descriptor: int) -> None:
    """Makes it the null device: what waits in its buffer would fail again when Python ends, with another exit code."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)


def tell(text: str) -> None:
    """Prints on stderr. Where that cannot be written, the exit code alone tells."""
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError:
        _silence(2)


def _output_is_full() -> bool:
    """Whether stdout has no room, told by a line end: nothing is kept of what could not be written. Pipes and terminals
    always have room, and would show that line. Another file of its disk may be what failed."""
    if os.isatty(1) or stat.S_ISFIFO(os.fstat(1).st_mode):
        return False
    try:
        os.write(1, b"\n")
    except OSError as error:
        _silence(1)
        return error.errno in DISK_FULL_ERRNOS
    return False


def system_error(error: BaseException) -> BaocError | None:
    """The BaocError for a cause outside of this package, searched in the chain of causes; None if there is none. Such
    causes are a full or failing disk, an unwritable folder, exhausted memory and a missing package of an extra."""
    for cause in exception_chain(error):
        missing = (cause.name or "").partition(".")[0] if isinstance(cause, ModuleNotFoundError) else ""
        if missing in _EXTRAS:
            extra = _EXTRAS[missing]
            return BadInputError(f"this needs {missing}, which is not installed: pip install 'baoc[{extra}]'")
        if isinstance(cause, RuntimeError) and "home directory" in str(cause):  # of Path.expanduser
            return BadInputError("a path begins with ~ and names no home folder: write it in full")
        if isinstance(cause, FileNotFoundError) and cause.errno and cause.filename is None:  # os.getcwd
            return BadInputError("the folder that the command runs in is gone: change to another one")
        if isinstance(cause, OSError) and cause.errno in DISK_FULL_ERRNOS:
            if cause.filename is None and _output_is_full():
                return OutputError(
                    "no space left for what the command prints or a file beside it: free space where its standard "
                    "output goes, or send that (>FILE) and what it writes (hydra.run.dir=PATH) elsewhere"
                )
            return disk_full_error(cause, cause.filename)
        if isinstance(cause, OSError) and _made_a_folder(cause):
            return OutputError(
                f"cannot make the folder {cause.filename}: {cause.strerror}; name another one (hydra.run.dir=PATH, "
                "hydra.sweep.dir=PATH for a multirun, or the option or variable that names it)"
            )
        if isinstance(cause, OSError) and cause.errno in _NOT_WRITABLE | _STORAGE_FAILED:
            what = f"{f' {cause.filename}' if cause.filename else ''}: {cause.strerror}"
            if cause.errno in _STORAGE_FAILED:
                return TrainingFailedError(f"cannot read or write{what}: the disk or network file system has failed")
            return OutputError(f"cannot open or write{what}; a run writes into hydra.run.dir=PATH")
        if _is_out_of_memory(cause):
            return BudgetBreachedError(
                f"out of memory: {str(cause).splitlines()[0] if str(cause) else 'the machine has none left'}\n"
                "set a smaller micro_batch, model.size or budget"
            )
    return None


def _made_a_folder(error: OSError) -> bool:
    """Whether a call of mkdir or makedirs raised the error. In file systems without folders, such as /proc, it is that
    a file is missing, which elsewhere may be a bug."""
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and frames[-1].name in ("mkdir", "makedirs")


def _is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return True
    return isinstance(error, RuntimeError | ImportError) and any(text in str(error).lower() for text in _OUT_OF_MEMORY)


def is_interrupt(error: BaseException) -> bool:
    """Whether the error is Ctrl-C, or the SystemExit that Lightning makes of it."""
    return isinstance(error, KeyboardInterrupt) or (
        isinstance(error, SystemExit) and any(isinstance(cause, KeyboardInterrupt) for cause in exception_chain(error))
    )
