"""What every allocator shares: the protocol, the candidates as padded arrays, and how choices become an answer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import fsum
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from baoc.types import Allocation, Candidate, Limits

STEP_TOLERANCE = 1e-9  # seconds are sums of floats: a limit counts as met within this fraction
TINY = 1e-12  # below this a risk counts as none when a gap is stated
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class NoFeasibleAllocation(Exception):
    """No allocation meets the limits. Each figure is the least that can be had while the other limit is met.

    `least_state_bytes` are charged bytes.

    Where the other limit cannot be met at all, it is left out of account. The planner turns this into the user's error.
    """

    def __init__(self, *, least_state_bytes: int, least_step_s: float):
        super().__init__(f"the least is {least_state_bytes} state bytes, {least_step_s:.6g} s")
        self.least_state_bytes = least_state_bytes
        self.least_step_s = least_step_s


class Allocator(Protocol):
    """Chooses one candidate per block within the limits, the same one for the same arguments.

    `full`: wants every applicable candidate, not only those that are not dominated (baselines do).
    Raises NoFeasibleAllocation.
    """

    @property
    def name(self) -> str: ...

    @property
    def description(self) -> str: ...

    @property
    def full(self) -> bool: ...

    def __call__(
        self, candidates: Mapping[str, Sequence[Candidate]], *, limits: Limits, seed: int = 0
    ) -> Allocation: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """The candidates as [blocks, specs] arrays; a spec a block lacks has infinite risk, and 0 bytes and seconds.

    `num_bytes` are the charged bytes, each block's raised by what it can save at most, so that none is negative; the
    limit is raised by the sum of these, `offset`.
    """

    names: tuple[str, ...]
    candidates: tuple[tuple[Candidate, ...], ...]
    risk: Floats
    num_bytes: Floats  # exact: below 2^53
    step_s: Floats
    byte_limit: float  # infinite where there is none
    step_limit: float
    offset: int = 0

    @property
    def valid(self) -> NDArray[np.bool_]:
        return np.isfinite(self.risk)

    def totals(self, choice: Ints) -> tuple[float, float, float]:
        """(risk, bytes, seconds) of one candidate index per block."""
        rows = np.arange(len(choice))
        return (
            float(self.risk[rows, choice].sum()),
            float(self.num_bytes[rows, choice].sum()),
            float(self.step_s[rows, choice].sum()),
        )

    def feasible(self, choice: Ints) -> bool:
        _, num_bytes, step_s = self.totals(choice)
        return num_bytes <= self.byte_limit and step_s <= self.step_limit

    def least(self, *keys: Floats) -> Ints:
        """Per block the candidate that is least in the first key, ties by the next ones, then by position."""
        alive = self.valid
        for key in keys:
            best = np.where(alive, key, np.inf).min(axis=1, keepdims=True)
            alive = alive & (key == best)
        return alive.argmax(axis=1)


def make_problem(candidates: Mapping[str, Sequence[Candidate]], *, limits: Limits) -> Problem:
    """Candidates -> arrays; every block must have at least one candidate."""
    names = tuple(candidates)
    rows = tuple(tuple(candidates[name]) for name in names)
    assert all(rows), f"blocks without a candidate: {[n for n, r in zip(names, rows, strict=True) if not r]}"
    shape = (len(rows), max((len(row) for row in rows), default=1))
    risk, num_bytes, step_s = np.full(shape, np.inf), np.zeros(shape), np.zeros(shape)
    most_saved = [max(0, *(candidate.cost.saved_bytes for candidate in row)) for row in rows]
    offset = sum(most_saved)
    for index, row in enumerate(rows):
        risk[index, : len(row)] = [candidate.risk.total for candidate in row]
        num_bytes[index, : len(row)] = [most_saved[index] + candidate.cost.charged_bytes for candidate in row]
        step_s[index, : len(row)] = [candidate.cost.step_s for candidate in row]
    return Problem(
        names=names,
        candidates=rows,
        risk=risk,
        num_bytes=num_bytes,
        step_s=step_s,
        byte_limit=np.inf if limits.state_bytes is None else float(limits.state_bytes + offset),
        step_limit=np.inf if limits.step_s is None else limits.step_s * (1 + STEP_TOLERANCE),
        offset=offset,
    )


def least_risk(problem: Problem) -> Ints:
    """The choice without limits; ties go to fewer bytes, then seconds."""
    return problem.least(problem.risk, problem.num_bytes, problem.step_s)


def make_allocation(problem: Problem, choice: Ints, *, allocator: str, bound: float | None = None) -> Allocation:
    """The chosen indices as an Allocation; `bound` is a lower bound of the risk, from which the gap follows."""
    chosen = [row[int(index)] for row, index in zip(problem.candidates, choice, strict=True)]
    risk = fsum(candidate.risk.total for candidate in chosen)
    return Allocation(
        choices={candidate.block: candidate.spec for candidate in chosen},
        state_bytes=sum(candidate.cost.state_bytes for candidate in chosen),
        risk=risk,
        allocator=allocator,
        step_s=fsum(candidate.cost.step_s for candidate in chosen),
        transfer_bytes=sum(candidate.cost.transfer_bytes for candidate in chosen),
        saved_bytes=sum(candidate.cost.saved_bytes for candidate in chosen),
        gap=None if bound is None else max(0.0, risk - bound) / max(abs(risk), TINY),
    )
