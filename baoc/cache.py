"""The folder for what is kept between runs: tokens, measured seconds, decisions, the CPU's library.

What others could have put there is not read back where it would steer a run: `read_own` and `shared_with` tell. Nor is
code that compilers of others keep (`keep_private`).
"""

import hashlib
import json
import logging
import os
import stat
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)
CACHE = "BAOC_CACHE"  # the environment variable


def cache_folder() -> Path:
    """$BAOC_CACHE, or the platform's cache folder of the user."""
    given = os.environ.get(CACHE)
    if given:
        return Path(given).expanduser()
    try:
        home = Path.home()
    except RuntimeError:  # a user without an account, as containers have
        home = Path(tempfile.gettempdir()) / f"baoc-{user()}"
    if sys.platform == "darwin":
        return home / "Library" / "Caches" / "baoc"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", home)) / "baoc"
    return Path(os.environ.get("XDG_CACHE_HOME") or home / ".cache") / "baoc"


def hash_of(*of: Any) -> str:
    """SHA-256 of plain values, for names of files."""
    return hashlib.sha256(json.dumps(of, sort_keys=True).encode()).hexdigest()


# -- files of the user alone ------------------------------------------------------------------------------------------


def read_own(path: Path) -> str | None:
    """The text of a file that nobody but the user could have put there; None of another one, or of none."""
    try:
        if shared_with(path.parent) is None and fault_of(path.lstat(), is_folder=False) is None:
            return path.read_text(encoding="utf-8")
    except (OSError, ValueError):
        pass
    return None


def write_own(path: Path, text: str) -> None:
    """Replaces a file in one rename, so that two runs leave a whole one. Errors of the file system are ignored."""
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        handle, draft = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
            os.replace(draft, path)
        except OSError:  # such as a full disk
            os.unlink(draft)


def shared_with(folder: Path) -> str | None:
    """Why another user could put files into `folder`, or another folder in its place; None where none could.

    The folder itself and all above it count, as for ssh. Of symbolic links only those of the user or of root are
    followed.
    """
    parts = [folder.absolute(), *folder.absolute().parents]
    for part in parts:
        status = part.lstat()
        if stat.S_ISLNK(status.st_mode):
            if status.st_uid not in (user(), 0):
                return f"{part} is a symbolic link of another user"
            return shared_with(part.resolve()) or shared_with(part.parent)
        sticky = part is not parts[0] and status.st_mode & stat.S_ISVTX  # others cannot replace what is not theirs
        if not sticky and (fault := fault_of(status, is_folder=True)) is not None:
            return f"{part} {fault}"
    return None


def keep_private(variable: str, folder: Path) -> None:
    """Has a compiler load its code, from the `folder` that the environment's `variable` names, where nobody else could
    have put it: another folder takes its place where others could write into this one."""
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if (fault := shared_with(folder)) is None:
            return
        own = cache_folder() / variable.lower()
        own.mkdir(parents=True, exist_ok=True, mode=0o700)
        if shared_with(own) is not None:
            own = Path(tempfile.mkdtemp(prefix="baoc-"))
        log.warning("%s: compiled code is kept in %s instead; set $%s to a folder of yours", fault, own, variable)
        os.environ[variable] = str(own)


def fault_of(status: os.stat_result, *, is_folder: bool) -> str | None:
    """Why what has this status is not the user's alone."""
    if not (stat.S_ISDIR if is_folder else stat.S_ISREG)(status.st_mode):
        return "is a link or of another kind"
    if not hasattr(os, "getuid"):
        return None  # Windows gives each user a folder of its own
    if status.st_uid not in (user(), 0):
        return "belongs to another user"
    if status.st_mode & stat.S_IWOTH or (status.st_mode & stat.S_IWGRP and not is_own_group(status.st_gid)):
        return "may be written by other users"
    return None


def user() -> int:
    return os.getuid() if hasattr(os, "getuid") else 0


def is_own_group(group: int) -> bool:
    """True for the group of the user alone that many systems make, with a umask under which it may write."""
    import grp
    import pwd

    try:
        own, entry = pwd.getpwuid(user()).pw_name, grp.getgrgid(group)
    except KeyError:
        return False
    return entry.gr_name == own and not set(entry.gr_mem) - {own}
