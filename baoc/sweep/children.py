"""Processes for trials, forked from a server that has imported torch and Lightning once, without threads or CUDA.

Whatever happens to a trial leaves the study and its other trials alone; a trial begins in milliseconds.
"""

import ctypes
import fcntl
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from types import ModuleType

_CONTEXT = multiprocessing.get_context("forkserver")
PRELOAD = "baoc.sweep.preload"
_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG
ORPHAN_S = 120.0  # how long a trial waits for an earlier attempt that still writes into its folder
_SERVER_VARIABLES = {"OPENBLAS_NUM_THREADS": "1"}  # numpy's pool would be threads that a fork loses


def preload(*modules: str) -> None:
    """What the server imports before its first fork; without effect on a server that runs already."""
    _CONTEXT.set_forkserver_preload(list(modules))


def start(
    body: Callable[[], None], *, log: Path, lock: Path, arguments: Sequence[str], variables: Mapping[str, str]
) -> ForkServerProcess:
    """`body()` in a process of its own session: its output goes to `log`, `arguments` are its sys.argv[1:].

    It holds `lock` while it lives, and is asked to end (SIGTERM) when the server ends, which ends with this process.
    `body` must be picklable: a function of a module, or a partial of one.
    """
    process = _CONTEXT.Process(target=_child, args=(body, str(log), str(lock), list(arguments), dict(variables)))
    with _variables(_SERVER_VARIABLES), _without_main():
        process.start()
    return process


def _child(body: Callable[[], None], log: str, lock: str, arguments: list[str], variables: dict[str, str]) -> None:
    os.setsid()  # a Ctrl-C in the terminal is the study's to pass on
    die_with_parent()
    _die_first()
    _output_to(log)
    held = _hold(lock)
    os.environ.update(variables)
    torch = sys.modules.get("torch")
    if torch is not None and "OMP_NUM_THREADS" in variables:
        torch.set_num_threads(int(variables["OMP_NUM_THREADS"]))
    sys.argv = ["run.py", *arguments]
    try:
        body()
    finally:
        os.close(held)


def die_with_parent() -> None:
    """If the study is killed, its trials are asked to end as well (SIGTERM). On Linux; elsewhere they end their run."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_DEATH_SIGNAL, signal.SIGTERM)
        if os.getppid() == 1 and os.getpid() != 1:
            sys.exit(f"-{signal.SIGTERM}: the study ended before its trial began")


def _die_first() -> None:
    """A machine short of memory shall kill a trial, not the study."""
    try:
        Path("/proc/self/oom_score_adj").write_text("500")
    except OSError:
        return


def _output_to(log: str) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)


def _hold(lock: str) -> int:
    """The open file that holds the lock; waits for an attempt whose study was killed and that still writes here."""
    file = os.open(lock, os.O_WRONLY | os.O_CREAT, 0o666)
    end = time.monotonic() + ORPHAN_S
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # what the trial forks (loaders of data) may outlive it, and would hold its next attempt up
            os.register_at_fork(after_in_child=partial(os.close, file))
            return file
        except OSError:
            if time.monotonic() > end:
                sys.exit(f"an earlier attempt at this trial holds {lock} and does not end: end it, and begin again")
            time.sleep(0.05)


@contextmanager
def _without_main() -> Iterator[None]:
    """A child would import the script that started the study again, and with it start the study once more."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


@contextmanager
def _variables(values: Mapping[str, str]) -> Iterator[None]:
    """The environment while the server starts: it lasts as long as the server."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update({name: value for name, value in values.items() if before[name] is None})
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
