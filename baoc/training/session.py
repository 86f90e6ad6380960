"""Session: the plan of one network under one budget, and the optimizer on it. Every way in uses it.

1. A `Measurer` runs a step and returns its `Footprint` (bytes without optimizer state) and, where time is limited, a
   `LatencyTable`: `Probe` under a Trainer, `CallerProbe` in a plain loop. `assume` plans without one.
2. `Session.measure` plans by them. If the settings leave the number of recomputed layers open, or resharding of
   fully_shard, it searches them: `search_resharding` calls `_plan_layers`, which calls `_plan_once` for each try.
3. `Session.start` builds the `BlockwiseOptimizer` on the plan, and the `Reallocator` that holds both.
"""

import logging
import math
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from baoc.cache import cache_folder
from baoc.config.schema import ReallocationConfig
from baoc.config.validate import check_ranges, require
from baoc.core.blocks import partition
from baoc.core.catalogue import device_spec_name
from baoc.core.measured import AUTO
from baoc.core.recipes import Recipe, choosing_nothing, find_recipe, tuning_of
from baoc.core.rule_tags import RULE_INFOS
from baoc.errors import BadInputError, InfeasibleBudgetError
from baoc.kernels.host_memory import check_host_memory
from baoc.models.pretrained import pretrained_reason
from baoc.models.switches import count_recomputed_layers, recomputable_layers, set_recomputed
from baoc.optim import BlockwiseOptimizer, GradientRelease
from baoc.optim.matching import Matching
from baoc.optim.shards import is_sharded, largest_shard, local_shard
from baoc.optim.weights import conversion_bytes
from baoc.optim.wrappers import ddp_params
from baoc.parallel import SINGLE_PROCESS, Ranks, refusal
from baoc.planning.allocators import ALLOCATORS
from baoc.planning.budgeted import MEASURED, PlannerSettings, blocks_of_choice, may_use_host
from baoc.planning.candidates import why_inapplicable
from baoc.planning.messages import too_small
from baoc.planning.microbatch import RATE_TOLERANCE, smallest_number
from baoc.planning.planner import Planner
from baoc.profiling import GradientProfiler, cap_device, clear_cache, context_bytes, free_bytes, uncapped
from baoc.profiling.bf16_params import as_native, bf16_savings, cast_to_bf16
from baoc.profiling.footprint import PAGES_BYTES
from baoc.profiling.memory import least_budget_with_same_pages, least_confirmed_bytes
from baoc.profiling.step_temporaries import step_temporaries
from baoc.profiling.step_time import specs_timed_first, time_specs, with_link_rates
from baoc.training.decision_cache import Least, least_key_of_step, load_least, store_decision
from baoc.training.reallocator import Reallocator
from baoc.types import Block, Budget, Footprint, LatencyTable, OptimizerSpec, ParamInfo, Plan, Role

RecipeLike = str | Path | Mapping[str, Any] | Recipe  # a name, a file, the contents of one, or a recipe
log = logging.getLogger(__name__)
LIMITED_TIMING_S = 5.0  # seconds to spend on a latency table that a step_time limit needs
RECORDED_TIMING_S = 0.5  # and on one that is only written into the run folder
MAX_RETIMINGS = 4  # plans whose specs are timed before one is taken
LARGE_TIE = 4.0  # times 1 / sqrt(width): nn.Embedding's N(0, 1) is at least that from a width of 16 on


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionSettings:
    """Everything a budgeted optimizer needs to know beside its parameters and its budget.

    `overlap`: step host-placed blocks in backward, if nothing changes their gradients after it.
    `checkpointing`: number of layers, from the first, that recompute their activations in backward (see
    `baoc.models.switches.recomputable_layers`). True: all. "auto": the fewest with which the plan is as good as with
    all. None: leave the module as it is.
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
    """Layers of fully_shard whose resharding is open: `switch(reshards)` sets it; unsharded they take `num_bytes`."""

    switch: Callable[[bool], None]
    num_bytes: int


class Measurer(Protocol):
    """Measures a training step before there is an optimizer."""

    accumulation: int  # micro-batches of a step
    upkeep_bytes: int  # per element that a step moves beside what `rest_seconds` times

    @property
    def inputs(self) -> Any:
        """What a step runs on, as plain values, once it was measured; None if that is not known."""
        ...

    def footprint(self, *, context_bytes: int, released: Sequence[Sequence[Tensor]] = ()) -> Footprint:
        """Bytes of a step without optimizer state. `released`: the parameters of each block under gradient release."""
        ...

    def rest_seconds(
        self, specs: Sequence[OptimizerSpec], *, max_s: float, released: Sequence[Sequence[Tensor]]
    ) -> float:
        """Seconds of a step without the optimizer's part, timed for about `max_s`. `specs`: those that may step it."""
        ...


