"""Turns a memory budget into limits that are sums over blocks, the only ones that allocators understand.

A peak is the largest of several moments of a step, so it is no sum over blocks. The planner therefore makes several
`Attempt`s: each fixes the room for a step's temporaries (`levels`), how far host placement goes (`placement.Way`),
and how the bytes that 16-bit weights save are counted (`Savings`). Within one attempt the charged bytes are sums, and
the peak of the resulting plan then decides. Savings are counted boldest first: `copies` (weights, gradients and
autocast's copies, as at the largest moment), then `gradients` (weights and gradients), then `weights` alone, which
holds at every moment.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from baoc.planning.allocators import NoFeasibleAllocation, least_bytes
from baoc.planning.cost import saved
from baoc.planning.placement import Way, ways
from baoc.types import Block, Candidate, Footprint, Limits, OptimizerSpec, Plan, Profile

if TYPE_CHECKING:
    from baoc.planning.planner import Planner


Savings = Literal["none", "copies", "gradients", "weights"]
Pool = Mapping[str, tuple[Candidate, ...]]

MAX_LEVELS = 6  # of room for the temporaries of a step; each costs an allocation


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """Candidates, cheapest first, and limits for one level, one way of host placement and one count of savings.

    `base_peak` is the peak without state, with room for the buffers that host-placed states pass through.
    """

    pool: Pool
    limits: Limits
    base_peak: int | None
    way: Way = field(default_factory=Way)

    def least(self) -> list[Candidate]:
        """Each block's candidate of fewest charged bytes; within the host's memory, if that can be met here."""
        chosen = [options[0] for options in self.pool.values()]
        room = self.limits.host_bytes
        if room is None or sum(c.cost.host_bytes for c in chosen) <= room:
            return chosen
        return least_bytes(self.pool, limits=Limits(host_bytes=room)) or chosen

    @property
    def meets_bytes(self) -> bool:
        """Whether every block has a candidate within the bytes of the device."""
        room = self.limits.state_bytes
        return room is None or sum(options[0].cost.charged_bytes for options in self.pool.values()) <= room

    @property
    def meets_host(self) -> bool:
        """Whether every block has a candidate within the host's memory."""
        room = self.limits.host_bytes
        return room is None or sum(min(c.cost.host_bytes for c in options) for options in self.pool.values()) <= room


