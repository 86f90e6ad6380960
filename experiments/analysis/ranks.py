"""Rank correlations of tables of runs, tested by permutation."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.stats import permutation_test, rankdata

from baoc.core.statistics import DEFAULT_LEVEL, check_values

MOST_EXACT = 7  # values, up to which all permutations are counted: 5,040
PERMUTATIONS = 4999  # drawn of more values, so that the least p is 1/5,000
Floats = NDArray[np.float64]


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
    check_values(x, DEFAULT_LEVEL)
    check_values(y, DEFAULT_LEVEL)
    if len(set(x)) == 1 or len(set(y)) == 1:
        return RankCorrelation(rho=math.nan, p=1.0, n=len(x))
    a, b = ranks(x), ranks(y)
    a, b = (a - a.mean()) / np.linalg.norm(a - a.mean()), (b - b.mean()) / np.linalg.norm(b - b.mean())

    def size(orders: Floats, axis: int) -> Floats:
        return np.abs(orders @ a)

    found = permutation_test(
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
    return rankdata(values) - 1
