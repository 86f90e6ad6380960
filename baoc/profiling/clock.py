"""How long profiling took, and whether it may take more."""

from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter

LARGE_PARAMS = 10_000_000  # from here on limits are shares of time and size; below, they are absolute
MAX_S = 3.0
MAX_SHARE = 0.05


class Stopwatch:
    """Seconds spent inside `running()` against the seconds since `start`.

    Below LARGE_PARAMS the only question ever asked of the clock is whether MAX_S are used up, so what is sampled (and
    with it every result) does not depend on the machine's speed until they are. From there on a sample is skipped
    while more than `max_share` of the time since the start has gone into samples.
    """

    def __init__(self, *, num_params: int, max_share: float = MAX_SHARE):
        self._large = num_params >= LARGE_PARAMS
        self._max_share = max_share
        self._began: float | None = None
        self._before = 0.0  # elapsed before a resume
        self.spent_s = 0.0

    def start(self) -> None:
        """Starts the time that shares are taken of; later calls change nothing."""
        if self._began is None:
            self._began = perf_counter()

    @property
    def elapsed_s(self) -> float:
        return self._before + (perf_counter() - self._began if self._began is not None else 0.0)

    @property
    def has_time(self) -> bool:
        return self.spent_s <= (self._max_share * self.elapsed_s if self._large else MAX_S)

    @contextmanager
    def running(self) -> Iterator[None]:
        began = perf_counter()
        try:
            yield
        finally:
            self.spent_s += perf_counter() - began

    def state_dict(self) -> dict[str, float]:
        return {"spent_s": self.spent_s, "elapsed_s": self.elapsed_s}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.spent_s, self._before, self._began = state["spent_s"], state["elapsed_s"], None
