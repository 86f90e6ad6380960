"""Changing one or two blocks at a time: down into the limits (`repair`), up into what is left (`fill`, `swap`)."""

from heapq import heapify, heappop, heappush
from math import isfinite

import numpy as np

from baoc.allocation.base import Floats, Ints, Problem

_SAFE = 1 - 1e-12  # running sums of seconds may be off by rounding; `Problem.feasible` has the last word


def repair(problem: Problem, choice: Ints) -> Ints | None:
    """Moves blocks, each time the one that takes the least risk per violation removed, until the limits are met.

    Violation is the excess over each limit as a fraction of it, added up. None where no single move helps any more.
    """
    choice = choice.copy()
    _, num_bytes, step_s = problem.totals(choice)
    blocks = np.arange(len(choice))
    ratios, columns = _best_repairs(problem, choice, blocks, num_bytes=num_bytes, step_s=step_s)
    heap = [(ratios[i], i, columns[i]) for i in range(len(blocks)) if isfinite(ratios[i])]
    heapify(heap)
    while heap and _violation(problem, num_bytes, step_s) > 0:
        _, block, _ = heappop(heap)
        one = np.array([block])
        ratio, column = (v[0] for v in _best_repairs(problem, choice, one, num_bytes=num_bytes, step_s=step_s))
        if not isfinite(ratio):
            continue
        if heap and ratio > heap[0][0]:  # the totals have moved since it was ranked
            heappush(heap, (ratio, block, column))
            continue
        num_bytes += problem.num_bytes[block, column] - problem.num_bytes[block, choice[block]]
        step_s += problem.step_s[block, column] - problem.step_s[block, choice[block]]
        choice[block] = column
        heappush(heap, (ratio, block, column))
    return choice if problem.feasible(choice) else None


def _violation(problem: Problem, num_bytes: Floats | float, step_s: Floats | float) -> Floats:
    over_bytes = np.maximum(num_bytes - problem.byte_limit, 0.0) / max(abs(problem.byte_limit), 1.0)
    over_step = np.maximum(step_s - problem.step_limit * _SAFE, 0.0) / max(abs(problem.step_limit), 1e-12)
    return np.asarray(over_bytes + over_step)


def _best_repairs(
    problem: Problem, choice: Ints, blocks: Ints, *, num_bytes: float, step_s: float
) -> tuple[list[float], list[int]]:
    """For each of `blocks` the move of least added risk per violation removed; an infinite ratio where none helps."""
    now = choice[blocks]
    risk, held, time = problem.risk[blocks], problem.num_bytes[blocks], problem.step_s[blocks]
    rows = np.arange(len(blocks))
    new_bytes = num_bytes + held - held[rows, now][:, None]
    new_step = step_s + time - time[rows, now][:, None]
    gain = _violation(problem, num_bytes, step_s) - _violation(problem, new_bytes, new_step)
    helps = (gain > 0) & np.isfinite(risk)
    added = np.where(helps, risk, 0.0) - risk[rows, now][:, None]
    ratio = np.where(helps, added / np.where(helps, gain, 1.0), np.inf)
    columns = ratio.argmin(axis=1)
    return ratio[rows, columns].tolist(), columns.tolist()


def fill(problem: Problem, choice: Ints, *, byte_price: float = 1.0, step_price: float = 1.0) -> Ints:
    """Spends what the limits leave, most risk removed per price first, until no single move lowers the risk."""
    choice = choice.copy()
    rows = np.arange(len(choice))
    while True:
        _, num_bytes, step_s = problem.totals(choice)
        byte_slack, step_slack = problem.byte_limit - num_bytes, problem.step_limit * _SAFE - step_s
        less, more_bytes, more_step = _deltas(problem, choice)
        fits = (less < 0) & (more_bytes <= byte_slack) & (more_step <= step_slack)
        spent = byte_price * np.maximum(more_bytes, 0.0) + step_price * np.maximum(more_step, 0.0)
        score = np.where(fits, -less, 0.0) / (spent + 1e-300)
        columns = score.argmax(axis=1)
        best = score[rows, columns]
        order = np.argsort(-best, kind="stable")
        moved = False
        for block in order[best[order] > 0].tolist():
            column = columns[block]
            if more_bytes[block, column] <= byte_slack and more_step[block, column] <= step_slack:
                byte_slack -= more_bytes[block, column]
                step_slack -= more_step[block, column]
                choice[block] = column
                moved = True
        if not moved:
            return choice


def _deltas(problem: Problem, choice: Ints) -> tuple[Floats, Floats, Floats]:
    """(risk, bytes, seconds) added by moving each block from its choice to each candidate."""
    rows = np.arange(len(choice))
    return (
        problem.risk - problem.risk[rows, choice][:, None],
        problem.num_bytes - problem.num_bytes[rows, choice][:, None],
        problem.step_s - problem.step_s[rows, choice][:, None],
    )


def swap(
    problem: Problem, choice: Ints, *, byte_price: float, step_price: float, most: int = 128, rounds: int = 50
) -> Ints:
    """Moves one block up and another down where that lowers the risk within the limits, best pair first.

    Looks at the `most` moves of each kind whose reduced cost (risk + prices) is least, for at most `rounds` pairs.
    """
    choice = choice.copy()
    columns = problem.risk.shape[1]
    for _ in range(rounds):
        _, num_bytes, step_s = problem.totals(choice)
        less, more_bytes, more_step = (delta.ravel() for delta in _deltas(problem, choice))
        reduced = less + byte_price * more_bytes + step_price * more_step
        up = _least(reduced, where=less < 0, most=most)
        down = _least(reduced, where=(less > 0) & ((more_bytes < 0) | (more_step < 0)), most=most)
        gain = less[up][:, None] + less[down]
        fits = (
            (more_bytes[up][:, None] + more_bytes[down] <= problem.byte_limit - num_bytes)
            & (more_step[up][:, None] + more_step[down] <= problem.step_limit * _SAFE - step_s)
            & (up[:, None] // columns != down // columns)
            & (gain < -1e-12 * np.abs(less[up][:, None]))
        )
        if not fits.any():
            return choice
        first, second = np.unravel_index(np.where(fits, gain, np.inf).argmin(), gain.shape)
        for move in (up[first], down[second]):
            choice[move // columns] = move % columns
    return choice


def _least(values: Floats, *, where: np.ndarray, most: int) -> Ints:
    """Indices of the `most` least values among those in `where`, in ascending order."""
    found = np.flatnonzero(where & np.isfinite(values))
    if len(found) > most:
        found = found[np.argpartition(values[found], most)[:most]]
    return found[np.argsort(values[found], kind="stable")]
