"""Closes the gap that prices alone leave: fixes what no better answer can contain, then branches on what is left.

With a handful of large blocks the bound of a relaxation stays away from any whole answer. Reduced costs rule out nearly
every other choice, so that the rest is small enough for best-first branching with the same bound.
"""

import heapq
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from baoc.planning.allocators.base import Floats, Ints, Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounded:
    """A feasible choice and a lower bound of the risk of all of them."""

    choice: Ints
    bound: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Relaxed:
    """A relaxation solved: its bound, its prices, a rounded feasible choice if one was found, and a block to split.

    `split` is a block that is not whole in it, None where all are; `options` are its candidates that take part.
    """

    bound: float
    prices: Floats  # [limits], in risk
    choice: Ints | None
    split: int | None
    options: Ints


Relax = Callable[[Problem, float], Relaxed]


def close(problem: Problem, root: Relaxed, *, best: Ints, relax: Relax, good_gap: float, most_nodes: int) -> Bounded:
    """`best` or a better choice, with the best bound that `most_nodes` relaxations give.

    Ends as soon as the gap is at most `good_gap` of the risk. `relax(problem, ceiling)` solves a relaxation, of which
    bounds from `ceiling` on are of no interest.
    """
    core = Core(problem, root, best=best)
    if core.problem is None:  # any better choice is the one at the prices
        if problem.feasible(core.base):
            core.best = min(core.base, best, key=problem.total_risk)
        return Bounded(choice=core.best, bound=problem.total_risk(core.best))
    first = relax(core.problem, core.risk - core.offset)
    core.improve(first)
    nodes = [(max(first.bound + core.offset, root.bound), 0, core.problem.risk, first)]
    for count in range(1, most_nodes // 2):
        if not nodes or core.risk - nodes[0][0] <= good_gap * abs(core.risk) or nodes[0][3].split is None:
            break
        bound, _, risk, node = heapq.heappop(nodes)
        for side, kept in enumerate(_parts(core.problem, risk, node)):
            child = relax(replace(core.problem, risk=kept), core.risk - core.offset)
            core.improve(child)
            child_bound = max(child.bound + core.offset, bound)
            if child_bound < core.risk:
                heapq.heappush(nodes, (child_bound, 2 * count + side, kept, child))
    return Bounded(choice=core.best, bound=min(nodes[0][0] if nodes else core.risk, core.risk))


def _parts(problem: Problem, risk: Floats, node: Relaxed) -> list[Floats]:
    """Risks of the two children: the split block's candidates up to a number of bytes, and those above it."""
    assert node.split is not None
    sizes = problem.num_bytes[node.split]
    low, high = sizes[node.options].min(), sizes[node.options].max()
    below = sizes <= (low + high) / 2 if high > low else np.arange(len(sizes)) == node.options[0]
    parts: list[Floats] = []
    for kept in (below, ~below):
        child = risk.copy()
        child[node.split, ~kept] = np.inf
        if np.isfinite(child[node.split]).any():
            parts.append(child)
    return parts


class Core:
    """The blocks that may still change, with their candidates that may, and the best choice of the whole problem."""

    def __init__(self, problem: Problem, root: Relaxed, *, best: Ints):
        self.whole_problem, self.best, self.risk = problem, best, problem.total_risk(best)
        priced = problem.priced(root.prices)
        reduced = priced - priced.min(axis=1, keepdims=True)
        # What costs more than the gap cannot be part of a better choice.
        kept = problem.valid & (reduced <= (self.risk - root.bound) * (1 + 1e-9))
        self.blocks = np.flatnonzero(kept.sum(axis=1) > 1)
        self.base = np.where(kept, priced, np.inf).argmin(axis=1)
        self.offset = 0.0  # risk of the blocks that are settled
        self.problem = self._shrunk(kept) if len(self.blocks) else None

    def _shrunk(self, kept: NDArray[np.bool_]) -> Problem:
        problem = self.whole_problem
        settled = np.setdiff1d(np.arange(len(kept)), self.blocks)
        chosen = self.base[settled]
        self.offset = float(problem.risk[settled, chosen].sum())
        width = int(kept[self.blocks].sum(axis=1).max())
        self.columns = np.argsort(~kept[self.blocks], axis=1, kind="stable")[:, :width]
        there = np.take_along_axis(kept[self.blocks], self.columns, axis=1)

        def cut(values: Floats, missing: float) -> Floats:
            return np.where(there, np.take_along_axis(values[self.blocks], self.columns, axis=1), missing)

        return Problem(
            names=tuple(problem.names[block] for block in self.blocks.tolist()),
            candidates=(),
            risk=cut(problem.risk, np.inf),
            spent=np.stack([cut(values, 0.0) for values in problem.spent]),
            limits=problem.limits - np.array([float(values[settled, chosen].sum()) for values in problem.spent]),
            effort=cut(problem.effort, 0.0),
            kinds=problem.kinds,
        )

    def improve(self, node: Relaxed) -> None:
        """Takes a node's choice if the whole problem is better with it."""
        if node.choice is None:
            return
        choice = self.base.copy()
        choice[self.blocks] = self.columns[np.arange(len(self.blocks)), node.choice]
        risk = self.whole_problem.total_risk(choice)
        if risk < self.risk and self.whole_problem.feasible(choice):
            self.best, self.risk = choice, risk
