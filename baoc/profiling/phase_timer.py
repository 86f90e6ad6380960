"""Seconds that planning spends, by phase: written to the run folder and shown on the console."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter


class PhaseTimer:
    """`with timer(name): ...` adds to `seconds[name]`. Nested phases do not count towards the outer one."""

    def __init__(self, *, clock: Callable[[], float] = perf_counter):
        self.seconds: dict[str, float] = {}  # in order of first use
        self._clock = clock
        self._nested_s = [0.0]  # for each open phase, the seconds of the phases inside it that have ended

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        self.seconds.setdefault(name, 0.0)
        self._nested_s.append(0.0)
        began = self._clock()
        try:
            yield
        finally:
            took = self._clock() - began
            self.seconds[name] += took - self._nested_s.pop()
            self._nested_s[-1] += took

    @property
    def total_s(self) -> float:
        return sum(self.seconds.values())

    def summary(self) -> str:
        """`12.3 s: 6.1 trials, 4.0 rehearsals, ...`: longest phase first, without phases below 0.1 s."""
        long = sorted(((s, name) for name, s in self.seconds.items() if s >= 0.1), key=lambda pair: -pair[0])
        parts = ", ".join(f"{seconds:.1f} {name}" for seconds, name in long)
        return f"{self.total_s:.1f} s" + (f": {parts}" if parts else "")
