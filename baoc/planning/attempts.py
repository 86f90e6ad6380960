"""The attempts at a plan: allocation problems whose limits are sums, made of one memory budget (see `limits`).

Each fixes the room for a step's temporaries, host placement, and how savings of 16-bit weights are counted. The
predicted peak of the plan that comes of it then decides.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from baoc.planning.allocators import NoFeasibleAllocation, least_bytes
from baoc.planning.budgeted import BudgetedBlocks
from baoc.planning.limits import Pool, StagingLimit, largest_savings, staging_limits, temporaries_levels
from baoc.types import Candidate, Limits, Plan, Profile

SPARE_SHARE = 0.02  # share of a budget that is not worth a search
BISECTION_STEPS = 5  # bisection steps of `spend`


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """Candidates, cheapest first, and limits for one level, one way of host placement and one count of savings.

    `base_peak` is the peak without state, with room for the buffers that host-placed states pass through.
    """

    pool: Pool
    limits: Limits
    base_peak: int | None
    staging: StagingLimit = field(default_factory=StagingLimit)

    def smallest_choice(self) -> list[Candidate]:
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


def all_attempts(
    planner: BudgetedBlocks, *, risk: str, profile: Profile | None, stand_ins: bool = False, every: bool = False
) -> Iterator[Attempt]:
    """Attempts with a candidate for each block: over levels from little room to much, ways of placement, and counts of
    savings from the boldest on. `stand_ins`: roles that are fp32 otherwise may run 8-bit momentum. `every`: all levels,
    to find the least budget; else some within the budget."""
    by_level: list[tuple[int | None, frozenset[str]]] = [(None, frozenset(planner.specs))]
    if planner.budget.memory_bytes is not None and planner.footprint is not None:
        within = None if every else planner.budget.memory_bytes
        most_saved = largest_savings(planner.blocks, specs=planner.specs)
        by_level = list(
            temporaries_levels(planner.footprint, specs=planner.specs, memory=within, most_saved=most_saved)
        )
    for base_peak, specs in by_level:
        for staging in _staging_limits(planner, risk=risk, profile=profile):
            above = None if base_peak is None else base_peak + staging.device_bytes
            for count in planner.savings_modes:
                everything = planner.candidates(risk=risk, profile=profile, count=count, stand_ins=stand_ins)
                pool = staging.admitted(everything, specs={name: planner.specs[name] for name in specs})
                if all(pool.values()):
                    limits = planner.limits(base_peak=above, staging=staging)
                    yield Attempt(pool=pool, limits=limits, base_peak=above, staging=staging)


def smallest_attempt(planner: BudgetedBlocks, attempts: Iterable[Attempt]) -> Attempt:
    """The attempt whose `least()` takes fewest bytes in the budget's own measure; within the host's memory, if that can
    be met."""
    attempts = list(attempts)
    return min(
        [a for a in attempts if a.meets_host] or attempts,
        key=lambda one: planner.budget_bytes_of(one.smallest_choice()),
    )


def refine(
    planner: BudgetedBlocks, beyond: Sequence[tuple[Plan, Attempt]], *, found: Plan, attempt: Callable[[Attempt], Plan]
) -> Plan:
    """A plan of less risk than `found`, if `found` leaves more than SPARE of the budget and there is one; else `found`.

    `beyond` are plans whose peak passes the budget because their savings were counted too boldly. `attempt` makes the
    least risky of them again with fewer charged bytes: first the least plus what `found` leaves, then by bisection
    towards the most with which the peak fits.
    """
    memory = planner.budget.memory_bytes
    if memory is None or not beyond or found.peak_bytes >= (1 - SPARE_SHARE) * memory:
        return found
    bold, one = min(beyond, key=lambda entry: entry[0].allocation.risk)
    if bold.allocation.risk >= found.allocation.risk or one.limits.state_bytes is None:
        return found
    best, low, high = found, sum(c.cost.charged_bytes for c in one.smallest_choice()), one.limits.state_bytes
    middle = low + memory - found.peak_bytes
    for _ in range(BISECTION_STEPS):
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
        if best.peak_bytes >= (1 - SPARE_SHARE) * memory:
            break
    return best


def _staging_limits(planner: BudgetedBlocks, *, risk: str, profile: Profile | None) -> list[StagingLimit]:
    """How far host placement may go; only the farthest way where its buffers are charged to no limit."""
    if not planner.may_use_host:
        return [StagingLimit()]
    found = staging_limits(planner.candidates(risk=risk, profile=profile, count="none"), specs=planner.specs)
    charged = planner.budget.memory_bytes is not None or planner.budget.host_memory_bytes is not None
    return found if charged else found[-1:]
