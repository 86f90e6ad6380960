"""Intervals, paired differences and rank correlations: the one place that decides whether data tell two things apart.

Frontier pages, calibration, races and benchmarks take their intervals from here. All intervals are two-sided unless
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

import numpy as np
from numpy.typing import NDArray

LEVEL = 0.9  # of an interval where nothing is said
MOST_EXACT = 7  # values, up to which all permutations are counted: 5,040
PERMUTATIONS = 4999  # drawn of more values, so that the least p is 1/5,000
Floats = NDArray[np.float64]


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
    return float(_stats().t.ppf(probability, degrees))


def mean_interval(values: Sequence[float], *, level: float = LEVEL) -> Interval:
    """Student's interval of the mean of independent values.

    Args:
        values: at least one finite number.
        level: probability that intervals like this one hold the true mean, for normal values.

    Raises:
        ValueError: for no value, for one that is not finite, or for a level outside of (0, 1).
    """
    _check(values, level)
    n = len(values)
    sd = stdev(values) if n > 1 else math.nan
    half = student_quantile(0.5 + level / 2, degrees=n - 1) * (sd / math.sqrt(n)) if n > 1 else math.inf
    return Interval(mean=fmean(values), half=half, sd=sd, n=n, level=level)


def paired_difference(ours: Mapping[int, float], theirs: Mapping[int, float], *, level: float = LEVEL) -> Interval:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class RankCorrelation:
    """Spearman's rank correlation of `n` pairs, and the permutation probability of one as large in size by chance.

    `rho` is NaN, and `p` 1, where one side is constant.
    """

    rho: float
    p: float
    n: int


def rank_correlation(x: Sequence[float], y: Sequence[float], *, seed: int = 0) -> RankCorrelation:
    """Spearman's rho, tested by permuting `y`: all orders of up to 7 values, else 4,999 drawn by `seed`.

    Resampling pairs is not a test: where all but one value of `x` are equal, most resamples agree with each other and
    their percentiles exclude 0, though a single run carries all that is known.

    Raises:
        ValueError: for sides of different length, fewer than 3 pairs, or a value that is not finite.
    """
    if len(x) != len(y) or len(x) < 3:
        raise ValueError(f"{len(x)} and {len(y)} values: a rank correlation needs two sides of one length, 3 or more")
    _check(x, LEVEL)
    _check(y, LEVEL)
    if len(set(x)) == 1 or len(set(y)) == 1:
        return RankCorrelation(rho=math.nan, p=1.0, n=len(x))
    a, b = ranks(x), ranks(y)
    a, b = (a - a.mean()) / np.linalg.norm(a - a.mean()), (b - b.mean()) / np.linalg.norm(b - b.mean())

    def size(orders: Floats, axis: int) -> Floats:
        return np.abs(orders @ a)

    found = _stats().permutation_test(
        (b,),
        size,
        permutation_type="pairings",
        alternative="greater",
        vectorized=True,
        n_resamples=PERMUTATIONS if len(x) > MOST_EXACT else math.inf,
        rng=np.random.default_rng(seed),
    )
    return RankCorrelation(rho=float(a @ b), p=float(found.pvalue), n=len(x))


def ranks(values: Sequence[float] | Floats) -> Floats:
    """Ranks from 0; equal values share their mean rank."""
    return _stats().rankdata(values) - 1


def _stats() -> Any:
    """scipy.stats, which has no types and takes 0.3 s."""
    return importlib.import_module("scipy.stats")


def _check(values: Sequence[float], level: float) -> None:
    if not len(values):
        raise ValueError("no values were given: a mean needs one, an interval two")
    if not all(math.isfinite(value) for value in values):
        raise ValueError("a value is not finite: leave out runs that diverged, and count them apart")
    if not 0 < level < 1:
        raise ValueError(f"level={level} is no probability: give one between 0 and 1, such as 0.9")
