"""The allocators' protocol, and the knapsack problem as arrays [limits, blocks, candidates] with padding."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from math import fsum
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from baoc.types import Allocation, Candidate, Limits

STEP_TOLERANCE = 1e-9  # fraction by which seconds may pass their limit, as they are sums of floats
SAFE_FRACTION = 1 - 1e-12  # of a limit of seconds, for running sums; `Problem.feasible` decides
TINY_RISK = 1e-12  # the gap is relative to at least this risk
LIMIT_KINDS = ("state_bytes", "step_s", "host_bytes", "link_s")  # the fields of `types.Limits`
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class NoFeasibleAllocation(Exception):
    """No allocation meets the limits. The planner turns this into the user's error.

    Each value is the least total that is possible while the other limits are met; a limit that cannot be met at all is
    ignored. `least_state_bytes` are charged bytes. `least_host_bytes` and `least_link_s` are 0 without a limit.
    """

    def __init__(self, *, least_state_bytes: int, least_step_s: float, least_host_bytes: int, least_link_s: float):
        super().__init__(f"the least is {least_state_bytes} state bytes, {least_step_s:.6g} s")
        self.least_state_bytes = least_state_bytes
        self.least_step_s = least_step_s
        self.least_host_bytes = least_host_bytes
        self.least_link_s = least_link_s


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatorTraits:
    """Properties of an allocator that planning and training read.

    Args:
        every_candidate: it is given dominated candidates too, as a baseline, a recipe or a random choice.
        only_spec: the one spec that it runs wherever that applies; None if there is no such spec.
        matching: whether the RMS of updates is matched to AdamW's, unless the run says otherwise.
    """

    every_candidate: bool = False
    only_spec: str | None = None
    matching: bool = True


BASELINE = AllocatorTraits(every_candidate=True)


class Allocator(Protocol):
    """Chooses one candidate per block within the limits. Equal arguments give equal choices. Raises
    NoFeasibleAllocation."""

    @property
    def name(self) -> str: ...

    @property
    def description(self) -> str: ...

    @property
    def traits(self) -> AllocatorTraits: ...

    def __call__(
        self, candidates: Mapping[str, Sequence[Candidate]], *, limits: Limits, seed: int = ...
    ) -> Allocation: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """The candidates as [blocks, specs] arrays. A spec that a block lacks has infinite risk and spends nothing.

    `spent` [limits, blocks, specs]: what each candidate takes of each limit, in the order of LIMIT_KINDS; the first two
    are always there, the others only if they are limited. Charged bytes of a block are raised by the most that it can
    save, so that none is negative, and their limit by the sum of these, `offset`. `effort`: seconds of the link, which
    decide between choices of equal risk. A choice is the index of a candidate for each block.
    """

    names: tuple[str, ...]
    candidates: tuple[tuple[Candidate, ...], ...]
    risk: Floats
    spent: Floats  # bytes are exact: below 2^53
    limits: Floats  # infinite if there is none
    effort: Floats
    kinds: tuple[str, ...] = LIMIT_KINDS[:2]
    offset: int = 0

    @property
    def valid(self) -> NDArray[np.bool_]:
        return np.isfinite(self.risk)

    @property
    def safe_limits(self) -> Floats:
        """Limits for running sums: those of seconds are slightly lower, as rounding may add up."""
        exact = np.array([kind.endswith("bytes") for kind in self.kinds])
        return np.where(exact, self.limits, self.limits * SAFE_FRACTION)

    @property
    def units(self) -> Floats:
        """[limits]: the unit of each limit, so that shares of limits can be added up."""
        return np.where(self.limits == 0, 1.0, np.abs(self.limits))

    @property
    def least_totals(self) -> Floats:
        """[limits]: the least of each total, ignoring the other limits."""
        return np.where(self.valid, self.spent, np.inf).min(axis=2).sum(axis=1)

    def chosen(self, choice: Ints) -> list[Candidate]:
        return [self.candidates[block][index] for block, index in enumerate(choice.tolist())]

    def used(self, choice: Ints) -> Floats:
        """[limits]: the totals of a choice."""
        blocks = np.arange(len(choice))
        return np.array([values[blocks, choice].sum() for values in self.spent])  # one by one, to round equally

    def total_risk(self, choice: Ints) -> float:
        return float(self.risk[np.arange(len(choice)), choice].sum())

    def feasible(self, choice: Ints) -> bool:
        return bool((self.used(choice) <= self.limits).all())

    def least(self, *keys: Floats) -> Ints:
        """The choice of the candidate that is least in the first key, ties by the next keys, then by position."""
        alive = self.valid
        for key in keys:
            best = np.where(alive, key, np.inf).min(axis=1, keepdims=True)
            alive = alive & (key == best)
        return alive.argmax(axis=1)


def weighted(prices: Floats, spent: Floats) -> Floats:
    """[...]: `spent` [limits, ...] times `prices` [limits], added up in the same order on every machine."""
    return (prices * spent.T).T.sum(axis=0)


def make_problem(candidates: Mapping[str, Sequence[Candidate]], *, limits: Limits) -> Problem:
    """The candidates and limits as arrays. Every block needs at least one candidate."""
    blocks = {name: tuple(options) for name, options in candidates.items()}
    assert all(blocks.values()), f"blocks without a candidate: {[name for name, row in blocks.items() if not row]}"
    saved = {name: max(0, *(candidate.cost.saved_bytes for candidate in row)) for name, row in blocks.items()}
    offset = sum(saved.values())

    def table(value_of: Callable[[Candidate], float], missing: float = 0.0) -> Floats:
        values = np.full((len(blocks), max(map(len, blocks.values()), default=1)), missing)
        for row, options in enumerate(blocks.values()):
            values[row, : len(options)] = [value_of(candidate) for candidate in options]
        return values

    costs: dict[str, Callable[[Candidate], float]] = {
        "state_bytes": lambda c: c.cost.charged_bytes + saved[c.block],
        "step_s": lambda c: c.cost.step_s,
        "host_bytes": lambda c: c.cost.host_bytes,
        "link_s": lambda c: c.cost.link_s,
    }
    bounds = {
        "state_bytes": None if limits.state_bytes is None else limits.state_bytes + offset,
        "step_s": None if limits.step_s is None else limits.step_s * (1 + STEP_TOLERANCE),
        "host_bytes": limits.host_bytes,
        "link_s": None if limits.link_s is None else limits.link_s * (1 + STEP_TOLERANCE),
    }
    kinds = tuple(kind for kind in LIMIT_KINDS if kind in LIMIT_KINDS[:2] or bounds[kind] is not None)
    return Problem(
        names=tuple(blocks),
        candidates=tuple(blocks.values()),
        risk=table(lambda c: c.risk.total, missing=np.inf),
        spent=np.stack([table(costs[kind]) for kind in kinds]),
        limits=np.array([np.inf if (bound := bounds[kind]) is None else bound for kind in kinds]),
        effort=table(costs["link_s"]),
        kinds=kinds,
        offset=offset,
    )


def infeasible(problem: Problem, least: Sequence[float] | Floats) -> NoFeasibleAllocation:
    """The error with the `least` totals [limits] that are possible."""
    totals = {kind: float(least[index]) for index, kind in enumerate(problem.kinds)}
    return NoFeasibleAllocation(
        least_state_bytes=round(totals["state_bytes"]) - problem.offset,
        least_step_s=totals["step_s"],
        least_host_bytes=round(totals.get("host_bytes", 0)),
        least_link_s=totals.get("link_s", 0.0),
    )


def least_risk(problem: Problem) -> Ints:
    """The choice of least risk without limits; ties by seconds of the link, then bytes, then seconds of the device."""
    return problem.least(problem.risk, problem.effort, *problem.spent)


def allocation_of(chosen: Collection[Candidate], *, allocator: str, gap: float | None = None) -> Allocation:
    """One candidate per block as an Allocation."""
    return Allocation(
        choices={c.block: c.spec for c in chosen},
        state_bytes=sum(c.cost.state_bytes for c in chosen),
        step_s=fsum(c.cost.step_s for c in chosen),
        transfer_bytes=sum(c.cost.transfer_bytes for c in chosen),
        host_bytes=sum(c.cost.host_bytes for c in chosen),
        link_s=fsum(c.cost.link_s for c in chosen),
        risk=fsum(c.risk.total for c in chosen),
        saved_bytes=sum(c.cost.saved_bytes for c in chosen),
        allocator=allocator,
        gap=gap,
    )


def make_allocation(problem: Problem, choice: Ints, *, allocator: str, bound: float | None = None) -> Allocation:
    """A choice as an Allocation. Its gap follows from `bound`, a lower bound of the risk."""
    chosen = problem.chosen(choice)
    risk = fsum(candidate.risk.total for candidate in chosen)
    gap = None if bound is None else max(0.0, risk - bound) / max(abs(risk), TINY_RISK)
    return allocation_of(chosen, allocator=allocator, gap=gap)


def allocate_first_wanted(
    candidates: Mapping[str, Sequence[Candidate]],
    *,
    limits: Limits,
    allocator: str,
    wanted: Callable[[Sequence[Candidate]], Sequence[str]],
) -> Allocation:
    """The first of the `wanted` specs that a block has a candidate of, else its candidate of least risk. Raises
    NoFeasibleAllocation, with the totals of this choice, if it is not within the limits."""

    def index_of(options: Sequence[Candidate]) -> int:
        indices = {candidate.spec: index for index, candidate in enumerate(options)}
        index = next((indices[spec] for spec in wanted(options) if spec in indices), None)
        return min(range(len(options)), key=lambda i: (options[i].risk.total, i)) if index is None else index

    problem = make_problem(candidates, limits=limits)
    choice = np.fromiter(map(index_of, problem.candidates), dtype=np.int64)
    if not problem.feasible(choice):
        raise infeasible(problem, problem.used(choice))
    return make_allocation(problem, choice, allocator=allocator)


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizingAllocator:
    """Takes the choice of least risk if it is within the limits, else `best`: (choice, lower bound of the risk)."""

    name: str
    description: str
    best: Callable[[Problem], tuple[Ints, float]]
    traits: AllocatorTraits = AllocatorTraits()

    def __call__(self, candidates: Mapping[str, Sequence[Candidate]], *, limits: Limits, seed: int = 0) -> Allocation:
        problem = make_problem(candidates, limits=limits)
        choice = least_risk(problem)
        bound = problem.total_risk(choice)
        if not problem.feasible(choice):
            choice, bound = self.best(problem)
        return make_allocation(problem, choice, allocator=self.name, bound=bound)
