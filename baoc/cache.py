"""The user's cache folder: tokens, measured step times, chosen options and the compiled C++ library.

Files that another user could have written are not read where they would change a run (`read_private`), and compiled
code is not loaded from a folder that another user can write to (`ensure_private_folder`).
"""

import hashlib
import json
import logging
import os
import stat
import sys
import tempfile
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)
CACHE_VARIABLE = "BAOC_CACHE"  # environment variable of the folder


def cache_folder() -> Path:
    """$BAOC_CACHE, else BAOC's folder in the user's cache folder of this platform."""
    if folder := os.environ.get(CACHE_VARIABLE):
        return Path(folder).expanduser()
    try:
        home = Path.home()
    except RuntimeError:  # a user id without an account, as in containers
        home = Path(tempfile.gettempdir()) / f"baoc-{user()}"
    if sys.platform == "darwin":
        return home / "Library" / "Caches" / "baoc"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", home)) / "baoc"
    return Path(os.environ.get("XDG_CACHE_HOME") or home / ".cache") / "baoc"


def json_sha256(*values: Any) -> str:
    """SHA-256, in hexadecimal, of the values as JSON with sorted keys."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


# -- files of the user alone ------------------------------------------------------------------------------------------


def read_private(path: Path) -> str | None:
    """The text of a file that only the user could have written; None if others could have, or if it cannot be read."""
    try:
        if why_others_can_write(path.parent) is None and why_not_private(path.lstat(), is_folder=False) is None:
            return path.read_text(encoding="utf-8")
    except (OSError, ValueError):
        pass
    return None


def write_private(path: Path, text: str) -> None:
    """Writes a file atomically, by a rename, so that of two runs one wins. An error of the file system is no error of
    the caller, see `warn_unwritable`."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        handle, draft = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
            os.replace(draft, path)
        except OSError:  # such as a full disk
            os.unlink(draft)
            raise
    except OSError as error:
        warn_unwritable(path.parent, error)


def warn_unwritable(folder: Path, error: OSError) -> None:
    """Warns, once, if a folder of those below the one that the user has set cannot be written."""
    if (setting := os.environ.get(CACHE_VARIABLE)) and folder.is_relative_to(cache_folder()):
        _warn_of(setting, error.strerror or str(error))


@lru_cache
def _warn_of(setting: str, reason: str) -> None:
    log.warning(
        "$%s=%s cannot be written (%s), so nothing is kept there: set it to a folder of yours",
        CACHE_VARIABLE,
        setting,
        reason,
    )


def why_others_can_write(folder: Path) -> str | None:
    """Why another user could write into `folder` or replace it, as text; None if nobody could.

    All parent folders are checked too, as ssh does. Symbolic links are followed if they are the user's or root's.
    """
    path = folder.absolute()
    for part in (path, *path.parents):
        status = part.lstat()
        if stat.S_ISLNK(status.st_mode):
            if status.st_uid not in (user(), 0):
                return f"{part} is a symbolic link of another user"
            try:
                target = part.resolve(strict=True)
            except (OSError, RuntimeError):
                return f"{part} is a symbolic link that leads nowhere"
            return why_others_can_write(target) or why_others_can_write(part.parent)
        sticky = part != path and status.st_mode & stat.S_ISVTX  # in a sticky parent nobody can replace others' folders
        if not sticky and (reason := why_not_private(status, is_folder=True)) is not None:
            return f"{part} {reason}"
    return None


def ensure_private_folder(variable: str, folder: Path) -> None:
    """Keeps a compiler from loading code that another user wrote into `folder`, its cache.

    If others can write there, sets the environment `variable`, which names that cache, to a folder of the user's and
    logs a warning.
    """
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if (reason := why_others_can_write(folder)) is None:
            return
        own = cache_folder() / variable.lower()
        own.mkdir(parents=True, exist_ok=True, mode=0o700)
        if why_others_can_write(own) is not None:
            own = Path(tempfile.mkdtemp(prefix="baoc-"))
        log.warning("%s: compiled code is kept in %s instead; set $%s to a folder of yours", reason, own, variable)
        os.environ[variable] = str(own)


def why_not_private(status: os.stat_result, *, is_folder: bool) -> str | None:
    """Why another user may have written a file or folder of this status, as text; None if nobody may."""
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
    """True for the user's private group: many systems make one, and let it write by their umask."""
    import grp
    import pwd

    try:
        own, entry = pwd.getpwuid(user()).pw_name, grp.getgrgid(group)
    except KeyError:
        return False
    return entry.gr_name == own and not set(entry.gr_mem) - {own}