class Session:
    """Plans once a Measurer has measured a step, and then builds the optimizer.

    `plan` and `planner` exist after `measure` or `assume`.

    Args:
        infos: The parameters to plan for, see `largest_shards`.
        params: The tensors, by name.
        betas: The optimizer's, for the profiler.
        module: The network; its declared blocks are used, as far as they are of `params`.
        ranks: Measure together: an error on one is raised on all. Rank 0 plans, by the footprint of the rank that needs
            most.
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
        declared = None if module is None else declared_blocks(module, among=params)
        planner = blocks_of_choice(settings.planner, params=self.infos, declared=declared)
        settings = replace(settings, planner=planner)
        self.budget, self.settings, self.betas, self.device = budget, settings, betas, device
        self.declared = declared
        blocks = partition(infos, declared=declared, patterns=planner.patterns, by=planner.blocks_by)
        released = [[params[param.name] for param in block.params] for block in blocks]
        self.released = released if settings.release is not False else []  # for the measurer
        hidden = {p.name for block in blocks if block.role not in (Role.EMBEDDING, Role.HEAD) for p in block.params}
        self.hidden = [param for name, param in params.items() if name in hidden]  # that Muon may step
        self.bf16_params = params_that_may_be_bf16(blocks, params=params, planner=planner)
        self.bf16_savings = bf16_savings(self.bf16_params)
        self.context_bytes = context_bytes(device)
        self.latency: LatencyTable | None = None
        self.layers_summary = ""  # how layers are recomputed and resharded, if the settings say so
        self.resharding: Resharding | None = None  # if reshard_after_forward is open
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

    def measure(
        self,
        measurer: Measurer,
        *,
        latency: LatencyTable | None = None,
        record_latency: bool = False,
        host_steps_overlap_backward: bool = False,
        weights_on_host: bool = False,
        known_footprint: Footprint | None = None,
    ) -> None:
        """Measures a step within the budget's cap and plans by it, with recomputed and resharded layers searched.

        Args:
            latency: Step times that were measured before.
            record_latency: Measure step times even if no limit needs them.
            host_steps_overlap_backward: Gradients are final in backward, so host-placed blocks can be stepped there.
            weights_on_host: The weights wait in CPU memory, as they exceed the budget unless in bf16.
            known_footprint: A footprint by which this very step was found to fit.

        Raises:
            InfeasibleBudgetError: No plan fits. On a GPU, and without fully_shard, the memory budget that it names was
                planned for, if any was.
            BadInputError: The host lacks the memory of a plan, or the device has no room to time a step.
        """

        key = cache(partial(self._least_key, measurer))  # of one measurement, as hashing a network takes .04 s
        set_latency = partial(
            self._set_latency, measurer, latency=latency, record=record_latency, overlaps=host_steps_overlap_backward
        )
        plan_once = partial(
            self._plan_once,
            measurer,
            set_latency=set_latency,
            weights_on_host=weights_on_host,
            known_footprint=known_footprint,
            key=key,
        )

        def replan() -> None:
            if self.resharding is None:
                self._plan_layers(plan_once)
            else:
                self.search_resharding(lambda: self._plan_layers(plan_once), self.resharding)

        try:
            replan()
            return
        except InfeasibleBudgetError as error:
            # The least bytes of a state budget were counted, not measured; those of a recipe are the recipe's own.
            exact = self.budget.memory_bytes is None or self.settings.planner.recipe is not None
            if exact or not needs_confirmation(self.device, error, sharded=self._sharded):
                raise
            refusal = error.without_frames()
        raise self.confirm_refusal(refusal, replan=replan, key=key())

    def _least_key(self, measurer: Measurer) -> dict[str, Any] | None:
        """What the least budget of a refusal rests on; None if it is not confirmed, or if the step is not known."""
        module = self.module
        if module is None or self.budget.memory_bytes is None or not confirms(self.device, sharded=self._sharded):
            return None
        if (inputs := measurer.inputs) is None:
            return None
        common = {"infos": self.infos, "settings": self.settings, "budget": self.budget, "device": self.device}
        return least_key_of_step(inputs, network=module, **common)

    def _load_least(self, key: Mapping[str, Any] | None) -> Least | None:
        return self.ranks.broadcast_result(lambda: load_least(key) if key is not None else None)

    def _named_before(self, key: Mapping[str, Any] | None, measured: Sequence[Footprint]) -> Least | None:
        """What an earlier process named of this very step, of which these footprints are; None if there is nothing."""
        least = self._load_least(key)
        if least is None or least.recomputed != self._num_recomputed() or not any(map(least.is_of, measured)):
            return None
        return least

    def confirm_refusal(
        self, refusal: InfeasibleBudgetError, *, replan: Callable[[], None], key: Mapping[str, Any] | None = None
    ) -> InfeasibleBudgetError:
        """Returns the refusal with a least budget that was planned for, by `replan` under larger budgets.

        With a `key` it is kept for later processes. What an earlier one named is named again if it is enough still, for
        the same step.
        Afterwards `plan` and `planner` belong to one of these budgets and must not be used.
        """
        budget, least = self.budget, None
        known = self._load_least(key)
        log.info("no plan fits budget %s: larger ones are measured for the least", budget.name)
        planned: dict[int, Least] = {}

        def plan_at(num_bytes: int) -> int:
            clear_cache(self.device)
            self.budget = replace(budget, memory_bytes=num_bytes)
            self.ranks.run_or_raise_on_all(lambda: cap_device(self.device, budget=self.budget))
            replan()
            if self.planner.footprint is not None:
                planned[num_bytes] = Least(
                    num_bytes=num_bytes, footprint=self.planner.footprint, recomputed=self._num_recomputed()
                )
            return self.plan.least_feasible_bytes

        if known is not None and known.num_bytes > refusal.budget_bytes:
            with suppress(InfeasibleBudgetError, BadInputError, torch.OutOfMemoryError):
                plan_at(known.num_bytes)
                again = self._named_before(key, [planned[known.num_bytes].footprint])
                least = None if again is None else again.num_bytes
        if least is None:

            def page_start(num_bytes: int) -> int:
                return self.ranks.broadcast(least_budget_with_same_pages(self.device, num_bytes))

            least = least_confirmed_bytes(refusal, plan_at=plan_at, page_start=page_start)
            if key is not None and least is not None and self.ranks.rank == 0:
                keep_least(key, planned[least], device=self.device)
        self.budget = budget
        if self.settings.checkpointing == "auto" and self.module is not None:
            self.recompute(0)  # as the module was, for whoever catches the refusal
        clear_cache(self.device)
        with suppress(BadInputError):
            cap_device(self.device, budget=budget)
        if least is None:
            return refusal
        return too_small(self.planner, allowed_bytes=refusal.budget_bytes, least_bytes=least)

    def search_resharding(self, replan: Callable[[], None], resharding: Resharding) -> None:
        """Plans with reshard_after_forward; without it if a memory budget then holds a plan as good, with no more
        recomputed layers. That is measured only if a plan fits by calculation, see `confirms`."""

        def plan_with(reshards: bool) -> tuple[float, int]:
            """Risk of the plan, and its number of recomputed layers if that is searched."""
            clear_cache(self.device)
            resharding.switch(reshards)
            self.reshards = reshards
            replan()
            return self.plan.allocation.risk, self._num_recomputed() if self.settings.checkpointing == "auto" else 0

        risk, num_layers = plan_with(True)
        footprint, max_risk = self.planner.footprint, _about_equal_risk(risk)
        if footprint is not None and self.budget.memory_bytes is not None:
            unsharded = replace(footprint, others_bytes=footprint.others_bytes + resharding.num_bytes)
            planner = self.planner_for(unsharded, budget=self.budget)
            unsharded_risk, unsharded_layers = math.inf, 0
            with suppress(InfeasibleBudgetError, torch.OutOfMemoryError):
                if self.ranks.broadcast_result(planner.propose).allocation.risk <= max_risk:
                    unsharded_risk, unsharded_layers = plan_with(False)
            if not self.reshards and (unsharded_risk > max_risk or unsharded_layers > num_layers):
                plan_with(True)
        gathered = "gathered again in backward" if self.reshards else "gathered once, from forward to backward"
        self.layers_summary = "; ".join(filter(None, (self.layers_summary, f"layers are {gathered}")))

    def _plan_layers(self, plan_once: Callable[[], None]) -> None:
        """Plans with as many recomputed layers as the settings ask for; searches the number if it is "auto"."""
        if self.settings.checkpointing != "auto":
            self.set_recomputed_layers()
            plan_once()
            return
        num_layers, number = len(self._layers()), 0
        if num_layers and self.budget.memory_bytes is not None:
            try:
                number = self.search_recomputed_layers(plan_once, num_layers=num_layers)
            except BaseException:
                self.recompute(0)
                raise
        else:
            plan_once()
        self.layers_summary = f"recomputed layers {number} of {num_layers}"

    def set_recomputed_layers(self) -> None:
        """Sets the number of recomputed layers that the settings have. Raises BadInputError if the module has fewer or
        none, and for "auto", which needs a measurer."""
        number = self.settings.checkpointing
        if number is None:
            return
        if number == "auto":
            raise BadInputError(
                "checkpointing='auto' looks at steps before training: give probe=, a callable that runs one forward "
                "and backward, or a number of layers"
            )
        num_layers = len(self._layers())
        number = max(1, num_layers) if number is True else int(number)
        self.recompute(number)
        self.layers_summary = f"recomputed layers {number} of {num_layers}"

    def search_recomputed_layers(self, plan_once: Callable[[], None], *, num_layers: int) -> int:
        """Plans with the fewest recomputed layers whose risk is about that of all; returns their number."""
        self.recompute(0)
        risk_of_none = math.inf
        with suppress(InfeasibleBudgetError):
            plan_once()
            risk_of_none = self.plan.allocation.risk
            if not self.plan.binding:
                return 0
        clear_cache(self.device)
        self.recompute(num_layers)
        try:
            plan_once()
        except (InfeasibleBudgetError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # of layers whose forward differs when it is repeated
            log.warning("layers of %s cannot be recomputed (%s): all is kept", type(self.module).__name__, error)
            self.recompute(0)
            plan_once()
            return 0
        max_risk = _about_equal_risk(self.plan.allocation.risk)

        def is_enough(number: int) -> bool:
            clear_cache(self.device)
            self.recompute(number)
            with suppress(InfeasibleBudgetError):
                plan_once()
                return self.plan.allocation.risk <= max_risk
            return False

        number = 0 if risk_of_none <= max_risk else 1 + smallest_number(lambda n: is_enough(n + 1), most=num_layers - 1)
        assert self.module is not None
        if count_recomputed_layers(self.module) != number:
            clear_cache(self.device)
            self.recompute(number)
            plan_once()
        return number

    def _layers(self) -> list[nn.Module]:
        if self.module is None:
            raise BadInputError(
                f"checkpointing={self.settings.checkpointing!r} is about the layers of a module, and only parameters "
                "are here: give the module, or model="
            )
        return recomputable_layers(self.module)

    def _num_recomputed(self) -> int:
        return 0 if self.module is None else count_recomputed_layers(self.module)

    def recompute(self, number: int) -> None:
        assert self.module is not None
        set_recomputed(self.module, number)

    def _plan_once(
        self,
        measurer: Measurer,
        *,
        set_latency: Callable[[], torch.OutOfMemoryError | None],
        weights_on_host: bool,
        known_footprint: Footprint | None,
        key: Callable[[], Mapping[str, Any] | None],
    ) -> None:
        """Measures and plans with the layers as they are. Arguments and errors: see `measure`; `key`: of `Least`."""
        self.profiler = None  # else a measurement of another budget would have the former plan's buffers beside it
        params_to_cast = {} if weights_on_host else self.bf16_params  # weights on the host arrive in bf16
        always_bf16 = weights_on_host or all_specs_use_bf16_weights(self.settings.planner)
        footprint, in_bf16 = self._measure_footprint(
            measurer, params_to_cast=params_to_cast, try_native=not (self.bf16_savings and always_bf16)
        )

        cast = partial(cast_to_bf16, params_to_cast if in_bf16 else {}, module=self.module)
        with cast():
            no_room = set_latency()
        if no_room is not None:  # without the cap seconds are the same, and nothing of a timing stays allocated
            with uncapped(self.device, budget=self.budget), cast():
                no_room = set_latency()
        # Bytes alone may refuse the budget then; else the end of this method does.
        budget = self.budget if no_room is None else replace(self.budget, step_time=None)
        refusals: list[InfeasibleBudgetError] = []

        def is_planned(footprint: Footprint) -> bool:
            try:
                self._propose(measurer, footprint, budget=budget)
            except InfeasibleBudgetError as error:
                refusals.append(error.without_frames())
                return False
            return True

        footprint = nearest = self.with_context(footprint)
        fits = is_planned(footprint)
        if not fits and self.bf16_params and not in_bf16:
            clear_cache(self.device)
            nearest, _ = self._measure_footprint(measurer, params_to_cast=self.bf16_params, try_native=False)
            fits = is_planned(nearest)
        # The same step may take a page more or less in another process: what a refusal named holds here too.
        least = self._named_before(key(), [footprint, nearest]) if known_footprint is None else None
        allowed = self.budget.memory_bytes or 0
        if least is not None:
            if fits and allowed < least.num_bytes:
                raise too_small(self.planner, allowed_bytes=allowed, least_bytes=least.num_bytes)
            if allowed >= least.num_bytes:
                footprint = known_footprint = least.footprint
        if not fits and known_footprint is not None:
            clear_cache(self.device)
            fits = is_planned(self.known_or_measured(self.with_context(footprint), known=known_footprint))
        if not fits:
            raise min(refusals, key=lambda error: error.least_feasible_bytes)
        if no_room is not None and self.budget.step_time is not None:
            raise BadInputError(
                f"budget.step_time={self.budget.step_time:g} needs seconds of a step, and the device has no room to "
                f"time one ({str(no_room).splitlines()[0]}): leave step_time out, or run with less on the device"
            )

    def assume(self, footprint: Footprint | None = None) -> None:
        """Plans without measuring. Without a `footprint` a memory budget gets the plan of least state."""
        if footprint is not None or self.budget.memory_bytes is None:
            self._propose(None, footprint, budget=self.budget)
            return
        self.planner = self.planner_for(None, budget=replace(self.budget, memory_bytes=None))
        self.profiler = make_profiler(
            self.planner, self.params, settings=self.settings, betas=self.betas, ranks=self.ranks
        )
        self.plan = self.planner.least_state_plan()

    # -- bytes ----------------------------------------------------------------------------------------------------

    def _measure_footprint(
        self, measurer: Measurer, *, params_to_cast: Mapping[str, Tensor], try_native: bool
    ) -> tuple[Footprint, bool]:
        """Measures the step's footprint; returns it, and whether it was measured with bf16 weights.

        Tries, in this order: native weights under the cap, if `try_native`; bf16 weights under the cap, where a plan
        may keep them; bf16 weights without the cap, so that a refusal can name the bytes that would be enough.
        `params_to_cast`: the parameters that a bf16 measurement has to cast.
        """

        def measure() -> Footprint:
            def complete() -> Footprint:
                return self.complete(measurer.footprint(context_bytes=self.context_bytes, released=self.released))

            own = self.ranks.run_or_raise_on_all(complete, has_collectives=self._steps_together)
            return self.largest_on_ranks(own)

        if try_native:
            with suppress(torch.OutOfMemoryError):
                return measure(), False
            clear_cache(self.device)  # after the except clause: its traceback held activations
        if self.bf16_savings:
            with suppress(torch.OutOfMemoryError), cast_to_bf16(params_to_cast, module=self.module):
                return as_native(measure(), savings=self.bf16_savings), True
            clear_cache(self.device)
        with uncapped(self.device, budget=self.budget), cast_to_bf16(params_to_cast, module=self.module):
            return as_native(measure(), savings=self.bf16_savings), True

    def complete(self, footprint: Footprint) -> Footprint:
        """The footprint with the bytes that every measurer leaves out: a step's temporaries, and arriving weights."""
        specs = list(self.settings.planner.all_specs.values())
        planned = [self.params[info.name] for info in self.infos]  # a GAN's loop may have frozen them for now
        matrix_specs = [spec for spec in specs if RULE_INFOS[spec.rule].hidden_only]
        other_specs = [spec for spec in specs if spec not in matrix_specs]
        temporaries = step_temporaries(other_specs, params=planned)
        return replace(
            footprint,
            step_temporary_bytes=temporaries | step_temporaries(matrix_specs, params=self.hidden or planned),
            arrival_bytes=max(footprint.arrival_bytes, conversion_bytes(specs, device=footprint.device)),
        )

    def largest_on_ranks(self, footprint: Footprint) -> Footprint:
        """The footprint of the rank that needs most memory, relabelled with this rank's device. A collective."""
        footprints = self.ranks.all_gather(footprint)
        largest = max(footprints, key=lambda of_rank: of_rank.peak_bytes(state_bytes=0))
        context = max(of_rank.context_bytes for of_rank in footprints)
        return replace(largest, device=footprint.device, context_bytes=context)

    def with_context(self, footprint: Footprint) -> Footprint:
        """The footprint with the present size of the CUDA context, which measuring may have grown; caps accordingly."""
        now = int(self.ranks.all_reduce_max(max(footprint.context_bytes, context_bytes(self.device)))[0])
        if now != self.context_bytes:
            self.context_bytes = now
            cap_device(self.device, budget=self.budget)
        return replace(footprint, context_bytes=now)

    def known_or_measured(self, measured: Footprint, *, known: Footprint) -> Footprint:
        """`known` if `measured` exceeds it by no more than PAGES_BYTES, else `measured`.

        A context that has grown counts in the excess alone: the cap goes by the present one, so the budget holds.
        """
        excess = measured.peak_bytes(state_bytes=0) - known.peak_bytes(state_bytes=0)
        return known if excess <= PAGES_BYTES else measured

    # -- seconds --------------------------------------------------------------------------------------------------

    def _set_latency(
        self, measurer: Measurer, *, latency: LatencyTable | None, record: bool, overlaps: bool
    ) -> torch.OutOfMemoryError | None:
        """Sets `self.latency`: the table that is there, a new one if a limit needs it or it is to be recorded, or None.
        Returns the OutOfMemoryError of a device without room to time a step, instead of raising it: mostly no plan fits
        then either, and its refusal says what would."""
        limited = self.budget.step_time is not None
        if latency is not None or not (limited or record):
            self.latency = latency
            return None
        specs = self.settings.planner.all_specs.values()
        try:
            table = self._time(measurer, specs_timed_first(specs, device=self.device) if limited else set())
        except torch.OutOfMemoryError as error:
            clear_cache(self.device)
            return error.with_traceback(None)  # its frames hold activations
        if limited and may_use_host(self.settings.planner, budget=self.budget):
            table = self.ranks.broadcast(
                with_link_rates(table, device=self.device, accumulation=measurer.accumulation, hides=overlaps)
            )
        self.latency = table
        return None

    def _time(self, measurer: Measurer, needed: set[str], *, given: LatencyTable | None = None) -> LatencyTable:
        """The table of the slowest rank, for which the others wait, relabelled with this rank's device. `needed`: specs
        to time. `given`: a table with the seconds of everything else."""
        specs, max_s = list(self.settings.planner.all_specs.values()), self._max_timing_s

        def measure() -> LatencyTable:
            rest_s = measurer.rest_seconds(specs, max_s=max_s, released=self.released) if given is None else 0.0
            return self.spec_table(specs, needed, upkeep_bytes=measurer.upkeep_bytes, rest_s=rest_s, previous=given)

        own = self.ranks.run_or_raise_on_all(measure, has_collectives=self._steps_together)
        return replace(max(self.ranks.all_gather(own), key=lambda table: table.base_step_s), device=own.device)

    @property
    def _max_timing_s(self) -> float:
        return LIMITED_TIMING_S if self.budget.step_time is not None else RECORDED_TIMING_S

    def spec_table(
        self,
        specs: Sequence[OptimizerSpec],
        needed: Collection[str],
        *,
        upkeep_bytes: int,
        rest_s: float = 0.0,
        previous: LatencyTable | None = None,
    ) -> LatencyTable:
        """This rank's table of `specs`, of which the `needed` ones are timed; see `time_specs`."""
        trained = [param for param in self.params.values() if param.requires_grad]
        return time_specs(
            specs,
            device=self.device,
            num_elements=sum(local_shard(param).numel() for param in trained),
            num_tensors=len(trained),
            rest_s=rest_s,
            upkeep_bytes=upkeep_bytes,
            needed=needed,
            max_s=self._max_timing_s,
            cache_dir=cache_folder(),
            previous=previous,
        )

    @property
    def _sharded(self) -> bool:
        return any(map(is_sharded, self.params.values()))

    @property
    def _steps_together(self) -> bool:
        """True if a rank waits for the others in a step: by fully_shard, or by DistributedDataParallel of a probe."""
        return self._sharded or not ddp_params().isdisjoint(map(id, self.params.values()))

    # -- planning -------------------------------------------------------------------------------------------------

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
        """Sets planner, profiler and plan. Chosen specs of assumed seconds are timed, and under a limit replanned."""
        planner = self.planner_for(footprint, budget=budget)
        profiler = self._profiler_with_room(planner)
        plan = self.ranks.broadcast_result(planner.propose)
        for _ in range(MAX_RETIMINGS):
            chosen = set(map(device_spec_name, plan.allocation.choices.values()))
            latency = self.latency
            assumed = chosen & set(latency.assumed if latency is not None else ())
            if not assumed or latency is None or measurer is None:
                break
            table = self._time(measurer, (set(latency.fixed_s) - set(latency.assumed)) | assumed, given=latency)
            planner.latency = self.latency = replace(table, link=latency.link, hidden_s=latency.hidden_s)
            if budget.step_time is not None:
                plan = self.ranks.broadcast_result(planner.propose)
        if plan.host_bytes:
            check_host_memory(plan.host_bytes * self.ranks.size, what="states on the host")
        self.planner, self.profiler, self.plan = planner, profiler, plan

    def _profiler_with_room(self, planner: Planner) -> GradientProfiler | None:
        """The profiler. Without room for it raises InfeasibleBudgetError, by its bytes, or OutOfMemoryError."""
        make = partial(make_profiler, planner, self.params, settings=self.settings, betas=self.betas)
        with suppress(torch.OutOfMemoryError):
            return self.ranks.run_or_raise_on_all(lambda: make(ranks=self.ranks))
        clear_cache(self.device)
        with uncapped(self.device, budget=planner.budget):
            make()  # for its bytes in planner.footprint
        planner.propose()  # raises if nothing fits with these bytes
        raise torch.OutOfMemoryError(
            "there is no room for statistics of gradients, which reallocation=off does without"
        )

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
        """The optimizer on this plan, attached to what will reallocate it, which holds both. `groups` have (name,
        parameter) pairs, `defaults` are AdamW's; parameters that wait elsewhere come to `device`."""
        optimizer = BlockwiseOptimizer(groups, **self.arguments(), device=device, **defaults)
        optimizer.network = None if self.module is None else weakref.ref(self.module)
        reallocator = self.reallocator(optimizer)
        reallocator.attach()
        return reallocator


