"""Session: the plan of one network under one budget, and the optimizer on it. Every way in uses it.

1. A `Measurer` runs a step and returns its `Footprint` (bytes without optimizer state) and, where time is limited, a
   `LatencyTable`: `Probe` under a Trainer, `CallerProbe` in a plain loop. `assume` plans without one.
2. `measure` plans by them, with recomputed layers and gathered layers as the settings ask. Where weights in full have
   no room it measures with 16-bit ones; where no plan fits it names a budget that was planned for.
3. `start` builds the `BlockwiseOptimizer` on the plan, and the `Reallocator` that holds both.
"""

import logging
import math
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from baoc.config.schema import ReallocationConfig
from baoc.config.validate import check_ranges, require
from baoc.core.blocks import partition
from baoc.core.catalogue import device_spec_name
from baoc.core.measured import AUTO
from baoc.core.recipes import RACED, Recipe, find_recipe, tuning_of
from baoc.core.rule_tags import RULE_INFOS
from baoc.errors import BadInputError, InfeasibleBudgetError
from baoc.kernels.host_memory import check_host_memory
from baoc.models.pretrained import pretrained_reason
from baoc.models.switches import count_recomputed_layers, recomputable_layers, set_recomputed
from baoc.optim import BlockwiseOptimizer, GradientRelease
from baoc.optim.matching import Matching
from baoc.optim.offload import weight_conversion_bytes
from baoc.optim.shards import is_sharded, largest_shard
from baoc.parallel import SINGLE_PROCESS, Ranks, ranks, refusal
from baoc.planning.allocators import ALLOCATORS
from baoc.planning.budgeted import MEASURED, PlannerSettings, may_place
from baoc.planning.candidates import applies
from baoc.planning.messages import too_small
from baoc.planning.microbatch import ALIKE, fewest
from baoc.planning.planner import Planner
from baoc.profiling import GradientProfiler, cap_device, clear_cache, context_bytes, uncapped
from baoc.profiling.bf16_params import as_native, bf16_savings, cast_to_bf16
from baoc.profiling.footprint import PAGES_BYTES
from baoc.profiling.step_temporaries import step_temporaries
from baoc.profiling.step_time import specs_timed_first, with_link_rates
from baoc.training.reallocator import Reallocator
from baoc.types import Block, Budget, Footprint, LatencyTable, OptimizerSpec, ParamInfo, Plan, Role

RecipeLike = str | Path | Mapping[str, Any] | Recipe  # a name, a file, the contents of one, or a recipe
log = logging.getLogger(__name__)
TIMING_S = 5.0  # what a latency table may take where a step_time limit needs it
RECORDING_S = 0.5  # and where it is only written down
MOST_CONFIRMED = 4  # budgets that are planned for before a refusal names one
MOST_RETIMED = 4  # plans whose specs are timed before one is taken


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionSettings:
    """Everything a budgeted optimizer needs to know beside its parameters and its budget.

    `overlap`: blocks whose states are on the host are stepped in backward, where nothing is to change their gradients.
    `checkpointing`: how many layers of the module recompute their activations in backward, see
    `baoc.models.switches.recomputable_layers`: all, none, or so many, the first ones; auto takes the fewest with which
    the plan is as good as with all; None leaves the module as it is.
    """

    planner: PlannerSettings = field(default_factory=lambda: PlannerSettings(risk=MEASURED, family=AUTO))
    reallocation: ReallocationConfig = field(default_factory=ReallocationConfig)
    backend: str = "auto"
    nonfinite: str = "skip_element"
    rms_matching: bool | Matching = True
    checkpointing: bool | int | Literal["auto"] | None = None
    release: bool | GradientRelease = False
    overlap: bool = True

    def __post_init__(self) -> None:
        check_ranges(self.reallocation, path="reallocation")
        number = self.checkpointing
        allowed = number is None or isinstance(number, bool) or number == "auto"
        allowed = allowed or (isinstance(number, int) and number >= 0)
        require(allowed, "checkpointing", number, "a number of layers from 0, True, False, 'auto' or None")


@dataclass(frozen=True, slots=True, kw_only=True)
class Resharding:
    """Layers of fully_shard: `switch(reshards)` sets their reshard_after_forward; `num_bytes` of all of them."""

    switch: Callable[[bool], None]
    num_bytes: int