def levels(footprint: Footprint, *, specs: Collection[str]) -> list[tuple[int, frozenset[str]]]:
    """(Peak without state, specs whose step stays below it), from few specs to all.

    More than one level only where some spec's temporaries would pass the peak of forward and backward; then a plan may
    either do without that spec or leave room for it.
    """
    peaks = {spec: footprint.peak_bytes(state_bytes=0, specs=(spec,)) for spec in specs}
    found = sorted(set(peaks.values()))
    if len(found) > MAX_LEVELS:
        found = [found[i * (len(found) - 1) // (MAX_LEVELS - 1)] for i in range(MAX_LEVELS)]
    return [(level, frozenset(spec for spec, peak in peaks.items() if peak <= level)) for level in found]


def saved_bytes(block: Block, spec: OptimizerSpec, *, count: Savings, footprint: Footprint) -> int:
    """Bytes that the weights format of `spec` saves on the block, counted as `count` says."""
    less = saved(block, spec=spec)
    if count == "copies" and footprint.intervals:
        return footprint.saved_at_most(less)
    return sum(less.values()) * (1 if count == "weights" else 2)


Saved = tuple[tuple[int, ...], ...]  # bytes saved: [block][weights format]


def savings(
    blocks: Collection[Block], *, specs: Mapping[str, OptimizerSpec], count: Savings, footprint: Footprint
) -> Saved:
    """Bytes that each weights format among `specs` saves on each block."""
    formats = _formats(specs)
    return tuple(
        tuple(saved_bytes(block, spec, count=count, footprint=footprint) for spec in formats.values())
        for block in blocks
    )


def charged(
    candidates: Pool, *, blocks: Collection[Block], specs: Mapping[str, OptimizerSpec], saved: Saved
) -> dict[str, tuple[Candidate, ...]]:
    """The candidates charged for their state less what their weights save (see `savings`), cheapest first."""
    found: dict[str, tuple[Candidate, ...]] = {}
    for block, less in zip(blocks, saved, strict=True):
        by_weights = dict(zip(_formats(specs), less, strict=True))
        made: list[Candidate] = []
        for candidate in candidates[block.name]:
            saves = by_weights[specs[candidate.spec].weights]
            cost = replace(candidate.cost, saved_bytes=saves) if saves else candidate.cost
            made.append(replace(candidate, cost=cost) if saves else candidate)
        found[block.name] = tuple(sorted(made, key=lambda c: (c.cost.charged_bytes, c.risk.total, c.cost.step_s)))
    return found


def _formats(specs: Mapping[str, OptimizerSpec]) -> dict[str, OptimizerSpec]:
    """Weights format -> a spec that has it."""
    return {spec.weights: spec for spec in specs.values()}


def saved_by(
    choices: Mapping[str, str], *, blocks: Collection[Block], specs: Mapping[str, OptimizerSpec]
) -> dict[str, int]:
    """Parameter name -> bytes that an allocation saves on its weights."""
    return {name: nbytes for block in blocks for name, nbytes in saved(block, spec=specs[choices[block.name]]).items()}


SPARE = 0.02  # share of a budget that is not worth a search
SEARCHES = 5


def all_attempts(
    planner: "Planner", *, risk: str, profile: Profile | None, stand_ins: bool = False
) -> Iterator[Attempt]:
    """Every attempt with a candidate for each block: over levels from little room to much, ways of placement, and
    counts of savings from the boldest on."""
    by_level: list[tuple[int | None, frozenset[str]]] = [(None, frozenset(planner.specs))]
    if planner.budget.memory_bytes is not None and planner.footprint is not None:
        by_level = list(levels(planner.footprint, specs=planner.specs))
    for base_peak, specs in by_level:
        for way in _ways(planner, risk=risk, profile=profile):
            above = None if base_peak is None else base_peak + way.device_bytes
            for count in planner.counts:
                everything = planner.candidates(risk=risk, profile=profile, count=count, stand_ins=stand_ins)
                pool = way.admitted(everything, specs={name: planner.specs[name] for name in specs})
                if all(pool.values()):
                    limits = planner.limits(base_peak=above, way=way)
                    yield Attempt(pool=pool, limits=limits, base_peak=above, way=way)


def least_of(planner: "Planner", attempts: Iterable[Attempt]) -> list[Candidate]:
    """The candidates of fewest bytes in the budget's own measure; within the host's memory, if that can be met."""
    attempts = list(attempts)
    return min((one.least() for one in [a for a in attempts if a.meets_host] or attempts), key=planner.taken)


def spend(
    planner: "Planner", beyond: Sequence[tuple[Plan, Attempt]], *, found: Plan, attempt: Callable[[Attempt], Plan]
) -> Plan:
    """A plan of less risk than `found`, if `found` leaves more than SPARE of the budget and there is one; else `found`.

    `beyond` are plans whose peak passes the budget because their savings were counted too boldly. `attempt` makes the
    least risky of them again with fewer charged bytes: first the least plus what `found` leaves, then by bisection
    towards the most with which the peak fits.
    """
    memory = planner.budget.memory_bytes
    if memory is None or not beyond or found.peak_bytes >= (1 - SPARE) * memory:
        return found
    bold, one = min(beyond, key=lambda entry: entry[0].allocation.risk)
    if bold.allocation.risk >= found.allocation.risk or one.limits.state_bytes is None:
        return found
    best, low, high = found, sum(c.cost.charged_bytes for c in one.least()), one.limits.state_bytes
    middle = low + memory - found.peak_bytes
    for _ in range(SEARCHES):
        middle = middle if low < middle < high else (low + high) // 2
        try:
            plan = attempt(replace(one, limits=replace(one.limits, state_bytes=middle)))
        except NoFeasibleAllocation:
            low = middle
            continue
        low, high = (middle, high) if planner.fits(plan) else (low, middle)
        if planner.fits(plan) and plan.allocation.risk < best.allocation.risk:
            named = replace(plan.allocation, allocator=found.allocation.allocator, gap=None)
            best = replace(plan, allocation=named, limits=one.limits)
        if best.peak_bytes >= (1 - SPARE) * memory:
            break
    return best


def _ways(planner: "Planner", *, risk: str, profile: Profile | None) -> list[Way]:
    """How far host placement may go; only the farthest way where its buffers are charged to no limit."""
    if not planner.places:
        return [Way()]
    found = ways(planner.candidates(risk=risk, profile=profile, count="none"), specs=planner.specs)
    charged = planner.budget.memory_bytes is not None or planner.budget.host_memory_bytes is not None
    return found if charged else found[-1:]
