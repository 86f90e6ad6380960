"""The oracle: the allocation of least risk, proven by a mixed-integer program."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from baoc.planning.allocators.base import (
    CHOOSES,
    AllocatorTraits,
    Ints,
    Problem,
    least_risk,
    make_allocation,
    make_problem,
)
from baoc.planning.allocators.lagrangian import approximate
from baoc.planning.allocators.moves import effort_problem, fill
from baoc.planning.allocators.program import Undecided, minimise, no_feasible
from baoc.types import Allocation, Candidate, Limits

PROVEN = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class ExactAllocator:
    """Least risk, proven; of equal answers always the same one.

    Where `time_limit_s` ends the proof, the answer is the better of what was found and the lagrangian allocator's, and
    the gap says how far from proven it is.
    """

    name: str = "exact"
    description: str = "mixed-integer program solved by HiGHS, proven optimal: for up to some hundred blocks"
    traits: AllocatorTraits = CHOOSES
    time_limit_s: float = 60.0

    def __call__(self, candidates: Mapping[str, Sequence[Candidate]], *, limits: Limits, seed: int = 0) -> Allocation:
        problem = make_problem(candidates, limits=limits)
        choice = least_risk(problem)
        if problem.feasible(choice):
            return make_allocation(problem, choice, allocator=self.name, bound=problem.total_risk(choice))
        try:
            solved = minimise(problem, objective=problem.risk, time_limit_s=self.time_limit_s)
        except Undecided:
            choice, bound = approximate(problem)
        else:
            if solved is None:
                raise no_feasible(problem)
            choice, bound = solved.choice, solved.bound
            risk = problem.total_risk(choice)
            if risk - bound > PROVEN * risk:
                other, lower = approximate(problem)
                choice, bound = min(choice, other, key=problem.total_risk), max(bound, lower)
        return make_allocation(problem, self._with_less_effort(problem, choice), allocator=self.name, bound=bound)

    def _with_less_effort(self, problem: Problem, choice: Ints) -> Ints:
        """The choice with the least traffic on the link among those with no more risk in any block."""
        effort = effort_problem(problem, choice)
        if effort is None:
            return choice
        found = [fill(effort, choice)]
        with suppress(Undecided):
            solved = minimise(effort, objective=effort.risk, time_limit_s=self.time_limit_s / 4)
            found += [] if solved is None else [solved.choice]
        return min(found, key=effort.total_risk)
