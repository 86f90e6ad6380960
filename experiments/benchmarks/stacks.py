"""Where the seconds of a process go: its Python stacks, looked at many times a second, in the files that flame graphs
are drawn from. What runs in C counts for the line of Python that called it.
"""

import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from time import perf_counter
from types import CodeType, FrameType

EVERY_S = 0.01


@contextmanager
def sampled(path: Path | None) -> Iterator[None]:
    """Inside, the stacks of all threads but the looking one are counted; `path` has a line for each, outermost function
    first, and its milliseconds. Nothing is done where it is None."""
    if path is None:
        yield
        return
    counts: Counter[str] = Counter()
    ended = threading.Event()

    def look() -> None:
        last = perf_counter()
        while not ended.wait(EVERY_S):
            now = perf_counter()
            for thread, frame in sys._current_frames().items():
                if thread != threading.get_ident():
                    counts[stack_of(frame)] += round(1e6 * (now - last))
            last = now

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(f"{stack} {us // 1000}\n" for stack, us in counts.most_common() if us >= 1000))


def stack_of(frame: FrameType | None) -> str:
    names: list[str] = []
    while frame is not None:
        names.append(_name(frame.f_code, frame.f_lineno))
        frame = frame.f_back
    return ";".join(reversed(names))


@cache  # else it would take a tenth of the interpreter's time
def _name(code: CodeType, line: int) -> str:
    file = "/".join(Path(code.co_filename).parts[-2:])
    return f"{file}:{code.co_name}:{line}".replace(";", ",").replace(" ", "_")
