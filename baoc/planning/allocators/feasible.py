"""Finds any allocation that meets the limits, or proves that there is none."""

from collections.abc import Mapping, Sequence
from itertools import combinations

import numpy as np

from baoc.planning.allocators.base import Floats, Ints, Problem, make_problem, weighted
from baoc.planning.allocators.moves import repair
from baoc.planning.allocators.program import minimise, no_feasible
from baoc.types import Candidate, Limits

MAX_REPAIRS = 19  # choices that are repaired before the exact program is solved


def find_feasible(problem: Problem) -> Ints:
    """A choice that meets the limits, without regard to risk. Raises NoFeasibleAllocation if there is none."""
    choice = search(problem)
    if choice is None:
        raise no_feasible(problem)
    return choice


def possible(candidates: Mapping[str, Sequence[Candidate]], *, limits: Limits) -> bool:
    return search(make_problem(candidates, limits=limits)) is not None


def search(problem: Problem) -> Ints | None:
    """A choice that meets the limits; None if there is none. With one limit the least choice decides. With several, the
    least choices in mixtures of two limits are repaired first, then the exact program is solved."""
    for spent in problem.spent:
        choice = problem.least(spent, *problem.spent, problem.risk)
        if problem.feasible(choice):
            return choice
    if (problem.least_totals > problem.limits).any():
        return None
    shares = problem.spent / problem.units[:, None, None]
    choices = [problem.least(weighted(weights, shares)) for weights in mixtures(problem)]
    distinct = list({choice.tobytes(): choice for choice in choices}.values())
    for choice in distinct[:MAX_REPAIRS]:
        repaired = repair(problem, choice)
        if repaired is not None:
            return repaired
    solved = minimise(problem, objective=np.zeros_like(problem.risk))
    return None if solved is None else solved[0]


def mixtures(problem: Problem) -> list[Floats]:
    """Weights [limits] of mixtures of each pair of limited totals, nine for each pair."""
    result: list[Floats] = []
    for first, second in combinations(np.flatnonzero(np.isfinite(problem.limits)).tolist(), 2):
        for share in np.linspace(0.1, 0.9, 9):
            weights = np.zeros(len(problem.kinds))
            weights[first], weights[second] = share, 1 - share
            result.append(weights)
    return result
