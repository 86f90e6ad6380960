"""Which files of baoc/ are entered, for tests of how many a step is read in."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import baoc

ROOT = Path(baoc.__file__).parent
MOST = 6  # files that one step may be read in


@contextmanager
def entered() -> Iterator[set[str]]:
    """Files of baoc/ whose functions are called inside, as paths from `baoc/optim` or `baoc`."""
    found: set[str] = set()

    def note(frame: FrameType, event: str, arg: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(ROOT):
            found.add(path.relative_to(ROOT).as_posix().removeprefix("optim/"))

    sys.setprofile(note)
    try:
        yield found
    finally:
        sys.setprofile(None)