# -- settings ---------------------------------------------------------------------------------------------------------


def with_recipe(
    settings: SessionSettings, *, recipe: RecipeLike | None, objective: str = "", **overrides: Any
) -> SessionSettings:
    """The settings with the `overrides` that are not None, and the recipe in place of the allocator. Warns of settings,
    and an `objective` other than the default, that choose nothing beside it. Raises BadInputError if `settings` is of
    another class."""
    if not isinstance(settings, SessionSettings):
        raise BadInputError(f"settings is a {type(settings).__name__}: give SessionSettings of baoc.training.session")
    settings = replace(settings, **{key: value for key, value in overrides.items() if value is not None})
    planner, defaults = settings.planner, PlannerSettings()
    resolved = None if recipe is None else find_recipe(recipe)
    if resolved is not None or (planner.allocator.startswith("uniform_") and not planner.from_conf):  # run.py has told
        for sentence in choosing_nothing(
            f"allocator={planner.allocator}" if resolved is None else f"recipe={resolved.name}",
            idle="" if resolved is None or planner.specs == defaults.specs else "specs",
            risk="" if planner.risk in (MEASURED, defaults.risk) else planner.risk,
            objective=objective,
        ):
            log.warning("%s", sentence)
    if resolved is None:
        return settings
    matching = settings.rms_matching if resolved.matching else False
    return replace(settings, planner=replace(settings.planner, recipe=resolved), rms_matching=matching)


