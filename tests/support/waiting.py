"""Waiting for other processes by what they do, with a limit that only what hangs reaches, however busy the machine."""

import time
from collections.abc import Callable

PATIENCE_S = 400  # less than pytest's own limit, so that a test which waits in vain says for what


def wait_until(done: Callable[[], bool], *, what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not done():
        assert time.monotonic() < deadline, f"{what} does not come"
        time.sleep(0.05)
