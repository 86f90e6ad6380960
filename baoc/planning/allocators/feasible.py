"""Any allocation that meets the limits, or proof that there is none."""

from collections.abc import Mapping, Sequence
from itertools import combinations

import numpy as np

from baoc.planning.allocators.base import Floats, Ints, Problem, make_problem
from baoc.planning.allocators.moves import repair
from baoc.planning.allocators.program import minimise, no_feasible
from baoc.types import Candidate, Limits

MOST_REPAIRS = 19  # mixtures from which moves are tried, before the exact program is asked


def find_feasible(problem: Problem) -> Ints:
    """A choice that meets the limits, without regard to risk. Raises NoFeasibleAllocation where there is none."""
    choice = search(problem)
    if choice is None:
        raise no_feasible(problem)
    return choice


def possible(candidates: Mapping[str, Sequence[Candidate]], *, limits: Limits) -> bool:
    """Whether some choice meets the limits."""
    return search(make_problem(candidates, limits=limits)) is not None


def search(problem: Problem) -> Ints | None:
    """A choice that meets the limits, None where there is none.

    With one limit the least choice decides. With several, mixtures of them are tried before the exact program is asked.
    """
    for kind in range(len(problem.kinds)):
        others = [values for other, values in enumerate(problem.spent) if other != kind]
        choice = problem.least(problem.spent[kind], *others, problem.risk)
        if problem.feasible(choice):
            return choice
    least = np.where(problem.valid, problem.spent, np.inf).min(axis=-1).sum(axis=-1)
    if not (least <= problem.limits).all():
        return None
    units = problem.units
    mixed = [
        problem.least(sum((weight * values / unit for weight, values, unit in mixture), np.zeros(problem.risk.shape)))
        for mixture in (zip(weights, problem.spent, units, strict=True) for weights in _mixtures(problem))
    ]
    distinct = list({choice.tobytes(): choice for choice in mixed}.values())
    for choice in distinct:
        if problem.feasible(choice):
            return choice
    for choice in distinct[:MOST_REPAIRS]:
        repaired = repair(problem, choice)
        if repaired is not None:
            return repaired
    solved = minimise(problem, objective=np.where(problem.valid, 0.0, np.inf))
    return None if solved is None else solved.choice


def _mixtures(problem: Problem) -> list[Floats]:
    """Weights [limits] that mix bytes and seconds; with more limits, each pair of the limited totals."""
    several = len(problem.kinds) > 2
    shares = np.linspace(0.2, 0.8, 4) if several else np.linspace(0.05, 0.95, 19)
    limited = np.flatnonzero(np.isfinite(problem.limits)).tolist() if several else [0, 1]
    found: list[Floats] = []
    for first, second in combinations(limited, 2):
        for share in shares:
            weights = np.zeros(len(problem.kinds))
            weights[first], weights[second] = share, 1 - share
            found.append(weights)
    even = np.isfinite(problem.limits) / max(len(limited), 1)
    return [*found, even] if len(limited) > 2 else found
