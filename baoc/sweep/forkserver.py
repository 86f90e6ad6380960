"""Processes for trials, forked from a server that has imported torch and Lightning once, without threads or CUDA.

A trial starts in milliseconds, and its crash leaves the study and the other trials alone.
"""

import ctypes
import fcntl
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from types import ModuleType

_CONTEXT = multiprocessing.get_context("forkserver")
PRELOAD = "baoc.sweep.preload"
_PR_SET_PDEATHSIG = 1  # of prctl(2)
ORPHAN_S = 120.0  # how long a trial waits for an earlier attempt that still holds its folder
# A fork would lose the threads of numpy's pool; trials share cores with each other, so waiting threads sleep.
_SERVER_VARIABLES = {"OPENBLAS_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}


def preload(*modules: str) -> None:
    """Sets the modules that the server imports before its first fork; has no effect once the server runs."""
    _CONTEXT.set_forkserver_preload(list(modules))


def start(
    body: Callable[[], None], *, log: Path, lock: Path, arguments: Sequence[str], variables: Mapping[str, str]
) -> ForkServerProcess:
    """Runs `body()` in a new process that leads its own session.

    The process holds `lock` while it lives. It is asked to end (SIGTERM) when the server ends, which ends with this
    process.

    Args:
        body: must be picklable: a function of a module, or a partial of one.
        log: file that its stdout and stderr are appended to.
        arguments: its sys.argv[1:].
        variables: added to its environment.
    """
    process = _CONTEXT.Process(target=_child_main, args=(body, str(log), str(lock), list(arguments), dict(variables)))
    with _default_environment(_SERVER_VARIABLES), _hidden_main_module():
        process.start()
    return process


def _child_main(body: Callable[[], None], log: str, lock: str, arguments: list[str], variables: dict[str, str]) -> None:
    os.setsid()  # the study, not the terminal, passes Ctrl-C on
    end_with_parent()
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("500")  # out of memory, the kernel kills this before the study
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    lock_file = _acquire_lock(lock)
    os.environ.update(variables)
    torch = sys.modules.get("torch")
    if torch is not None and "OMP_NUM_THREADS" in variables:
        torch.set_num_threads(int(variables["OMP_NUM_THREADS"]))
    sys.argv = ["run.py", *arguments]
    try:
        body()
    finally:
        os.close(lock_file)


def end_with_parent() -> None:
    """Asks this process to end (SIGTERM) when its parent dies; on Linux only, elsewhere it runs to its end."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() == 1 and os.getpid() != 1:
            sys.exit(f"-{signal.SIGTERM}: the study ended before its trial began")


def _acquire_lock(lock: str) -> int:
    """Opens and locks a file; waits for an attempt of a killed study that still writes into the folder."""
    file = os.open(lock, os.O_WRONLY | os.O_CREAT, 0o666)
    end = time.monotonic() + ORPHAN_S
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # data loaders that the trial forks may outlive it and would keep the lock from the next attempt
            os.register_at_fork(after_in_child=partial(os.close, file))
            return file
        except OSError:
            if time.monotonic() > end:
                sys.exit(f"an earlier attempt at this trial holds {lock} and does not end: end it, and begin again")
            time.sleep(0.05)


@contextmanager
def _hidden_main_module() -> Iterator[None]:
    """Hides `__main__` from multiprocessing: the child would import the script and start the study again."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


@contextmanager
def _default_environment(values: Mapping[str, str]) -> Iterator[None]:
    """Sets variables that are not set, while the server starts and inherits them."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update({name: value for name, value in values.items() if before[name] is None})
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
