"""Student intervals and paired differences, for frontier pages, races and benchmarks.

Intervals are two-sided unless the name says otherwise. The interval of a single value is infinite, so nothing follows
from it.
"""

import importlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import fmean, stdev
from typing import Any

DEFAULT_LEVEL = 0.9  # of confidence


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A mean with its Student interval, `mean` +- `half`, from `n` values of standard deviation `sd`. `half` is
    infinite for one value, and 0 for several equal ones."""

    mean: float
    half: float
    sd: float
    n: int
    level: float

    @property
    def low(self) -> float:
        return self.mean - self.half

    @property
    def high(self) -> float:
        return self.mean + self.half

    @property
    def excludes_zero(self) -> bool:
        """Whether 0 lies outside of the interval: the sign of the mean is known at this level."""
        return abs(self.mean) > self.half

    def __str__(self) -> str:
        return f"{self.mean:+.4g} +- {self.half:.2g} (n {self.n})"


@cache
def student_quantile(probability: float, *, degrees: int) -> float:
    """The quantile of Student's t distribution; infinite without a degree of freedom."""
    if degrees < 1:
        return math.inf
    stats: Any = importlib.import_module("scipy.stats")  # imported late, as it takes .3 s; it has no types
    return float(stats.t.ppf(probability, degrees))


def mean_interval(values: Sequence[float], *, level: float = DEFAULT_LEVEL) -> Interval:
    """Student's interval of the mean of independent values.

    Args:
        values: at least one finite number.
        level: probability that such an interval contains the true mean, for normal values.

    Raises:
        ValueError: there is no value, one is not finite, or the level is outside of (0, 1).
    """
    check_values(values, level)
    n = len(values)
    sd = stdev(values) if n > 1 else math.nan
    return Interval(mean=fmean(values), half=half_interval(sd, n=n, level=level), sd=sd, n=n, level=level)


def half_interval(sd: float, *, n: int, level: float = DEFAULT_LEVEL) -> float:
    """Half of Student's interval of the mean of `n` values of standard deviation `sd`; infinite for one value."""
    return student_quantile(0.5 + level / 2, degrees=n - 1) * (sd / math.sqrt(n)) if n > 1 else math.inf


def paired_difference(
    ours: Mapping[int, float], theirs: Mapping[int, float], *, level: float = DEFAULT_LEVEL
) -> Interval:
    """The mean of `ours` - `theirs` over the seeds that both have.

    Raises:
        ValueError: they share no seed.
    """
    shared = sorted(ours.keys() & theirs.keys())
    if not shared:
        raise ValueError(
            f"no seed is in both: {sorted(ours)[:5]} and {sorted(theirs)[:5]}; pairs are runs of the same seed"
        )
    return mean_interval([ours[seed] - theirs[seed] for seed in shared], level=level)


def upper_bound(interval: Interval, *, level: float) -> float:
    """The one-sided upper bound of the true mean at `level`; infinite for one value."""
    if interval.n < 2:
        return math.inf
    return interval.mean + student_quantile(level, degrees=interval.n - 1) * interval.sd / math.sqrt(interval.n)


def check_values(values: Sequence[float], level: float) -> None:
    """Raises ValueError for no values, for values that are not finite, and for a level outside of (0, 1)."""
    if not len(values):
        raise ValueError("no values were given: a mean needs one, an interval two")
    if not all(math.isfinite(value) for value in values):
        raise ValueError("a value is not finite: leave out runs that diverged, and count them apart")
    if not 0 < level < 1:
        raise ValueError(f"level={level} is no probability: give one between 0 and 1, such as 0.9")
