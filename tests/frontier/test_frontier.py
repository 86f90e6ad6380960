"""Frontiers by hand: dominance, hypervolume, seeds, rows."""

import math

import pytest

from baoc.frontier.pareto import (
    Objective,
    average_seeds,
    build_frontier,
    doublings,
    frontier_rows,
    hypervolume_history,
    knee,
    pareto,
)
from tests.support.frontier_points import point

LOSS = Objective(name="quality")
STATE = Objective(name="state_bytes")
SPEED = Objective(name="samples_per_s", higher_is_better=True)


def test_pareto_keeps_equal_points_and_drops_what_is_worse_somewhere_and_better_nowhere():
    assert pareto([(1, 3), (2, 2), (3, 1), (3, 2), (2, 2)]) == [True, True, True, False, True]


def test_a_frontier_marks_dominated_runs_in_the_given_order():
    runs = [point("a", 0.3, 2), point("b", 0.4, 4), point("c", 0.1, 8), point("nan", math.nan, 1)]
    frontier = build_frontier(runs, objectives=[LOSS, STATE], reference=[0.5, 10])
    assert [p.dominated for p in frontier.points] == [False, True, False, True]
    assert [p.label for p in frontier.best] == ["a", "c"]
    assert frontier.hypervolume == pytest.approx((0.5 - 0.1) * math.log2(10 / 8) + (0.5 - 0.3) * math.log2(8 / 2))


def test_doublings_give_no_state_a_place_and_end_at_seven():
    assert [doublings(v, up_to=64) for v in (16, 64, 128, 0.5, 1e-9, 0)] == [2, 0, -1, 7, 7, 7]
    assert [doublings(v, up_to=0) for v in (0, 1)] == [0, -7]
    none, least, half = (point(name, 0.5, state) for name, state in (("none", 0), ("least", 1), ("half", 64)))
    of = {"objectives": [LOSS, STATE], "reference": [1.0, 128]}
    assert build_frontier([none], **of).hypervolume == build_frontier([least], **of).hypervolume == 0.5 * 7
    assert build_frontier([half], **of).hypervolume == 0.5
    assert build_frontier([none], objectives=[LOSS, STATE], reference=[1.0, 0]).hypervolume == 0, "nothing is below 0"


def test_objectives_that_are_better_when_higher():
    runs = [point("slow", 0.1, 4, speed=10), point("fast", 0.1, 4, speed=20)]
    frontier = build_frontier(runs, objectives=[STATE, SPEED], reference=[5, 10])
    assert [p.dominated for p in frontier.points] == [True, False]
    assert frontier.hypervolume == pytest.approx(math.log2(5 / 4) * math.log2(20 / 10))


def test_the_default_reference_is_the_worst_of_each():
    frontier = build_frontier([point("a", 0.3, 2, speed=5), point("c", 0.1, 8, speed=9)], objectives=[LOSS, SPEED])
    assert frontier.reference == (0.3, 5.0)
    lost = build_frontier([point("nan", math.nan, 1)], objectives=[LOSS, STATE])
    assert (lost.hypervolume, lost.best) == (0.0, ())


def test_seeds_become_one_point_with_its_spread():
    runs = [point("a", 0.1, 4, run="s0", speed=1), point("b", 0.5, 2), point("a", 0.3, 5, run="s1", speed=3)]
    a, b = average_seeds(runs)
    assert (a.run, a.quality, a.state_bytes, a.samples_per_s, a.num_seeds) == ("s0 s1", pytest.approx(0.2), 5, 2.0, 2)
    assert a.quality_spread == pytest.approx(math.sqrt(0.02))
    assert (b.num_seeds, b.quality_spread) == (1, None)
    diverged = average_seeds([point("a", 0.1, 4), point("a", math.nan, 4)])[0]
    assert math.isnan(diverged.quality)
    assert diverged.quality_spread is None, "a seed that diverged is not averaged away"


def test_rows_come_best_first():
    runs = [point("b", 0.4, 4), point("c", 0.1, 8), point("a", 0.3, 2)]
    rows = frontier_rows(build_frontier(runs, objectives=[LOSS, STATE]))
    assert [(row["label"], row["dominated"]) for row in rows] == [("c", False), ("a", False), ("b", True)]
    assert list(rows[0])[:5] == ["run", "task", "model", "label", "quality"]


def test_the_history_of_a_hypervolume_never_falls_and_ends_at_the_whole():
    runs = [point("a", 0.3, 2), point("nan", math.nan, 1), point("b", 0.4, 4), point("c", 0.1, 8), point("d", 0.1, 2)]
    found = hypervolume_history(runs, objectives=[LOSS, STATE], reference=[0.5, 10])
    first, last = math.log2(10 / 2), math.log2(10 / 8)
    assert found == pytest.approx([0.2 * first] * 3 + [0.2 * first + 0.2 * last, 0.4 * first])
    assert found[-1] == build_frontier(runs, objectives=[LOSS, STATE], reference=[0.5, 10]).hypervolume
    better_when_higher = hypervolume_history(
        [point("x", 0.1, 2, speed=5)], objectives=[SPEED, STATE], reference=[1, 10]
    )
    assert better_when_higher == [math.log2(5 / 1) * math.log2(10 / 2)]
    assert hypervolume_history([], objectives=[LOSS, STATE], reference=[0.5, 10]) == []


def test_the_knee_is_where_more_memory_stops_paying():
    runs = [point("least", 1.0, 1), point("knee", 0.2, 16), point("more", 0.1, 64), point("most", 0.0, 256)]
    # 7 (at most), 4, 2 and 0 doublings below the most: under the line through the ends by 4/7 - .2 and 2/7 - .1
    found = knee([*runs, point("dominated", 0.9, 32), point("nan", math.nan, 1)], quality=LOSS, memory=STATE)
    assert found is not None and found.label == "knee"
    assert knee(runs[:1] + runs[3:], quality=LOSS, memory=STATE) is None, "two points are a line"
    line = [point("a", 1.0, 4), point("b", 0.5, 32), point("c", 0.0, 256)]
    assert knee(line, quality=LOSS, memory=STATE) is None
    assert knee([], quality=LOSS, memory=STATE) is None
