"""What a forked command starts as `sys.executable` is forked too: ranks and tasks of torchrun and submitit, and servers
of forks, would import torch and Lightning for 3 to 5 s each. `sys.executable` becomes a script that asks a fork of the
command as it began. It hands over arguments, environment and open files, passes signals on and ends as its fork does;
killed, it takes that along.
"""

import fcntl
import json
import multiprocessing
import os
import runpy
import signal
import socket
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from baoc.sweep.forkserver import end_with_parent

MOST_FILES = 64
PYTHON = sys.executable
SCRIPT = """#!{python} -SI
import json, os, signal, socket, sys
if "submitit.local._local" in sys.argv:  # which goes by its own process id, and imports little
    os.execv({python!r}, [{python!r}, *sys.argv[1:]])
files = [file for file in map(int, os.listdir("/proc/self/fd")) if os.path.exists(f"/proc/self/fd/{{file}}")]
server = socket.socket(socket.AF_UNIX)
server.connect({address!r})
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT):
    signal.signal(number, lambda number, _: server.sendall(bytes([number])))
socket.send_fds(server, [b"."], files)
server.sendall(json.dumps([files, os.getpid(), sys.argv[1:], os.getcwd(), dict(os.environ)]).encode() + b"\\n")
code = int(server.makefile().read() or 255)
if code < 0:
    signal.signal(-code, signal.SIG_DFL) if -code != signal.SIGKILL else None
    os.kill(os.getpid(), -code)
sys.exit(code)
"""


def fork_for_children(folder: Path, take_environment: Callable[[dict[str, str]], None]) -> None:
    """From here on, as long as this process lives. It has no threads yet."""
    sys.executable = str(folder / "python")  # for forks of its fork too
    multiprocessing.set_executable(sys.executable)
    fork_on_demand(folder, take_environment)


def fork_on_demand(folder: Path, take_environment: Callable[[dict[str, str]], None]) -> None:
    """`folder`/python runs as this Python, forked from this process as it is now, while that lives."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address := f"\0baoc-test-{os.getpid()}")
    listener.listen()
    script = folder / "python"
    script.write_text(SCRIPT.format(python=PYTHON, address=address))
    script.chmod(0o755)
    if os.fork():
        listener.close()
        return
    end_with_parent()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for what it forks
    null = os.open(os.devnull, os.O_RDWR)
    for file in map(int, os.listdir("/proc/self/fd")):  # whoever reads from this process waits for its end alone
        if file > 2 and file != listener.fileno():
            os.dup2(null, file)
    while True:
        asked, _ = listener.accept()
        if not os.fork():
            listener.close()
            with suppress(OSError):  # who asked was killed
                _answer(asked, take_environment)
            os.kill(os.getpid(), signal.SIGKILL)  # nothing of the command's is to be ended here
        asked.close()


def _answer(asked: socket.socket, take_environment: Callable[[dict[str, str]], None]) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _, received, *_ = socket.recv_fds(asked, 1, MOST_FILES)
    places, *given = json.loads(asked.makefile().readline())
    received = [_moved(file, above=max(places)) for file in received]
    asked = socket.socket(fileno=_moved(asked.detach(), above=max(places)))
    for place, file in zip(places, received, strict=True):  # as whoever asked has them, before a pipe takes the place
        os.dup2(file, place)
        os.close(file)
    process: Any = multiprocessing.get_context("fork").Process(target=_run, args=(asked, take_environment, *given))
    process.start()
    for place in places:
        os.close(place)
    ended = os.pidfd_open(process.pid)  # its sentinel would wait for what it has forked, too
    while process.exitcode is None:
        if asked in wait([ended, asked]):
            signals = asked.recv(1)
            process.kill() if not signals else os.kill(process.pid, signals[0])
            process.join(None if not signals else 0)
    asked.sendall(str(process.exitcode).encode())


def _moved(file: int, *, above: int) -> int:
    copy = fcntl.fcntl(file, fcntl.F_DUPFD, above + 1)
    os.close(file)
    return copy


def _run(
    asked: socket.socket, take_environment: Any, asking: int, words: list[str], cwd: str, environment: Any
) -> None:
    asked.close()
    take_environment(environment)
    os.chdir(cwd)
    own, parent = os.getpid(), os.getppid
    # The parent is who started the script.
    asked_by = lambda: int(Path(f"/proc/{asking}/stat").read_text().rpartition(")")[2].split()[1])  # noqa: E731
    os.getppid = lambda: asked_by() if os.getpid() == own else parent()
    sys.path[:0] = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.modules.pop("sitecustomize", None)
    with suppress(ImportError):
        import sitecustomize  # noqa: F401  # pyright: ignore[reportMissingImports]
    while words[0].startswith("-") and words[0] not in ("-c", "-m"):  # flags of the interpreter
        words = words[1:]
    warnings.filterwarnings("ignore", module="runpy")  # what runs may be imported already
    if words[0] == "-c":
        sys.argv = ["-c", *words[2:]]
        exec(compile(words[1], "<string>", "exec"), {"__name__": "__main__"})
    elif words[0] == "-m":
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        runpy.run_path(words[0], run_name="__main__")
