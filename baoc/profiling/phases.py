"""Where the seconds of a decision go, by phase."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter


class Phases:
    """Seconds by name, in the order in which names came up. What runs inside of an inner phase counts there alone."""

    def __init__(self, *, clock: Callable[[], float] = perf_counter):
        self.seconds: dict[str, float] = {}
        self._clock = clock
        self._inner = [0.0]  # of the phases that are open: seconds of those inside that have ended

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        self.seconds.setdefault(name, 0.0)
        self._inner.append(0.0)
        began = self._clock()
        try:
            yield
        finally:
            took = self._clock() - began
            self.seconds[name] += took - self._inner.pop()
            self._inner[-1] += took

    @property
    def total_s(self) -> float:
        return sum(self.seconds.values())

    def told(self) -> str:
        """`12.3 s: trials 6.1, rehearsals 4.0, ...`, what took longest first, and nothing below a tenth of a second."""
        long = sorted(((s, name) for name, s in self.seconds.items() if s >= 0.1), key=lambda pair: -pair[0])
        parts = ", ".join(f"{name} {seconds:.1f}" for seconds, name in long)
        return f"{self.total_s:.1f} s" + (f": {parts}" if parts else "")
