"""What a planner tries: levels of room for the temporaries of a step, ways to place states, and ways to count savings.

Each turns peaks, which are no sums over blocks, into limits that are.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from baoc.planning.allocators import NoFeasibleAllocation
from baoc.planning.charges import Try, levels
from baoc.planning.placement import Way, ways
from baoc.types import Candidate, Plan, Profile

if TYPE_CHECKING:
    from baoc.planning.planner import Planner

SPARE = 0.02  # of a budget, that is not worth a search
SEARCHES = 5


def all_tries(planner: "Planner", *, risk: str, profile: Profile | None) -> Iterator[Try]:
    """Every level of room for temporaries and staging on which every block can run something, savings counted in every
    way; little room first, savings boldest first.
    """
    by_level: list[tuple[int | None, frozenset[str]]] = [(None, frozenset(planner.specs))]
    if planner.budget.memory_bytes is not None and planner.footprint is not None:
        by_level = list(levels(planner.footprint, specs=planner.specs))
    for base_peak, specs in by_level:
        for way in _ways(planner, risk=risk, profile=profile):
            room = way.device_bytes + (way.host_bytes if planner.host_counts else 0)
            above = None if base_peak is None else base_peak + room
            for count in planner.counts:
                everything = planner.candidates(risk=risk, profile=profile, count=count)
                pool = way.admitted(everything, specs={name: planner.specs[name] for name in specs})
                if all(pool.values()):
                    limits = planner.limits(base_peak=above, way=way)
                    yield Try(pool=pool, limits=limits, base_peak=above, way=way)


def least_of(planner: "Planner", tries: Iterable[Try]) -> list[Candidate]:
    """The candidates of fewest bytes in the budget's own measure, within the host's memory where that can be met."""
    tries = list(tries)
    return min((one.least() for one in [t for t in tries if t.meets_host] or tries), key=planner.taken)


def spend(
    planner: "Planner", beyond: Sequence[tuple[Plan, Try]], *, found: Plan, attempt: Callable[[Try], Plan]
) -> Plan:
    """A plan of less risk than `found` where that leaves more than SPARE of the budget and there is one.

    `beyond` are plans whose own peak passes the budget, as their savings were counted too boldly: `attempt` makes the
    best of them again with fewer bytes to charge, at first so many more than the least as `found` leaves, then halving
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
    """How far host placement may go; where its staging is charged to nothing, as far as it likes.

    An allocator that has rows of its own goes as far as these do.
    """
    if not planner.places:
        return [Way()]
    memory, host = planner.budget.memory_bytes is not None, planner.budget.host_memory_bytes is not None
    counted = host or (memory and planner.host_counts)
    pool = planner.candidates(risk=risk, profile=profile, count="none")
    rows = getattr(planner.allocator, "rows", ())
    if rows:
        pool = {block: [c for c in options if c.spec in rows] for block, options in pool.items()}
    flushed = planner.settings.flush_only
    found = ways(pool, blocks=planner.blocks, specs=planner.specs, host_counts=counted, flushed=flushed)
    return found if not rows and (memory or counted) else found[-1:]
