"""Local search over choices by moves of one or two blocks: into the limits (`repair`), then to less risk (`fill`,
`swap`).
"""

from dataclasses import replace
from typing import Any

import numpy as np

from baoc.planning.allocators.base import Floats, Ints, Problem, weighted

SWAP_MOVES, SWAP_PAIRS, SWAP_ROUNDS = 96, 512, 12  # moves of each kind that are paired, pairs tried, rounds


def repair(problem: Problem, choice: Ints, *, prices: Floats | None = None) -> Ints | None:
    """Moves blocks until the limits are met, first those that add the least risk per violation removed.

    With `prices` the reduced cost counts in place of the risk. Violation is the sum of excesses as fractions of their
    limits. Moves are ranked again after a sixteenth of the blocks, so that a second move of a block competes with the
    first move of another. None if no move helps.
    """
    choice = choice.copy()
    blocks = np.arange(len(choice))
    limits, units = problem.safe_limits, problem.units
    while not problem.feasible(choice):
        used = problem.used(choice)
        excess = _violation(used, limits, units)
        risk_change, spent_change = _deltas(problem, choice)
        gain = excess - _violation((used[:, None, None] + spent_change).T, limits, units).T
        added = risk_change if prices is None else risk_change + weighted(prices, spent_change)
        ratio = np.divide(added, gain, out=np.full_like(added, np.inf), where=gain > 1e-12 * excess)
        columns = ratio.argmin(axis=1)
        order = np.argsort(ratio[blocks, columns], stable=True)[: len(choice) // 16 + 1]
        before, order = excess, order[np.isfinite(ratio[order, columns[order]])]
        for block in order:
            after = used + spent_change[:, block, columns[block]]
            remaining = _violation(after, limits, units)
            if remaining < excess:
                used, excess = after, remaining
                choice[block] = columns[block]
        if excess == before:
            return None
    return choice


def _violation(used: Floats, limits: Floats, units: Floats) -> Any:
    """The sum, over the last axis of `used`, of excesses over limits as fractions of them."""
    return (np.maximum(used - limits, 0.0) / units).sum(axis=-1)


def fill(problem: Problem, choice: Ints, *, prices: Floats | None = None) -> Ints:
    """Moves single blocks to less risk within the limits, most risk removed per price first, until no move is left."""
    choice = choice.copy()
    blocks = np.arange(len(choice))
    limits = problem.safe_limits
    weights = np.ones(len(problem.limits)) if prices is None else prices
    while True:
        slack = limits - problem.used(choice)
        risk_change, spent_change = _deltas(problem, choice)
        fits = (spent_change <= slack[:, None, None]).all(axis=0)
        score = np.where(fits, -risk_change, 0.0) / (weighted(weights, np.maximum(spent_change, 0.0)) + 1e-300)
        columns = score.argmax(axis=1)
        best = score[blocks, columns]
        order = np.argsort(-best, stable=True)
        order = order[best[order] > 0]
        if not len(order):
            return choice
        for block in order:
            step = spent_change[:, block, columns[block]]
            if (step <= slack).all():
                slack = slack - step
                choice[block] = columns[block]


def _deltas(problem: Problem, choice: Ints) -> tuple[Floats, Floats]:
    """Changes by moving each block to each candidate: of risk [blocks, specs], of totals [limits, blocks, specs]."""
    blocks = np.arange(len(choice))
    return (
        problem.risk - problem.risk[blocks, choice][:, None],
        problem.spent - problem.spent[:, blocks, choice][:, :, None],
    )


def swap(problem: Problem, choice: Ints, *, prices: Floats) -> Ints:
    """Moves one block to less risk and another to more, where both together lower it within the limits.

    The best pairs come first. Each of SWAP_ROUNDS rounds pairs the SWAP_MOVES moves of each kind whose reduced cost
    (risk + prices) is least.
    """
    choice = choice.copy()
    columns = problem.risk.shape[1]
    for _ in range(SWAP_ROUNDS):
        slack = problem.safe_limits - problem.used(choice)
        risk_change, spent_change = _deltas(problem, choice)
        risk_change, spent_change = risk_change.ravel(), spent_change.reshape(len(spent_change), risk_change.size)
        reduced = risk_change + weighted(prices, spent_change)
        up = _least(reduced, where=risk_change < 0, most=SWAP_MOVES)
        down = _least(reduced, where=(risk_change > 0) & (spent_change < 0).any(axis=0), most=SWAP_MOVES)
        gain = risk_change[up][:, None] + risk_change[down]
        fits = (
            (spent_change[:, up][:, :, None] + spent_change[:, down][:, None, :] <= slack[:, None, None]).all(axis=0)
            & (up[:, None] // columns != down // columns)
            & (gain < -1e-12 * np.abs(risk_change[up][:, None]))
        )
        pairs = np.flatnonzero(fits)
        if not len(pairs):
            return choice
        touched: set[int] = set()
        for pair in pairs[np.argsort(gain.ravel()[pairs], stable=True)[:SWAP_PAIRS]].tolist():
            moves = (int(up[pair // len(down)]), int(down[pair % len(down)]))
            blocks = {move // columns for move in moves}
            slack_after = slack - (spent_change[:, moves[0]] + spent_change[:, moves[1]])
            if slack_after.min() < 0 or blocks & touched:
                continue
            slack, touched = slack_after, touched | blocks
            for move in moves:
                choice[move // columns] = move % columns
    return choice


def reduce_effort(problem: Problem, choice: Ints) -> Ints:
    """The choice with fewer seconds of the link at no more risk in any block, by single moves."""
    effort = effort_problem(problem, choice)
    return choice if effort is None else fill(effort, choice)


def effort_problem(problem: Problem, choice: Ints) -> Problem | None:
    """The problem with seconds of the link in place of risk, among candidates of no more risk than the chosen ones.
    None if the choice takes no seconds of the link."""
    blocks = np.arange(len(choice))
    if not problem.effort[blocks, choice].any():
        return None
    no_riskier = problem.valid & (problem.risk <= problem.risk[blocks, choice][:, None])
    return replace(problem, risk=np.where(no_riskier, problem.effort, np.inf))


def _least(values: Floats, *, where: np.ndarray, most: int) -> Ints:
    """Indices of the `most` least values among those in `where`, in ascending order."""
    indices = np.flatnonzero(where & np.isfinite(values))
    if len(indices) > most:
        indices = indices[np.argpartition(values[indices], most)[:most]]
    return indices[np.argsort(values[indices], stable=True)]
