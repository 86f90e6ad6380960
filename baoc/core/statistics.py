"""Intervals and paired differences: the one place that decides whether data tell two things apart.

Frontier pages, races and benchmarks take their intervals from here. All intervals are two-sided unless
the name says otherwise, and assume what the docstring says; with one value, or where nothing is known of the spread,
they are infinite, so nothing follows from them.
"""

import importlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import fmean, stdev
from typing import Any

DEFAULT_LEVEL = 0.9  # of an interval where nothing is said


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A mean with its Student interval, `mean` +- `half`, from `n` values of standard deviation `sd`.

    `half` is infinite for one value, and 0 for several that are equal.
    """

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
        """Whether 0 lies outside of the interval, so that the sign of the mean is known at this level."""
        return abs(self.mean) > self.half

    def __str__(self) -> str:
        return f"{self.mean:+.4g} +- {self.half:.2g} (n {self.n})"


@cache
def student_quantile(probability: float, *, degrees: int) -> float:
    """The quantile of Student's t distribution; infinite for no degree of freedom."""
    if degrees < 1:
        return math.inf
    stats: Any = importlib.import_module("scipy.stats")  # which has no types and takes .3 s
    return float(stats.t.ppf(probability, degrees))


def mean_interval(values: Sequence[float], *, level: float = DEFAULT_LEVEL) -> Interval:
    """Student's interval of the mean of independent values.

    Args:
        values: at least one finite number.
        level: probability that intervals like this one hold the true mean, for normal values.

    Raises:
        ValueError: for no value, for one that is not finite, or for a level outside of (0, 1).
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
        ValueError: where they share no seed.
    """
    shared = sorted(ours.keys() & theirs.keys())
    if not shared:
        raise ValueError(
            f"no seed is in both: {sorted(ours)[:5]} and {sorted(theirs)[:5]}; pairs are runs of the same seed"
        )
    return mean_interval([ours[seed] - theirs[seed] for seed in shared], level=level)


def upper_bound(interval: Interval, *, level: float) -> float:
    """The one-sided bound that the true mean stays below at `level`; infinite for one value."""
    if interval.n < 2:
        return math.inf
    return interval.mean + student_quantile(level, degrees=interval.n - 1) * interval.sd / math.sqrt(interval.n)


def check_values(values: Sequence[float], level: float) -> None:
    """Raises ValueError for values of which nothing can be told."""
    if not len(values):
        raise ValueError("no values were given: a mean needs one, an interval two")
    if not all(math.isfinite(value) for value in values):
        raise ValueError("a value is not finite: leave out runs that diverged, and count them apart")
    if not 0 < level < 1:
        raise ValueError(f"level={level} is no probability: give one between 0 and 1, such as 0.9")
