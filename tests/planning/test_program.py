"""The allocation as a mixed-integer program: what HiGHS is asked and answers, and limits that it passes."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from scipy import optimize  # pyright: ignore[reportMissingTypeStubs]

from baoc.planning.allocators import program
from baoc.planning.allocators.base import Ints, Problem, make_problem
from baoc.types import Limits
from tests.support.decision import candidates

LAYER = [(0.0, 10, 1.0), (1.0, 4, 5.0), (3.0, 1, 2.0)]  # risk, bytes, seconds
OTHER = [(0.0, 6, 3.0), (2.0, 3, 9.0)]
LIMITS = Limits(state_bytes=22, step_s=20.0)


def problem(limits: Limits = LIMITS) -> Problem:
    """Two equal layers and another block, which are two classes of five candidates."""
    return make_problem(candidates(LAYER, LAYER, OTHER), limits=limits)


def classes() -> list[Ints]:
    return [np.array([0, 1]), np.array([2])]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The arguments of each call of the solver, which answers."""
    calls: list[dict[str, Any]] = []
    solver: Any = optimize.milp

    def milp(costs: Any, **options: Any) -> Any:
        calls.append({"costs": costs, **options})
        return solver(costs, **options)

    monkeypatch.setattr(optimize, "milp", milp)
    return calls


@pytest.mark.parametrize(("limit", "unit"), [(22, 22.0), (0, 1.0)])
def test_the_solver_is_asked_in_its_own_units(asked: list[dict[str, Any]], limit: int, unit: float):
    found = replace(problem(), limits=np.array([limit, np.inf]))
    counts, bound = program.solve(found, classes(), found.risk)
    (call,) = asked
    assert np.ptp(call["costs"]) == pytest.approx(1000), "the widest difference of risk"
    assert call["integrality"].tolist() == [1] * 5
    assert (call["bounds"].lb.tolist(), call["bounds"].ub.tolist()) == ([0.0] * 5, [2.0, 2.0, 2.0, 1.0, 1.0])
    assert call["options"] == {"mip_rel_gap": 1e-9, "time_limit": 60.0}
    blocks, memory = call["constraints"]  # no row for seconds, which are not limited
    assert blocks.A.toarray().tolist() == [[1, 1, 1, 0, 0], [0, 0, 0, 1, 1]]
    assert (blocks.lb.tolist(), blocks.ub.tolist()) == ([2, 1], [2, 1])
    assert memory.A.toarray()[0].tolist() == pytest.approx([value * 1e5 / unit for value in (10, 4, 1, 6, 3)])
    assert memory.ub.tolist() == pytest.approx([limit * 1e5 / unit])
    if limit:  # 10 + 4 + 6 bytes: one layer is cheaper
        assert counts is not None and counts.tolist() == [[1, 1, 0], [1, 0, 0]] and bound == pytest.approx(1.0)
    else:
        assert (counts, bound) == (None, np.inf)


def test_where_all_cost_the_same_their_unit_is_one(asked: list[dict[str, Any]]):
    found = problem()
    program.solve(found, classes(), np.where(found.valid, 7.0, np.inf))
    assert asked[0]["costs"].tolist() == pytest.approx([7000.0] * 5)


@pytest.mark.parametrize(("told", "bound"), [(2.5, 2.5), (None, 4.0)])
def test_the_bound_is_the_solvers_or_else_the_value_of_its_answer(
    monkeypatch: pytest.MonkeyPatch, told: float | None, bound: float
):
    answer = SimpleNamespace(x=np.array([1, 1 - 1e-9, 0, 1, 0]), status=0, fun=4.0, mip_dual_bound=told, message="")
    monkeypatch.setattr(optimize, "milp", lambda *_, **__: answer)
    found = problem()
    counts, lower = program.solve(found, classes(), found.risk)
    assert counts is not None and counts.dtype == np.int64 and counts.tolist() == [[1, 1, 0], [1, 0, 0]]
    assert lower == pytest.approx(bound * 3.0 / 1000)


