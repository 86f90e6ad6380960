"""The cache of trained tokenizers and token arrays, whose file names are hashes of what they were made from."""

import hashlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from baoc.cache import cache_folder
from baoc.errors import OutputError


def cached(kind: str, *made_of: str, suffix: str) -> Path:
    """Path of the file of a `kind` that was made from `made_of`, whether it exists or not."""
    digest = hashlib.sha256("\n".join(("1", *made_of)).encode()).hexdigest()
    return cache_folder() / f"{kind}-{digest[:32]}{suffix}"


def write_whole(path: Path, *, write: Callable[[Any], object]) -> None:
    """Writes a file in one rename, so that no run ever reads a part of it. Raises OutputError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as stream:
            try:
                write(stream)
                stream.close()
                os.replace(stream.name, path)
            except BaseException:
                os.unlink(stream.name)
                raise
    except OSError as error:
        raise OutputError(
            f"the token cache {path.parent} cannot be written ({error.strerror}): set BAOC_CACHE to a folder with room"
        ) from error
