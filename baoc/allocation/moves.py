"""Changing one or two blocks at a time: down into the limits (`repair`), up into what is left (`fill`, `swap`)."""

import numpy as np

from baoc.allocation.base import Floats, Ints, Problem

_SAFE = 1 - 1e-12  # running sums of seconds may be off by rounding; `Problem.feasible` has the last word


def repair(problem: Problem, choice: Ints, *, byte_price: float = 0.0, step_price: float = 0.0) -> Ints | None:
    """Moves blocks into the limits, least risk (at prices: reduced cost) per violation removed first.

    Violation is the excess over each limit as a fraction of it, added up. Moves are ranked anew after a sixteenth of
    the blocks, so that a second move of a block competes with the first of another. None where no move helps any more.
    """
    choice = choice.copy()
    rows = np.arange(len(choice))
    while not problem.feasible(choice):
        _, num_bytes, step_s = problem.totals(choice)
        excess = _violation(problem, num_bytes, step_s)
        less, more_bytes, more_step = _deltas(problem, choice)
        gain = excess - _violations(problem, num_bytes + more_bytes, step_s + more_step)
        added = less + byte_price * more_bytes + step_price * more_step
        helps = (gain > 1e-12 * excess) & np.isfinite(added)
        ratio = np.where(helps, added, np.inf) / np.where(helps, gain, 1.0)
        columns = ratio.argmin(axis=1)
        order = np.argsort(ratio[rows, columns], kind="stable")[: len(choice) // 16 + 1]
        moved = False
        for block in order[np.isfinite(ratio[order, columns[order]])].tolist():
            column = columns[block]
            after = (num_bytes + float(more_bytes[block, column]), step_s + float(more_step[block, column]))
            left = _violation(problem, *after)
            if left < excess:
                (num_bytes, step_s), excess, moved = after, left, True
                choice[block] = column
            if excess <= 0:
                break
        if not moved:
            return None
    return choice


def _violations(problem: Problem, num_bytes: Floats, step_s: Floats) -> Floats:
    """Excess over each limit as a fraction of it, added up, at each of the totals."""
    over_bytes = np.maximum(num_bytes - problem.byte_limit, 0.0) / _unit(problem.byte_limit)
    return over_bytes + np.maximum(step_s - problem.step_limit * _SAFE, 0.0) / _unit(problem.step_limit)


def _violation(problem: Problem, num_bytes: float, step_s: float) -> float:
    over_bytes = max(num_bytes - problem.byte_limit, 0.0) / _unit(problem.byte_limit)
    return over_bytes + max(step_s - problem.step_limit * _SAFE, 0.0) / _unit(problem.step_limit)


def _unit(limit: float) -> float:
    return abs(limit) or 1.0


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
    problem: Problem, choice: Ints, *, byte_price: float, step_price: float, most: int = 96, rounds: int = 12
) -> Ints:
    """Moves one block up and another down where that lowers the risk within the limits, best pairs first.

    Looks at the `most` moves of each kind whose reduced cost (risk + prices) is least, `rounds` times anew.
    """
    choice = choice.copy()
    columns = problem.risk.shape[1]
    for _ in range(rounds):
        _, num_bytes, step_s = problem.totals(choice)
        slack = (problem.byte_limit - num_bytes, problem.step_limit * _SAFE - step_s)
        less, more_bytes, more_step = (delta.ravel() for delta in _deltas(problem, choice))
        reduced = less + byte_price * more_bytes + step_price * more_step
        up = _least(reduced, where=less < 0, most=most)
        down = _least(reduced, where=(less > 0) & ((more_bytes < 0) | (more_step < 0)), most=most)
        gain = less[up][:, None] + less[down]
        fits = (
            (more_bytes[up][:, None] + more_bytes[down] <= slack[0])
            & (more_step[up][:, None] + more_step[down] <= slack[1])
            & (up[:, None] // columns != down // columns)
            & (gain < -1e-12 * np.abs(less[up][:, None]))
        )
        pairs = np.flatnonzero(fits)
        if not len(pairs):
            return choice
        touched: set[int] = set()
        for pair in pairs[np.argsort(gain.ravel()[pairs], kind="stable")[:512]].tolist():
            moves = (int(up[pair // len(down)]), int(down[pair % len(down)]))
            blocks = {move // columns for move in moves}
            left = tuple(s - sum(d[m] for m in moves) for s, d in zip(slack, (more_bytes, more_step), strict=True))
            if min(left) < 0 or blocks & touched:
                continue
            slack, touched = left, touched | blocks
            for move in moves:
                choice[move // columns] = move % columns
    return choice


def _least(values: Floats, *, where: np.ndarray, most: int) -> Ints:
    """Indices of the `most` least values among those in `where`, in ascending order."""
    found = np.flatnonzero(where & np.isfinite(values))
    if len(found) > most:
        found = found[np.argpartition(values[found], most)[:most]]
    return found[np.argsort(values[found], kind="stable")]