def warn_of_large_ties(infos: Sequence[ParamInfo], *, params: Mapping[str, Tensor], plan: Plan) -> None:
    """Warns of a matrix that is embedding and head in one and begins LARGE times as large as a head's usual weights,
    where the plan's rates were measured on networks that begin small: logits begin saturated there, and training at
    these rates was seen to end worse than at AdamW's."""
    if plan.basis is None or not any(multiple > 1 for multiple in (plan.basis.lr or {}).values()):
        return
    for info in infos:
        weight = params.get(info.name)
        if not info.aliases or len(info.shape) != 2 or weight is None or weight.is_meta:
            continue
        rms, usual = float(weight.detach().float().square().mean().sqrt()), info.shape[1] ** -0.5
        if rms > LARGE * usual:
            log.warning(
                "%s is tied (%s) and begins with weights of RMS %.2g, where %.2g is usual for a head of its width: the "
                "plan's rates were measured on embeddings that begin at .02, and such a network can end worse than "
                "with AdamW. Initialise it smaller (nn.init.normal_(weight, std=0.02)), or choose another recipe",
                info.name, ", ".join(info.aliases), rms, usual,
            )  # fmt: skip


def with_recipe(settings: SessionSettings, *, recipe: RecipeLike | None, **asked: Any) -> SessionSettings:
    """The settings with those that are `asked` for beside them, where not None, and with a recipe in the place of their
    allocator. Raises BadInputError where another one was set."""
    if not isinstance(settings, SessionSettings):
        raise BadInputError(f"settings is a {type(settings).__name__}: give SessionSettings of baoc.training.session")
    settings = replace(settings, **{key: value for key, value in asked.items() if value is not None})
    if recipe is None:
        return settings
    if recipe == RACED:
        raise BadInputError(
            'recipe="raced" is of run.py, which knows the data that it races on: give the file of the race that is '
            'yours, such as recipe="outputs/races/NAME.json"; its "lr" is the learning rate that was best'
        )
    found = find_recipe(recipe)
    matching = settings.rms_matching if found.matching else False
    return replace(settings, planner=replace(settings.planner, recipe=found), rms_matching=matching)


def without_scratch_measurements(
    settings: SessionSettings, *, network: nn.Module | None, pretrained: bool | None
) -> SessionSettings:
    """The settings without what was measured in training from scratch, where weights are `pretrained`: as it says, or
    with None as far as the network tells."""
    require(pretrained is None or isinstance(pretrained, bool), "pretrained", pretrained, "True, False or None")
    known = pretrained if pretrained is not None else network is not None and bool(pretrained_reason(network))
    return replace(settings, planner=replace(settings.planner, family=None)) if known else settings


def make_profiler(
    planner: Planner,
    params: Mapping[str, Tensor],
    *,
    settings: SessionSettings,
    betas: tuple[float, float],
    ranks: Ranks = SINGLE_PROCESS,
) -> GradientProfiler | None:
    """The profiler that the settings call for, or None with reallocation=off; its bytes join the footprint."""
    if settings.reallocation.mode == "off":
        return None
    profiler = GradientProfiler(
        planner.blocks,
        params=params,
        betas=betas,
        incremental=settings.release is not False,
        ranks=ranks,
    )
    if planner.footprint is not None:
        planner.count_profile(profiler.nbytes, temporary_bytes=profiler.temporary_bytes())
    return profiler


def _profiler_with_room(
    planner: Planner,
    params: Mapping[str, Tensor],
    *,
    settings: SessionSettings,
    betas: tuple[float, float],
    ranks: Ranks,
) -> GradientProfiler | None:
    """The profiler. Where there is no room for it, one outside of the cap tells its bytes: InfeasibleBudgetError where
    no plan holds the budget beside it, else torch.OutOfMemoryError."""
    with suppress(torch.OutOfMemoryError):
        return ranks.run_or_raise_on_all(
            lambda: make_profiler(planner, params, settings=settings, betas=betas, ranks=ranks)
        )
    device = next(iter(params.values())).device
    clear_cache(device)
    with uncapped(device, budget=planner.budget):
        make_profiler(planner, params, settings=settings, betas=betas)
    planner.propose()
    raise torch.OutOfMemoryError("there is no room for statistics of gradients, which reallocation=off does without")


