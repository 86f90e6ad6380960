"""Sampling schedule of the gradient profiler, which bounds its share of the training time."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from time import perf_counter, thread_time

from baoc.parallel import SINGLE_PROCESS, Ranks

LARGE_PARAMS = 10_000_000  # parameters from which on limits are shares of time and size; below, they are absolute
MAX_S = 3.0  # processor seconds of sampling, below LARGE_PARAMS
MAX_SHARE = 0.05  # of the training time, from LARGE_PARAMS on
COST_DECAY = 0.9  # of the largest cost of earlier samples, with each sample
STEPS_AT_FULL_RATE = 64  # then as many at half of this rate, twice as many at a quarter, and so on


class SamplingAction(StrEnum):
    """What the profiler does with the gradients of a step."""

    SKIP = "skip"
    GATHER = "gather"  # keep them, to be paired with those of the next step
    SAMPLE = "sample"


_ACTIONS = tuple(SamplingAction)


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedSchedule:
    """A schedule in a checkpoint. `seen`: number of steps. `armed`: the step before was gathered."""

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

    Rank 0 of several `ranks` decides for all, as the clocks of ranks differ.
    """

    def __init__(self, *, num_params: int, max_share: float = MAX_SHARE, ranks: Ranks = SINGLE_PROCESS):
        self._ranks = ranks
        self.large = num_params >= LARGE_PARAMS
        self._share = max_share
        self.spent_s = 0.0
        self._latest_s = {"gather": 0.0, "sample": 0.0}
        self._largest_s = dict(
            self._latest_s
        )  # decaying maximum of earlier ones: costs vary by half, a share is a limit
        self._num_steps = 0
        self._gathered_before = False  # the step before was gathered
        self._processor_s = 0.0
        self._began: float | None = None
        self._resumed_s = 0.0  # elapsed before a resume

    def start(self) -> None:
        """Starts the clock; later calls change nothing."""
        if self._began is None:
            self._began = perf_counter()

    @property
    def elapsed_s(self) -> float:
        return self._resumed_s + (perf_counter() - self._began if self._began is not None else 0.0)

    def next_action(self) -> SamplingAction:
        """The action for the coming step, the same on all ranks."""
        return _ACTIONS[int(self._ranks.broadcast_number(_ACTIONS.index(self._local_action())))]

    def _local_action(self) -> SamplingAction:
        if self.large:
            if self._gathered_before:
                return SamplingAction.SAMPLE
            once_more_s = self._cost("gather") + self._cost("sample")
            affords = self.spent_s + once_more_s <= self._share * self.elapsed_s
            return SamplingAction.GATHER if affords else SamplingAction.SKIP
        if self._processor_s > MAX_S:
            return SamplingAction.SKIP
        stride = 2 ** (self._num_steps // STEPS_AT_FULL_RATE).bit_length()
        if self._num_steps % stride == 0:
            return SamplingAction.SAMPLE
        return SamplingAction.GATHER if (self._num_steps + 1) % stride == 0 else SamplingAction.SKIP

    def advance(self, action: SamplingAction) -> None:
        self._num_steps += 1
        self._gathered_before = action is SamplingAction.GATHER

    def _cost(self, kind: str) -> float:
        """Seconds that the next one of this kind is expected to take at most."""
        return max(self._latest_s[kind], self._largest_s[kind])

    @contextmanager
    def timed(self, kind: str, *, continued: bool = False) -> Iterator[None]:
        """Counts the time spent inside. `kind` "gather" or "sample": it is also the expected cost of the next one.

        `continued`: the time belongs to the latest one of this kind.
        """
        began, busy = perf_counter(), thread_time()
        try:
            yield
        finally:
            seconds = perf_counter() - began
            self._processor_s += thread_time() - busy
            self.spent_s += seconds
            if kind in self._latest_s and continued:
                self._latest_s[kind] += seconds
            elif kind in self._latest_s:
                self._largest_s[kind] = COST_DECAY * self._cost(kind)
                self._latest_s[kind] = seconds

    def saved(self) -> SavedSchedule:
        return SavedSchedule(
            seen=self._num_steps,
            armed=self._gathered_before,
            spent_s=self.spent_s,
            processor_s=self._processor_s,
            elapsed_s=self.elapsed_s,
        )

    def resume(self, saved: SavedSchedule) -> None:
        self._num_steps, self._gathered_before = saved.seen, saved.armed
        self.spent_s, self._processor_s = saved.spent_s, saved.processor_s
        self._resumed_s, self._began = saved.elapsed_s, None
