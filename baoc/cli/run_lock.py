"""One process per run folder: whoever trains in it holds a lock that the system lets go of however the process ends.

Two runs in one folder would put each other's metrics aside and mix their checkpoints.
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
    """Another process is in this folder, and nothing in it is to be touched."""


@contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Holds `folder` for this process; forked workers do not keep it. Raises FolderInUseError where another does.

    Nothing is held on systems and file systems without such locks, nor where the folder cannot be written: that is told
    by what is written first.
    """
    file = _locked(folder / LOCK)
    try:
        yield
    finally:
        if file is not None:
            with suppress(OSError):
                (folder / LOCK).unlink()
            file.close()


def _locked(path: Path) -> IO[str] | None:
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
        file.close()  # its holder has just removed it: whoever comes now would lock another one
    with suppress(OSError):  # a full disk: the lock holds, and who has it is not told
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
    return file
