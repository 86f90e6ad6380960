"""Stages 3 to 9 as one object: parameters and a budget in, a Plan out; what `mode=plan` runs.

A Planner holds what does not change during a run (blocks, catalogue, budget, footprint); `propose` is called once at
the start with role priors, and again whenever a new profile is there. Both answers come from the same code.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from baoc.core.blocks import partition
from baoc.core.catalogue import STORAGES, select
from baoc.core.measured import AUTO, KAPPA, families, family_of
from baoc.core.recipes import RECIPES, Recipe
from baoc.core.rule_tags import RULE_INFOS
from baoc.errors import BadInputError
from baoc.planning.allocators import ALLOCATORS, NoFeasibleAllocation
from baoc.planning.allocators.base import Allocator
from baoc.planning.allocators.hosted import HostedAllocator
from baoc.planning.allocators.recipe import Pick, RecipeAllocator, pick
from baoc.planning.candidates import build_candidates, undominated
from baoc.planning.cost import adamw_state_bytes, cost, whole_step_seconds
from baoc.planning.limits import Savings, Try, all_tries, allocated, charged, least_of, saved_by, savings, spend
from baoc.planning.measured import basis_of, choose, useful_bytes
from baoc.planning.messages import last_resort, reasons
from baoc.planning.placement import Way, check_named, placed, staging_bytes, with_host
from baoc.planning.risk import RISKS, RiskModel, risk_of
from baoc.planning.tied_blocks import tied, untied
from baoc.planning.transfer import PIECE_BYTES, STORED, drain_seconds, pinned_bytes, pinned_room
from baoc.types import (
    Allocation,
    Basis,
    Block,
    Budget,
    Candidate,
    Footprint,
    LatencyTable,
    Limits,
    LinkRates,
    ParamInfo,
    Plan,
    Profile,
    Reason,
    Role,
    StateKind,
)

MEASURED = "measured"
MOST_MADE = 64  # sets of candidates that are kept
FEW_BLOCKS = 64  # with more, every level is tried by prices, and only the best one proven


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerSettings:
    """What a user chooses about planning; defaults are those of `conf/`.

    `risk="measured"` chooses by measurements of the `family`; where there are none it is `prior`.

    A `recipe` chooses in place of an allocator: it brings its own rows of the catalogue, runs them on every role, and
    has blocks by part where it tells parts apart. Blocks made otherwise than by layer and role stay as they are.
    """

    specs: tuple[str, ...] = ("*",)
    keep_fp32_roles: tuple[Role, ...] = (Role.EMBEDDING, Role.HEAD, Role.NORM)
    blocks_by: str = "layer_role"
    patterns: tuple[tuple[str, str], ...] = ()
    merge_penalty: float | None = None  # None: blocks that behave alike are not tied together
    risk: str = "prior"
    risk_weights: Mapping[str, float] = field(default_factory=dict)
    allocator: str = "exact"
    every: int | None = None  # of allocator=host_every_kth
    flush_only: bool = False  # updated blocks' gradients come to the host in backward, and wait there
    seed: int = 0
    measured_specs: tuple[str, ...] = ()  # rows beside `specs` that risk=measured alone may choose
    recipe: Recipe | None = None
    family: str | None = None  # of risk=measured: AUTO goes by the network, None has no measurements

    def __post_init__(self) -> None:
        if self.recipe is None:
            if self.allocator == "recipe":
                raise BadInputError(
                    f"allocator=recipe needs a recipe: name one with recipe=NAME, such as {', '.join(RECIPES)}, or a "
                    "FILE.yaml"
                )
            return
        if self.allocator not in ("exact", "recipe"):
            raise BadInputError(
                f"recipe={self.recipe.name} and allocator={self.allocator} exclude each other: a recipe says what "
                "every block runs, so that nothing is left to an allocator. Leave one out"
            )
        own: dict[str, Any] = {"allocator": "recipe", "specs": self.recipe.rows, "keep_fp32_roles": ()}
        own["measured_specs"] = ()
        if self.blocks_by == "layer_role" and self.recipe.tells_parts:
            own["blocks_by"] = "layer_part"
        for key, value in own.items():
            object.__setattr__(self, key, value)


def known(name: str, options: Mapping[str, object], what: str) -> str:
    """`name` if it is one of `options`, else BadInputError that lists them."""
    if name not in options:
        raise BadInputError(f"unknown {what} {name!r}: choose one of {', '.join(options)}")
    return name


def may_place(settings: PlannerSettings, *, budget: Budget) -> bool:
    """Whether some spec that is offered keeps its states on the host."""
    named = any(map(placed, select(settings.specs).values()))
    return named or budget.host_memory_bytes is not None or bool(ALLOCATORS[settings.allocator].traits.rows)


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
        self.declared = declared
        self.budget = budget
        self.footprint = footprint
        self.latency = latency
        self.rules = RULE_INFOS
        check_named(settings.specs, rules=self.rules)
        self.allocator = ALLOCATORS[settings.allocator]
        if settings.every is not None and isinstance(self.allocator, HostedAllocator):
            self.allocator = replace(self.allocator, every=settings.every)
        chosen = select([*settings.specs, *self.allocator.traits.rows])
        self.offered = with_host(chosen) if budget.host_memory_bytes is not None else chosen
        self.blocks: tuple[Block, ...] = partition(
            self.params, declared=declared, patterns=settings.patterns, by=settings.blocks_by
        )
        if settings.recipe is not None:
            absent = [name for name in settings.recipe.blocks if name not in {block.name for block in self.blocks}]
            if absent:
                some = ", ".join(absent[:3]) + (", ..." if len(absent) > 3 else "")
                raise BadInputError(
                    f"recipe {settings.recipe.title} names blocks that this network does not have ({some}): it is a "
                    "plan of another network or another blocks.by. Use it there, or give specs by role"
                )
            self.allocator = RecipeAllocator(picks={b.name: pick(b, recipe=settings.recipe) for b in self.blocks})
        self.state_bytes_adamw = adamw_state_bytes(self.blocks)
        self.num_params = sum(block.numel for block in self.blocks)
        named = family_of(self.params) if settings.family == AUTO else settings.family
        self.family = families().get(named or "") if settings.risk == MEASURED else None
        more = settings.measured_specs if self.family is not None and self._chooses else ()
        self.specs = {**self.offered, **select(more)} if more else self.offered
        self.kappa = settings.risk_weights.get("kappa", KAPPA)
        self._made: dict[Any, tuple[tuple[Any, ...], Any]] = {}  # by risk and count; made anew where its basis changed
        if budget.memory_bytes is not None and footprint is None:
            raise BadInputError(
                f"budget {budget.name} limits device memory, which needs a footprint: give a probe (a callable that "
                "runs one forward and backward), or use a state fraction such as state_25"
            )

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_made": {}}

    def with_settings(self, settings: PlannerSettings) -> "Planner":
        """The same network under the same budget, planned otherwise."""
        return Planner(
            self.params,
            budget=self.budget,
            settings=settings,
            declared=self.declared,
            footprint=self.footprint,
            latency=self.latency,
        )

    def count_profile(self, num_bytes: int, *, temporary_bytes: int = 0) -> None:
        """Puts a profiler's buffers into the footprint: they live beside the activations while a run warms up.

        `temporary_bytes`: what it holds for a moment when it samples.
        """
        if self.footprint is not None:
            self.footprint = replace(self.footprint, profile_bytes=num_bytes, profile_temporary_bytes=temporary_bytes)

    # -- limits ---------------------------------------------------------------------------------------------------

    @property
    def places(self) -> bool:
        """Whether some spec keeps its states on the host."""
        return any(map(placed, self.specs.values()))

    @property
    def host_counts(self) -> bool:
        """Whether the device is the host, so that what is kept there counts in its memory."""
        return self.footprint is not None and self.footprint.device.startswith("cpu")

    def limits(self, *, base_peak: int | None = None, way: Way | None = None) -> Limits:
        """The budget as totals over the blocks: what is left of it for charged bytes, for seconds, and on the host.

        `base_peak` is the predicted peak without state, with native weights; by default that of forward and backward.
        `way`: how far host placement goes, for which staging has its room.
        """
        way = way or Way()
        state_bytes = None
        if self.budget.memory_bytes is not None:
            assert self.footprint is not None
            base_peak = self.footprint.peak_bytes(state_bytes=0) if base_peak is None else base_peak
            state_bytes = self.budget.memory_bytes - base_peak
        elif self.budget.state_fraction is not None:
            state_bytes = int(self.budget.state_fraction * self.state_bytes_adamw)
        step_s = None
        if self.budget.step_time is not None and self.latency is not None:
            fixed_s = self.latency.base_step_s + self.latency.step_s
            step_s = self.budget.step_time * self.latency.reference_step_s - fixed_s
        host_bytes, beside_s = None, None
        if self.budget.host_memory_bytes is not None:
            host_bytes = pinned_room(self.budget.host_memory_bytes) - way.host_bytes
        if step_s is not None and self.latency is not None and self.places:
            piece = max(way.slab_bytes and PIECE_BYTES, way.slab_bytes)
            beside_s = max(step_s + self.latency.hidden_s - drain_seconds(piece, link=self.link), 0.0)
        return Limits(state_bytes=state_bytes, step_s=step_s, host_bytes=host_bytes, link_s=beside_s, host_s=beside_s)

    @property
    def link(self) -> LinkRates:
        """Rates of this machine where seconds are limited, else stored ones, which decide between equals."""
        measured = self.latency.link if self.latency is not None and self.budget.step_time is not None else None
        return measured or STORED

    @property
    def counts(self) -> tuple[Savings, ...]:
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
        """Predicted peak of an allocation; its state bytes where no footprint is known.

        `state_bytes` are those on the device; staging comes to them.
        """
        if self.footprint is None:
            return state_bytes
        used = tuple(sorted(set(choices.values())))
        less = saved_by(choices, blocks=self.blocks, specs=self.specs)
        held = state_bytes + self.staging_bytes(choices)
        return self.footprint.peak_bytes(state_bytes=held, specs=used, saved=less)

    def staging_bytes(self, choices: Mapping[str, str]) -> int:
        """Bytes of the device's buffers, through which states pass that are kept on the host."""
        device, host = self._staging(choices)
        return device + host if self.host_counts else device

    def _staging(self, choices: Mapping[str, str]) -> tuple[int, int]:
        flushed = self.settings.flush_only
        return staging_bytes(choices, blocks=self.blocks, specs=self.specs, rules=self.rules, flushed=flushed)

    def host_bytes(self, allocation: Allocation) -> int:
        """Pinned host memory of an allocation: its states there, and buffers of blocks that are updated there."""
        return pinned_bytes(allocation.host_bytes + self._staging(allocation.choices)[1])

    def taken(self, chosen: Collection[Candidate]) -> int:
        """What one candidate per block takes in the budget's own measure."""
        state_bytes = sum(c.cost.state_bytes + c.cost.shared_bytes for c in chosen)
        if self.budget.memory_bytes is None:
            return state_bytes
        return self.peak_bytes({c.block: c.spec for c in chosen}, state_bytes=state_bytes)

    def step_seconds(self, choices: Mapping[str, str]) -> float:
        """Predicted seconds of a whole step of an allocation; NaN where the latency table lacks one of its specs."""
        if self.latency is None:
            return math.nan
        seconds = whole_step_seconds(choices, blocks=self.blocks, specs=self.specs, latency=self.latency)
        return max(seconds, self._beside_seconds(choices, latency=self.latency)) if self.places else seconds

    def _beside_seconds(self, choices: Mapping[str, str], *, latency: LatencyTable) -> float:
        """Predicted seconds of a whole step whose device never waits: see `baoc.planning.transfer`."""
        link_s, host_s, largest = 0.0, 0.0, 0
        for block in self.blocks:
            spec = self.specs[choices[block.name]]
            if placed(spec):
                spent = cost(block, spec=spec, rule=self.rules[spec.rule], link=latency.link or STORED)
                link_s, host_s, largest = link_s + spent.link_s, host_s + spent.host_s, max(largest, spent.in_bytes)
        if not largest:
            return 0.0
        drain_s = drain_seconds(max(largest, PIECE_BYTES), link=latency.link or STORED)
        return latency.base_step_s - latency.hidden_s + max(link_s, host_s) + drain_s

    @property
    def _lines(self) -> Mapping[str, float] | None:
        """What of the latency table candidates depend on: nothing where seconds are not limited."""
        return self.latency.per_element_s if self.latency is not None and self.budget.step_time is not None else None

    # -- proposing ------------------------------------------------------------------------------------------------

    def candidates(
        self, *, risk: str, profile: Profile | None, count: Savings | None = None, stand_ins: bool = True
    ) -> dict[str, tuple[Candidate, ...]]:
        """Every spec that applies to each block, dominated ones included, cheapest first.

        `stand_ins`: with momentum in 8 bits on roles that keep fp32, which run it only where they would lose it.
        """
        count = self.counts[0] if count is None else count
        profile = _read_by(risk, profile)
        picks = self.allocator.picks if isinstance(self.allocator, RecipeAllocator) else None
        base = self._once(
            ("candidates", risk, self.host_counts, stand_ins),
            (profile, self._lines, self.budget),
            lambda: build_candidates(
                self.blocks,
                specs=self.specs if risk == MEASURED else self.offered,
                rules=self.rules,
                storages=STORAGES,
                risk=self._risk_model(risk),
                profile=profile,
                weights=self.settings.risk_weights,
                latency=self.latency if self.budget.step_time is not None else None,
                link=self.link,
                shared=self.host_counts,
                keep_fp32_roles=self.settings.keep_fp32_roles if risk != MEASURED else (),
                stand_ins=stand_ins,
                only={} if picks is None else {block: one.spec for block, one in picks.items()},
            ),
        )
        footprint = self.footprint
        if count == "none" or footprint is None:
            return base
        saved = self._once(
            ("savings", count),
            (footprint.intervals, footprint.gradient_order),
            lambda: savings(self.blocks, specs=self.specs, count=count, footprint=footprint),
        )
        # Footprints of different micro-batches mostly save the same, so the candidates are kept by what is saved.
        return self._once(
            ("charged", risk, saved, stand_ins),
            (base,),
            lambda: charged(base, blocks=self.blocks, specs=self.specs, saved=saved),
        )

    def _risk_model(self, name: str) -> RiskModel:
        return risk_of(self.blocks, family=self.family, kappa=self.kappa) if name == MEASURED else RISKS[name]

    def _once(self, name: Any, basis: tuple[Any, ...], make: Any) -> Any:
        """What `make` gave for the very same values of `basis`."""
        made = self._made.get(name)
        if made is None or not all(a is b for a, b in zip(made[0], basis, strict=True)):
            if len(self._made) >= MOST_MADE:  # of footprints and profiles of long ago
                self._made.clear()
            made = self._made[name] = (basis, make())
        return made[1]

    def propose(self, *, risk: str | None = None, profile: Profile | None = None) -> Plan:
        """The allocation of least risk within the budget. `risk` defaults to the settings' one.

        A risk that needs a profile falls back to `prior` while there is none, and so does `measured` where nothing that
        was measured fits, or an allocator leaves no choice. Raises InfeasibleBudgetError.
        """
        name = risk or self.settings.risk
        if name == MEASURED:
            basis = (self.budget, self.footprint, self.latency)  # no profile: a later decision mostly finds it made
            plan = self._once((MEASURED, "plan"), basis, self._measured)
            if plan is not None:
                return plan
            name = "prior"
        if RISKS[name].needs and profile is None:
            name = "prior"
        plan = self._propose(risk=name, profile=profile, stand_ins=False)
        return plan if self._keeps_momentum(plan) else self._propose(risk=name, profile=profile, stand_ins=True)

    def _keeps_momentum(self, plan: Plan) -> bool:
        """Whether roles that keep fp32 did not lose their momentum by it, where the allocator had a choice."""
        if not self._chooses:
            return True
        kept = [block for block in self.blocks if block.role in self.settings.keep_fp32_roles]
        rules = {self.rules[self.specs[plan.allocation.choices[block.name]].rule] for block in kept}
        return all(any(state.kind is StateKind.M for state in rule.states) for rule in rules)

    def _propose(self, *, risk: str, profile: Profile | None, stand_ins: bool) -> Plan:
        name, allocator = risk, self.allocator
        tries = list(all_tries(self, risk=name, profile=profile, stand_ins=stand_ins))
        many = len(self.blocks) > FEW_BLOCKS or self.places
        quick = len(tries) > 1 and many and allocator.name == "exact"
        found: list[tuple[Plan, Try]] = []
        beyond: list[tuple[Plan, Try]] = []
        refused: list[tuple[NoFeasibleAllocation, Try]] = []
        settled: set[tuple[int | None, Way]] = (
            set()
        )  # levels on which savings, counted boldly, have led to a plan that fits
        for one in tries:
            if (one.base_peak, one.way) in settled:
                continue
            by = ALLOCATORS["lagrangian"] if quick else allocator
            try:
                plan = self._attempt(one, allocator=by, risk=name, profile=profile)
            except NoFeasibleAllocation as error:
                refused.append((error, one))
                continue
            if self.fits(plan):
                found.append((plan, one))
                settled.add((one.base_peak, one.way))
            else:
                beyond.append((plan, one))
        by = ALLOCATORS["lagrangian"] if allocator.name == "exact" else allocator
        attempt = partial(self._attempt, allocator=by, risk=name, profile=profile)
        if not found:
            plan = last_resort(self, tries, refused=refused, risk=name, profile=profile)
            return plan if allocator.traits.every_candidate else spend(self, beyond, found=plan, attempt=attempt)
        plan, one = min(found, key=lambda entry: (entry[0].allocation.risk, _effort(entry[0].allocation)))
        if quick:
            proven = self._attempt(one, allocator=allocator, risk=name, profile=profile)
            plan = (
                proven if self.fits(proven) else replace(plan, allocation=replace(plan.allocation, allocator="exact"))
            )
        return plan if allocator.traits.every_candidate else spend(self, beyond, found=plan, attempt=attempt)

    @property
    def _chooses(self) -> bool:
        return not self.allocator.traits.every_candidate

    def _measured(self) -> Plan | None:
        """The plan of the measured choice, among the planner's own candidates and with its own range of budgets; None
        where nothing that was measured fits, or there is no choice."""
        family = self.family
        choice = choose(self, family=family) if family is not None and self._chooses else None
        if family is None or choice is None:
            return None
        plan = self.adopted(choice.plan.allocation.choices, risk=MEASURED, limits=choice.plan.limits)
        useful = self._once(
            (MEASURED, "range"), (self.footprint, self.budget), lambda: useful_bytes(self, family=family)
        )
        allowed = self.budget.memory_bytes if self.budget.memory_bytes is not None else plan.limits.state_bytes
        return replace(
            plan,
            reasons=choice.plan.reasons,
            most_useful_bytes=useful,
            binding=allowed is not None and useful > allowed,
            basis=basis_of(choice, family=family, plan=plan, num_params=self.num_params),
        )

    def adopted(self, choices: Mapping[str, str], *, risk: str, limits: Limits) -> Plan:
        """The plan that runs `choices`, whatever it takes."""
        everything = self.candidates(risk=risk, profile=None)
        by_spec = {block: {c.spec: c for c in options} for block, options in everything.items()}
        chosen = [by_spec[block][spec] for block, spec in choices.items()]
        return self.plan_of(allocated(chosen, allocator="recipe"), everything, limits=limits, risk=risk, profile=None)

    def fits(self, plan: Plan) -> bool:
        """Whether the plan's own peak, and what it keeps on the host, are within the budget."""
        memory, host = self.budget.memory_bytes, self.budget.host_memory_bytes
        return (memory is None or plan.peak_bytes <= memory) and (host is None or plan.host_bytes <= host)

    def _attempt(self, one: Try, *, allocator: Allocator, risk: str, profile: Profile | None) -> Plan:
        """The plan of one try, which need not fit: savings may have been counted too boldly."""
        pool = (
            one.pool
            if allocator.traits.every_candidate
            else undominated(one.pool, with_time=self.budget.step_time is not None)
        )
        penalty = self.settings.merge_penalty
        segments = None
        if penalty is not None and profile is not None:
            segments = tied(pool, blocks=self.blocks, profile=profile, penalty=penalty)
        allocation = allocator(segments or pool, limits=one.limits, seed=self.settings.seed)
        if segments:
            allocation = untied(allocation, pool)
        return self.plan_of(allocation, pool, limits=one.limits, risk=risk, profile=profile)

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
            plan = self.plan_of(allocation, everything, limits=limits, risk=risk, profile=profile)
            if risk == MEASURED:
                proposed = self.propose(risk=risk)
                if dict(proposed.allocation.choices) == dict(choices):
                    return proposed
            whole = self.budget.memory_bytes is not None or limits.state_bytes is None
            if self.fits(plan) if whole else allocation.state_bytes <= (limits.state_bytes or 0):
                return plan
        return self.propose(risk=risk, profile=profile)

    def least(self) -> Plan:
        """The plan of fewest state bytes, whatever the budget: for a first step whose activations are not yet known."""
        pool = self.candidates(risk="prior", profile=None)
        chosen = [
            min(options, key=lambda c: (c.cost.host_bytes > 0, c.cost.state_bytes, c.risk.total))
            for options in pool.values()
        ]
        allocation = allocated(chosen, allocator="least_state")
        plan = self.plan_of(allocation, pool, limits=Limits(), risk="prior", profile=None)
        return replace(plan, basis=Basis(by="least_state", text="the least state, until a step is measured"))

    def price(self, choices: Mapping[str, str], *, risk: str, profile: Profile | None) -> float:
        """Risk of an allocation that is already in use, under another risk model or a newer profile."""
        by_spec = {
            block: {c.spec: c for c in options}
            for block, options in self.candidates(risk=risk, profile=profile).items()
        }
        return sum(by_spec[block][spec].risk.total for block, spec in choices.items())

    # -- results --------------------------------------------------------------------------------------------------

    def plan_of(
        self,
        allocation: Allocation,
        pool: Mapping[str, Sequence[Candidate]],
        *,
        limits: Limits,
        risk: str,
        profile: Profile | None,
    ) -> Plan:
        """A plan with its range of budgets over all levels: one that does without a spec is bound by that."""
        everything = self.candidates(risk=risk, profile=profile, stand_ins=False)
        least, useful = self._once(
            ("range", risk),
            (_read_by(risk, profile), self._lines, self.budget, self.footprint),
            lambda: (
                self.taken(least_of(self, all_tries(self, risk=risk, profile=profile))),
                self.taken([min(options, key=_by_risk) for options in everything.values()]),
            ),
        )
        allowed = self.budget.memory_bytes if self.budget.memory_bytes is not None else limits.state_bytes
        shared = allocation.host_bytes if self.host_counts else 0
        picks = self.allocator.picks if isinstance(self.allocator, RecipeAllocator) else None
        return Plan(
            blocks=self.blocks,
            candidates={block: tuple(options) for block, options in pool.items()},
            allocation=allocation,
            budget=self.budget,
            limits=limits,
            risk_model=risk,
            binding=allowed is not None and useful > allowed,
            peak_bytes=self.peak_bytes(allocation.choices, state_bytes=allocation.state_bytes + shared),
            staging_bytes=self.staging_bytes(allocation.choices),
            host_bytes=self.host_bytes(allocation),
            state_bytes_adamw=self.state_bytes_adamw,
            least_feasible_bytes=least,
            most_useful_bytes=useful,
            reasons=reasons(allocation, pool) if picks is None else _recipe_reasons(allocation, picks),
            basis=self._basis(risk),
        )

    def _basis(self, risk: str) -> Basis:
        """What a plan rests on that was not chosen by measurements."""
        recipe = self.settings.recipe
        if recipe is not None:
            text = f"{recipe.title}: the recipe that was asked for"
            return Basis(by="recipe", text=text, recipe=recipe.name, lr=dict(recipe.lr), betas=dict(recipe.betas))
        if not self._chooses:
            return Basis(by=self.allocator.name, text=f"{self.allocator.name}: {self.allocator.description}")
        text = f"risk={risk} ({self._risk_model(risk).description}): argued for, not shown to predict quality"
        if self.settings.risk == MEASURED:
            why = (
                "no measured recipe fits" if self.family is not None else "nothing was measured of this kind of network"
            )
            text = f"{why}, so by {text}"
        return Basis(by=risk, text=text)


def _recipe_reasons(allocation: Allocation, picks: Mapping[str, Pick]) -> tuple[Reason, ...]:
    """By which role each block runs its spec, and which blocks fell back."""
    return tuple(
        Reason(block=block, spec=spec, cheaper=None, dearer=None, text=picks[block].text)
        for block, spec in allocation.choices.items()
    )


def _read_by(risk: str, profile: Profile | None) -> Profile | None:
    """The profile where the risk reads one: others give the same whatever is newest, and need not be asked again."""
    return profile if RISKS[risk].needs else None


def _by_risk(candidate: Candidate) -> tuple[float, float, int]:
    cost = candidate.cost
    return candidate.risk.total, cost.link_s + cost.host_s, cost.charged_bytes


def _effort(allocation: Allocation) -> float:
    return allocation.link_s + allocation.host_s
