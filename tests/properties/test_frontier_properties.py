"""Frontiers on random points: hypervolume against counting cells, and what dominance must obey."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baoc.frontier import hypervolume, pareto

SIDE = 5


def points(dimensions: int):
    return st.lists(st.tuples(*[st.integers(0, SIDE)] * dimensions), max_size=8)


def cells(costs: list[tuple[int, ...]], dimensions: int) -> int:
    """Unit cells of a grid up to the reference that some point dominates."""
    return sum(
        any(all(c <= x for c, x in zip(cost, cell, strict=True)) for cost in costs)
        for cell in product(range(SIDE), repeat=dimensions)
    )


@pytest.mark.parametrize("dimensions", [1, 2, 3])
@given(data=st.data())
def test_hypervolume_counts_dominated_cells(dimensions: int, data: st.DataObject):
    costs = data.draw(points(dimensions))
    assert hypervolume(costs, reference=(SIDE,) * dimensions) == cells(costs, dimensions)


@given(costs=points(3), extra=st.tuples(*[st.integers(0, SIDE)] * 3))
def test_a_point_more_never_lowers_the_hypervolume(costs: list[tuple[int, ...]], extra: tuple[int, ...]):
    reference = (SIDE,) * 3
    assert hypervolume([*costs, extra], reference=reference) >= hypervolume(costs, reference=reference)


@given(costs=points(2))
def test_what_is_dominated_adds_nothing_and_the_rest_dominate_it(costs: list[tuple[int, ...]]):
    kept = [cost for cost, keep in zip(costs, pareto(costs), strict=True) if keep]
    assert bool(kept) == bool(costs)
    assert hypervolume(kept, reference=(SIDE + 1, SIDE + 1)) == hypervolume(costs, reference=(SIDE + 1, SIDE + 1))
    for cost in costs:
        assert any(all(k <= c for k, c in zip(best, cost, strict=True)) for best in kept)
    assert all(pareto(kept))
