"""Waiting for other processes by what they do, with a limit that only what hangs reaches, however busy the machine."""

import time
from collections.abc import Callable
from pathlib import Path

PATIENCE_S = 3000  # less than pytest's own limit, so that a test which waits in vain says for what


def wait_until(done: Callable[[], bool], *, what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not done():
        assert time.monotonic() < deadline, f"{what} does not come"
        time.sleep(0.05)


def has_ended(process: int) -> bool:
    """Whether a process that is not a child of this one has ended: an orphan may stay in the system's table, as a
    container's first process need not wait for it."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True
