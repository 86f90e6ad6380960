"""Frontiers on random points: hypervolume against counting cells, and what dominance must obey."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baoc.frontier.pareto import MAX_DOUBLINGS, Objective, build_frontier, hypervolume, hypervolume_history, pareto
from tests.support.frontier_points import point

SIDE = 5
TOP = 9  # bytes up to 2^9, of which the upper seven doublings count


def points(dimensions: int):
    return st.lists(st.tuples(*[st.integers(0, SIDE)] * dimensions), max_size=8)


def cells(costs: list[tuple[int, ...]], dimensions: int) -> int:
    """Unit cells of a grid up to the reference that some point dominates."""
    return sum(
        any(all(c <= x for c, x in zip(cost, cell, strict=True)) for cost in costs)
        for cell in product(range(SIDE), repeat=dimensions)
    )


@pytest.mark.parametrize("dimensions", [1, 2, 3, 4])
@given(data=st.data())
def test_hypervolume_counts_dominated_cells(dimensions: int, data: st.DataObject):
    costs = data.draw(points(dimensions))
    assert hypervolume(costs, reference=(SIDE,) * dimensions) == cells(costs, dimensions)


@given(
    runs=st.lists(st.tuples(st.integers(0, SIDE), st.integers(-1, TOP), st.integers(0, SIDE)), max_size=8),
    axes=st.sampled_from([("state_bytes",), ("state_bytes", "samples_per_s")]),
)
def test_a_frontier_counts_cells_of_quality_by_doublings(runs: list[tuple[int, int, int]], axes: tuple[str, ...]):
    """Bytes are 0 or powers of 2, rates are powers of 2, so that each doubling is one cell."""
    found = [point(str(r), r[0], int(2 ** r[1]) if r[1] >= 0 else 0, speed=2.0 ** r[2]) for r in runs]
    spans = [SIDE, int(MAX_DOUBLINGS), SIDE][: 1 + len(axes)]
    at = [(quality, max(log - (TOP - int(MAX_DOUBLINGS)), 0), SIDE - rate) for quality, log, rate in runs]
    wanted = sum(
        any(all(p <= c for p, c in zip(place, cell, strict=False)) for place in at)
        for cell in product(*map(range, spans))
    )
    of = {
        "objectives": [Objective(name="quality"), *(Objective(name=a, higher_is_better=a[:2] == "sa") for a in axes)],
        "reference": [SIDE, 2**TOP, 1.0][: 1 + len(axes)],
    }
    assert build_frontier(found, **of).hypervolume == wanted
    assert hypervolume_history(found, **of)[-1:] == ([wanted] if runs else [])


@given(costs=points(2))
def test_what_is_kept_dominates_the_rest(costs: list[tuple[int, ...]]):
    kept = [cost for cost, keep in zip(costs, pareto(costs), strict=True) if keep]
    assert bool(kept) == bool(costs)
    for cost in costs:
        assert any(all(k <= c for k, c in zip(best, cost, strict=True)) for best in kept)
    assert all(pareto(kept))
