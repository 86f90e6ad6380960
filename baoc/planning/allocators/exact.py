"""`allocator=exact`: the allocation of least risk, proven optimal by a mixed-integer program (HiGHS)."""

from contextlib import suppress

from baoc.planning.allocators.base import Ints, OptimizingAllocator, Problem
from baoc.planning.allocators.lagrangian import approximate
from baoc.planning.allocators.moves import effort_problem, fill
from baoc.planning.allocators.program import Undecided, minimise, no_feasible

PROVEN_GAP = 1e-6  # a relative gap below it counts as proven optimal


def prove(problem: Problem) -> tuple[Ints, float]:
    """(choice of least risk, lower bound of the risk), the same one for equal problems.

    If time runs out before the proof, the choice is the better one of the solver's and `approximate`'s, and the bound
    tells how far it may be from optimal. Raises NoFeasibleAllocation.
    """
    try:
        solved = minimise(problem, objective=problem.risk)
    except Undecided:
        return approximate(problem)
    if solved is None:
        raise no_feasible(problem)
    choice, bound = solved
    risk = problem.total_risk(choice)
    if risk - bound > PROVEN_GAP * risk:
        other, lower = approximate(problem)
        choice, bound = min(choice, other, key=problem.total_risk), max(bound, lower)
    return _with_less_effort(problem, choice), bound


def _with_less_effort(problem: Problem, choice: Ints) -> Ints:
    """The choice with the fewest seconds of the link among those with no more risk in any block."""
    effort = effort_problem(problem, choice)
    if effort is None:
        return choice
    choices = [fill(effort, choice)]
    with suppress(Undecided):
        solved = minimise(effort, objective=effort.risk)
        choices += [] if solved is None else [solved[0]]
    return min(choices, key=effort.total_risk)


EXACT = OptimizingAllocator(
    name="exact",
    description="mixed-integer program solved by HiGHS, proven optimal: for up to some hundred blocks",
    best=prove,
)
