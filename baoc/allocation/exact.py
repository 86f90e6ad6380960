"""The oracle: the allocation as a mixed-integer program, solved by HiGHS to a proven gap.

Blocks whose candidates are equal are counted instead of told apart: twelve equal layers are one row of integers, not
twelve rows of choices that a solver would have to prove equivalent.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from baoc.allocation.base import Floats, Ints, NoFeasibleAllocation, Problem, least_risk, make_allocation, make_problem
from baoc.types import Allocation, Candidate, Limits


@dataclass(frozen=True, slots=True, kw_only=True)
class Solved:
    choice: Ints
    bound: float  # lower bound of the objective


@dataclass(frozen=True, slots=True, kw_only=True)
class ExactAllocator:
    """Least risk, proven; of equal answers always the same one. `time_limit_s` bounds the proof, not the answer."""

    name: str = "exact"
    description: str = "mixed-integer program solved by HiGHS, proven optimal: for up to some hundred blocks"
    full: bool = False
    time_limit_s: float = 60.0

    def __call__(self, candidates: Mapping[str, Sequence[Candidate]], *, limits: Limits, seed: int = 0) -> Allocation:
        problem = make_problem(candidates, limits=limits)
        choice = least_risk(problem)
        if problem.feasible(choice):
            return make_allocation(problem, choice, allocator=self.name, bound=problem.totals(choice)[0])
        solved = minimise(problem, objective=problem.risk, time_limit_s=self.time_limit_s)
        if solved is None:
            raise no_feasible(problem)
        return make_allocation(problem, solved.choice, allocator=self.name, bound=solved.bound)


def no_feasible(problem: Problem) -> NoFeasibleAllocation:
    """The error with the least bytes under the limit of seconds, and the least seconds under that of bytes."""

    def least(values: Floats, other: Floats, *, limit: float) -> float:
        free = problem.least(values, other)
        rows = np.arange(len(free))
        alone = float(values[rows, free].sum())
        attainable = float(np.where(problem.valid, other, np.inf).min(axis=1).sum()) <= limit
        if not attainable or float(other[rows, free].sum()) <= limit:
            return alone
        only = values is problem.num_bytes
        relaxed = _relaxed(problem, byte_limit=not only, step_limit=only)
        solved = minimise(relaxed, objective=values)
        return alone if solved is None else float(values[rows, solved.choice].sum())

    return NoFeasibleAllocation(
        least_state_bytes=int(least(problem.num_bytes, problem.step_s, limit=problem.step_limit)),
        least_step_s=least(problem.step_s, problem.num_bytes, limit=problem.byte_limit),
    )


def _relaxed(problem: Problem, *, byte_limit: bool, step_limit: bool) -> Problem:
    """The problem with only the limits that are named."""
    return Problem(
        names=problem.names,
        candidates=problem.candidates,
        risk=problem.risk,
        num_bytes=problem.num_bytes,
        step_s=problem.step_s,
        byte_limit=problem.byte_limit if byte_limit else np.inf,
        step_limit=problem.step_limit if step_limit else np.inf,
    )


def minimise(problem: Problem, *, objective: Floats, time_limit_s: float = 60.0) -> Solved | None:
    """The feasible choice of least `objective` [blocks, specs]; None if there is none.

    HiGHS meets a limit to 1e-6 of it, which is not enough for bytes: if its answer is over, the limit is tightened by
    as much and the program solved again, while the bound stays that of the first.
    """
    classes = _classes(problem, objective)
    byte_limit, step_limit = problem.byte_limit, problem.step_limit
    bound = -np.inf
    for _ in range(8):
        counts, lower = _solve(problem, classes, objective, limits=(byte_limit, step_limit), time_limit_s=time_limit_s)
        bound = max(bound, lower) if np.isinf(bound) else bound
        if counts is None:
            return None
        choice = _spread(problem, classes, counts)
        if problem.feasible(choice):
            return Solved(choice=choice, bound=bound)
        _, num_bytes, step_s = problem.totals(choice)
        byte_limit -= max(0.0, num_bytes - problem.byte_limit)
        step_limit -= max(0.0, step_s - problem.step_limit)
    return None


def _classes(problem: Problem, objective: Floats) -> list[Ints]:
    """Blocks with equal rows in every array, in order of first appearance."""
    found: dict[bytes, list[int]] = {}
    for index in range(len(problem.names)):
        key = b"".join(a[index].tobytes() for a in (objective, problem.risk, problem.num_bytes, problem.step_s))
        found.setdefault(key, []).append(index)
    return [np.array(blocks) for blocks in found.values()]


def _solve(
    problem: Problem, classes: list[Ints], objective: Floats, *, limits: tuple[float, float], time_limit_s: float
) -> tuple[Ints | None, float]:
    """(how many blocks of each class run each spec [classes, specs], lower bound); None where infeasible."""
    from scipy.optimize import Bounds, LinearConstraint, milp  # takes 0.3 s to import: not every command needs it
    from scipy.sparse import csr_array

    first = np.array([blocks[0] for blocks in classes])
    sizes = np.array([len(blocks) for blocks in classes], dtype=float)
    row, column = np.nonzero(problem.valid[first])
    costs = objective[first][row, column]
    scale = max(float(np.ptp(costs)), 1e-300) / 1e3  # HiGHS stops at an absolute gap of 1e-6
    one_each = csr_array((np.ones(len(row)), (row, np.arange(len(row)))), shape=(len(classes), len(row)))
    constraints: list[Any] = [LinearConstraint(one_each, sizes, sizes)]
    for values, limit in zip((problem.num_bytes, problem.step_s), limits, strict=True):
        if np.isfinite(limit):
            unit = max(abs(limit), 1e-300)
            constraints.append(
                LinearConstraint(csr_array(values[first][row, column][None] / unit), -np.inf, limit / unit)
            )
    result = milp(
        costs / scale,
        integrality=np.ones(len(row)),
        bounds=Bounds(0, sizes[row]),
        constraints=constraints,
        options={"mip_rel_gap": 1e-9, "time_limit": time_limit_s},
    )
    if result.x is None:
        return None, np.inf
    counts = np.zeros((len(classes), problem.risk.shape[1]), dtype=np.int64)
    counts[row, column] = np.rint(result.x).astype(np.int64)
    bound = result.mip_dual_bound
    return counts, (float(result.fun) if bound is None else float(bound)) * scale


def _spread(problem: Problem, classes: list[Ints], counts: Ints) -> Ints:
    """One choice per block: within a class the dearer candidates (in bytes) go to the earlier blocks."""
    choice = np.zeros(len(problem.names), dtype=np.int64)
    for blocks, count in zip(classes, counts, strict=True):
        order = np.argsort(-problem.num_bytes[blocks[0]], kind="stable")
        choice[blocks] = np.repeat(order, count[order])
    return choice
