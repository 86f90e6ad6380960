"""Intervals: exact small cases, and on noise the rate of false alarms that their level promises."""

import math
import re

import numpy as np
import pytest

from baoc.core.statistics import mean_interval, paired_difference, student_quantile, upper_bound

NOISE = np.random.default_rng(0)


def test_a_known_interval():
    found = mean_interval([1.0, 2.0, 3.0], level=0.95)
    assert (found.mean, found.sd, found.n) == (2.0, 1.0, 3)
    assert found.half == pytest.approx(4.302653 / math.sqrt(3), rel=1e-6)  # t with 2 degrees of freedom
    assert not found.excludes_zero and str(found) == "+2 +- 2.5 (n 3)"
    assert (found.level, found.low, found.high) == (0.95, 2.0 - found.half, 2.0 + found.half)
    assert upper_bound(found, level=0.975) == pytest.approx(found.high)  # one side of an interval of 95 %


def test_a_quantile_as_it_is_computed_first():
    assert student_quantile.__wrapped__(0.975, degrees=2) == pytest.approx(4.302653, rel=1e-6)


def test_one_value_tells_nothing():
    found = mean_interval([5.0])
    assert math.isinf(found.half) and not found.excludes_zero
    assert math.isinf(upper_bound(found, level=0.9))


def test_equal_values_have_no_spread():
    assert mean_interval([0.0, 0.0]).excludes_zero is False
    assert mean_interval([0.1, 0.1, 0.1]).excludes_zero is True


@pytest.mark.parametrize("n", [2, 8])
def test_noise_excludes_zero_as_often_as_the_level_says(n: int):
    wrong = np.mean([mean_interval(list(row), level=0.95).excludes_zero for row in NOISE.normal(size=(1000, n))])
    assert wrong == pytest.approx(0.05, abs=0.02)


@pytest.mark.parametrize("n", [2, 8])
def test_one_sided_bounds_hold_as_often_as_the_level_says(n: int):
    below = np.mean([upper_bound(mean_interval(list(row)), level=0.9) < 0 for row in NOISE.normal(size=(1000, n))])
    assert below == pytest.approx(0.1, abs=0.02)


def test_differences_are_paired_by_seed():
    ours, theirs = {1: 1.0, 2: 2.0, 3: 9.0}, {2: 1.5, 1: 0.5, 7: 0.0}
    found = paired_difference(ours, theirs)
    assert (found.mean, found.sd, found.n) == (0.5, 0.0, 2)
    assert paired_difference(ours, theirs, level=0.5).level == 0.5 and found.level == 0.9
    five, other = "[1, 2, 3, 4, 5]", "[7, 8, 9, 10, 11]"
    with pytest.raises(ValueError, match=re.escape(f"no seed is in both: {five} and {other}; pairs are runs of the")):
        paired_difference(dict.fromkeys(range(1, 7), 0.0), dict.fromkeys(range(7, 13), 0.0))


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
