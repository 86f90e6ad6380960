"""The allocation as a mixed-integer program, solved by HiGHS to a proven gap.

Blocks with equal candidates form a class, in which the program only counts blocks per spec. Twelve equal layers are one
row of integers, not twelve rows of choices that the solver would have to prove equivalent.
"""

import ctypes
import importlib
import os
import sys
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import numpy as np

from baoc.planning.allocators.base import Floats, Ints, NoFeasibleAllocation, Problem, infeasible, make_problem
from baoc.types import Candidate, Limits

TIME_LIMIT_S = 60.0
_LIMIT_UNITS = 1e5  # a limit in solver units: HiGHS meets rows to 1e-6, thus limits to 1e-11
_COST_UNITS = 1e3  # the largest difference of the objective in solver units: HiGHS stops at an absolute gap of 1e-6
MAX_SOLVES = 8  # with limits tightened by the solver's excess


class Undecided(Exception):
    """The solver ran out of time before it found a feasible choice or proved that none exists."""


def least_bytes(candidates: Mapping[str, Sequence[Candidate]], *, limits: Limits) -> list[Candidate] | None:
    """The candidates of fewest charged bytes within the limits, one per block; None if there are none."""
    problem = make_problem(candidates, limits=limits)
    solved = minimise(problem, objective=problem.spent[0])
    return None if solved is None else problem.chosen(solved[0])


def no_feasible(problem: Problem) -> NoFeasibleAllocation:
    """The error with the least of each limited total under the other limits."""
    return infeasible(problem, [_least(problem, kind) for kind in range(len(problem.kinds))])


def _least(problem: Problem, kind: int) -> float:
    """Least total of one kind while the other limits are met, but for those that cannot be met at all."""
    limits = np.where(problem.least_totals <= problem.limits, problem.limits, np.inf)
    limits[kind] = np.inf
    relaxed, values = replace(problem, limits=limits), problem.spent[kind]
    choice = problem.least(values)
    if not relaxed.feasible(choice):
        with suppress(Undecided):
            solved = minimise(relaxed, objective=values)
            choice = choice if solved is None else solved[0]
    return problem.used(choice)[kind]


def minimise(problem: Problem, *, objective: Floats) -> tuple[Ints, float] | None:
    """(feasible choice of least `objective` [blocks, specs], lower bound of it); None if no choice is feasible.

    If the solver's choice passes a limit by its tolerance, the limit is tightened by as much and the program is solved
    again; the bound stays that of the first. Raises Undecided.
    """
    if not problem.names:  # HiGHS takes no program without variables
        nothing = problem.least(objective)
        return (nothing, 0.0) if problem.feasible(nothing) else None
    classes = _classes(problem, objective)
    tightened, bound = problem, None
    for _ in range(MAX_SOLVES):
        counts, lower = solve(tightened, classes, objective)
        bound = lower if bound is None else bound
        if counts is None:
            return None
        choice = _spread(problem, classes, counts)
        if problem.feasible(choice):
            return choice, bound
        over = np.maximum(problem.used(choice) - problem.limits, 0.0)
        tightened = replace(tightened, limits=tightened.limits - over)
    return None


def _classes(problem: Problem, objective: Floats) -> list[Ints]:
    """Indices of blocks with equal rows in every array, by class, in order of first appearance."""
    classes: dict[tuple[bytes, ...], list[int]] = {}
    for index in range(len(problem.names)):
        key = tuple(a[index].tobytes() for a in (objective, problem.risk, *problem.spent, problem.effort))
        classes.setdefault(key, []).append(index)
    return [np.array(blocks) for blocks in classes.values()]


def solve(problem: Problem, classes: list[Ints], objective: Floats) -> tuple[Ints | None, float]:
    """(number of blocks of each class on each spec [classes, specs], lower bound); counts None if infeasible. Raises
    Undecided."""
    scipy: Any = importlib.import_module("scipy")  # imported late: its modules take .3 s
    optimize, sparse = scipy.optimize, scipy.sparse
    first = np.array([blocks[0] for blocks in classes])
    sizes = np.array([len(blocks) for blocks in classes])
    row, column = np.nonzero(problem.valid[first])
    costs = objective[first][row, column]
    cost_unit = (float(np.ptp(costs)) or 1.0) / _COST_UNITS
    one_each = sparse.csr_array((np.ones(len(row)), (row, np.arange(len(row)))))
    constraints = [optimize.LinearConstraint(one_each, sizes, sizes)]
    for kind in np.flatnonzero(np.isfinite(problem.limits)):
        unit = problem.units[kind] / _LIMIT_UNITS
        weights = sparse.csr_array(problem.spent[kind][first][row, column][None] / unit)
        constraints.append(optimize.LinearConstraint(weights, -np.inf, problem.limits[kind] / unit))
    with _quiet():
        result = optimize.milp(
            costs / cost_unit,
            integrality=np.ones(len(row)),
            bounds=optimize.Bounds(0, sizes[row]),
            constraints=constraints,
            options={"mip_rel_gap": 1e-9, "time_limit": TIME_LIMIT_S},
        )
    if result.x is None:
        if result.status == 2:  # proven infeasible
            return None, np.inf
        raise Undecided(result.message)
    counts = np.zeros((len(classes), problem.risk.shape[1]), dtype=np.int64)
    counts[row, column] = np.rint(result.x)
    bound = result.mip_dual_bound
    return counts, float(result.fun if bound is None else bound) * cost_unit


@contextmanager
def _quiet() -> Generator[None]:
    """Redirects descriptor 1 to the null device: HiGHS writes debug lines there that no option of scipy turns off."""
    try:
        stdout = os.dup(1)
        sys.stdout.flush()
    except (OSError, AttributeError):  # the process has no standard output
        yield
        return
    try:
        with open(os.devnull, "w") as null:
            os.dup2(null.fileno(), 1)
            yield
            if os.name == "posix":
                ctypes.CDLL(None).fflush(None)  # the rest of these lines is in C's buffer
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)


def _spread(problem: Problem, classes: list[Ints], counts: Ints) -> Ints:
    """The choice by block: within a class the candidates of more bytes go to the earlier blocks."""
    choice = np.zeros(len(problem.names), dtype=np.int64)
    for index, blocks in enumerate(classes):
        order = np.argsort(-problem.spent[0, blocks[0]], stable=True)
        choice[blocks] = np.repeat(order, counts[index, order])
    return choice