def without_scratch_measurements(
    settings: SessionSettings, *, network: nn.Module | None, pretrained: bool | None
) -> SessionSettings:
    """Drops `planner.family`, measured from scratch, if the weights are `pretrained` (None: as the network says)."""
    require(pretrained is None or isinstance(pretrained, bool), "pretrained", pretrained, "True, False or None")
    if pretrained is None:
        pretrained = network is not None and bool(pretrained_reason(network))
    return replace(settings, planner=replace(settings.planner, family=None)) if pretrained else settings


def bf16_weight_specs(planner: PlannerSettings) -> list[OptimizerSpec]:
    return [spec for spec in planner.all_specs.values() if spec.weights != "native"]


def all_specs_use_bf16_weights(planner: PlannerSettings) -> bool:
    """True if no plan of these settings keeps native weights where bf16 ones are possible."""
    only = ALLOCATORS[planner.allocator].traits.only_spec  # of an allocator without a choice
    return all(spec.weights != "native" for spec in planner.all_specs.values() if only in (None, spec.name))


def params_that_may_be_bf16(
    blocks: Sequence[Block], *, params: Mapping[str, Tensor], planner: PlannerSettings
) -> dict[str, Tensor]:
    """The parameters of more than 16 bits, by name, that some plan of these settings would keep in bf16."""
    only = ALLOCATORS[planner.allocator].traits.only_spec  # of an allocator without a choice
    specs = [spec for spec in bf16_weight_specs(planner) if only in (None, spec.name)]

    def may_be_bf16(block: Block) -> bool:
        keep = planner.keep_fp32_roles
        return any(
            why_inapplicable(block, spec=spec, rule=RULE_INFOS[spec.rule], keep_fp32_roles=keep) is None
            for spec in specs
        )

    names = [param.name for block in blocks if may_be_bf16(block) for param in block.params]
    return {name: params[name] for name in names if params[name].element_size() > torch.bfloat16.itemsize}


