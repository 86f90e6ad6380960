"""Puts planner, optimizer, profiler and reallocator together, the same way for Lightning and for a plain loop."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from baoc.core.blocks import partition
from baoc.core.catalogue import SPECS, base_name, on_device, select
from baoc.core.recipes import Recipe, Tuning, find_recipe
from baoc.core.rule_tags import RULE_INFOS
from baoc.kernels.host_memory import check_host_memory
from baoc.optim import BlockwiseOptimizer, GradientRelease
from baoc.optim.matching import Matching
from baoc.planning.allocators import ALLOCATORS
from baoc.planning.candidates import applies
from baoc.planning.planner import Planner, PlannerSettings
from baoc.planning.risk import RISKS
from baoc.profiling import GradientProfiler, clear_cache, uncapped
from baoc.training.reallocation.reallocator import Reallocator
from baoc.training.reallocation.triggers import ReallocationSettings
from baoc.types import Budget, Footprint, LatencyTable, ParamInfo

RecipeLike = str | Path | Mapping[str, Any] | Recipe  # a name, a file, the contents of one, or a recipe
MOST_RETIMED = 4  # plans whose specs are timed before one is taken


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionSettings:
    """Everything a budgeted optimizer needs to know beside its parameters and its budget.

    `overlap`: blocks whose states are on the host are stepped in backward, where nothing is to change their gradients;
    with `planner.flush_only` the host only gets their gradients then, see `BlockwiseOptimizer.last_backward`.
    """

    planner: PlannerSettings = field(default_factory=PlannerSettings)
    reallocation: ReallocationSettings = field(default_factory=ReallocationSettings)
    backend: str = "auto"
    nonfinite: str = "skip_element"
    rms_matching: bool | Matching = True
    release: bool | GradientRelease = False
    overlap: bool = True


def with_recipe(settings: SessionSettings, *, recipe: RecipeLike | None) -> SessionSettings:
    """The settings with a recipe in the place of their allocator. Raises BadInputError where another one was set."""
    if recipe is None:
        return settings
    found = find_recipe(recipe)
    matching = settings.rms_matching if found.matching else False
    return replace(settings, planner=replace(settings.planner, recipe=found), rms_matching=matching)


def tuning_of(settings: SessionSettings) -> Tuning | None:
    """What the recipe changes of rates and betas."""
    recipe = settings.planner.recipe
    return None if recipe is None else recipe.tuning


def make_profiler(
    planner: Planner, params: Mapping[str, Tensor], *, settings: SessionSettings, betas: tuple[float, float]
) -> GradientProfiler | None:
    """The profiler that the settings call for, or None with reallocation=off; its bytes join the footprint."""
    if settings.reallocation.mode == "off":
        return None
    wants_shadow = "shadow" in RISKS[planner.settings.risk].needs
    bases = dict.fromkeys(map(base_name, planner.specs))  # risk asks for those, wherever states and weights are kept
    profiler = GradientProfiler(
        planner.blocks,
        params=params,
        betas=betas,
        shadow_specs=tuple(SPECS[name] for name in bases) if wants_shadow else (),
        by_parts=settings.release is not False,
    )
    if planner.footprint is not None:
        planner.count_profile(profiler.nbytes, temporary_bytes=profiler.temporary_bytes())
    return profiler


def _profiler_with_room(
    planner: Planner, params: Mapping[str, Tensor], *, settings: SessionSettings, betas: tuple[float, float]
) -> GradientProfiler | None:
    """The profiler. Where there is no room for it, one outside of the cap tells its bytes: InfeasibleBudgetError where
    no plan holds the budget beside it, else torch.OutOfMemoryError."""
    with suppress(torch.OutOfMemoryError):
        return make_profiler(planner, params, settings=settings, betas=betas)
    device = next(iter(params.values())).device
    clear_cache(device)
    with uncapped(device, budget=planner.budget):
        make_profiler(planner, params, settings=settings, betas=betas)
    planner.propose(risk="prior")
    raise torch.OutOfMemoryError("there is no room for statistics of gradients, which reallocation=off does without")


def released_blocks(
    infos: Sequence[ParamInfo],
    *,
    params: Mapping[str, Tensor],
    settings: SessionSettings,
    declared: Mapping[str, Sequence[str]] | None,
) -> list[list[Tensor]]:
    """The parameters of each block, for a probe that is to drop gradients as training will; empty where it will not."""
    if settings.release is False:
        return []
    planner = settings.planner
    blocks = partition(infos, declared=declared, patterns=planner.patterns, by=planner.blocks_by)
    return [[params[param.name] for param in block.params] for block in blocks]


def narrow_params(
    infos: Sequence[ParamInfo],
    *,
    params: Mapping[str, Tensor],
    settings: SessionSettings,
    declared: Mapping[str, Sequence[str]] | None,
) -> dict[str, Tensor]:
    """The parameters that some plan of these settings would keep in 16 bits, though they come in more."""
    planner = settings.planner
    only = ALLOCATORS[planner.allocator].traits.only_spec  # of an allocator that leaves no choice
    specs = [spec for spec in select(planner.specs).values() if spec.weights != "native" and only in (None, spec.name)]
    rules = RULE_INFOS
    found = {
        param.name: params[param.name]
        for block in partition(infos, declared=declared, patterns=planner.patterns, by=planner.blocks_by)
        if any(
            applies(block, spec=spec, rule=rules[spec.rule], keep_fp32_roles=planner.keep_fp32_roles) is None
            for spec in specs
        )
        for param in block.params
    }
    return {name: param for name, param in found.items() if param.element_size() > torch.bfloat16.itemsize}


def only_narrow(planner: PlannerSettings) -> bool:
    """Whether every plan of these settings keeps in 16 bits whatever it may."""
    only = ALLOCATORS[planner.allocator].traits.only_spec
    rows = select(planner.specs).values()
    return all(spec.weights != "native" for spec in rows if only in (None, spec.name))


def assemble(
    infos: Sequence[ParamInfo],
    *,
    params: Mapping[str, Tensor],
    groups: Sequence[dict[str, Any]],
    defaults: Mapping[str, Any],
    budget: Budget,
    settings: SessionSettings,
    declared: Mapping[str, Sequence[str]] | None = None,
    footprint: Footprint | None = None,
    latency: LatencyTable | None = None,
    retime: Callable[[set[str]], LatencyTable] | None = None,
    arrive: Callable[..., torch.device | None] | None = None,
) -> Reallocator:
    """Plans with role priors, builds the optimizer on that plan, and attaches what will reallocate it.

    The Reallocator holds planner, plan and optimizer. `groups` are the user's, with (name, parameter) pairs; `defaults`
    are lr, betas, eps and weight_decay. `retime` gives a latency table in which the specs that it is told (names) are
    timed: what a plan rests on is not left to assumptions, and a limit on time is planned for again then. `arrive` is
    called with the plan and `footprint=` before the optimizer is built, and says where that is to bring parameters that
    wait elsewhere. Raises InfeasibleBudgetError, or BadInputError where the host lacks the memory, before anything is
    allocated for the optimizer.
    """
    planner = Planner(
        infos, budget=budget, settings=settings.planner, declared=declared, footprint=footprint, latency=latency
    )
    profiler = _profiler_with_room(planner, params, settings=settings, betas=tuple(defaults["betas"]))
    plan = planner.propose(risk="prior")
    for _ in range(MOST_RETIMED if retime is not None else 0):
        assumed = set(map(on_device, plan.allocation.choices.values())) & set(
            planner.latency.assumed if planner.latency else ()
        )
        if not assumed:
            break
        assert retime is not None
        planner.latency = retime(assumed)
        plan = planner.propose(risk="prior") if budget.step_time is not None else plan
    if plan.host_bytes:
        check_host_memory(plan.host_bytes, what="states on the host, and what passes there,")
    device = arrive(plan, footprint=planner.footprint) if arrive is not None else None
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()  # states get memory of their own, not gaps in what the probe's activations have left
    optimizer = BlockwiseOptimizer(
        groups,
        plan.allocation.choices,
        blocks=planner.blocks,
        backend=settings.backend,
        nonfinite=settings.nonfinite,
        rms_matching=settings.rms_matching,
        release=settings.release,
        tuning=tuning_of(settings),
        device=device,
        **defaults,
    )
    reallocator = Reallocator(
        planner=planner, optimizer=optimizer, plan=plan, settings=settings.reallocation, profiler=profiler
    )
    reallocator.attach()
    return reallocator
