"""One process per run folder: it holds a lock, which the system releases however the process ends.

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
_HELD = (errno.EACCES, errno.EAGAIN)


class FolderInUseError(BadInputError):
    """Another process runs in this folder; nothing in it may be changed."""


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Holds the folder's lock; forked workers do not keep it. Raises FolderInUseError if another process holds it. Does
    nothing on systems and file systems without such locks, or if the folder cannot be written: the first write reports
    that."""
    file = _acquire(folder / LOCK)
    try:
        yield
    finally:
        if file is not None:
            with suppress(OSError):
                (folder / LOCK).unlink()
            file.close()


def _acquire(path: Path) -> IO[str] | None:
    """The open lock file with this process's name in it; None if the system offers no lock."""
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
                if error.errno not in _HELD:
                    return None
                file.seek(0)
                holder = file.read(200).strip() or "another process"
            raise FolderInUseError(
                f"{holder} is at work in {path.parent}: wait for it or end it (if its machine died, remove "
                f"{path.name} there), or choose another folder with hydra.run.dir=PATH"
            ) from None
        with suppress(FileNotFoundError):
            if os.fstat(file.fileno()).st_ino == path.stat().st_ino:
                break
        file.close()  # its holder has just removed it, and the next process would lock a new file
    with suppress(OSError):  # on a full disk the lock holds without its holder's name
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
    return file
