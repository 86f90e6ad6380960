"""From the choice without limits downwards, the least risk per violation removed first, then up into what is left."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from baoc.allocation.base import Ints, Problem, least_risk, make_allocation, make_problem
from baoc.allocation.feasible import find_feasible
from baoc.allocation.moves import fill, repair
from baoc.types import Allocation, Candidate, Limits


def descend(problem: Problem) -> Ints:
    """A feasible choice by greedy descent from the one of least risk. Raises NoFeasibleAllocation."""
    choice = repair(problem, least_risk(problem))
    if choice is None:
        choice = find_feasible(problem)
    return fill(
        problem, choice, byte_price=1 / max(problem.byte_limit, 1.0), step_price=1 / max(problem.step_limit, 1e-12)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class GreedyAllocator:
    """Fast and without a bound of its error: a baseline."""

    name: str = "greedy"
    description: str = "cheapens the block that risks least per byte until the limits are met: no gap is known"
    full: bool = False

    def __call__(self, candidates: Mapping[str, Sequence[Candidate]], *, limits: Limits, seed: int = 0) -> Allocation:
        problem = make_problem(candidates, limits=limits)
        unlimited = least_risk(problem)
        bound = problem.totals(unlimited)[0] if problem.feasible(unlimited) else None
        return make_allocation(problem, descend(problem), allocator=self.name, bound=bound)
