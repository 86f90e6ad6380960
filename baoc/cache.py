"""The folder for what is kept between runs: tokens, measured seconds, the CPU's library."""

import os
import sys
from pathlib import Path

CACHE = "BAOC_CACHE"  # the environment variable


def cache_folder() -> Path:
    """$BAOC_CACHE, or the platform's cache folder of the user."""
    given = os.environ.get(CACHE)
    if given:
        return Path(given).expanduser()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "baoc"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", Path.home())) / "baoc"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "baoc"