# -- parameters -------------------------------------------------------------------------------------------------------


def largest_shards(infos: Sequence[ParamInfo], *, params: Mapping[str, Tensor]) -> tuple[ParamInfo, ...]:
    """The parameters as a device's budget is planned for: each sharded one with the shape of its largest shard."""
    return tuple(largest_shard(info, param=params[info.name]) for info in infos)


def refuse_sharded(
    params: Mapping[str, Tensor], *, budget: Budget, settings: SessionSettings, probed: bool = True
) -> None:
    """Raises BadInputError for a budget that sharded parameters do not support. `probed`: a step can be measured."""
    if not any(map(is_sharded, params.values())):
        return
    if budget.step_time is not None:
        raise refusal("sharded_budget", budget=budget.name, why="seconds of a step are not predicted yet")
    if budget.memory_bytes is not None and not probed:
        raise refusal("sharded_budget", budget=budget.name, why="a step has to be measured before training")


def declared_blocks(module: nn.Module, *, among: Collection[str]) -> dict[str, list[str]] | None:
    """Blocks that the module declares by `parameter_blocks()`, or the network in its `model` or `net` does, by the
    module's names, as far as these are `among` those given."""
    children = ((f"{name}.", getattr(module, name, None)) for name in ("model", "net", "network"))
    inner = ((prefix, child) for prefix, child in children if isinstance(child, nn.Module))
    for prefix, declares in (*inner, ("", module)):
        blocks: Any = getattr(declares, "parameter_blocks", None)
        if blocks is not None:
            own = {
                block: [prefix + name for name in names if prefix + name in among] for block, names in blocks().items()
            }
            return {block: names for block, names in own.items() if names}
    return None


