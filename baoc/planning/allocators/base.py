"""The allocators' protocol, and the knapsack problem as arrays [limits, blocks, candidates] with padding."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from math import fsum
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from baoc.types import Allocation, Candidate, Limits

STEP_TOLERANCE = 1e-9  # seconds are sums of floats: a limit counts as met within this fraction
SAFE = 1 - 1e-12  # of a limit of seconds, for running sums; `Problem.feasible` has the last word
TINY = 1e-12  # below this a risk counts as none when a gap is stated
KINDS = ("state_bytes", "step_s", "host_bytes", "link_s")  # what may be limited, as in `types.Limits`
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class NoFeasibleAllocation(Exception):
    """No allocation meets the limits. Each figure is the least that can be had while the other limits are met.

    `least_state_bytes` are charged bytes. `least_host_bytes` and `least_link_s` are 0 where they have no limit.

    Where another limit cannot be met at all, it is left out of account. The planner turns this into the user's error.
    """

    def __init__(self, *, least_state_bytes: int, least_step_s: float, least_host_bytes: int, least_link_s: float):
        super().__init__(f"the least is {least_state_bytes} state bytes, {least_step_s:.6g} s")
        self.least_state_bytes = least_state_bytes
        self.least_step_s = least_step_s
        self.least_host_bytes = least_host_bytes
        self.least_link_s = least_link_s


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatorTraits:
    """Properties of an allocator that planning and training ask for.

    Args:
        every_candidate: it wants dominated candidates too, as baselines do.
        only_spec: the one spec that it runs wherever this applies; None for an allocator that has a choice.
        matching: the RMS of updates is matched to AdamW's, where the run does not say otherwise.
    """

    every_candidate: bool = False
    only_spec: str | None = None
    matching: bool = True


CHOOSES = AllocatorTraits()  # of an allocator that weighs candidates
BASELINE = AllocatorTraits(every_candidate=True)


class Allocator(Protocol):
    """Chooses one candidate per block within the limits, the same one for the same arguments.

    Raises NoFeasibleAllocation.
    """

    @property
    def name(self) -> str: ...

    @property
    def description(self) -> str: ...

    @property
    def traits(self) -> AllocatorTraits: ...

    def __call__(
        self, candidates: Mapping[str, Sequence[Candidate]], *, limits: Limits, seed: int = 0
    ) -> Allocation: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """The candidates as [blocks, specs] arrays; a spec a block lacks has infinite risk, and spends nothing.

    `spent` is [limits, blocks, specs]: what each candidate takes of each limit, in the order of `KINDS`; the first two
    are always there, the others where they are limited. Charged bytes of a block are raised by what it can save at
    most, so that none is negative; their limit is raised by the sum of these, `offset`. `effort` are seconds of
    the link, which decide between choices of equal risk.
    """

    names: tuple[str, ...]
    candidates: tuple[tuple[Candidate, ...], ...]
    risk: Floats
    spent: Floats  # bytes are exact: below 2^53
    limits: Floats  # infinite where there is none
    effort: Floats
    kinds: tuple[str, ...] = KINDS[:2]
    offset: int = 0

    @property
    def valid(self) -> NDArray[np.bool_]:
        return np.isfinite(self.risk)

    @property
    def safe_limits(self) -> Floats:
        """Limits for running sums: those of seconds a hair below, as rounding may add up."""
        whole = np.array([kind.endswith("bytes") for kind in self.kinds])
        return np.where(whole, self.limits, self.limits * SAFE)

    @property
    def units(self) -> Floats:
        """The unit of each limit, so that shares of limits can be added up."""
        return np.where(self.limits == 0, 1.0, np.abs(self.limits))

    @property
    def least_totals(self) -> Floats:
        """[limits]: the least of each total, the others left out of account."""
        return np.where(self.valid, self.spent, np.inf).min(axis=2).sum(axis=1)

    def chosen(self, choice: Ints) -> list[Candidate]:
        return [self.candidates[block][index] for block, index in enumerate(choice.tolist())]

    def used(self, choice: Ints) -> Floats:
        """[limits]: the totals of one candidate index per block."""
        rows = np.arange(len(choice))
        return np.array([values[rows, choice].sum() for values in self.spent])  # one by one: sums round alike

    def total_risk(self, choice: Ints) -> float:
        return float(self.risk[np.arange(len(choice)), choice].sum())

    def feasible(self, choice: Ints) -> bool:
        return bool((self.used(choice) <= self.limits).all())

    def least(self, *keys: Floats) -> Ints:
        """Per block the candidate that is least in the first key, ties by the next ones, then by position."""
        alive = self.valid
        for key in keys:
            best = np.where(alive, key, np.inf).min(axis=1, keepdims=True)
            alive = alive & (key == best)
        return alive.argmax(axis=1)


def weighted(prices: Floats, spent: Floats) -> Floats:
    """[...]: what is `spent` [limits, ...] at `prices` [limits], added up in the same order on every machine."""
    return (prices.reshape(-1, *[1] * (spent.ndim - 1)) * spent).sum(axis=0)


def make_problem(candidates: Mapping[str, Sequence[Candidate]], *, limits: Limits) -> Problem:
    """Candidates -> arrays; every block must have at least one candidate."""
    rows = {name: tuple(row) for name, row in candidates.items()}
    assert all(rows.values()), f"blocks without a candidate: {[name for name, row in rows.items() if not row]}"
    saved = {name: max(0, *(candidate.cost.saved_bytes for candidate in row)) for name, row in rows.items()}
    offset = sum(saved.values())

    def table(of: Callable[[Candidate], float], missing: float = 0.0) -> Floats:
        values = np.full((len(rows), max(map(len, rows.values()), default=1)), missing)
        for held, row in zip(values, rows.values(), strict=True):
            held[: len(row)] = [of(candidate) for candidate in row]
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
    kinds = tuple(kind for kind in KINDS if kind in KINDS[:2] or bounds[kind] is not None)
    return Problem(
        names=tuple(rows),
        candidates=tuple(rows.values()),
        risk=table(lambda c: c.risk.total, missing=np.inf),
        spent=np.stack([table(costs[kind]) for kind in kinds]),
        limits=np.array([np.inf if (bound := bounds[kind]) is None else bound for kind in kinds], dtype=np.float64),
        effort=table(costs["link_s"]),
        kinds=kinds,
        offset=offset,
    )


def infeasible(problem: Problem, least: Sequence[float] | Floats) -> NoFeasibleAllocation:
    """The error that names the `least` [limits] that would do."""
    found = dict(zip(problem.kinds, map(float, least), strict=True))
    return NoFeasibleAllocation(
        least_state_bytes=round(found["state_bytes"]) - problem.offset,
        least_step_s=found["step_s"],
        least_host_bytes=round(found.get("host_bytes", 0)),
        least_link_s=found.get("link_s", 0.0),
    )


def least_risk(problem: Problem) -> Ints:
    """The choice without limits; ties go to less effort of the link, then to fewer bytes, then seconds."""
    return problem.least(problem.risk, problem.effort, *problem.spent)


def allocation_of(chosen: Collection[Candidate], *, allocator: str, gap: float | None = None) -> Allocation:
    """One candidate per block as an Allocation, by whatever way they were chosen."""
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
    """The chosen indices as an Allocation; `bound` is a lower bound of the risk, from which the gap follows."""
    chosen = problem.chosen(choice)
    risk = fsum(candidate.risk.total for candidate in chosen)
    gap = None if bound is None else max(0.0, risk - bound) / max(abs(risk), TINY)
    return allocation_of(chosen, allocator=allocator, gap=gap)


def allocate_first_wanted(
    candidates: Mapping[str, Sequence[Candidate]],
    *,
    limits: Limits,
    allocator: str,
    wanted: Callable[[Sequence[Candidate]], Sequence[str]],
) -> Allocation:
    """The first of the `wanted` specs that each block's candidates have, else the one of least risk.

    Raises NoFeasibleAllocation with its own totals.
    """

    def index(options: Sequence[Candidate]) -> int:
        by_spec = {candidate.spec: at for at, candidate in enumerate(options)}
        found = next((by_spec[spec] for spec in wanted(options) if spec in by_spec), None)
        return min(range(len(options)), key=lambda at: (options[at].risk.total, at)) if found is None else found

    problem = make_problem(candidates, limits=limits)
    choice = np.fromiter(map(index, problem.candidates), dtype=np.int64)
    if not problem.feasible(choice):
        raise infeasible(problem, problem.used(choice))
    return make_allocation(problem, choice, allocator=allocator)


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizingAllocator:
    """The choice of least risk where the limits allow it, else `best`: a choice and a lower bound of any risk."""

    name: str
    description: str
    best: Callable[[Problem], tuple[Ints, float]]
    traits: AllocatorTraits = CHOOSES

    def __call__(self, candidates: Mapping[str, Sequence[Candidate]], *, limits: Limits, seed: int = 0) -> Allocation:
        problem = make_problem(candidates, limits=limits)
        choice = least_risk(problem)
        bound = problem.total_risk(choice)
        if not problem.feasible(choice):
            choice, bound = self.best(problem)
        return make_allocation(problem, choice, allocator=self.name, bound=bound)
