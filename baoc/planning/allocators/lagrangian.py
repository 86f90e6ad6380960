"""`allocator=lagrangian`: Lagrangian relaxation with one price per limit, in milliseconds, with a certified gap.

At fixed prices every block chooses alone, by an argmin over an array, and the sum is a lower bound of the risk of any
feasible allocation. The best prices are found by simplex steps on the Dantzig-Wolfe master program, which has a row per
limit. The choices on the way are repaired into the limits, filled up and improved by swaps. `exact` closes the gap.
"""

from dataclasses import dataclass
from operator import itemgetter

import numpy as np

from baoc.planning.allocators.base import Floats, Ints, OptimizingAllocator, Problem, least_risk, weighted
from baoc.planning.allocators.feasible import find_feasible
from baoc.planning.allocators.moves import fill, reduce_effort, repair, swap

MAX_SMALL = 5_000  # candidates of a small problem, whose choices are all improved by swaps
CLOSED_GAP = 9e-4  # of the risk: below it, swaps in a large problem are not worth their milliseconds
MAX_PRICES = 100  # steps of the master program; each gives a valid bound


@dataclass(frozen=True, slots=True, kw_only=True)
class Dual:
    """The end of the master program: bound, price of each limit in units of risk, and choices to start from."""

    bound: float
    prices: Floats
    choices: tuple[Ints, ...]


def approximate(problem: Problem) -> tuple[Ints, float]:
    """(choice within the limits, lower bound of the risk of any such choice). Raises NoFeasibleAllocation."""
    start = find_feasible(problem)
    dual = maximise(problem, start=start, most_prices=MAX_PRICES)
    return reduce_effort(problem, _round(problem, dual, start=start)), dual.bound


def maximise(problem: Problem, *, start: Ints, most_prices: int) -> Dual:
    """The prices of the greatest lower bound, from a feasible `start`, after `most_prices` steps at most.

    Master program: weights w of the choices so far that minimise sum w risk, with sum w = 1 and a mean excess over each
    limit of at most 0. Its dual variables are the prices; the choice that is best at those prices enters the basis.
    """
    limited = np.isfinite(problem.limits)
    units = np.array([_span(problem, values) for values in problem.spent])
    unit_risk = _span(problem, problem.risk)
    size = 1 + len(problem.limits)

    def column(choice: Ints) -> tuple[Floats, float]:
        excess = np.where(limited, problem.used(choice) - problem.limits, 0.0)
        return np.array([1.0, *excess / units]), problem.total_risk(choice) / unit_risk

    basis = np.eye(size)
    basis[:, 0], first_cost = column(start)
    right: Floats = np.eye(size)[0]  # weights add up to 1, with slacks excesses to 0
    costs = first_cost * right
    in_basis: list[Ints | None] = [None] * size  # `start` and slacks are none
    tried: list[tuple[float, Floats, Ints]] = []
    for _ in range(most_prices):
        value, *duals = np.linalg.solve(basis.T, costs)
        trial = -np.array(duals)
        if trial.min() < -1e-12:  # a slack enters: that limit does not bind
            entering, cost, choice = np.eye(size)[1 + int(trial.argmin())], 0.0, None
        else:
            trial = np.maximum(trial, 0.0)
            choice = (problem.risk + weighted(trial * unit_risk / units, problem.spent)).argmin(axis=1)
            entering, cost = column(choice)
            lower = cost + float(trial @ entering[1:])
            tried.append((lower, trial, choice))
            if lower >= value - 1e-9 * abs(value):
                break
        direction = np.linalg.solve(basis, entering)
        weights = np.linalg.solve(basis, right)
        leaves = np.flatnonzero(direction > 1e-12)  # some do, as the weights of choices add up to 1
        leaving = int(leaves[(np.maximum(weights[leaves], 0.0) / direction[leaves]).argmin()])
        basis[:, leaving], costs[leaving], in_basis[leaving] = entering, cost, choice
    bound, prices, last = max(tried, key=itemgetter(0))
    choices = (last, *(choice for choice in in_basis if choice is not None))
    return Dual(bound=bound * unit_risk, prices=prices * unit_risk / units, choices=choices)


def _span(problem: Problem, values: Floats) -> float:
    """Sum over blocks of (largest - least value): a unit in which the master program is well scaled."""
    least = np.where(problem.valid, values, np.inf).min(axis=1)
    most = np.where(problem.valid, values, -np.inf).max(axis=1)
    return float((most - least).sum()) or 1.0


def _round(problem: Problem, dual: Dual, *, start: Ints) -> Ints:
    """The best feasible choice that repair, fill and swap make of `start` and of the choices at the best prices.

    In small problems, where a single block matters, the choice of least risk is repaired too, all are also repaired
    without prices, and every choice is improved by swaps. In large ones only the best is, if its gap is worth it.
    """
    prices, small = dual.prices, problem.risk.size <= MAX_SMALL
    repaired = [
        repair(problem, choice, prices=repair_prices)
        for choice in ((*dual.choices, least_risk(problem)) if small else dual.choices)
        for repair_prices in ([prices, None] if small else [prices])
    ]
    distinct = {choice.tobytes(): choice for choice in (start, *repaired) if choice is not None}
    filled = sorted((fill(problem, choice, prices=prices) for choice in distinct.values()), key=problem.total_risk)
    least = problem.total_risk(filled[0])
    if not small and least - dual.bound <= CLOSED_GAP * least:
        return filled[0]
    swapped = [swap(problem, choice, prices=prices) for choice in (filled if small else filled[:1])]
    return fill(problem, min(swapped, key=problem.total_risk))


LAGRANGIAN = OptimizingAllocator(
    name="lagrangian",
    description="prices for bytes and seconds, then repair: milliseconds, reports its certified gap",
    best=approximate,
)
