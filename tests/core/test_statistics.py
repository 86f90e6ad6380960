"""Intervals and ranks: exact small cases, and on noise the rate of false alarms that their level promises."""

import math
import re

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
    assert (found.level, found.low, found.high) == (0.95, 2.0 - found.half, 2.0 + found.half)
    assert upper_bound(found, level=0.975) == pytest.approx(found.high)  # one side of an interval of 95 %


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
    assert paired_difference(ours, theirs, level=0.5).level == 0.5 and found.level == 0.9
    five, other = "[1, 2, 3, 4, 5]", "[7, 8, 9, 10, 11]"
    with pytest.raises(ValueError, match=re.escape(f"no seed is in both: {five} and {other}; pairs are runs of the")):
        paired_difference(dict.fromkeys(range(1, 7), 0.0), dict.fromkeys(range(7, 13), 0.0))


def test_ranks_share_ties():
    assert list(ranks([3.0, 1.0, 3.0, 2.0])) == [2.5, 0.0, 2.5, 1.0]


def test_rank_correlation_is_that_of_scipy():
    x, y = NOISE.normal(size=12), NOISE.integers(4, size=12).astype(float)
    found = rank_correlation(list(x), list(y))
    assert found.rho == pytest.approx(spearmanr(x, y).statistic)
    assert found.n == 12


def test_up_to_seven_values_every_order_is_counted():
    """As large in size as found are, of all n! orders, the sorted one and its reverse, times those that swap ties."""
    assert rank_correlation([1, 2, 3], [2, 4, 6]).p == pytest.approx(2 / 6)
    assert rank_correlation([1, 2, 3, 4, 5, 6, 7], [-1, -2, -3, -4, -5, -6, -7]).p == pytest.approx(2 / 5040)
    assert rank_correlation([1, 2, 3, 4], [0, 0, 1, 1]).p == pytest.approx(2 * 4 / 24)
    assert rank_correlation([1, 2, 3, 4], [2, 1, 4, 3]).p == pytest.approx(10 / 24)  # rho .6; counted by hand


def test_of_more_values_4999_orders_are_drawn_and_the_found_one_counts():
    sorted_values = list(range(12))
    assert rank_correlation(sorted_values, sorted_values).p == pytest.approx(1 / 5000)
    x, y = [0.0, 1, 2, 3, 4, 5, 6, 7], [1.0, 0, 3, 2, 7, 5, 4, 6]
    first, again, other = (rank_correlation(x, y, seed=seed).p for seed in (0, 0, 1))
    assert first == again != other and rank_correlation(x, y).p == first


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
        ([], 0.9, "^no values were given: a mean needs one, an interval two$"),
        ([1.0, math.nan], 0.9, "^a value is not finite: leave out runs that diverged, and count them apart$"),
        *(([1.0], level, f"^level={level} is no probability: give one between 0 and 1") for level in (90, 0, 1, 1.5)),
    ],
)
def test_bad_input_is_refused(values: list[float], level: float, words: str):
    with pytest.raises(ValueError, match=words):
        mean_interval(values, level=level)


@pytest.mark.parametrize(("x", "y"), [([1.0, 2], [1.0, 2]), ([1.0, 2, 3], [1.0, 2]), ([1.0, 2, 3], [1.0, 2, 3, 4])])
def test_pairs_are_three_or_more(x: list[float], y: list[float]):
    with pytest.raises(ValueError, match=f"^{len(x)} and {len(y)} values: a rank correlation needs two sides of one"):
        rank_correlation(x, y)
