"""From the choice without limits downwards, the least risk per violation removed first, then up into what is left."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from baoc.planning.allocators.base import (
    CHOOSES,
    AllocatorTraits,
    Ints,
    Problem,
    least_risk,
    make_allocation,
    make_problem,
)
from baoc.planning.allocators.feasible import find_feasible
from baoc.planning.allocators.moves import fill, repair, settle
from baoc.types import Allocation, Candidate, Limits


def descend(problem: Problem) -> Ints:
    """A feasible choice by greedy descent from the one of least risk. Raises NoFeasibleAllocation."""
    choice = repair(problem, least_risk(problem))
    if choice is None:
        choice = find_feasible(problem)
    least = np.array([1.0 if kind.endswith("bytes") else 1e-12 for kind in problem.kinds])
    return fill(problem, choice, prices=1 / np.maximum(problem.limits, least))


@dataclass(frozen=True, slots=True, kw_only=True)
class GreedyAllocator:
    """Fast and without a bound of its error: a baseline."""

    name: str = "greedy"
    description: str = "cheapens the block that risks least per byte until the limits are met: no gap is known"
    traits: AllocatorTraits = CHOOSES

    def __call__(self, candidates: Mapping[str, Sequence[Candidate]], *, limits: Limits, seed: int = 0) -> Allocation:
        problem = make_problem(candidates, limits=limits)
        unlimited = least_risk(problem)
        bound = problem.total_risk(unlimited) if problem.feasible(unlimited) else None
        return make_allocation(problem, settle(problem, descend(problem)), allocator=self.name, bound=bound)
