"""Intervals and ranks: exact small cases, and on noise the rate of false alarms that their level promises."""

import math

import numpy as np
import pytest
from scipy.stats import spearmanr

from baoc.core.statistics import mean_interval, paired_difference, rank_correlation, ranks, upper_bound

NOISE = np.random.default_rng(0)


def test_a_known_interval():
    found = mean_interval([1.0, 2.0, 3.0], level=0.95)
    assert (found.mean, found.sd, found.n) == (2.0, 1.0, 3)
    assert found.half == pytest.approx(4.302653 / math.sqrt(3), rel=1e-6)  # t with 2 degrees of freedom
    assert not found.excludes_zero and str(found) == "+2 +- 2.5 (n 3)"


def test_one_value_tells_nothing():
    found = mean_interval([5.0])
    assert math.isinf(found.half) and not found.excludes_zero
    assert math.isinf(upper_bound(found, level=0.9))


def test_equal_values_have_no_spread():
    assert mean_interval([0.0, 0.0]).excludes_zero is False
    assert mean_interval([0.1, 0.1, 0.1]).excludes_zero is True


@pytest.mark.parametrize("n", [2, 3, 8, 30])
def test_noise_excludes_zero_as_often_as_the_level_says(n: int):
    wrong = np.mean([mean_interval(list(row), level=0.95).excludes_zero for row in NOISE.normal(size=(2000, n))])
    assert wrong == pytest.approx(0.05, abs=0.015)


@pytest.mark.parametrize("n", [2, 3, 8])
def test_one_sided_bounds_hold_as_often_as_the_level_says(n: int):
    below = np.mean([upper_bound(mean_interval(list(row)), level=0.9) < 0 for row in NOISE.normal(size=(2000, n))])
    assert below == pytest.approx(0.1, abs=0.02)


def test_differences_are_paired_by_seed():
    ours, theirs = {1: 1.0, 2: 2.0, 3: 9.0}, {2: 1.5, 1: 0.5, 7: 0.0}
    found = paired_difference(ours, theirs)
    assert (found.mean, found.sd, found.n) == (0.5, 0.0, 2)
    with pytest.raises(ValueError, match=r"no seed is in both: \[1\] and \[2\]; pairs are runs of the same seed"):
        paired_difference({1: 0.0}, {2: 0.0})


def test_ranks_share_ties():
    assert list(ranks([3.0, 1.0, 3.0, 2.0])) == [2.5, 0.0, 2.5, 1.0]


def test_rank_correlation_is_that_of_scipy():
    x, y = NOISE.normal(size=12), NOISE.integers(4, size=12).astype(float)
    found = rank_correlation(list(x), list(y))
    assert found.rho == pytest.approx(spearmanr(x, y).statistic)
    assert rank_correlation([1, 2, 3, 4, 5], [2, 4, 6, 8, 10]).p == pytest.approx(2 / 120)  # both of the 120 orders


@pytest.mark.parametrize("n", [5, 9, 20])
def test_noise_is_correlated_as_often_as_p_says(n: int):
    draws = NOISE.normal(size=(400, 2, n))
    assert np.mean([rank_correlation(list(x), list(y)).p <= 0.05 for x, y in draws]) <= 0.08


def test_one_run_of_nine_is_no_correlation():
    """A term that is non-zero in one run: resampling those nine runs excluded 0 in 31 of 60 draws of noise."""
    term = [0.0] * 8 + [1.0]
    told = [rank_correlation(term, list(NOISE.normal(size=9))).p <= 0.05 for _ in range(60)]
    assert sum(told) == 0


def test_a_constant_side_is_said():
    found = rank_correlation([1.0] * 9, list(NOISE.normal(size=9)))
    assert math.isnan(found.rho) and found.p == 1.0


@pytest.mark.parametrize(
    ("values", "level", "words"),
    [
        ([], 0.9, "no values were given"),
        ([1.0, math.nan], 0.9, "not finite"),
        ([1.0], 90, "level=90 is no probability"),
    ],
)
def test_bad_input_is_refused(values: list[float], level: float, words: str):
    with pytest.raises(ValueError, match=words):
        mean_interval(values, level=level)
