"""Stages 3 to 9 as one object: parameters and a budget in, a Plan out; what `mode=plan` runs.

A Planner holds what does not change during a run (blocks, catalogue, budget, footprint); `propose` is called once at
the start with role priors, and again whenever a new profile is there. Both answers come from the same code.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from baoc.allocation import ALLOCATORS, NoFeasibleAllocation
from baoc.blocks import merge_similar, partition
from baoc.candidates import build_candidates, undominated
from baoc.catalogue import SPECS, STORAGES, select
from baoc.cost import adamw_state_bytes
from baoc.errors import BadInputError, InfeasibleBudgetError
from baoc.explain import reasons
from baoc.risk import RISKS
from baoc.rules import rule_infos
from baoc.types import (
    Allocation,
    Block,
    Budget,
    Candidate,
    Cost,
    Footprint,
    LatencyTable,
    Limits,
    ParamInfo,
    Plan,
    Profile,
    Risk,
    Role,
)
from baoc.units import format_bytes

MAX_LEVELS = 6  # of room for the temporaries of a step; each costs an allocation
ADVICE_MEMORY = (
    "a smaller micro_batch (activations)",
    "a smaller model.size",
    "more catalogue.specs, or fewer roles in catalogue.keep_fp32_roles (state)",
)
ADVICE_STATE = (
    "more catalogue.specs",
    "fewer roles in catalogue.keep_fp32_roles",
    "allocator=exact, if another was set",
)


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
        if budget.memory_bytes is not None and footprint is None:
            raise BadInputError(
                f"budget {budget.name} limits device memory, which needs a footprint: give a probe (a callable that "
                "runs one forward and backward), or use a state fraction such as state_25"
            )

    def count_profile(self, num_bytes: int) -> None:
        """Puts a profiler's buffers into the footprint: they live beside the activations while a run warms up."""
        if self.footprint is not None:
            self.footprint = replace(self.footprint, profile_bytes=num_bytes)

    # -- limits ---------------------------------------------------------------------------------------------------

    def limits(self, *, base_peak: int | None = None) -> Limits:
        """The budget as totals over the blocks: what is left of it for optimizer state and for optimizer seconds.

        `base_peak` is the predicted peak without state; by default that of forward and backward.
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

    def _levels(self) -> list[tuple[int | None, frozenset[str]]]:
        """(Peak without state, specs whose step stays below it), from few specs to all.

        More than one level only where some spec's temporaries would pass the peak of forward and backward; then a plan
        may either do without that spec or leave room for it.
        """
        if self.budget.memory_bytes is None or self.footprint is None:
            return [(None, frozenset(self.specs))]
        peaks = {spec: self.footprint.peak_bytes(state_bytes=0, specs=(spec,)) for spec in self.specs}
        levels = sorted(set(peaks.values()))
        if len(levels) > MAX_LEVELS:
            levels = [levels[i * (len(levels) - 1) // (MAX_LEVELS - 1)] for i in range(MAX_LEVELS)]
        return [(level, frozenset(spec for spec, peak in peaks.items() if peak <= level)) for level in levels]

    def measure(self, state_bytes: int, *, base_peak: int | None = None) -> int:
        """Optimizer state bytes in the budget's own measure: peak bytes under a memory budget, else state bytes."""
        if self.budget.memory_bytes is None or self.footprint is None:
            return state_bytes
        return state_bytes + (self.footprint.peak_bytes(state_bytes=0) if base_peak is None else base_peak)

    # -- proposing ------------------------------------------------------------------------------------------------

    def candidates(
        self, *, risk: str, profile: Profile | None, specs: frozenset[str] | None = None
    ) -> dict[str, tuple[Candidate, ...]]:
        """Every spec (of `specs`) that applies to each block, dominated ones included, cheapest first."""
        return build_candidates(
            self.blocks,
            specs={name: spec for name, spec in self.specs.items() if specs is None or name in specs},
            rules=self.rules,
            storages=STORAGES,
            risk=RISKS[risk],
            profile=profile,
            weights=self.settings.risk_weights,
            latency=self.latency if self.budget.step_time is not None else None,
            keep_fp32_roles=self.settings.keep_fp32_roles,
        )

    def propose(self, *, risk: str | None = None, profile: Profile | None = None) -> Plan:
        """The allocation of least risk within the budget. `risk` defaults to the settings' one.

        A risk that needs a profile falls back to `prior` while there is none. Raises InfeasibleBudgetError.
        """
        name = risk or self.settings.risk
        if RISKS[name].needs and profile is None:
            name = "prior"
        plans: list[Plan] = []
        refusals: list[tuple[NoFeasibleAllocation, Limits, int | None]] = []
        for base_peak, specs in self._levels():
            limits = self.limits(base_peak=base_peak)
            try:
                everything = self.candidates(risk=name, profile=profile, specs=specs)
            except BadInputError:  # some block can run none of these few
                continue
            try:
                plans.append(self._allocate(everything, limits=limits, risk=name, profile=profile))
            except NoFeasibleAllocation as error:
                refusals.append((error, limits, base_peak))
        if plans:
            return self._in_full(min(plans, key=lambda plan: plan.allocation.risk), risk=name, profile=profile)
        if not refusals:
            self.candidates(risk=name, profile=profile)  # raises what is wrong with the catalogue
        error, limits, base_peak = min(refusals, key=lambda r: self.measure(r[0].least_state_bytes, base_peak=r[2]))
        raise self._infeasible(error, limits=limits, base_peak=base_peak)

    def _in_full(self, plan: Plan, *, risk: str, profile: Profile | None) -> Plan:
        """The plan with its range of budgets taken over all levels: one that does without a spec is bound by that."""
        levels = self._levels()
        if len(levels) == 1:
            return plan
        base_peak, specs = levels[-1]
        options = self.candidates(risk=risk, profile=profile, specs=specs).values()
        useful = self.measure(sum(min(c, key=_by_risk).cost.state_bytes for c in options), base_peak=base_peak)
        assert self.budget.memory_bytes is not None
        return replace(plan, most_useful_bytes=useful, binding=useful > self.budget.memory_bytes)

    def _allocate(
        self,
        everything: Mapping[str, tuple[Candidate, ...]],
        *,
        limits: Limits,
        risk: str,
        profile: Profile | None,
    ) -> Plan:
        allocator = ALLOCATORS[self.settings.allocator]
        pool = everything if allocator.full else undominated(everything, with_time=self.budget.step_time is not None)
        tied = self._tied(pool, profile)
        allocation = allocator(tied or pool, limits=limits, seed=self.settings.seed)
        if tied:
            allocation = self._untie(allocation, pool)
        return self._plan(allocation, pool, limits=limits, risk=risk)

    def adopt(
        self, choices: Mapping[str, str], *, risk: str, profile: Profile | None, gap: float | None = None
    ) -> Plan:
        """The plan that runs `choices` (from a checkpoint) if they meet the budget, else a new proposal."""
        everything = self.candidates(risk=risk, profile=profile)
        by_spec = {block: {c.spec: c for c in options} for block, options in everything.items()}
        limits = self.limits()
        known_choices = set(choices) == set(by_spec) and all(choices[block] in by_spec[block] for block in by_spec)
        if known_choices:
            chosen = [by_spec[block][choices[block]] for block in by_spec]
            allocation = Allocation(
                choices={c.block: c.spec for c in chosen},
                state_bytes=sum(c.cost.state_bytes for c in chosen),
                step_s=sum(c.cost.step_s for c in chosen),
                risk=sum(c.risk.total for c in chosen),
                allocator=self.settings.allocator,
                gap=gap,
            )
            plan = self._plan(allocation, everything, limits=limits, risk=risk)
            memory = self.budget.memory_bytes
            if (limits.state_bytes is None or allocation.state_bytes <= limits.state_bytes) and (
                memory is None or plan.peak_bytes <= memory
            ):
                return plan
        return self.propose(risk=risk, profile=profile)

    def least(self) -> Plan:
        """The plan of fewest state bytes, whatever the budget: for a first step whose activations are not yet known."""
        pool = self.candidates(risk="prior", profile=None)
        chosen = [min(options, key=lambda c: (c.cost.state_bytes, c.risk.total)) for options in pool.values()]
        allocation = Allocation(
            choices={c.block: c.spec for c in chosen},
            state_bytes=sum(c.cost.state_bytes for c in chosen),
            risk=sum(c.risk.total for c in chosen),
            allocator="least_state",
        )
        return self._plan(allocation, pool, limits=Limits(), risk="prior")

    def price(self, choices: Mapping[str, str], *, risk: str, profile: Profile | None) -> float:
        """Risk of an allocation that is already in use, under another risk model or a newer profile."""
        by_spec = {
            block: {c.spec: c for c in options}
            for block, options in self.candidates(risk=risk, profile=profile).items()
        }
        return sum(by_spec[block][spec].risk.total for block, spec in choices.items())

    # -- results --------------------------------------------------------------------------------------------------

    def _plan(
        self, allocation: Allocation, pool: Mapping[str, Sequence[Candidate]], *, limits: Limits, risk: str
    ) -> Plan:
        least = sum(min(c.cost.state_bytes for c in options) for options in pool.values())
        useful = sum(min(options, key=_by_risk).cost.state_bytes for options in pool.values())
        specs = tuple(sorted(set(allocation.choices.values())))
        return Plan(
            blocks=self.blocks,
            candidates={block: tuple(options) for block, options in pool.items()},
            allocation=allocation,
            budget=self.budget,
            limits=limits,
            risk_model=risk,
            binding=limits.state_bytes is not None and useful > limits.state_bytes,
            peak_bytes=self.footprint.peak_bytes(state_bytes=allocation.state_bytes, specs=specs)
            if self.footprint is not None
            else allocation.state_bytes,
            state_bytes_adamw=self.state_bytes_adamw,
            least_feasible_bytes=self.measure(least),
            most_useful_bytes=self.measure(useful),
            reasons=reasons(allocation, pool),
        )

    def _infeasible(
        self, error: NoFeasibleAllocation, *, limits: Limits, base_peak: int | None
    ) -> InfeasibleBudgetError:
        if limits.step_s is not None and (limits.state_bytes is None or error.least_state_bytes <= limits.state_bytes):
            assert self.latency is not None
            whole_s = self.latency.base_step_s + error.least_step_s
            ratio = whole_s / max(self.latency.reference_step_s, 1e-12)
            return InfeasibleBudgetError(
                f"budget {self.budget.name} with step_time={self.budget.step_time} cannot be met: the fastest "
                f"allocation steps in {whole_s * 1e3:.3g} ms, {ratio:.3f} times the "
                f"{self.latency.reference_step_s * 1e3:.3g} ms of fused AdamW. Give "
                f"budget.step_time={ratio * 1.05:.2f} or more, or more memory",
                budget_bytes=limits.state_bytes or 0,
                least_feasible_bytes=self.measure(error.least_state_bytes, base_peak=base_peak),
                advice=("a larger budget.step_time", "more memory, so that slower compact specs are not needed"),
            )
        memory = self.budget.memory_bytes is not None
        advice = ADVICE_MEMORY if memory else ADVICE_STATE
        least = self.measure(error.least_state_bytes, base_peak=base_peak)
        asked = self.budget.memory_bytes if memory else limits.state_bytes
        assert asked is not None
        unit = "of device memory" if memory else "of optimizer state"
        fraction = "" if memory else f" (state_fraction={least / max(self.state_bytes_adamw, 1):.4f})"
        return InfeasibleBudgetError(
            f"budget {self.budget.name} cannot be met: it allows {format_bytes(asked)} {unit} ({asked} bytes), and the "
            f"least feasible is {format_bytes(least)} ({least} bytes){fraction} with "
            f"allocator={self.settings.allocator}. What would lower it: {'; '.join(advice)}",
            budget_bytes=asked,
            least_feasible_bytes=least,
            advice=advice,
        )

    # -- segments: neighbours that behave alike share one spec -----------------------------------------------------

    def _tied(
        self, pool: Mapping[str, Sequence[Candidate]], profile: Profile | None
    ) -> dict[str, tuple[Candidate, ...]] | None:
        """Candidates of whole segments, a segment named by its blocks joined with '+'; None where nothing is merged."""
        if self.settings.merge_penalty is None or profile is None:
            return None
        segments = merge_similar(self.blocks, stats=profile.stats, penalty=self.settings.merge_penalty)
        return {"+".join(names): _summed("+".join(names), [pool[name] for name in names]) for names in segments}

    def _untie(self, allocation: Allocation, pool: Mapping[str, Sequence[Candidate]]) -> Allocation:
        choices = {block: spec for names, spec in allocation.choices.items() for block in names.split("+")}
        return replace(allocation, choices={block: choices[block] for block in pool})


def _by_risk(candidate: Candidate) -> tuple[float, int]:
    return candidate.risk.total, candidate.cost.state_bytes


def _summed(name: str, options: Sequence[Sequence[Candidate]]) -> tuple[Candidate, ...]:
    """The specs that every block of a segment may run, with costs and risks added up, cheapest first."""
    by_spec = [{c.spec: c for c in block} for block in options]
    shared = [spec for spec in by_spec[0] if all(spec in block for block in by_spec[1:])]
    merged = []
    for spec in shared:
        parts = [block[spec] for block in by_spec]
        terms = {t: sum(p.risk.terms.get(t, 0.0) for p in parts) for t in parts[0].risk.terms}
        cost = Cost(
            state_bytes=sum(p.cost.state_bytes for p in parts),
            transfer_bytes=sum(p.cost.transfer_bytes for p in parts),
            step_s=sum(p.cost.step_s for p in parts),
        )
        risk = Risk(total=sum(p.risk.total for p in parts), terms=terms)
        merged.append(Candidate(block=name, spec=spec, cost=cost, risk=risk))
    return tuple(sorted(merged, key=lambda c: c.cost.state_bytes))
