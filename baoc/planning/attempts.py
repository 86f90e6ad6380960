"""Attempts at a plan: allocation problems whose limits are sums, made from one budget (see `limits`).

An attempt fixes the room for a step's temporaries, how far host placement goes, and how savings of 16-bit weights are
counted. The predicted peak of the resulting plan decides whether it fits. `refine` searches between two plans.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from baoc.planning.allocators import NoFeasibleAllocation, least_bytes
from baoc.planning.budgeted import BudgetedBlocks
from baoc.planning.limits import Pool, StagingLimit, largest_savings, staging_limits, temporaries_levels
from baoc.types import Candidate, Limits, Plan, Profile

SPARE_SHARE = 0.02  # `refine` stops once less than this share of the budget is left
BISECTION_STEPS = 5  # of `refine`; each costs an allocation


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """Candidates by block, fewest charged bytes first, with the limits of one level, placement and savings mode.
    `base_peak`: the peak without state, staging buffers of host placement included; None without a memory budget."""

    pool: Pool
    limits: Limits
    base_peak: int | None
    staging: StagingLimit = field(default_factory=StagingLimit)

    def smallest_choice(self) -> list[Candidate]:
        """One candidate per block, of fewest charged bytes; within the host's limit, if that can be met."""
        chosen = [options[0] for options in self.pool.values()]
        host_limit = self.limits.host_bytes
        if host_limit is None or sum(c.cost.host_bytes for c in chosen) <= host_limit:
            return chosen
        return least_bytes(self.pool, limits=Limits(host_bytes=host_limit)) or chosen

    @property
    def meets_bytes(self) -> bool:
        """Whether the candidates of fewest charged bytes are within the device's limit."""
        limit = self.limits.state_bytes
        return limit is None or sum(options[0].cost.charged_bytes for options in self.pool.values()) <= limit

    @property
    def meets_host(self) -> bool:
        """Whether the candidates of fewest host bytes are within the host's limit."""
        limit = self.limits.host_bytes
        return limit is None or sum(min(c.cost.host_bytes for c in options) for options in self.pool.values()) <= limit


def all_attempts(
    planner: BudgetedBlocks, *, risk: str, profile: Profile | None, stand_ins: bool = False, every: bool = False
) -> Iterator[Attempt]:
    """Attempts that have a candidate for every block: by level from low to high, by placement, by savings mode.

    Savings modes come boldest first. `stand_ins`: fp32-only roles may run 8-bit momentum instead of none. `every`: all
    levels, to find the least budget; else at most MAX_LEVELS of them, within the budget.
    """
    by_level: list[tuple[int | None, frozenset[str]]] = [(None, frozenset(planner.specs))]
    if planner.budget.memory_bytes is not None and planner.footprint is not None:
        within = None if every else planner.budget.memory_bytes
        most_saved = largest_savings(planner.blocks, specs=planner.specs)
        by_level = list(
            temporaries_levels(planner.footprint, specs=planner.specs, memory=within, most_saved=most_saved)
        )
    for base_peak, specs in by_level:
        for staging in _staging_limits(planner, risk=risk, profile=profile):
            peak_with_staging = None if base_peak is None else base_peak + staging.device_bytes
            for count in planner.savings_modes:
                candidates = planner.candidates(risk=risk, profile=profile, count=count, stand_ins=stand_ins)
                pool = staging.admitted(candidates, specs=specs)
                if all(pool.values()):
                    limits = planner.limits(base_peak=peak_with_staging, staging=staging)
                    yield Attempt(pool=pool, limits=limits, base_peak=peak_with_staging, staging=staging)


def smallest_attempt(planner: BudgetedBlocks, attempts: Iterable[Attempt]) -> Attempt:
    """The attempt whose smallest choice takes the fewest bytes in the budget's measure. Attempts that can meet the
    host's limit are preferred."""
    attempts = list(attempts)
    meeting_host = [attempt for attempt in attempts if attempt.meets_host]
    return min(meeting_host or attempts, key=lambda attempt: planner.budget_bytes_of(attempt.smallest_choice()))


def refine(
    planner: BudgetedBlocks,
    over_budget: Sequence[tuple[Plan, Attempt]],
    *,
    fitting: Plan,
    plan_at: Callable[[Attempt], Plan],
) -> Plan:
    """A fitting plan of less risk than `fitting`, if one is found, else `fitting`.

    The plans of `over_budget` exceed the budget because their savings were counted too boldly. The attempt of the least
    risky one is planned again (`plan_at`) with fewer bytes: first with what `fitting` leaves, then by bisection between
    its smallest choice and its own limit. Nothing is tried if `fitting` leaves less than SPARE_SHARE of the budget.
    """
    memory = planner.budget.memory_bytes
    if memory is None or not over_budget or fitting.peak_bytes >= (1 - SPARE_SHARE) * memory:
        return fitting
    boldest, attempt = min(over_budget, key=lambda entry: entry[0].allocation.risk)
    if boldest.allocation.risk >= fitting.allocation.risk or attempt.limits.state_bytes is None:
        return fitting
    best = fitting
    low, high = sum(c.cost.charged_bytes for c in attempt.smallest_choice()), attempt.limits.state_bytes
    middle = low + memory - fitting.peak_bytes
    for _ in range(BISECTION_STEPS):
        middle = middle if low < middle < high else (low + high) // 2
        try:
            plan = plan_at(replace(attempt, limits=replace(attempt.limits, state_bytes=middle)))
        except NoFeasibleAllocation:
            low = middle
            continue
        if not planner.fits(plan):
            high = middle
            continue
        low = middle
        if plan.allocation.risk < best.allocation.risk:
            # Reported under the allocator that was asked for; the gap of the narrower limits says nothing.
            allocation = replace(plan.allocation, allocator=fitting.allocation.allocator, gap=None)
            best = replace(plan, allocation=allocation, limits=attempt.limits)
        if best.peak_bytes >= (1 - SPARE_SHARE) * memory:
            break
    return best


def _staging_limits(planner: BudgetedBlocks, *, risk: str, profile: Profile | None) -> list[StagingLimit]:
    """How far host placement may go; only the farthest if no limit charges its buffers."""
    if not planner.may_use_host:
        return [StagingLimit()]
    limits = staging_limits(planner.candidates(risk=risk, profile=profile, count="none"), specs=planner.specs)
    charged = planner.budget.memory_bytes is not None or planner.budget.host_memory_bytes is not None
    return limits if charged else limits[-1:]