def needs_confirmation(device: torch.device, refusal: InfeasibleBudgetError) -> bool:
    """Whether a run with the budget that a refusal names may need other bytes: torch's allocator reserves less where it
    may not have more, so a step that was measured outside of the cap, or with weights of 16 bits, tells others."""
    other = refusal.least_step_s is not None or refusal.least_host_bytes is not None
    return device.type == "cuda" and refusal.budget_bytes > 0 and not other and ranks() is SINGLE_PROCESS


def least_confirmed_bytes(least: int, *, plan_at: Callable[[int], int]) -> int | None:
    """The least bytes of a few that were planned for, `least` first; None where nothing could be planned. `plan_at`
    plans within so many bytes and returns how few would do, or raises InfeasibleBudgetError."""
    held = None
    for _ in range(MOST_CONFIRMED):
        try:
            fewer = plan_at(least)
        except InfeasibleBudgetError as error:
            if held is not None:
                break
            least = max(error.without_frames().least_feasible_bytes, least + 1)
        except (BadInputError, torch.OutOfMemoryError):
            break
        else:
            held, least = least, min(least, fewer)
            if least == held:
                break
    return held


def bf16_weight_specs(planner: PlannerSettings) -> list[OptimizerSpec]:
    """The specs of a catalogue that keep weights in 16 bits."""
    return [spec for spec in planner.rows.values() if spec.weights != "native"]


def params_that_may_be_bf16(
    blocks: Sequence[Block], *, params: Mapping[str, Tensor], planner: PlannerSettings
) -> dict[str, Tensor]:
    """The parameters that some plan of these settings would keep in 16 bits, though they come in more."""
    only = ALLOCATORS[planner.allocator].traits.only_spec  # of an allocator that leaves no choice
    rows = [(spec, RULE_INFOS[spec.rule]) for spec in bf16_weight_specs(planner) if only in (None, spec.name)]
    keep = planner.keep_fp32_roles
    found = {
        param.name: params[param.name]
        for block in blocks
        if any(applies(block, spec=spec, rule=rule, keep_fp32_roles=keep) is None for spec, rule in rows)
        for param in block.params
    }
    return {name: param for name, param in found.items() if param.element_size() > torch.bfloat16.itemsize}


def largest_shards(infos: Sequence[ParamInfo], *, params: Mapping[str, Tensor]) -> tuple[ParamInfo, ...]:
    """What a budget of a device is planned for: of sharded parameters the part of the rank that has most."""
    return tuple(largest_shard(info, param=params[info.name]) for info in infos)


def refuse_sharded(
    params: Mapping[str, Tensor], *, budget: Budget, settings: SessionSettings, probed: bool = True
) -> None:
    """Raises BadInputError for what is not done yet where parameters are sharded."""
    if not any(map(is_sharded, params.values())):
        return
    if budget.step_time is not None:
        raise refusal("sharded_budget", budget=budget.name, why="seconds of a step are not predicted yet")
    if budget.memory_bytes is not None and not probed:
        raise refusal("sharded_budget", budget=budget.name, why="a step has to be measured before training")


def all_specs_use_bf16_weights(planner: PlannerSettings) -> bool:
    """Whether every plan of these settings keeps in 16 bits whatever it may."""
    only = ALLOCATORS[planner.allocator].traits.only_spec
    return all(spec.weights != "native" for spec in planner.rows.values() if only in (None, spec.name))


def declared_blocks(module: nn.Module) -> dict[str, list[str]] | None:
    """Blocks that the module declares by `parameter_blocks()`, or the network in its `model` or `net` does; names are
    those of the module."""
    children = ((f"{name}.", getattr(module, name, None)) for name in ("model", "net", "network"))
    inner = ((prefix, child) for prefix, child in children if isinstance(child, nn.Module))
    for prefix, declares in (*inner, ("", module)):
        blocks: Any = getattr(declares, "parameter_blocks", None)
        if blocks is not None:
            return {block: [prefix + name for name in names] for block, names in blocks().items()}
    return None


LARGE = 4.0  # times 1 / sqrt(width): nn.Embedding's N(0, 1) is at least that from a width of 16 on


