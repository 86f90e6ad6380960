"""What branching adds to the lagrangian allocator: a bound that stays below the optimum, and answers never above it."""

from dataclasses import replace

import numpy as np
import pytest

from baoc.planning.allocators import lagrangian
from baoc.planning.allocators.base import Problem
from baoc.planning.allocators.core import close
from baoc.planning.allocators.exact import minimise
from baoc.planning.allocators.feasible import find_feasible


def heavy(seed: int, *, blocks: int = 40, specs: int = 8) -> Problem:
    """A few blocks outweigh all others, so that prices alone leave a wide gap."""
    rng = np.random.default_rng(seed)
    size = rng.lognormal(3, 2, (blocks, 1))
    per_element = rng.uniform(0, 8, (blocks, specs))
    num_bytes = np.round(size * per_element)
    step_s = size * rng.uniform(0.5, 3, (blocks, specs))
    risk = size * np.exp(-per_element * rng.uniform(0.2, 1, (blocks, 1)))
    least, most = num_bytes.min(axis=1).sum(), num_bytes.max(axis=1).sum()
    fastest, slowest = step_s.min(axis=1).sum(), step_s.max(axis=1).sum()
    return Problem(
        names=tuple(map(str, range(blocks))),
        candidates=(),
        risk=risk,
        spent=np.stack([num_bytes, step_s]),
        limits=np.array([least + 0.3 * (most - least), fastest + 0.5 * (slowest - fastest)]),
        effort=np.zeros_like(step_s),
    )


def closed(problem: Problem, *, most_nodes: int):
    start = find_feasible(problem)
    dual = lagrangian.maximise(problem, start=start, most_prices=100)
    root = lagrangian.relaxed(problem, dual, choice=None)
    found = close(problem, root, best=start, relax=lagrangian.relax, good_gap=1e-9, most_nodes=most_nodes)
    return dual, found


@pytest.mark.parametrize("seed", range(8))
def test_the_bound_is_between_the_relaxation_s_and_the_optimum(seed: int):
    problem = heavy(seed)
    proven = minimise(problem, objective=problem.risk)
    assert proven is not None
    optimum = problem.total_risk(proven.choice)
    dual, found = closed(problem, most_nodes=40)
    assert problem.feasible(found.choice)
    assert dual.bound * (1 - 1e-9) <= found.bound <= optimum * (1 + 1e-9)
    assert problem.total_risk(found.choice) >= optimum * (1 - 1e-9)


def test_branching_narrows_the_gap():
    gaps = []
    for most_nodes in (2, 400):
        worst = 0.0
        for seed in range(8):
            problem = heavy(seed)
            _, found = closed(problem, most_nodes=most_nodes)
            risk = problem.total_risk(found.choice)
            worst = max(worst, (risk - found.bound) / risk)
        gaps.append(worst)
    assert gaps[1] < 0.01 < gaps[0]


def test_a_choice_that_cannot_be_bettered_is_proven():
    problem = heavy(0)
    proven = minimise(problem, objective=problem.risk)
    assert proven is not None
    optimum = problem.total_risk(proven.choice)
    dual = lagrangian.maximise(problem, start=proven.choice, most_prices=100)
    root = replace(lagrangian.relaxed(problem, dual, choice=None), bound=optimum)
    found = close(problem, root, best=proven.choice, relax=lagrangian.relax, good_gap=0.0, most_nodes=40)
    assert found.bound == pytest.approx(optimum, rel=1e-9)
