"""Sampling schedule of the gradient profiler, which bounds its share of the training time."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from time import perf_counter, thread_time

from baoc.parallel import SINGLE_PROCESS, Ranks

LARGE_PARAMS = 10_000_000  # from here on, limits are shares of time and size; below, they are absolute
MAX_S = 3.0  # processor seconds of sampling, below LARGE_PARAMS
MAX_SHARE = 0.05  # of the time
FADING = 0.9  # decay of the largest cost of a sample, with each sample
OCTAVE = 64  # steps at full rate, then as many at half of it, twice as many at a quarter, and so on


class SamplingAction(StrEnum):
    SKIP = "skip"
    GATHER = "gather"  # keep the gradient, to be paired with that of the next step
    SAMPLE = "sample"


_TURNS = tuple(SamplingAction)


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedSchedule:
    """How far a schedule was, in a checkpoint."""

    seen: int
    armed: bool
    spent_s: float
    processor_s: float
    elapsed_s: float


class SamplingSchedule:
    """Decides by step numbers for small networks, and by time for large ones.

    Below LARGE_PARAMS, which steps are sampled depends on their numbers alone until MAX_S processor seconds are used
    up, so results repeat on any machine. Wall time would end sampling earlier on a busy machine.

    From LARGE_PARAMS on, a step is sampled if a sample's cost fits into `max_share` of the time since `start`. These
    are wall seconds of the host: on a GPU, the time to launch kernels.

    Of several `ranks` the first decides, each of which has a clock of its own.
    """

    def __init__(
        self,
        *,
        num_params: int,
        max_share: float = MAX_SHARE,
        ranks: Ranks = SINGLE_PROCESS,
    ):
        self._ranks = ranks
        self.large = num_params >= LARGE_PARAMS
        self._share = max_share
        self._spent_s = 0.0
        self._newest = {"gather": 0.0, "sample": 0.0}  # seconds
        self._dearest = dict(self._newest)  # fading maximum of earlier ones: costs vary by half, and a share is a limit
        self._seen = 0
        self._armed = False
        self._processor_s = 0.0
        self._began: float | None = None
        self._before = 0.0  # elapsed before a resume

    def start(self) -> None:
        """Starts the clock; later calls change nothing."""
        if self._began is None:
            self._began = perf_counter()

    @property
    def elapsed_s(self) -> float:
        return self._before + (perf_counter() - self._began if self._began is not None else 0.0)

    @property
    def spent_s(self) -> float:
        return self._spent_s

    def next_action(self) -> SamplingAction:
        """The task of the coming step."""
        return _TURNS[int(self._ranks.broadcast_number(_TURNS.index(self._own_turn())))]

    def _own_turn(self) -> SamplingAction:
        if self.large:
            if self._armed:
                return SamplingAction.SAMPLE
            return SamplingAction.GATHER if self._affords_sample() else SamplingAction.SKIP
        if self._processor_s > MAX_S:
            return SamplingAction.SKIP
        stride = 2 ** (self._seen // OCTAVE).bit_length()  # 1 for an octave, 2 for as many steps, 4 for twice as many
        if self._seen % stride == 0:
            return SamplingAction.SAMPLE
        return SamplingAction.GATHER if (self._seen + 1) % stride == 0 else SamplingAction.SKIP

    def advance(self, turn: SamplingAction) -> None:
        """To be called when the turn of a step is known."""
        self._seen += 1
        self._armed = turn is SamplingAction.GATHER

    def _affords_sample(self) -> bool:
        """Whether a pair of gradients fits into the share."""
        return self._spent_s + self._cost("gather") + self._cost("sample") <= self._share * self.elapsed_s

    def _cost(self, kind: str) -> float:
        """Seconds that the next one is expected to take at most."""
        return max(self._newest[kind], self._dearest[kind])

    @contextmanager
    def running(self, kind: str, *, more: bool = False) -> Iterator[None]:
        """Times what runs inside as `gather`, `sample`, or another name, whose cost is not expected again.

        `more`: adds to the last one of this name instead of starting a new one.
        """
        began, busy = perf_counter(), thread_time()
        try:
            yield
        finally:
            seconds = perf_counter() - began
            self._processor_s += thread_time() - busy
            self._spent_s += seconds
            if kind in self._newest and more:
                self._newest[kind] += seconds
            elif kind in self._newest:
                self._dearest[kind] = FADING * self._cost(kind)
                self._newest[kind] = seconds

    def saved(self) -> SavedSchedule:
        return SavedSchedule(
            seen=self._seen,
            armed=self._armed,
            spent_s=self._spent_s,
            processor_s=self._processor_s,
            elapsed_s=self.elapsed_s,
        )

    def go_on(self, saved: SavedSchedule) -> None:
        self._seen, self._armed = saved.seen, saved.armed
        self._spent_s, self._processor_s = saved.spent_s, saved.processor_s
        self._before, self._began = saved.elapsed_s, None