class Measurer(Protocol):
    """Measures a training step before there is an optimizer."""

    accumulation: int  # micro-batches of a step

    def footprint(self, *, context_bytes: int, released: Sequence[Sequence[Tensor]] = ()) -> Footprint:
        """Bytes of a step without optimizer state; with the parameters of each block `released`, gradients go in
        backward."""
        ...

    def latency(
        self,
        specs: Sequence[OptimizerSpec],
        *,
        max_s: float,
        needed: Collection[str],
        given: LatencyTable | None = None,
        released: Sequence[Sequence[Tensor]] = (),
    ) -> LatencyTable:
        """Seconds of a step, `needed` specs timed; the rest of a step is as in a `given` table."""
        ...


class Session:
    """Plans once a Measurer has measured a step, and is given the optimizer afterwards.

    Blocks are those that `module` declares, as far as they are of `params`. `betas` are the optimizer's, for the
    profiler. `ranks` measure in step, so that an error of one is one of all; the
    plan is rank 0's, by what the rank measured that needs most.
    """

    def __init__(
        self,
        infos: Sequence[ParamInfo],
        *,
        params: Mapping[str, Tensor],
        budget: Budget,
        settings: SessionSettings,
        betas: tuple[float, float],
        device: torch.device,
        module: nn.Module | None = None,
        ranks: Ranks = SINGLE_PROCESS,
    ):
        self.ranks = ranks
        self.infos, self.params, self.module = tuple(infos), params, module
        task = getattr(module, "task_family", None)  # of `baoc.tasks.base.Task`
        if task is not None:
            settings = replace(settings, planner=replace(settings.planner, task=task))
        self.budget, self.settings, self.betas, self.device = budget, settings, betas, device
        declared = None if module is None else declared_blocks(module)
        if declared is not None:
            own = {block: [name for name in names if name in params] for block, names in declared.items()}
            declared = {block: names for block, names in own.items() if names}
        self.declared = declared
        planner = settings.planner
        blocks = partition(infos, declared=declared, patterns=planner.patterns, by=planner.blocks_by)
        released = [[params[param.name] for param in block.params] for block in blocks]
        self.released = released if settings.release is not False else []  # for who measures a step
        hidden = {p.name for block in blocks if block.role not in (Role.EMBEDDING, Role.HEAD) for p in block.params}
        self.hidden = [param for name, param in params.items() if name in hidden]  # that Muon may step
        self.bf16_params = params_that_may_be_bf16(blocks, params=params, planner=planner)
        self.bf16_savings = bf16_savings(self.bf16_params)
        self.context_bytes = context_bytes(device)
        self.latency: LatencyTable | None = None
        self.layers_summary = ""  # how they are recomputed and gathered, where that was asked for
        self.resharding: Resharding | None = None  # if it is open
        self.reshards: bool | None = None
        self.planner: Planner
        self.plan: Plan
        self.profiler: GradientProfiler | None = None
        wide = [info.name for info in infos if info.dtype == "float64"]
        if wide:
            log.warning(
                "%d of %d parameters are float64 (%s, ...), and no spec keeps optimizer state in more than float32: "
                "updates are no more precise than that. torch.optim.AdamW keeps float64 states",
                len(wide), len(infos), wide[0],
            )  # fmt: skip

    # -- the plan -------------------------------------------------------------------------------------------------

    def measure(self, measurer: Measurer, **given: Any) -> None:
        """Plans by what `measurer` finds within the budget's cap, see `_measure`, with as many recomputed layers as the
        settings ask for. Where that is auto, none of them, all, and the number in question are measured; likewise
        layers of fully_shard with reshard_after_forward and without.
        """
        plan = partial(self._in_layers, partial(self._measure, measurer, **given))
        plan = plan if self.resharding is None else partial(self.plan_resharding, plan, self.resharding)
        try:
            return plan()
        except InfeasibleBudgetError as error:
            own = self.budget.memory_bytes is None or self.settings.planner.recipe is not None
            if own or not needs_confirmation(self.device, error):
                raise  # bytes of states were counted, and of a recipe its own bytes are named
            refusal = error.without_frames()
        raise self.confirmed(refusal, plan=plan)

    def confirmed(self, refusal: InfeasibleBudgetError, *, plan: Callable[[], None]) -> InfeasibleBudgetError:
        """The refusal with a budget that was planned for."""
        budget = self.budget

        def plan_at(num_bytes: int) -> int:
            clear_cache(self.device)
            self.budget = replace(budget, memory_bytes=num_bytes)
            cap_device(self.device, budget=self.budget)
            plan()
            return self.plan.least_feasible_bytes

        least = least_confirmed_bytes(refusal.least_feasible_bytes, plan_at=plan_at)
        self.budget = budget
        if self.settings.checkpointing == "auto" and self.module is not None:
            self.recompute(0)  # as the module was, for whoever catches the refusal
        clear_cache(self.device)
        with suppress(BadInputError):
            cap_device(self.device, budget=budget)
        if least is None:
            return refusal
        return too_small(
            budget,
            allowed_bytes=refusal.budget_bytes,
            least_bytes=least,
            state_bytes_adamw=self.planner.state_bytes_adamw,
            allocator=self.planner.settings.allocator,
            footprint=self.planner.footprint,
            specs=self.planner.specs,
        )

    def plan_resharding(self, plan: Callable[[], None], resharding: Resharding) -> None:
        """Plans with reshard_after_forward, or without it where a memory budget holds a plan as good then, and no more
        layers are recomputed.

        Layers that stay whole are measured only where a plan holds them by their bytes: a step of fully_shard that runs
        out of memory in its middle leaves what no later one is sure to cope with.
        """

        def planned(reshards: bool) -> tuple[float, int]:
            clear_cache(self.device)
            resharding.switch(reshards)
            self.reshards = reshards
            plan()
            searched = self.settings.checkpointing == "auto" and self.module is not None
            return self.plan.allocation.risk, count_recomputed_layers(self.module) if searched and self.module else 0

        risk, layers = planned(True)
        footprint, most = self.planner.footprint, risk * (1 + ALIKE) + 1e-9
        if footprint is not None and self.budget.memory_bytes is not None:
            beside = replace(footprint, others_bytes=footprint.others_bytes + resharding.num_bytes)
            planner, kept = self.planner_for(beside, budget=self.budget), (math.inf, 0)
            with suppress(InfeasibleBudgetError, torch.OutOfMemoryError):
                if self.ranks.broadcast_result(planner.propose).allocation.risk <= most:
                    kept = planned(False)
            if not self.reshards and (kept[0] > most or kept[1] > layers):
                planned(True)
        gathered = "gathered again in backward" if self.reshards else "gathered once, from forward to backward"
        self.layers_summary = "; ".join(filter(None, (self.layers_summary, f"layers are {gathered}")))

    def _in_layers(self, plan: Callable[[], None]) -> None:
        """Plans by `plan` with as many recomputed layers as the settings ask for."""
        if self.settings.checkpointing != "auto":
            self.set_recomputed_layers()
            return plan()
        num_layers, number = len(self._layers()), 0
        if num_layers and self.budget.memory_bytes is not None:
            try:
                number = self.fewest_layers(plan, num_layers=num_layers)
            except BaseException:
                self.recompute(0)
                raise
        else:
            plan()
        self.layers_summary = f"recomputed layers {number} of {num_layers}"

    def set_recomputed_layers(self) -> None:
        """Sets the number of recomputed layers that the settings have. Raises BadInputError where the module has no
        layers, or fewer, and for auto, which only a measurer can tell."""
        asked = self.settings.checkpointing
        if asked is None:
            return
        if asked == "auto":
            raise BadInputError(
                "checkpointing='auto' looks at steps before training: give probe=, a callable that runs one forward "
                "and backward, or a number of layers"
            )
        num_layers = len(self._layers())
        number = max(1, num_layers) if asked is True else int(asked)
        self.recompute(number)
        self.layers_summary = f"recomputed layers {number} of {num_layers}"

    def _layers(self) -> list[nn.Module]:
        if self.module is None:
            raise BadInputError(
                f"checkpointing={self.settings.checkpointing!r} is about the layers of a module, and only parameters "
                "are here: give the module, or model="
            )
        return recomputable_layers(self.module)

    def recompute(self, number: int) -> None:
        assert self.module is not None
        set_recomputed(self.module, number)

    def fewest_layers(self, plan: Callable[[], None], *, num_layers: int) -> int:
        """Plans with the fewest recomputed layers with which the risk is about that of all; returns their number."""
        self.recompute(0)
        kept_risk = math.inf
        with suppress(InfeasibleBudgetError):
            plan()
            kept_risk = self.plan.allocation.risk
            if not self.plan.binding:
                return 0
        clear_cache(self.device)
        self.recompute(num_layers)
        try:
            plan()
        except (InfeasibleBudgetError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # of layers that do not do the same again, though none was recomputed in error
            log.warning("layers of %s cannot be recomputed (%s): all is kept", type(self.module).__name__, error)
            self.recompute(0)
            plan()
            return 0
        risk = self.plan.allocation.risk * (1 + ALIKE) + 1e-9

        def fits(number: int) -> bool:
            clear_cache(self.device)
            self.recompute(number)
            with suppress(InfeasibleBudgetError):
                plan()
                return self.plan.allocation.risk <= risk
            return False

        number = 0 if kept_risk <= risk else 1 + fewest(lambda fewer: fits(fewer + 1), most=num_layers - 1)
        assert self.module is not None
        if count_recomputed_layers(self.module) != number:
            clear_cache(self.device)
            self.recompute(number)
            plan()
        return number

    def _measure(
        self,
        measurer: Measurer,
        *,
        latency: LatencyTable | None = None,
        record_latency: bool = False,
        hides: bool = False,
        weights_on_host: bool = False,
        decided: Footprint | None = None,
    ) -> None:
        """Plans by what `measurer` finds within the budget's cap.

        `latency`: step times that were measured before. `record_latency`: measure them even if no limit needs them.
        `hides`: gradients are final in backward, so that host placement can pass there. `decided`: a footprint by which
        this very step was found to fit. Raises InfeasibleBudgetError, or BadInputError where the host lacks the memory.
        """
        inside = {} if weights_on_host else self.bf16_params  # which a measurement in 16 bits has yet to cast
        whole = not (self.bf16_savings and (weights_on_host or all_specs_use_bf16_weights(self.settings.planner)))
        measured = partial(self._footprint, measurer)
        footprint, in_bf16 = measured(bf16_params=inside, whole=whole)
        with cast_to_bf16(inside if in_bf16 else {}, module=self.module):
            full = self._time(measurer, latency=latency, record=record_latency, hides=hides)
        if full is not None:  # nothing that is timed stays, and seconds are the same outside of the cap
            with uncapped(self.device, budget=self.budget), cast_to_bf16(inside if in_bf16 else {}, module=self.module):
                full = self._time(measurer, latency=latency, record=record_latency, hides=hides)
        propose = partial(
            self._propose, measurer, budget=self.budget if full is None else replace(self.budget, step_time=None)
        )
        refusals: list[InfeasibleBudgetError] = []

        def planned(footprint: Footprint) -> bool:
            try:
                propose(footprint)
            except InfeasibleBudgetError as error:
                refusals.append(error.without_frames())
                return False
            return True

        found = planned(self.with_context(footprint))
        if not found and self.bf16_params and not in_bf16:
            clear_cache(self.device)
            found = planned(measured(bf16_params=self.bf16_params, whole=False)[0])
        if not found and decided is not None:
            clear_cache(self.device)
            found = planned(self.as_decided(self.with_context(footprint), decided=decided))
        if not found:
            raise min(refusals, key=lambda error: error.least_feasible_bytes)
        if full is not None and self.budget.step_time is not None:
            raise BadInputError(
                f"budget.step_time={self.budget.step_time:g} needs seconds of a step, and the device has no room to "
                f"time one ({str(full).splitlines()[0]}): leave step_time out, or run with less on the device"
            )

    def assume(self, footprint: Footprint | None = None) -> None:
        """Plans by a footprint that is known, or without one: then by least state where a memory budget needs one."""
        if footprint is not None or self.budget.memory_bytes is None:
            self._propose(None, footprint, budget=self.budget)
            return
        self.planner = self.planner_for(None, budget=replace(self.budget, memory_bytes=None))
        given = {"settings": self.settings, "betas": self.betas, "ranks": self.ranks}
        self.profiler = make_profiler(self.planner, self.params, **given)
        self.plan = self.planner.least()

    def complete(self, footprint: Footprint) -> Footprint:
        """The footprint with what does not depend on who measured it: a step's temporaries, and arriving weights."""
        specs = list(self.settings.planner.rows.values())
        planned = [self.params[info.name] for info in self.infos]  # a GAN's loop may have switched them off for now
        matrices = [spec for spec in specs if RULE_INFOS[spec.rule].hidden_only]
        others = [spec for spec in specs if spec not in matrices]
        temporaries = step_temporaries(others, params=planned)
        return replace(
            footprint,
            step_temporary_bytes=temporaries | step_temporaries(matrices, params=self.hidden or planned),
            arrival_bytes=weight_conversion_bytes(specs, device=footprint.device),
        )

    def largest(self, footprint: Footprint) -> Footprint:
        """That of the rank which needs most, as one of this rank."""
        found = self.ranks.all_gather(footprint)
        most = max(found, key=lambda one: one.peak_bytes(state_bytes=0))
        return replace(most, device=footprint.device, context_bytes=max(one.context_bytes for one in found))

    def _footprint(
        self, measurer: Measurer, *, bf16_params: Mapping[str, Tensor], whole: bool
    ) -> tuple[Footprint, bool]:
        """The footprint, measured under the budget's cap: with weights in full, and where that is too little (or not
        `whole`), with weights of 16 bits where a plan may keep such, so that a plan which holds the budget by them is
        found within it; and whether that was so. `bf16_params` are those that are yet to be cast.

        A third measurement, outside of the cap, is there for the refusal to name what would fit. Each comes after the
        error and the activations that its traceback held are gone, and the cap is back before anything is trained.
        """

        def measured() -> Footprint:
            given = {"context_bytes": self.context_bytes, "released": self.released}
            own = self.ranks.run_or_raise_on_all(
                lambda: self.complete(measurer.footprint(**given)), has_collectives=self._sharded
            )
            return self.largest(own)

        if whole:
            with suppress(torch.OutOfMemoryError):
                return measured(), False
            clear_cache(self.device)
        if self.bf16_savings:
            with suppress(torch.OutOfMemoryError), cast_to_bf16(bf16_params, module=self.module):
                return as_native(measured(), savings=self.bf16_savings), True
            clear_cache(self.device)
        with uncapped(self.device, budget=self.budget), cast_to_bf16(bf16_params, module=self.module):
            return as_native(measured(), savings=self.bf16_savings), True

    def _time(
        self, measurer: Measurer, *, latency: LatencyTable | None, record: bool, hides: bool
    ) -> torch.OutOfMemoryError | None:
        """The latency table to plan with or to record, none where nobody asks for one. An error tells that there was no
        room to time a step, where mostly no plan fits either, and the refusal says what would."""
        limited = self.budget.step_time is not None
        if latency is not None or not (limited or record):
            self.latency = latency
            return None
        specs = list(self.settings.planner.rows.values())
        needed = specs_timed_first(specs, device=self.device) if limited else set[str]()
        try:
            given = {"needed": needed, "max_s": self._max_s, "released": self.released}
            table = self._slowest(lambda: measurer.latency(specs, **given))
        except torch.OutOfMemoryError as error:
            clear_cache(self.device)
            return error.with_traceback(None)  # whose frames hold activations
        if limited and may_place(self.settings.planner, budget=self.budget):
            given = {"device": self.device, "accumulation": measurer.accumulation, "hides": hides}
            table = self.ranks.broadcast(with_link_rates(table, **given))
        self.latency = table
        return None

    def _slowest(self, measure: Callable[[], LatencyTable]) -> LatencyTable:
        """The table of the rank whose forward and backward are slowest, as one of this rank: others wait for it."""
        own = self.ranks.run_or_raise_on_all(measure, has_collectives=self._sharded)
        return replace(max(self.ranks.all_gather(own), key=lambda table: table.base_step_s), device=own.device)

    @property
    def _sharded(self) -> bool:
        return any(map(is_sharded, self.params.values()))

    @property
    def _max_s(self) -> float:
        return TIMING_S if self.budget.step_time is not None else RECORDING_S

    def _retimed(self, measurer: Measurer, names: set[str]) -> LatencyTable:
        """The table with the specs of these names timed beside those that are."""
        assert self.latency is not None
        timed = set(self.latency.fixed_s) - set(self.latency.assumed)
        specs = list(self.settings.planner.rows.values())
        given = {"needed": timed | names, "given": self.latency, "max_s": self._max_s}
        table = self._slowest(lambda: measurer.latency(specs, **given))
        self.latency = replace(table, link=self.latency.link, hidden_s=self.latency.hidden_s)
        return self.latency

    def planner_for(self, footprint: Footprint | None, *, budget: Budget) -> Planner:
        return Planner(
            self.infos,
            budget=budget,
            settings=self.settings.planner,
            declared=self.declared,
            footprint=footprint,
            latency=self.latency,
        )

    def _propose(self, measurer: Measurer | None, footprint: Footprint | None, *, budget: Budget) -> None:
        """What a plan rests on is not left to assumed seconds: its specs are timed, and a limit on time is planned for
        again then."""
        planner = self.planner_for(footprint, budget=budget)
        given = {"settings": self.settings, "betas": self.betas, "ranks": self.ranks}
        profiler = _profiler_with_room(planner, self.params, **given)
        plan = self.ranks.broadcast_result(planner.propose)
        for _ in range(MOST_RETIMED if measurer is not None else 0):
            used = set(map(device_spec_name, plan.allocation.choices.values()))
            assumed = used & set(planner.latency.assumed if planner.latency else ())
            if not assumed:
                break
            assert measurer is not None
            planner.latency = self._retimed(measurer, assumed)
            plan = self.ranks.broadcast_result(planner.propose) if budget.step_time is not None else plan
        if plan.host_bytes:
            check_host_memory(plan.host_bytes * self.ranks.size, what="states on the host")
        self.planner, self.profiler, self.plan = planner, profiler, plan

    def with_context(self, footprint: Footprint) -> Footprint:
        """The footprint with the context as it is taken for now that steps were measured, and a cap that leaves it."""
        now = int(self.ranks.all_reduce_max(max(footprint.context_bytes, context_bytes(self.device)))[0])
        if now != self.context_bytes:
            self.context_bytes = now
            cap_device(self.device, budget=self.budget)
        return replace(footprint, context_bytes=now)

    def as_decided(self, footprint: Footprint, *, decided: Footprint) -> Footprint:
        """What the decision measured of this step, where that is less by pages alone; else `footprint`."""
        decided = self.with_context(decided)
        more = footprint.peak_bytes(state_bytes=0) - decided.peak_bytes(state_bytes=0)
        return decided if more <= PAGES_BYTES else footprint

    # -- the optimizer --------------------------------------------------------------------------------------------

    def arguments(self) -> dict[str, Any]:
        """What a BlockwiseOptimizer on this plan is built with beside its parameters and hyperparameters."""
        warn_of_large_ties(self.infos, params=self.params, plan=self.plan)
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()  # states get memory of their own, not gaps that the probe's activations have left
        settings = self.settings
        return {
            "specs": self.plan.allocation.choices,
            "blocks": self.planner.blocks,
            "backend": settings.backend,
            "nonfinite": settings.nonfinite,
            "rms_matching": settings.rms_matching,
            "release": settings.release,
            "tuning": tuning_of(self.plan),
        }

    def reallocator(self, optimizer: Any) -> Reallocator:
        """What will reallocate the optimizer that was built on this plan; to be attached."""
        return Reallocator(
            planner=self.planner,
            optimizer=optimizer,
            plan=self.plan,
            settings=self.settings.reallocation,
            profiler=self.profiler,
            ranks=self.ranks,
            network=None if self.module is None else weakref.ref(self.module),
        )

    def start(
        self, groups: Sequence[dict[str, Any]], *, defaults: Mapping[str, Any], device: torch.device | None = None
    ) -> Reallocator:
        """The optimizer on this plan, attached to what will reallocate it, which holds both.

        `groups` are the user's, with (name, parameter) pairs; `defaults` are lr, betas, eps and weight_decay; `device`
        is where the optimizer is to bring parameters that wait elsewhere.
        """
        optimizer = BlockwiseOptimizer(groups, **self.arguments(), device=device, **defaults)
        optimizer.network = None if self.module is None else weakref.ref(self.module)
        reallocator = self.reallocator(optimizer)
        reallocator.attach()
        return reallocator
