"""A feasible allocation by chance that spends its budget: what an allocator must beat to have done anything."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from baoc.planning.allocators.base import BASELINE, AllocatorTraits, Ints, Problem, make_allocation, make_problem
from baoc.planning.allocators.feasible import find_feasible
from baoc.types import Allocation, Candidate, Limits


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomAllocator:
    """Draws among all applicable candidates, dominated ones too, block by block in random order.

    From a feasible start every block takes a random candidate that fits; then, in rounds, a random dearer one, until
    none fits: so it is compared at equal bytes, and without limits it ends on the dearest spec. Same seed, same answer.
    """

    name: str = "random"
    description: str = "a random feasible allocation that spends the budget, by seed"
    traits: AllocatorTraits = BASELINE

    def __call__(self, candidates: Mapping[str, Sequence[Candidate]], *, limits: Limits, seed: int = 0) -> Allocation:
        problem = make_problem(candidates, limits=limits)
        rng = np.random.default_rng(seed)
        choice, moved = _round(problem, find_feasible(problem), rng=rng, dearer=False)
        while moved:
            choice, moved = _round(problem, choice, rng=rng, dearer=True)
        return make_allocation(problem, choice, allocator=self.name)


def _round(problem: Problem, choice: Ints, *, rng: np.random.Generator, dearer: bool) -> tuple[Ints, bool]:
    """Every block once, in random order, to a random candidate that fits; `dearer`: to one of more bytes only."""
    choice = choice.copy()
    used = problem.used(choice)
    limits = problem.safe_limits
    moved = False
    for block in rng.permutation(len(choice)):
        more = problem.spent[:, block] - problem.spent[:, block, choice[block]][:, None]
        fits = (used[:, None] + more <= limits[:, None]).all(axis=0)
        fits &= problem.valid[block] & (more[0] > 0 if dearer else True)
        found = np.flatnonzero(fits)
        if len(found):
            choice[block] = rng.choice(found)
            used = used + more[:, choice[block]]
            moved = True
    return choice, moved
