"""Blocks under a budget: the settings of planning, and the candidates, limits, bytes and seconds that follow.

`BudgetedBlocks` is `Planner` without its way to a plan, in a module that attempts, messages and recipes can import.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Self

from baoc.core.blocks import partition
from baoc.core.catalogue import removal_message, select
from baoc.core.measured import AUTO, KAPPA, Family, families, family_of, nearest_family, nearest_size
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
MAX_CACHED = 64  # results that `BudgetedBlocks` caches, mostly sets of candidates


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerSettings:
    """A user's settings of planning; defaults are those of `conf/`.

    `risk="measured"` chooses by measurements of the network's `family`, else of the nearest family. Without hidden
    matrices there is none, and risk is `prior`. `task`: the family of the task, if known; a network that looks like
    another family then counts as not measured. `from_conf`: the caller is run.py, which knows whether training is from
    scratch, and has race=auto. For other callers weights may be pretrained, so a rate of the nearest family may lower
    the learning rate but not raise it.

    A `recipe` takes the place of the allocator. It sets the specs and runs them on every role. `blocks_by` of "auto" is
    settled by `blocks_of_choice`.
    """

    specs: tuple[str, ...] = ("*",)
    keep_fp32_roles: tuple[Role, ...] = (Role.EMBEDDING, Role.HEAD, Role.NORM)
    blocks_by: str = "auto"
    patterns: tuple[tuple[str, str], ...] = ()
    risk: str = "prior"
    risk_weights: Mapping[str, float] = field(default_factory=dict)
    allocator: str = "exact"
    seed: int = 0
    measured_specs: tuple[str, ...] = ()  # specs beside `specs` that only risk=measured may choose
    recipe: Recipe | None = None
    family: str | None = None  # for risk=measured: AUTO is by the network, None uses no measurements
    task: str | None = None
    from_conf: bool = False

    @property
    def kappa(self) -> float:
        return self.risk_weights.get("kappa", KAPPA)

    @property
    def all_specs(self) -> dict[str, OptimizerSpec]:
        """Every spec that a plan may run, by name, without those that a budget of host memory adds."""
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
        changes: dict[str, Any] = {"allocator": "recipe", "specs": self.recipe.all_specs}
        changes |= {"keep_fp32_roles": (), "measured_specs": ()}
        for key, value in changes.items():
            object.__setattr__(self, key, value)


def check_name(name: str, options: Mapping[str, object], what: str) -> None:
    """Raises BadInputError, which lists the `options`, if `name` is none of them."""
    if name not in options:
        if message := removal_message(name):
            raise BadInputError(message)
        raise BadInputError(f"unknown {what} {name!r}: choose one of {', '.join(options)}")


def may_use_host(settings: PlannerSettings, *, budget: Budget) -> bool:
    named = any(map(is_on_host, select(settings.specs).values()))
    return named or budget.host_memory_bytes is not None


def measured_at(params: Sequence[ParamInfo], *, settings: PlannerSettings) -> tuple[Family | None, bool]:
    """The measurements that a plan of these parameters goes by, and whether they are of another kind of network."""
    name = settings.family
    if name == AUTO:
        name = family_of(params)
        name = name if settings.task in (None, name) else None
    extrapolates = name is None and settings.family == AUTO
    name = nearest_family(params, task=settings.task) if extrapolates else name
    sizes = families().get(name or "", ()) if settings.risk == MEASURED else ()
    # Networks of other kinds were tried at the smallest size, and a larger transformer's multiple of the learning rate
    # may be too much for them. Recipes are a guess for them, and changes by role are not used.
    family = nearest_size(sizes[:1] if extrapolates else sizes, num_params=total_numel(params))
    return replace(family, roles={}) if family is not None and extrapolates else family, extrapolates


def total_numel(params: Iterable[ParamInfo]) -> int:
    """Elements of a network, with those that other ranks hold."""
    return sum(math.prod(param.whole or param.shape) for param in params)


def blocks_of_choice(
    settings: PlannerSettings,
    *,
    params: Sequence[ParamInfo],
    declared: Mapping[str, Sequence[str]] | None = None,
    measured: tuple[Family | None, bool] | None = None,
) -> PlannerSettings:
    """The settings, with blocks by part if `blocks_by` is "auto" and the `recipe` names parts, or blocks that only they
    make, or if the recipe that measured best at the size of this network names parts that blocks then tell. `measured`:
    what `measured_at` gives, if that is known."""
    if settings.blocks_by != "auto":
        return settings
    blocks_by = partial(partition, params, declared=declared, patterns=settings.patterns)
    by_part = replace(settings, blocks_by="layer_part")
    if settings.recipe is not None:
        named = settings.recipe.blocks.keys()
        parts = named and not named <= {block.name for block in blocks_by(by="layer_role")}
        parts = parts and named <= {block.name for block in blocks_by(by="layer_part")}
        return by_part if parts or settings.recipe.needs_part_blocks else settings
    if settings.risk != MEASURED:
        return settings
    allocator = ALLOCATORS.get(settings.allocator)  # Planner refuses an unknown one
    if allocator is None or allocator.traits.every_candidate:
        return settings
    family, extrapolates = measured or measured_at(params, settings=settings)
    if family is None or extrapolates:
        return settings
    best = family.ranked(settings.kappa)[0].recipe
    tells = best.needs_part_blocks and not best.untold_parts(blocks_by(by="layer_part"))
    return by_part if tells else settings


class BudgetedBlocks(ABC):
    """The blocks of a network under a budget: limits of the budget, candidates of blocks, bytes and seconds of choices.
    Raises BadInputError for unknown names."""

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
        settings = settings or PlannerSettings()
        check_name(settings.risk, RISKS, "risk")
        check_name(settings.allocator, ALLOCATORS, "allocator")
        if settings.task is not None:
            check_name(settings.task, families(), "task_family")
        self.family, self.extrapolates = measured = measured_at(params, settings=settings)
        self.settings = settings = blocks_of_choice(settings, params=params, declared=declared, measured=measured)
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
        self.num_params = total_numel(self.params)
        more = settings.measured_specs if self.family is not None and self.has_choice else ()
        self.specs = {**self.offered_specs, **select(more)} if more else self.offered_specs
        self.kappa = settings.kappa
        self._cache: dict[Any, tuple[tuple[Any, ...], Any]] = {}  # name -> (inputs, result), see `_cached`
        if budget.memory_bytes is not None and footprint is None:
            raise BadInputError(
                f"budget {budget.name} limits device memory, which needs a footprint: give a probe (a callable that "
                "runs one forward and backward), or use a state fraction such as state_25"
            )

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_cache": {}}

    def with_settings(self, settings: PlannerSettings) -> Self:
        """A planner of the same network and budget with other settings."""
        return type(self)(
            self.params,
            budget=self.budget,
            settings=settings,
            declared=self.declared,
            footprint=self.footprint,
            latency=self.latency,
        )

    def with_budget(self, budget: Budget) -> Self:
        """A planner of the same network and settings with another budget."""
        other = copy(self)
        other.budget = budget
        return other

    def count_profile(self, num_bytes: int, *, temporary_bytes: int = 0) -> None:
        """Adds a profiler's buffers to the footprint; `temporary_bytes` are those of a moment in which it samples."""
        if self.footprint is not None:
            self.footprint = replace(self.footprint, profile_bytes=num_bytes, profile_temporary_bytes=temporary_bytes)

    # -- limits ---------------------------------------------------------------------------------------------------

    @property
    def may_use_host(self) -> bool:
        return any(map(is_on_host, self.specs.values()))

    @property
    def device_is_host(self) -> bool:
        """Whether the device is the host, so that states on the host count in its memory."""
        return self.footprint is not None and self.footprint.device.startswith("cpu")

    def limits(self, *, base_peak: int | None = None, staging: StagingLimit | None = None) -> Limits:
        """The budget as limits of totals over the blocks.

        `base_peak`: the predicted peak without state and with native weights; by default that of forward and backward.
        `staging`: how far host placement goes, whose largest slab decides the pipeline's drain.
        """
        staging = staging or StagingLimit()
        state_bytes = None
        if self.budget.memory_bytes is not None:
            assert self.footprint is not None
            base_peak = self.footprint.peak_bytes(state_bytes=0) if base_peak is None else base_peak
            room = self.footprint.room_beside_gathered(self.budget.memory_bytes)
            state_bytes = min(self.budget.memory_bytes - base_peak, room)
        elif self.budget.state_fraction is not None:
            state_bytes = int(self.budget.state_fraction * self.state_bytes_adamw)
        step_s = None
        if self.budget.step_time is not None and self.latency is not None:
            fixed_s = self.latency.base_step_s + self.latency.step_s
            step_s = self.budget.step_time * self.latency.reference_step_s - fixed_s
        host_bytes, link_s = None, None
        if self.budget.host_memory_bytes is not None:
            host_bytes = pinned_room(self.budget.host_memory_bytes)
        if step_s is not None and self.latency is not None and self.may_use_host:
            piece_bytes = max(staging.slab_bytes, PIECE_BYTES) if staging.slab_bytes else 0
            link_s = max(step_s + self.latency.hidden_s - drain_seconds(piece_bytes, link=self.link), 0.0)
        return Limits(state_bytes=state_bytes, step_s=step_s, host_bytes=host_bytes, link_s=link_s)

    @property
    def link(self) -> LinkRates:
        """Measured rates if seconds are limited, else stored ones, which only decide between equal risks."""
        measured = self.latency.link if self.latency is not None and self.budget.step_time is not None else None
        return measured or STORED_RATES

    @property
    def savings_modes(self) -> tuple[SavingsMode, ...]:
        """The ways to count savings of 16-bit weights, boldest first."""
        any_saves = any(spec.weights != "native" for spec in self.specs.values())
        if not any_saves or self.budget.memory_bytes is None or self.footprint is None:
            return ("none",)
        return ("copies", "gradients", "weights")

    def to_budget_bytes(self, charged_bytes: int, *, base_peak: int | None = None) -> int:
        """Charged bytes in the budget's measure: peak bytes under a memory budget, else state bytes."""
        if self.budget.memory_bytes is None or self.footprint is None:
            return charged_bytes
        gathering = self.footprint.peak_bytes(state_bytes=max(charged_bytes, 0)) if self.footprint.gathered_ranks else 0
        base_peak = self.footprint.peak_bytes(state_bytes=0) if base_peak is None else base_peak
        return max(charged_bytes + base_peak, gathering)

    def peak_bytes(self, choices: Mapping[str, str], *, state_bytes: int) -> int:
        """Predicted peak of an allocation with `state_bytes` on the device, to which staging buffers are added. Without
        a footprint it is `state_bytes` alone."""
        if self.footprint is None:
            return state_bytes
        return self.footprint.peak_bytes(
            state_bytes=state_bytes + self.staging_bytes(choices),
            specs=tuple(sorted(set(choices.values()))),
            saved=savings_of_choices(choices, blocks=self.blocks, specs=self.specs),
        )

    def staging_bytes(self, choices: Mapping[str, str]) -> int:
        """Bytes of the device buffers that states on the host pass through."""
        return staging_bytes(choices, blocks=self.blocks, specs=self.specs, rules=self.rules)

    def budget_bytes_of(self, chosen: Collection[Candidate]) -> int:
        """Bytes of one candidate per block in the budget's measure."""
        state_bytes = sum(c.cost.state_bytes + c.cost.shared_bytes for c in chosen)
        if self.budget.memory_bytes is None:
            return state_bytes
        return self.peak_bytes({c.block: c.spec for c in chosen}, state_bytes=state_bytes)

    def step_seconds(self, choices: Mapping[str, str]) -> float:
        """Predicted seconds of a whole step; NaN if the latency table lacks one of the specs."""
        if self.latency is None:
            return math.nan
        seconds = whole_step_seconds(choices, blocks=self.blocks, specs=self.specs, latency=self.latency)
        return (
            max(seconds, self._streamed_step_seconds(choices, latency=self.latency)) if self.may_use_host else seconds
        )

    def _streamed_step_seconds(self, choices: Mapping[str, str], *, latency: LatencyTable) -> float:
        """Predicted seconds of a whole step that waits for the link alone; see `baoc.planning.transfer`."""
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
        """The part of the latency table that candidates depend on; None if seconds are not limited."""
        return self.latency.per_element_s if self.latency is not None and self.budget.step_time is not None else None

    # -- proposing ------------------------------------------------------------------------------------------------

    def candidates(
        self, *, risk: str, profile: Profile | None, count: SavingsMode | None = None, stand_ins: bool = True
    ) -> dict[str, tuple[Candidate, ...]]:
        """Every spec that applies to each block, dominated ones included, fewest charged bytes first.

        `count`: how savings are counted; by default as boldly as possible. `stand_ins`: 8-bit momentum is a candidate
        on roles that keep fp32, too.
        """
        count = self.savings_modes[0] if count is None else count
        profile = profile_for(risk, profile)
        picks = self.allocator.picks if isinstance(self.allocator, RecipeAllocator) else None
        without_savings = self._cached(
            ("candidates", risk, self.device_is_host, stand_ins),
            (profile, self._seconds_per_element, self.budget),
            lambda: build_candidates(
                self.blocks,
                specs=self.specs if risk == MEASURED else self.offered_specs,
                rules=self.rules,
                risk=self._risk_model(risk),
                profile=profile,
                weights=self.settings.risk_weights,
                latency=self.latency if self.budget.step_time is not None else None,
                link=self.link,
                shared=self.device_is_host,
                keep_fp32_roles=self.settings.keep_fp32_roles if risk != MEASURED else (),
                stand_ins=stand_ins,
                only={} if picks is None else {block: pick.spec for block, pick in picks.items()},
            ),
        )
        footprint = self.footprint
        if count == "none" or footprint is None:
            return without_savings
        saved = self._cached(
            ("savings", count),
            (footprint.intervals, footprint.gradient_order),
            lambda: savings_by_format(self.blocks, specs=self.specs, count=count, footprint=footprint),
        )
        # Footprints of different micro-batches mostly save the same bytes, so these are the key.
        return self._cached(
            ("charged", risk, saved, stand_ins),
            (without_savings,),
            lambda: charge_savings(without_savings, blocks=self.blocks, specs=self.specs, saved=saved),
        )

    def _risk_model(self, name: str) -> RiskModel:
        return measured_risk(self.blocks, family=self.family, kappa=self.kappa) if name == MEASURED else RISKS[name]

    def risk_of_saved(self, name: str, *, profile: Profile | None) -> str:
        """The risk to judge a saved plan by: its own, the settings' if this version lacks it, or `prior`. `prior` takes
        the place of a risk whose profile is absent; of a plan for which nothing measured fitted, or that ran a recipe,
        it is no choice, so that `measured` goes on."""
        name = name if name in RISKS else self.settings.risk
        name = "prior" if RISKS[name].needs and profile is None else name
        return MEASURED if (name, self.settings.risk) == ("prior", MEASURED) else name

    def candidates_by_spec(self, *, risk: str, profile: Profile | None) -> dict[str, dict[str, Candidate]]:
        pool = self.candidates(risk=risk, profile=profile)
        return self._cached(
            ("by spec", risk), (pool,), lambda: {block: {c.spec: c for c in options} for block, options in pool.items()}
        )

    def _cached(self, name: Any, inputs: tuple[Any, ...], make: Any) -> Any:
        """The result of `make`, computed again if one of the `inputs` is another object than last time."""
        entry = self._cache.get(name)
        if entry is None or not all(a is b for a, b in zip(entry[0], inputs, strict=True)):
            if len(self._cache) >= MAX_CACHED:  # most of them of old footprints and profiles
                self._cache.clear()
            entry = self._cache[name] = (inputs, make())
        return entry[1]

    def fits(self, plan: Plan) -> bool:
        """Whether the plan's peak and its host memory are within the budget."""
        memory, host = self.budget.memory_bytes, self.budget.host_memory_bytes
        return (memory is None or plan.peak_bytes <= memory) and (host is None or plan.host_bytes <= host)

    @property
    def has_choice(self) -> bool:
        """Whether the allocator weighs candidates, as baselines and recipes do not."""
        return not self.allocator.traits.every_candidate

    @abstractmethod
    def propose(self, *, risk: str | None = None, profile: Profile | None = None) -> Plan:
        """The plan of least risk within the budget, see `Planner`."""


def profile_for(risk: str, profile: Profile | None) -> Profile | None:
    """The profile if the risk reads one, else None, so that results are not computed again for a new profile."""
    return profile if RISKS[risk].needs else None
