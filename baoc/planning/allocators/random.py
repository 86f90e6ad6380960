"""`allocator=random`: a random feasible allocation that spends the budget, the least that an allocator must beat."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from baoc.planning.allocators.base import BASELINE, AllocatorTraits, Ints, Problem, make_allocation, make_problem
from baoc.planning.allocators.feasible import find_feasible
from baoc.types import Allocation, Candidate, Limits


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomAllocator:
    """Draws among all applicable candidates, dominated ones too, block by block in random order.

    From a feasible start every block takes a random candidate that fits, then, in rounds, a random one of more bytes,
    until none fits. So it is compared at equal bytes; without limits it ends on the largest specs. The seed decides.
    """

    name: str = "random"
    description: str = "a random feasible allocation that spends the budget, by seed"
    traits: AllocatorTraits = BASELINE

    def __call__(self, candidates: Mapping[str, Sequence[Candidate]], *, limits: Limits, seed: int = 0) -> Allocation:
        problem = make_problem(candidates, limits=limits)
        rng = np.random.default_rng(seed)
        choice = _round(problem, find_feasible(problem), rng=rng, more_than=-np.inf)
        while True:
            larger = _round(problem, choice, rng=rng, more_than=0)
            if (larger == choice).all():
                return make_allocation(problem, choice, allocator=self.name)
            choice = larger


def _round(problem: Problem, choice: Ints, *, rng: np.random.Generator, more_than: float) -> Ints:
    """The choice after each block, in random order, took a random candidate that fits, of over `more_than` bytes more
    than its own."""
    choice = choice.copy()
    used = problem.used(choice)
    limits = problem.safe_limits
    for block in rng.permutation(len(choice)):
        more = problem.spent[:, block] - problem.spent[:, block, choice[block]][:, None]
        fits = (used[:, None] + more <= limits[:, None]).all(axis=0)
        fits &= problem.valid[block] & (more[0] > more_than)
        fitting = np.flatnonzero(fits)
        if len(fitting):
            choice[block] = rng.choice(fitting)
            used = used + more[:, choice[block]]
    return choice