def test_no_answer_in_time_says_what_the_solver_says(monkeypatch: pytest.MonkeyPatch):
    late = SimpleNamespace(x=None, status=1, message="Time limit reached")
    monkeypatch.setattr(optimize, "milp", lambda *_, **__: late)
    with pytest.raises(program.Undecided, match=r"^Time limit reached$"):
        program.solve(problem(), classes(), problem().risk)


def test_a_refusal_out_of_time_has_the_least_of_each_total_alone(monkeypatch: pytest.MonkeyPatch):
    """Within 5 s it takes 26 bytes, and within 9 bytes 7 s; either alone could be 5."""
    refused = program.no_feasible(problem(Limits(state_bytes=9, step_s=5.0)))
    assert (refused.least_state_bytes, refused.least_step_s) == (26, 7.0)

    def late(*_: Any) -> Any:
        raise program.Undecided("time limit reached")

    monkeypatch.setattr(program, "solve", late)
    refused = program.no_feasible(problem(Limits(state_bytes=9, step_s=5.0)))
    assert (refused.least_state_bytes, refused.least_step_s) == (5, 5.0)


def test_candidates_of_equal_bytes_are_taken_in_their_order(monkeypatch: pytest.MonkeyPatch):
    rows = [(float(index), 4 + index % 2, 0.0) for index in range(40)]
    found = make_problem(candidates(*[rows] * 40), limits=Limits())
    answers(monkeypatch, [[1] * 40])
    solved = program.minimise(found, objective=found.risk)
    assert solved is not None and solved[0].tolist() == [*range(1, 40, 2), *range(0, 40, 2)]


def answers(monkeypatch: pytest.MonkeyPatch, *counts: list[list[int]]) -> list[list[float]]:
    """The limits of each call of `solve`, which gives these answers, the last one again and again, bounds 1, 2, ..."""
    limits: list[list[float]] = []

    def solve(tightened: Problem, classes: list[Ints], objective: Any) -> Any:
        limits.append(tightened.limits.tolist())
        return np.array(counts[min(len(limits), len(counts)) - 1]), float(len(limits))

    monkeypatch.setattr(program, "solve", solve)
    return limits


def test_a_limit_that_the_answer_passes_is_tightened_by_as_much(monkeypatch: pytest.MonkeyPatch):
    """26 of 22 bytes and 5 s of 20, then 20 bytes: bytes are limited to 18 the second time, seconds as they were."""
    found = problem()
    limits = answers(monkeypatch, [[2, 0, 0], [1, 0, 0]], [[1, 1, 0], [1, 0, 0]])
    solved = program.minimise(found, objective=found.risk)
    seconds = found.limits[1]
    assert limits == [[22.0, seconds], [18.0, seconds]]
    assert solved is not None and solved[0].tolist() == [0, 1, 0] and solved[1] == 1.0, "the bound is the first one's"


def test_a_limit_that_is_passed_eight_times_is_not_met(monkeypatch: pytest.MonkeyPatch):
    limits = answers(monkeypatch, [[2, 0, 0], [1, 0, 0]])
    assert program.minimise(problem(), objective=problem().risk) is None
    assert [first for first, _ in limits] == [22.0 - 4 * times for times in range(8)]


def test_of_equal_blocks_the_earlier_ones_take_more_bytes_whatever_the_seconds(monkeypatch: pytest.MonkeyPatch):
    answers(monkeypatch, [[0, 1, 1], [0, 1, 0]])
    solved = program.minimise(problem(), objective=problem().risk)
    assert solved is not None and solved[0].tolist() == [1, 2, 1]
    swapped = [(risk, 10 - held, held) for risk, held, _ in LAYER]
    answers(monkeypatch, [[0, 1, 1], [0, 1, 0]])
    found = make_problem(candidates(swapped, swapped, OTHER), limits=Limits())
    solved = program.minimise(found, objective=found.risk)
    assert solved is not None and solved[0].tolist() == [2, 1, 1]