def warn_of_large_ties(infos: Sequence[ParamInfo], *, params: Mapping[str, Tensor], plan: Plan) -> None:
    """Warns of a tied embedding whose weights begin with an RMS above LARGE_TIE / sqrt(width), under a plan with
    learning rates that were measured on networks which begin small: training ended worse than at AdamW's rate."""
    if plan.basis is None or not any(multiple > 1 for multiple in (plan.basis.lr or {}).values()):
        return
    for info in infos:
        weight = params.get(info.name)
        if not info.aliases or len(info.shape) != 2 or weight is None or weight.is_meta:
            continue
        rms, usual = float(weight.detach().float().square().mean().sqrt()), info.shape[1] ** -0.5
        if rms > LARGE_TIE * usual:
            log.warning(
                "%s is tied (%s) and begins with weights of RMS %.2g, where %.2g is usual for a head of its width: the "
                "plan's rates were measured on embeddings that begin at .02, and such a network can end worse than "
                "with AdamW. Initialise it smaller (nn.init.normal_(weight, std=0.02)), or choose another recipe",
                info.name, ", ".join(info.aliases), rms, usual,
            )  # fmt: skip


# -- the profiler -----------------------------------------------------------------------------------------------------


def make_profiler(
    planner: Planner,
    params: Mapping[str, Tensor],
    *,
    settings: SessionSettings,
    betas: tuple[float, float],
    ranks: Ranks = SINGLE_PROCESS,
) -> GradientProfiler | None:
    """The profiler that the settings call for; None with reallocation=off. Its bytes join the planner's footprint."""
    if settings.reallocation.mode == "off":
        return None
    profiler = GradientProfiler(
        planner.blocks, params=params, betas=betas, incremental=settings.release is not False, ranks=ranks
    )
    if planner.footprint is not None:
        planner.count_profile(profiler.nbytes, temporary_bytes=profiler.temporary_bytes())
    return profiler


# -- refusals ---------------------------------------------------------------------------------------------------------


def needs_confirmation(device: torch.device, refusal: InfeasibleBudgetError, *, sharded: bool) -> bool:
    """True if a run with the budget that a memory refusal names may need other bytes: under a cap torch's allocator
    reserves less, and the refusal may rest on a measurement without the cap, or with bf16 weights."""
    other_limit = refusal.least_step_s is not None or refusal.least_host_bytes is not None
    return confirms(device, sharded=sharded) and refusal.budget_bytes > 0 and not other_limit


def confirms(device: torch.device, *, sharded: bool = False) -> bool:
    """True if refusals on this device are confirmed. Elsewhere bytes are counted, the same in each process; after a
    step of fully_shard that runs out of memory in its middle, later steps may fail too."""
    return device.type == "cuda" and not sharded


def keep_least(key: Mapping[str, Any], least: Least, *, device: torch.device) -> None:
    """Keeps what a refusal named, unless others have filled the card: then it tells nothing about the step."""
    own = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    if free_bytes(device) + own >= least.num_bytes:
        store_decision(key, least)


def _about_equal_risk(risk: float) -> float:
    """The largest risk that counts as equal to `risk`."""
    return risk * (1 + RATE_TOLERANCE) + 1e-9
