"""Rank correlations: those of scipy, and on noise the rate of false alarms that p promises."""

import math

import numpy as np
import pytest
from scipy.stats import spearmanr

from experiments.analysis.ranks import rank_correlation, ranks

NOISE = np.random.default_rng(0)


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


@pytest.mark.slow
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


@pytest.mark.parametrize(("x", "y"), [([1.0, 2], [1.0, 2]), ([1.0, 2, 3], [1.0, 2]), ([1.0, 2, 3], [1.0, 2, 3, 4])])
def test_pairs_are_three_or_more(x: list[float], y: list[float]):
    with pytest.raises(ValueError, match=f"^{len(x)} and {len(y)} values: a rank correlation needs two sides of one"):
        rank_correlation(x, y)
