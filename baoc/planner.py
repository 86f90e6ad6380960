"""Stages 3 to 9 as one object: parameters and a budget in, a Plan out; what `mode=plan` runs.

A Planner holds what does not change during a run (blocks, catalogue, budget, footprint); `propose` is called once at
the start with role priors, and again whenever a new profile is there. Both answers come from the same code.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from baoc.allocation import ALLOCATORS, NoFeasibleAllocation
from baoc.allocation.base import Allocator
from baoc.blocks import partition
from baoc.candidates import build_candidates, undominated
from baoc.catalogue import SPECS, STORAGES, select
from baoc.charges import Savings, Try, allocated, charged, levels, saved_by
from baoc.cost import adamw_state_bytes
from baoc.errors import BadInputError, InfeasibleBudgetError
from baoc.explain import reasons
from baoc.refusals import too_slow, too_small
from baoc.risk import RISKS
from baoc.rules import rule_infos
from baoc.segments import tied, untied
from baoc.types import (
    Allocation,
    Block,
    Budget,
    Candidate,
    Footprint,
    LatencyTable,
    Limits,
    ParamInfo,
    Plan,
    Profile,
    Role,
)

FEW_BLOCKS = 64  # with more, every level is tried by prices, and only the best one proven


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerSettings:
    """What a user chooses about planning; defaults are those of `conf/`."""

    specs: tuple[str, ...] = ("*",)
    keep_fp32_roles: tuple[Role, ...] = (Role.EMBEDDING, Role.HEAD, Role.NORM)
    blocks_by: str = "layer_role"
    patterns: tuple[tuple[str, str], ...] = ()
    merge_penalty: float | None = None  # None: blocks that behave alike are not tied together
    risk: str = "prior"
    risk_weights: Mapping[str, float] = field(default_factory=dict)
    allocator: str = "exact"
    seed: int = 0


def known(name: str, options: Mapping[str, object], what: str) -> str:
    """`name` if it is one of `options`, else BadInputError that lists them."""
    if name not in options:
        raise BadInputError(f"unknown {what} {name!r}: choose one of {', '.join(options)}")
    return name


class Planner:
    """Turns parameters, a budget and (later) a profile into a Plan.

    Raises BadInputError for unknown names, InfeasibleBudgetError from `propose` where no allocation meets the budget.
    """

    def __init__(
        self,
        params: Sequence[ParamInfo],
        *,
        budget: Budget,
        settings: PlannerSettings | None = None,
        declared: Mapping[str, Sequence[str]] | None = None,
        footprint: Footprint | None = None,
        latency: LatencyTable | None = None,
    ):
        self.settings = settings = settings or PlannerSettings()
        known(settings.risk, RISKS, "risk")
        known(settings.allocator, ALLOCATORS, "allocator")
        self.params = tuple(params)
        self.budget = budget
        self.footprint = footprint
        self.latency = latency
        self.specs = {name: SPECS[name] for name in select(settings.specs)}
        self.rules = rule_infos()
        self.blocks: tuple[Block, ...] = partition(
            self.params, declared=declared, patterns=settings.patterns, by=settings.blocks_by
        )
        self.state_bytes_adamw = adamw_state_bytes(self.blocks)
        self._made: dict[Any, tuple[tuple[Any, ...], Any]] = {}  # by risk and count; made anew where its basis changed
        if budget.memory_bytes is not None and footprint is None:
            raise BadInputError(
                f"budget {budget.name} limits device memory, which needs a footprint: give a probe (a callable that "
                "runs one forward and backward), or use a state fraction such as state_25"
            )

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_made": {}}

    def count_profile(self, num_bytes: int, *, temporary_bytes: int = 0) -> None:
        """Puts a profiler's buffers into the footprint: they live beside the activations while a run warms up.

        `temporary_bytes`: what it holds for a moment when it samples.
        """
        if self.footprint is not None:
            self.footprint = replace(self.footprint, profile_bytes=num_bytes, profile_temporary_bytes=temporary_bytes)

    # -- limits ---------------------------------------------------------------------------------------------------

    def limits(self, *, base_peak: int | None = None) -> Limits:
        """The budget as totals over the blocks: what is left of it for charged bytes and for optimizer seconds.

        `base_peak` is the predicted peak without state, with native weights; by default that of forward and backward.
        """
        state_bytes = None
        if self.budget.memory_bytes is not None:
            assert self.footprint is not None
            base_peak = self.footprint.peak_bytes(state_bytes=0) if base_peak is None else base_peak
            state_bytes = self.budget.memory_bytes - base_peak
        elif self.budget.state_fraction is not None:
            state_bytes = int(self.budget.state_fraction * self.state_bytes_adamw)
        step_s = None
        if self.budget.step_time is not None and self.latency is not None:
            step_s = self.budget.step_time * self.latency.reference_step_s - self.latency.base_step_s
        return Limits(state_bytes=state_bytes, step_s=step_s)

    @property
    def _counts(self) -> tuple[Savings, ...]:
        """How savings on weights may be counted, boldest first."""
        weighted = any(spec.weights != "native" for spec in self.specs.values())
        if not weighted or self.budget.memory_bytes is None or self.footprint is None:
            return ("none",)
        return ("copies", "gradients", "weights")

    def measure(self, charged_bytes: int, *, base_peak: int | None = None) -> int:
        """Charged bytes in the budget's own measure: peak bytes under a memory budget, else state bytes."""
        if self.budget.memory_bytes is None or self.footprint is None:
            return charged_bytes
        return charged_bytes + (self.footprint.peak_bytes(state_bytes=0) if base_peak is None else base_peak)

    def peak_bytes(self, choices: Mapping[str, str], *, state_bytes: int) -> int:
        """Predicted peak of an allocation; its state bytes where no footprint is known."""
        if self.footprint is None:
            return state_bytes
        used = tuple(sorted(set(choices.values())))
        less = saved_by(choices, blocks=self.blocks, specs=self.specs)
        return self.footprint.peak_bytes(state_bytes=state_bytes, specs=used, saved=less)

    def taken(self, chosen: Collection[Candidate]) -> int:
        """What one candidate per block takes in the budget's own measure."""
        state_bytes = sum(c.cost.state_bytes for c in chosen)
        if self.budget.memory_bytes is None:
            return state_bytes
        return self.peak_bytes({c.block: c.spec for c in chosen}, state_bytes=state_bytes)

    # -- proposing ------------------------------------------------------------------------------------------------

    def candidates(
        self, *, risk: str, profile: Profile | None, count: Savings | None = None
    ) -> dict[str, tuple[Candidate, ...]]:
        """Every spec that applies to each block, dominated ones included, cheapest first."""
        count = self._counts[0] if count is None else count
        base = self._once(
            ("candidates", risk),
            (profile, self.latency, self.budget),
            lambda: build_candidates(
                self.blocks,
                specs=self.specs,
                rules=self.rules,
                storages=STORAGES,
                risk=RISKS[risk],
                profile=profile,
                weights=self.settings.risk_weights,
                latency=self.latency if self.budget.step_time is not None else None,
                keep_fp32_roles=self.settings.keep_fp32_roles,
            ),
        )
        footprint = self.footprint
        if count == "none" or footprint is None:
            return base
        return self._once(
            ("charged", risk, count),
            (base, footprint.moments),
            lambda: charged(base, blocks=self.blocks, specs=self.specs, count=count, footprint=footprint),
        )

    def _once(self, name: Any, basis: tuple[Any, ...], make: Any) -> Any:
        """What `make` gave for the very same values of `basis`."""
        made = self._made.get(name)
        if made is None or not all(a is b for a, b in zip(made[0], basis, strict=True)):
            made = self._made[name] = (basis, make())
        return made[1]

    def propose(self, *, risk: str | None = None, profile: Profile | None = None) -> Plan:
        """The allocation of least risk within the budget. `risk` defaults to the settings' one.

        A risk that needs a profile falls back to `prior` while there is none. Raises InfeasibleBudgetError.
        """
        name = risk or self.settings.risk
        if RISKS[name].needs and profile is None:
            name = "prior"
        allocator = ALLOCATORS[self.settings.allocator]
        tries = list(self._tries(risk=name, profile=profile))
        quick = len(tries) > 1 and len(self.blocks) > FEW_BLOCKS and allocator.name == "exact"
        found: list[tuple[Plan, Try]] = []
        refused: list[tuple[NoFeasibleAllocation, Try]] = []
        settled: set[int | None] = set()  # levels on which savings, counted boldly, have led to a plan that fits
        for one in tries:
            if one.base_peak in settled:
                continue
            by = ALLOCATORS["lagrangian"] if quick else allocator
            try:
                plan = self._attempt(one, allocator=by, risk=name, profile=profile)
            except NoFeasibleAllocation as error:
                refused.append((error, one))
                continue
            if self._fits(plan):
                found.append((plan, one))
                settled.add(one.base_peak)
        if not found:
            return self._last_resort(tries, refused=refused, risk=name, profile=profile)
        plan, one = min(found, key=lambda entry: entry[0].allocation.risk)
        if quick:
            proven = self._attempt(one, allocator=allocator, risk=name, profile=profile)
            plan = (
                proven if self._fits(proven) else replace(plan, allocation=replace(plan.allocation, allocator="exact"))
            )
        return plan

    def _fits(self, plan: Plan) -> bool:
        return self.budget.memory_bytes is None or plan.peak_bytes <= self.budget.memory_bytes

    def _tries(self, *, risk: str, profile: Profile | None) -> Iterator[Try]:
        """Every level of room for temporaries on which every block can run something, savings counted in every way."""
        by_level: list[tuple[int | None, frozenset[str]]] = [(None, frozenset(self.specs))]
        if self.budget.memory_bytes is not None and self.footprint is not None:
            by_level = list(levels(self.footprint, specs=self.specs))
        for base_peak, specs in by_level:
            for count in self._counts:
                everything = self.candidates(risk=risk, profile=profile, count=count)
                pool = {block: tuple(c for c in options if c.spec in specs) for block, options in everything.items()}
                if all(pool.values()):
                    yield Try(pool=pool, limits=self.limits(base_peak=base_peak), base_peak=base_peak)

    def _attempt(self, one: Try, *, allocator: Allocator, risk: str, profile: Profile | None) -> Plan:
        """The plan of one try, which need not fit: savings may have been counted too boldly."""
        pool = one.pool if allocator.full else undominated(one.pool, with_time=self.budget.step_time is not None)
        penalty = self.settings.merge_penalty
        segments = None
        if penalty is not None and profile is not None:
            segments = tied(pool, blocks=self.blocks, profile=profile, penalty=penalty)
        allocation = allocator(segments or pool, limits=one.limits, seed=self.settings.seed)
        if segments:
            allocation = untied(allocation, pool)
        return self._plan(allocation, pool, limits=one.limits, risk=risk, profile=profile)

    def _last_resort(
        self,
        tries: Sequence[Try],
        *,
        refused: Sequence[tuple[NoFeasibleAllocation, Try]],
        risk: str,
        profile: Profile | None,
    ) -> Plan:
        """The allocation of fewest bytes if it fits after all, as charges are upper bounds; else raises what would."""
        free = not ALLOCATORS[self.settings.allocator].full and self.budget.step_time is None
        least = min((one.least() for one in tries), key=self.taken)
        if free and len(self._counts) > 1:
            last = allocated(least, allocator=self.settings.allocator)
            plan = self._plan(last, tries[-1].pool, limits=tries[-1].limits, risk=risk, profile=profile)
            if self._fits(plan):
                return plan
            raise self._refusal(tries[-1].limits, least_bytes=self.taken(least))
        if not refused:
            raise self._refusal(tries[-1].limits, least_bytes=self.taken(least))
        error, one = min(refused, key=lambda r: self.measure(r[0].least_state_bytes, base_peak=r[1].base_peak))
        least_bytes = self.measure(error.least_state_bytes, base_peak=one.base_peak)
        bytes_fit = one.limits.state_bytes is None or error.least_state_bytes <= one.limits.state_bytes
        if one.limits.step_s is not None and bytes_fit:
            assert self.latency is not None
            raise too_slow(
                self.budget,
                latency=self.latency,
                least_step_s=error.least_step_s,
                allowed_bytes=one.limits.state_bytes,
                least_bytes=least_bytes,
            )
        raise self._refusal(one.limits, least_bytes=least_bytes)

    def _refusal(self, limits: Limits, *, least_bytes: int) -> InfeasibleBudgetError:
        allowed = self.budget.memory_bytes if self.budget.memory_bytes is not None else limits.state_bytes
        assert allowed is not None
        return too_small(
            self.budget,
            allowed_bytes=allowed,
            least_bytes=least_bytes,
            state_bytes_adamw=self.state_bytes_adamw,
            allocator=self.settings.allocator,
            footprint=self.footprint,
        )

    def adopt(
        self, choices: Mapping[str, str], *, risk: str, profile: Profile | None, gap: float | None = None
    ) -> Plan:
        """The plan that runs `choices` (from a checkpoint) if they meet the budget, else a new proposal."""
        everything = self.candidates(risk=risk, profile=profile)
        by_spec = {block: {c.spec: c for c in options} for block, options in everything.items()}
        if set(choices) == set(by_spec) and all(choices[block] in by_spec[block] for block in by_spec):
            chosen = [by_spec[block][choices[block]] for block in by_spec]
            allocation = allocated(chosen, allocator=self.settings.allocator, gap=gap)
            limits = self.limits()
            plan = self._plan(allocation, everything, limits=limits, risk=risk, profile=profile)
            whole = self.budget.memory_bytes is not None or limits.state_bytes is None
            if self._fits(plan) if whole else allocation.state_bytes <= (limits.state_bytes or 0):
                return plan
        return self.propose(risk=risk, profile=profile)

    def least(self) -> Plan:
        """The plan of fewest state bytes, whatever the budget: for a first step whose activations are not yet known."""
        pool = self.candidates(risk="prior", profile=None)
        chosen = [min(options, key=lambda c: (c.cost.state_bytes, c.risk.total)) for options in pool.values()]
        allocation = allocated(chosen, allocator="least_state")
        return self._plan(allocation, pool, limits=Limits(), risk="prior", profile=None)

    def price(self, choices: Mapping[str, str], *, risk: str, profile: Profile | None) -> float:
        """Risk of an allocation that is already in use, under another risk model or a newer profile."""
        by_spec = {
            block: {c.spec: c for c in options}
            for block, options in self.candidates(risk=risk, profile=profile).items()
        }
        return sum(by_spec[block][spec].risk.total for block, spec in choices.items())

    # -- results --------------------------------------------------------------------------------------------------

    def _plan(
        self,
        allocation: Allocation,
        pool: Mapping[str, Sequence[Candidate]],
        *,
        limits: Limits,
        risk: str,
        profile: Profile | None,
    ) -> Plan:
        """A plan with its range of budgets over all levels: one that does without a spec is bound by that."""
        everything = self.candidates(risk=risk, profile=profile)
        least, useful = self._once(
            ("range", risk),
            (profile, self.latency, self.budget, self.footprint),
            lambda: (
                min(self.taken(one.least()) for one in self._tries(risk=risk, profile=profile)),
                self.taken([min(options, key=_by_risk) for options in everything.values()]),
            ),
        )
        allowed = self.budget.memory_bytes if self.budget.memory_bytes is not None else limits.state_bytes
        return Plan(
            blocks=self.blocks,
            candidates={block: tuple(options) for block, options in pool.items()},
            allocation=allocation,
            budget=self.budget,
            limits=limits,
            risk_model=risk,
            binding=allowed is not None and useful > allowed,
            peak_bytes=self.peak_bytes(allocation.choices, state_bytes=allocation.state_bytes),
            state_bytes_adamw=self.state_bytes_adamw,
            least_feasible_bytes=least,
            most_useful_bytes=useful,
            reasons=reasons(allocation, pool),
        )


def _by_risk(candidate: Candidate) -> tuple[float, int]:
    return candidate.risk.total, candidate.cost.charged_bytes
