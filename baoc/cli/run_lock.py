"""A lock that keeps a run folder to one process. The system releases it however the process ends.

Two runs in one folder would supersede each other's metrics and mix their checkpoints.
"""

import errno
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from baoc.errors import BadInputError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

LOCK = "run.lock"
_LOCKED_BY_OTHER = (errno.EACCES, errno.EAGAIN)


class FolderInUseError(BadInputError):
    """Another process runs in this folder; nothing in it may be changed."""


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Holds the folder's lock; forked workers do not keep it. Raises FolderInUseError if another process holds it.

    Does nothing on systems and file systems without such locks, or if the folder cannot be written, which the first
    write of the run reports.
    """
    file = _acquire(folder / LOCK)
    try:
        yield
    finally:
        if file is not None:
            with suppress(OSError):
                if _is_at(folder / LOCK, file):
                    (folder / LOCK).unlink()
            file.close()


def _acquire(path: Path) -> IO[str] | None:
    """Returns the open lock file with this process's id in it; None if the system offers no lock."""
    if fcntl is None:
        return None
    while True:
        try:
            file = path.open("a+", encoding="utf-8")
        except OSError:
            return None
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            with file:
                if error.errno not in _LOCKED_BY_OTHER:
                    return None
                file.seek(0)
                holder = file.read(200).strip() or "another process"
            raise FolderInUseError(
                f"{holder} is at work in {path.parent}: wait for it or end it (if its machine died, remove "
                f"{path.name} there), or choose another folder with hydra.run.dir=PATH"
            ) from None
        with suppress(FileNotFoundError):
            if _is_at(path, file):
                break
        file.close()  # another process has just removed this file: lock the new one
    with suppress(OSError):  # on a full disk the file stays empty, but locked
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
    return file


def _is_at(path: Path, file: IO[str]) -> bool:
    """Whether `file` is still the one at `path`, which someone may have removed, and another process made again."""
    return os.path.samestat(os.fstat(file.fileno()), path.stat())
