"""Blocks under a budget: what a planner holds of a run, and the candidates, limits and costs that follow from it."""

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

from baoc.core.blocks import partition
from baoc.core.catalogue import STORAGES, removal_message, select
from baoc.core.measured import AUTO, KAPPA, families, family_of, nearest_family
from baoc.core.recipes import RECIPES, Recipe
from baoc.core.rule_tags import RULE_INFOS
from baoc.errors import BadInputError
from baoc.planning.allocators import ALLOCATORS
from baoc.planning.allocators.recipe import RecipeAllocator, pick_spec
from baoc.planning.candidates import build_candidates
from baoc.planning.cost import adamw_state_bytes, cost, whole_step_seconds
from baoc.planning.limits import (
    SavingsMode,
    StagingLimit,
    charge_savings,
    is_on_host,
    savings_by_format,
    savings_of_choices,
    staging_bytes,
    with_streamed_twins,
)
from baoc.planning.risk import RISKS, RiskModel, measured_risk
from baoc.planning.transfer import PIECE_BYTES, STORED_RATES, drain_seconds, pinned_room
from baoc.types import (
    Allocation,
    Block,
    Budget,
    Candidate,
    Footprint,
    LatencyTable,
    Limits,
    LinkRates,
    OptimizerSpec,
    ParamInfo,
    Plan,
    Profile,
    Role,
)

MEASURED = "measured"
MAX_CACHED = 64  # sets of candidates that are kept


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerSettings:
    """A user's choices about planning; defaults are those of `conf/`.

    `risk="measured"` chooses by measurements of the `family`, or of the nearest one where nothing was measured of the
    network's kind; where it has no hidden matrices it is `prior`. `task`: the family of the task, where it is known; a
    network that looks like another family's is then of no measured kind. `from_conf`: run.py plans, which knows whether
    it trains from scratch, and has race=auto. At other doors weights may be pretrained, so a guess from the nearest
    family raises no learning rate there.

    A `recipe` chooses in place of an allocator: it brings its own rows of the catalogue, runs them on every role, and
    has blocks by part where it tells parts apart. Blocks made otherwise than by layer and role stay as they are.
    """

    specs: tuple[str, ...] = ("*",)
    keep_fp32_roles: tuple[Role, ...] = (Role.EMBEDDING, Role.HEAD, Role.NORM)
    blocks_by: str = "layer_role"
    patterns: tuple[tuple[str, str], ...] = ()
    risk: str = "prior"
    risk_weights: Mapping[str, float] = field(default_factory=dict)
    allocator: str = "exact"
    seed: int = 0
    measured_specs: tuple[str, ...] = ()  # rows beside `specs` that risk=measured alone may choose
    recipe: Recipe | None = None
    family: str | None = None  # of risk=measured: AUTO goes by the network, None has no measurements
    task: str | None = None
    from_conf: bool = False

    @property
    def all_specs(self) -> dict[str, OptimizerSpec]:
        """Every row of the catalogue that a plan may run, by name; host placement apart."""
        return select((*self.specs, *self.measured_specs))

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
        own: dict[str, Any] = {"allocator": "recipe", "specs": self.recipe.all_specs, "keep_fp32_roles": ()}
        own["measured_specs"] = ()
        if self.blocks_by == "layer_role" and self.recipe.needs_part_blocks:
            own["blocks_by"] = "layer_part"
        for key, value in own.items():
            object.__setattr__(self, key, value)


def checked_name(name: str, options: Mapping[str, object], what: str) -> str:
    """`name` if it is one of `options`, else BadInputError that lists them."""
    if name not in options:
        if told := removal_message(name):
            raise BadInputError(told)
        raise BadInputError(f"unknown {what} {name!r}: choose one of {', '.join(options)}")
    return name


def may_use_host(settings: PlannerSettings, *, budget: Budget) -> bool:
    """Whether some spec that is offered keeps its states on the host."""
    named = any(map(is_on_host, select(settings.specs).values()))
    return named or budget.host_memory_bytes is not None


