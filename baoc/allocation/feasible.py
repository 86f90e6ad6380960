"""Any allocation that meets the limits, or proof that there is none."""

import numpy as np

from baoc.allocation.base import Ints, Problem
from baoc.allocation.moves import repair


def find_feasible(problem: Problem) -> Ints:
    """A choice that meets the limits, without regard to risk. Raises NoFeasibleAllocation where there is none.

    With one limit the least choice decides. With two, mixtures of both are tried before the exact program is asked.
    """
    for keys in ((problem.num_bytes, problem.step_s), (problem.step_s, problem.num_bytes)):
        choice = problem.least(*keys, problem.risk)
        if problem.feasible(choice):
            return choice
    from baoc.allocation import exact

    within_bytes = np.where(problem.valid, problem.num_bytes, np.inf).min(axis=1).sum() <= problem.byte_limit
    within_step = np.where(problem.valid, problem.step_s, np.inf).min(axis=1).sum() <= problem.step_limit
    if not (within_bytes and within_step):
        raise exact.no_feasible(problem)
    byte_unit, step_unit = abs(problem.byte_limit) or 1.0, abs(problem.step_limit) or 1.0
    shares = np.linspace(0.05, 0.95, 19)
    mixed = [problem.least(w * problem.num_bytes / byte_unit + (1 - w) * problem.step_s / step_unit) for w in shares]
    for choice in mixed:
        if problem.feasible(choice):
            return choice
    for choice in mixed:
        repaired = repair(problem, choice)
        if repaired is not None:
            return repaired
    solved = exact.minimise(problem, objective=np.where(problem.valid, 0.0, np.inf))
    if solved is None:
        raise exact.no_feasible(problem)
    return solved.choice
