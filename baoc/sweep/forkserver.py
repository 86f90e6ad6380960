"""Processes for trials, forked from a server process that has imported torch and Lightning, without threads or CUDA.

A trial starts in milliseconds, and its crash ends neither the study nor other trials.
"""

import ctypes
import fcntl
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing import forkserver, util
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from types import ModuleType
from typing import Any

_CONTEXT = multiprocessing.get_context("forkserver")
PRELOAD = "baoc.sweep.preload"
_PR_SET_PDEATHSIG = 1  # of prctl(2)
_MAX_FOLDER_BYTES = 85  # of the sockets' folder: a path has at most 107, and its name is like listener-XXXXXXXX
ORPHAN_PATIENCE_S = 120.0  # how long a trial waits for an earlier attempt that still holds the folder's lock
# OpenBLAS: a fork would lose the threads of numpy's pool. OpenMP: trials share cores, so waiting threads sleep.
_SERVER_VARIABLES = {"OPENBLAS_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}


def preload(*modules: str) -> None:
    """Sets the modules that the server imports before its first fork; has no effect once the server runs."""
    _CONTEXT.set_forkserver_preload(list(modules))


def start(
    body: Callable[[], None], *, log: Path, lock: Path, arguments: Sequence[str], variables: Mapping[str, str]
) -> ForkServerProcess:
    """Runs `body()` in a new process that leads its own session.

    The process holds `lock` while it lives. It gets SIGTERM when the fork server ends, which ends with this process.

    Args:
        body: must be picklable: a function of a module, or a partial of one.
        log: file that its stdout and stderr are appended to.
        arguments: its sys.argv[1:].
        variables: added to its environment.
    """
    process = _CONTEXT.Process(target=_child_main, args=(body, str(log), str(lock), list(arguments), dict(variables)))
    _shorten_socket_paths()
    with _server_environment():
        process.start()
    return process


def _child_main(body: Callable[[], None], log: str, lock: str, arguments: list[str], variables: dict[str, str]) -> None:
    os.setsid()  # Ctrl-C goes to the study only, which ends its trials
    end_with_parent()
    _release_server()
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
    """Has the kernel send SIGTERM to this process when its parent dies. Does nothing on systems other than Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() == 1 and os.getpid() != 1:
            sys.exit(f"-{signal.SIGTERM}: the study ended before its trial began")


def _release_server() -> None:
    """Closes the pipe that keeps the server alive. multiprocessing hands it to each child, so that the server of a
    killed study, and with it the study's trials, would stay at work."""
    server: Any = forkserver._forkserver  # pyright: ignore[reportPrivateUsage,reportAttributeAccessIssue]
    descriptor: int | None = getattr(server, "_forkserver_alive_fd", None)
    if descriptor is not None:
        os.close(descriptor)
        server._forkserver_alive_fd = None


def _acquire_lock(lock: str) -> int:
    """Opens and locks a file; returns its descriptor. Waits for an attempt of a killed study that still holds it."""
    file = os.open(lock, os.O_WRONLY | os.O_CREAT, 0o666)
    deadline = time.monotonic() + ORPHAN_PATIENCE_S
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # data loaders that the trial forks may outlive it, and would hold the lock against the next attempt
            os.register_at_fork(after_in_child=partial(_close_once, [file]))
            return file
        except OSError:
            if time.monotonic() > deadline:
                sys.exit(f"an earlier attempt at this trial holds {lock} and does not end: end it, and begin again")
            time.sleep(0.05)


def _close_once(file: list[int]) -> None:
    """In a fork; its own forks inherit the empty list, and have another file of that number."""
    if file:
        os.close(file.pop())


def _shorten_socket_paths() -> None:
    """Makes multiprocessing put its sockets into a private folder of /tmp if TMPDIR is too long for a socket's path."""
    config: dict[str, Any] = multiprocessing.current_process()._config  # pyright: ignore[reportAttributeAccessIssue]
    folder = config.get("tempdir") or f"{tempfile.gettempdir()}/pymp-XXXXXXXX"
    if len(os.fsencode(folder)) > _MAX_FOLDER_BYTES:
        config["tempdir"] = folder = tempfile.mkdtemp(prefix="baoc-", dir="/tmp")
        util.Finalize(None, shutil.rmtree, args=(folder, True), exitpriority=-100)  # that of multiprocessing


@contextmanager
def _server_environment() -> Iterator[None]:
    """Sets the server's environment variables that are not set, and hides `__main__` from multiprocessing: a child
    would import the script and start the study again."""
    main = sys.modules["__main__"]
    unset = [name for name in _SERVER_VARIABLES if name not in os.environ]
    sys.modules["__main__"] = ModuleType("__main__")
    os.environ.update({name: _SERVER_VARIABLES[name] for name in unset})
    try:
        yield
    finally:
        sys.modules["__main__"] = main
        for name in unset:
            del os.environ[name]