class BudgetedBlocks(ABC):
    """The blocks of a network under a budget: what the budget leaves them, what each may run, and what a choice takes.

    Raises BadInputError for unknown names.
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
        checked_name(settings.risk, RISKS, "risk")
        checked_name(settings.allocator, ALLOCATORS, "allocator")
        if settings.task is not None:
            checked_name(settings.task, families(), "task_family")
        self.params = tuple(params)
        self.declared = declared
        self.budget = budget
        self.footprint = footprint
        self.latency = latency
        self.rules = RULE_INFOS
        self.allocator = ALLOCATORS[settings.allocator]
        chosen = select(settings.specs)
        self.offered_specs = with_streamed_twins(chosen) if budget.host_memory_bytes is not None else chosen
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
            self.allocator = RecipeAllocator(picks={b.name: pick_spec(b, recipe=settings.recipe) for b in self.blocks})
        self.state_bytes_adamw = adamw_state_bytes(self.blocks)
        self.num_params = sum(block.numel for block in self.blocks)
        named = family_of(self.params) if settings.family == AUTO else settings.family
        if settings.family == AUTO and settings.task is not None and named != settings.task:
            named = None
        # Nothing was measured of this kind: whole recipes of the nearest one are a guess, its entries by role are not.
        self.extrapolates = named is None and settings.family == AUTO
        named = nearest_family(self.params, task=settings.task) if self.extrapolates else named
        self.family = families().get(named or "") if settings.risk == MEASURED else None
        if self.family is not None and self.extrapolates:
            self.family = replace(self.family, roles={})
        more = settings.measured_specs if self.family is not None and self._has_choice else ()
        self.specs = {**self.offered_specs, **select(more)} if more else self.offered_specs
        self.kappa = settings.risk_weights.get("kappa", KAPPA)
        self._cache: dict[Any, tuple[tuple[Any, ...], Any]] = {}  # by risk and count; made anew where its basis changed
        if budget.memory_bytes is not None and footprint is None:
            raise BadInputError(
                f"budget {budget.name} limits device memory, which needs a footprint: give a probe (a callable that "
                "runs one forward and backward), or use a state fraction such as state_25"
            )

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_made": {}}

    def with_settings(self, settings: PlannerSettings) -> Self:
        """The same network under the same budget, planned otherwise."""
        return type(self)(
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
    def may_use_host(self) -> bool:
        """Whether some spec keeps its states on the host."""
        return any(map(is_on_host, self.specs.values()))

    @property
    def device_is_host(self) -> bool:
        """Whether the device is the host, so that what is kept there counts in its memory."""
        return self.footprint is not None and self.footprint.device.startswith("cpu")

    def limits(self, *, base_peak: int | None = None, staging: StagingLimit | None = None) -> Limits:
        """The budget as totals over the blocks: what is left of it for charged bytes, for seconds, and on the host.

        `base_peak` is the predicted peak without state, with native weights; by default that of forward and backward.
        `staging`: how far host placement goes, for which staging has its room.
        """
        staging = staging or StagingLimit()
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
            host_bytes = pinned_room(self.budget.host_memory_bytes)
        if step_s is not None and self.latency is not None and self.may_use_host:
            piece = max(staging.slab_bytes and PIECE_BYTES, staging.slab_bytes)
            beside_s = max(step_s + self.latency.hidden_s - drain_seconds(piece, link=self.link), 0.0)
        return Limits(state_bytes=state_bytes, step_s=step_s, host_bytes=host_bytes, link_s=beside_s)

    @property
    def link(self) -> LinkRates:
        """Rates of this machine where seconds are limited, else stored ones, which decide between equals."""
        measured = self.latency.link if self.latency is not None and self.budget.step_time is not None else None
        return measured or STORED_RATES

    @property
    def savings_modes(self) -> tuple[SavingsMode, ...]:
        """How savings on weights may be counted, boldest first."""
        weighted = any(spec.weights != "native" for spec in self.specs.values())
        if not weighted or self.budget.memory_bytes is None or self.footprint is None:
            return ("none",)
        return ("copies", "gradients", "weights")

    def to_budget_bytes(self, charged_bytes: int, *, base_peak: int | None = None) -> int:
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
        less = savings_of_choices(choices, blocks=self.blocks, specs=self.specs)
        held = state_bytes + self.staging_bytes(choices)
        return self.footprint.peak_bytes(state_bytes=held, specs=used, saved=less)

    def staging_bytes(self, choices: Mapping[str, str]) -> int:
        """Bytes of the device's buffers, through which states pass that are kept on the host."""
        return staging_bytes(choices, blocks=self.blocks, specs=self.specs, rules=self.rules)

    def budget_bytes_of(self, chosen: Collection[Candidate]) -> int:
        """Bytes of one candidate per block in the budget's own measure."""
        state_bytes = sum(c.cost.state_bytes + c.cost.shared_bytes for c in chosen)
        if self.budget.memory_bytes is None:
            return state_bytes
        return self.peak_bytes({c.block: c.spec for c in chosen}, state_bytes=state_bytes)

    def step_seconds(self, choices: Mapping[str, str]) -> float:
        """Predicted seconds of a whole step of an allocation; NaN where the latency table lacks one of its specs."""
        if self.latency is None:
            return math.nan
        seconds = whole_step_seconds(choices, blocks=self.blocks, specs=self.specs, latency=self.latency)
        return (
            max(seconds, self._streamed_step_seconds(choices, latency=self.latency)) if self.may_use_host else seconds
        )

    def _streamed_step_seconds(self, choices: Mapping[str, str], *, latency: LatencyTable) -> float:
        """Predicted seconds of a whole step whose device never waits: see `baoc.planning.transfer`."""
        link_s, largest = 0.0, 0
        for block in self.blocks:
            spec = self.specs[choices[block.name]]
            if is_on_host(spec):
                spent = cost(block, spec=spec, rule=self.rules[spec.rule], link=latency.link or STORED_RATES)
                link_s, largest = link_s + spent.link_s, max(largest, spent.streamed_bytes)
        if not largest:
            return 0.0
        drain_s = drain_seconds(max(largest, PIECE_BYTES), link=latency.link or STORED_RATES)
        return latency.base_step_s - latency.hidden_s + link_s + drain_s

    @property
    def _seconds_per_element(self) -> Mapping[str, float] | None:
        """The part of the latency table that candidates depend on; None where seconds are not limited."""
        return self.latency.per_element_s if self.latency is not None and self.budget.step_time is not None else None

    # -- proposing ------------------------------------------------------------------------------------------------

    def candidates(
        self, *, risk: str, profile: Profile | None, count: SavingsMode | None = None, stand_ins: bool = True
    ) -> dict[str, tuple[Candidate, ...]]:
        """Every spec that applies to each block, dominated ones included, cheapest first.

        `stand_ins`: with momentum in 8 bits on roles that keep fp32, which run it only where they would lose it.
        """
        count = self.savings_modes[0] if count is None else count
        profile = profile_for(risk, profile)
        picks = self.allocator.picks if isinstance(self.allocator, RecipeAllocator) else None
        base = self._cached(
            ("candidates", risk, self.device_is_host, stand_ins),
            (profile, self._seconds_per_element, self.budget),
            lambda: build_candidates(
                self.blocks,
                specs=self.specs if risk == MEASURED else self.offered_specs,
                rules=self.rules,
                storages=STORAGES,
                risk=self._risk_model(risk),
                profile=profile,
                weights=self.settings.risk_weights,
                latency=self.latency if self.budget.step_time is not None else None,
                link=self.link,
                shared=self.device_is_host,
                keep_fp32_roles=self.settings.keep_fp32_roles if risk != MEASURED else (),
                stand_ins=stand_ins,
                only={} if picks is None else {block: one.spec for block, one in picks.items()},
            ),
        )
        footprint = self.footprint
        if count == "none" or footprint is None:
            return base
        saved = self._cached(
            ("savings", count),
            (footprint.intervals, footprint.gradient_order),
            lambda: savings_by_format(self.blocks, specs=self.specs, count=count, footprint=footprint),
        )
        # Footprints of different micro-batches mostly save the same, so the candidates are kept by what is saved.
        return self._cached(
            ("charged", risk, saved, stand_ins),
            (base,),
            lambda: charge_savings(base, blocks=self.blocks, specs=self.specs, saved=saved),
        )

    def _risk_model(self, name: str) -> RiskModel:
        return measured_risk(self.blocks, family=self.family, kappa=self.kappa) if name == MEASURED else RISKS[name]

    def risk_of_saved(self, name: str, *, profile: Profile | None) -> str:
        """The risk to judge a saved plan by: its own, the settings' where this version lacks it, `prior` without the
        profile that it needs."""
        name = name if name in RISKS else self.settings.risk
        return "prior" if RISKS[name].needs and profile is None else name

    def _cached(self, name: Any, basis: tuple[Any, ...], make: Any) -> Any:
        """The cached result of `make` for the very same values of `basis`."""
        made = self._cache.get(name)
        if made is None or not all(a is b for a, b in zip(made[0], basis, strict=True)):
            if len(self._cache) >= MAX_CACHED:  # of footprints and profiles of long ago
                self._cache.clear()
            made = self._cache[name] = (basis, make())
        return made[1]

    def fits(self, plan: Plan) -> bool:
        """Whether the plan's own peak, and what it keeps on the host, are within the budget."""
        memory, host = self.budget.memory_bytes, self.budget.host_memory_bytes
        return (memory is None or plan.peak_bytes <= memory) and (host is None or plan.host_bytes <= host)

    @property
    def _has_choice(self) -> bool:
        return not self.allocator.traits.every_candidate

    # -- plans ----------------------------------------------------------------------------------------------------

    @abstractmethod
    def propose(self, *, risk: str | None = None, profile: Profile | None = None) -> Plan:
        """See `Planner`, which makes plans of what is here."""

    @abstractmethod
    def plan_of(
        self,
        allocation: Allocation,
        pool: Mapping[str, Sequence[Candidate]],
        *,
        limits: Limits,
        risk: str,
        profile: Profile | None,
    ) -> Plan:
        """See `Planner`."""


def profile_for(risk: str, profile: Profile | None) -> Profile | None:
    """The profile where the risk reads one: others give the same whatever is newest, and need not be asked again."""
    return profile if RISKS[risk].needs else None
