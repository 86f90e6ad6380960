"""`mode=plan` for a GPU that is not in this machine: bytes are counted from shapes, seconds from data-sheet values.

1. `fake_` puts fake tensors in the place of the network's. Forward and backward of a small micro-batch run on them;
   nothing is allocated or computed (`MicroBatchRunner` with `emulate_cuda`, which rounds as CUDA's allocator does).
2. `_CardOptions` makes a footprint on the card of them, and seconds of operations and bytes by the card's rates.
3. Each micro-batch, number of recomputed layers and release of gradients is planned; `best_option` chooses by
   `objective`.
"""

import math
from collections.abc import Collection
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from baoc.config.resolve import needs_microbatch_search
from baoc.config.schema import RunConfig
from baoc.core.budgets import resolve_auto
from baoc.core.catalogue import device_specs, with_placement
from baoc.core.rule_tags import RULE_INFOS
from baoc.data.base import DataModule
from baoc.models.switches import params_keeping_activations, recomputable_layers, set_recomputed
from baoc.optim.backends.fused import has_kernel, temporary_bytes
from baoc.optim.weights import conversion_bytes
from baoc.planning.cards import CARDS, Card
from baoc.planning.microbatch import (
    Axes,
    MicroBatchMeasurement,
    best_option,
    interpolate,
    make_option,
    no_option_fits,
    promising_recomputed_counts,
    upper_bound_at,
    with_gradient_release,
)
from baoc.planning.transfer import hidden_seconds
from baoc.profiling import describe
from baoc.profiling.bf16_params import as_native, cast_to_bf16
from baoc.profiling.depth import DEEP, SHALLOW, LayerStack, extrapolated, find_layer_stack
from baoc.profiling.footprint import memory_reserve_bytes
from baoc.profiling.memory import LATE_MODULES_BYTES
from baoc.profiling.step_temporaries import step_temporaries
from baoc.profiling.step_time import FUSED_BYTES, bytes_moved_per_element
from baoc.tasks.base import Task
from baoc.tracking import console, files
from baoc.training.arriving_weights import weights_bytes
from baoc.training.measure.microbatch_search import axes_of, write_options
from baoc.training.measure.microbatches import MicroBatchRunner
from baoc.training.measure.probe import upkeep_bytes
from baoc.training.plan_files import Recorder
from baoc.training.resume import decision_of, with_decision
from baoc.training.session import Session, SessionSettings, all_specs_use_bf16_weights
from baoc.training.user_optimizer import widened
from baoc.types import Block, Budget, Footprint, LatencyTable, Option, Placement, Plan
from baoc.units import format_bytes

DEFAULT_CARD = "h100"
PROFILE_BYTES = 0.2  # bytes per parameter that sampling gradients takes


def card_of(config: RunConfig) -> Card | None:
    """The card to plan for that is not here: the named one; for a network too large for a CPU DEFAULT_CARD; or None."""
    if config.mode != "plan":
        return None
    if config.device in CARDS:
        return CARDS[config.device]
    if config.device != "auto" or torch.cuda.is_available() or config.model.size == "auto":
        return None
    from baoc.models import family_of

    row = family_of(config.model.name).sizes[config.model.size]
    return CARDS[DEFAULT_CARD] if row.micro_batch is not None or row.name in ("small", "60m", "130m") else None


def fake_(module: nn.Module) -> None:
    """Replaces a module's tensors, which may be on meta, by fake CPU tensors; ties stay."""
    replaced: dict[int, nn.Parameter] = {}
    for child in module.modules():
        for name, param in child._parameters.items():
            if param is None:
                continue
            if id(param) not in replaced:
                empty = torch.empty_strided(param.shape, param.stride(), dtype=param.dtype, device="cpu")
                replaced[id(param)] = nn.Parameter(empty, requires_grad=param.requires_grad)
            child._parameters[name] = replaced[id(param)]
        for name, buffer in child._buffers.items():
            if buffer is not None:
                child._buffers[name] = torch.empty_strided(
                    buffer.shape, buffer.stride(), dtype=buffer.dtype, device="cpu"
                )


def fake_batch(batch: Any) -> Any:
    """Fake tensors of a real batch's shapes. Call it inside a FakeTensorMode."""
    return apply_to_collection(batch, Tensor, lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype))


def plan_for(
    card: Card, config: RunConfig, *, task: Task, data: DataModule, settings: SessionSettings, run_dir: Path
) -> None:
    """Plans `config` on `card` and writes plan and options into the run folder. `task` may be on meta; it becomes fake.

    If recomputing is open, it is tried when nothing fits without it. Raises InfeasibleBudgetError if no option fits.
    """
    budget = resolve_auto(config.budget, free_bytes=card.memory_bytes)
    if budget.memory_bytes is not None and budget.memory_bytes > card.memory_bytes:
        console.say(
            f"budget {budget.name} is more than {card.name} has: planned for its {format_bytes(card.memory_bytes)}"
        )
        budget = replace(budget, memory_bytes=card.memory_bytes)
    settings = widened(settings, device="cuda", budget=budget, precision=str(config.trainer.precision or "32-true"))
    axes = planned_axes(config, task=task)
    real = next(iter(data.make_train_loader(limit=None)))
    with FakeTensorMode(allow_non_fake_inputs=True):
        fake_(task)
        batch = fake_batch(real)
    options: list[Option] = []
    chosen = None
    card_options = _CardOptions(card, config, task=task, batch=batch, settings=settings, budget=budget)
    for recomputed in axes.recomputed:
        options += card_options.options(axes, recomputed=recomputed)
        chosen = best_option(options, objective=config.objective)
        if chosen is not None:
            break
    if chosen is not None and chosen.recomputed and len(axes.recomputed) > 1:
        options += card_options.between_ends(options)
        chosen = best_option(options, objective=config.objective)
        assert chosen is not None
    if chosen is None:  # a refusal names the least of all options
        options = [o for n in axes.recomputed for o in card_options.options(axes, recomputed=n, nothing_fits=True)]
        chosen = best_option(options, objective=config.objective)
    write_options(
        [replace(option, chosen=option is chosen) for option in options], run_dir=run_dir, objective=config.objective
    )
    if chosen is None:
        raise no_option_fits(options, budget=budget, axes=axes, specs=card_options.planner.specs)
    card_options.planner.footprint, card_options.planner.latency = card_options.footprint_and_latency(chosen.key)
    plan = card_options.planner.propose()
    Recorder(run_dir).planned(card_options.planner, plan)
    console.say(
        f"planned for {card.name} ({card.description}), which is not here: bytes are counted from shapes, risks are "
        "priors by role, rates are approximate"
    )
    config = with_decision(config, decision=decision_of(chosen))
    write_plan_totals(plan, config=config, device=card.name, rate=chosen.samples_per_s, source="prior", run_dir=run_dir)


def planned_axes(config: RunConfig, *, task: Task) -> Axes:
    """The values to search, the same as in a run on the card."""
    axes = axes_of(config, task=task)
    if needs_microbatch_search(config, device="cuda"):
        return axes
    recomputed = (0,) if config.model.checkpointing is None else axes.recomputed  # auto is always decided
    return replace(axes, recomputed=recomputed, release=(bool(config.optim.release_gradients),))


@dataclass(frozen=True, slots=True, kw_only=True)
class _CardMeasurements:
    """Measurements with one number of recomputed layers; `as_bf16`: with bf16 weights where a plan may keep them."""

    sizes: list[MicroBatchMeasurement]
    as_bf16: bool


class _CardOptions:
    """Plans the options of a fake network on a card."""

    def __init__(
        self, card: Card, config: RunConfig, *, task: Task, batch: Any, settings: SessionSettings, budget: Budget
    ):
        self.card, self.config, self.task, self.batch = card, config, task, batch
        self.session = Session(  # of fake tensors on this machine's CPU; footprint and latency are the card's
            describe(task, optimizer_groups=task.optimizer_groups()),
            params=dict(task.named_parameters()),
            budget=budget,
            settings=settings,
            betas=config.optim.betas,
            device=torch.device("cpu"),
            module=task,
        )
        self.numel = sum(info.numel for info in self.session.infos)
        self.num_layers = len(recomputable_layers(task.model))
        self.measurements: dict[int, _CardMeasurements] = {}  # by recomputed layers
        self.equal_layers = True  # layers are equal, so a line from none to all recomputed is an upper bound
        self.forward_flops = math.nan  # of one sample
        self.reference_s = math.nan  # of a step with fused AdamW
        # A Planner refuses a budget of memory without a footprint, which is yet to come.
        self.planner = self.session.planner_for(None, budget=replace(budget, memory_bytes=None)).with_budget(budget)
        self.bf16_savings = self.session.bf16_savings
        trained = [param for param in task.parameters() if param.requires_grad]
        largest = max(trained, key=lambda param: param.numel())
        specs = list(self.planner.specs.values())
        eager = [spec for spec in specs if not has_kernel(with_placement(spec, Placement.DEVICE))]
        hidden = self.session.hidden or trained
        self.temporaries = {
            spec.name: temporary_bytes(spec, params=hidden if RULE_INFOS[spec.rule].hidden_only else trained)
            for spec in specs
            if spec not in eager
        }
        self.temporaries |= step_temporaries(eager, params=[largest]) if eager else {}
        self.per_element_s = {
            spec.name: self._moving_s(bytes_moved_per_element(spec))
            for spec in device_specs(self.planner.specs.values())
        }

    def options(self, axes: Axes, *, recomputed: int, nothing_fits: bool = False) -> list[Option]:
        """Options with this number of recomputed layers; if `nothing_fits`, or the smallest does, all micro-batches."""
        sizes = axes.micro_batches
        set_recomputed(self.task.model, recomputed, name=self.config.model.name)
        precision = str(self.config.trainer.precision or "32-true")
        accumulation = 2 if sizes[0] < self.config.batch_size else 1
        with FakeTensorMode(allow_non_fake_inputs=True):
            runner = MicroBatchRunner(
                self.task,
                batch=self.batch,
                val_batch=None,
                device=torch.device("cpu"),
                precision=precision,
                emulate_cuda=True,
            )
            layers = find_layer_stack(self.task, layers=recomputable_layers(self.task.model))
            measure = partial(self._measure, runner, accumulation=accumulation, layers=layers)
            memory = self.planner.budget.memory_bytes
            native_bytes = weights_bytes(self.task) + self.card.context_bytes + LATE_MODULES_BYTES
            no_room = memory is not None and native_bytes > memory
            # As on the card, bf16 weights are measured if native ones have no room and a plan may keep bf16.
            only_as_bf16 = nothing_fits or all_specs_use_bf16_weights(self.session.settings.planner) or no_room
            native = [] if self.bf16_savings and only_as_bf16 else [False]
            for as_bf16 in [*native, *([True] if self.bf16_savings else [])]:
                measurements = _CardMeasurements(sizes=[measure(sizes[0], as_bf16=as_bf16)], as_bf16=as_bf16)
                self.measurements[recomputed] = measurements
                if math.isnan(self.forward_flops):
                    self.forward_flops = self._forward_flops(runner, sizes[0], layers=layers) / sizes[0]
                    batch_s = self._seconds(self.config.batch_size, recomputed=recomputed)
                    self.reference_s = batch_s + self._moving_s(FUSED_BYTES * self.numel)
                least = [] if nothing_fits else [self._option((sizes[0], recomputed, kind)) for kind in axes.release]
                if any(option is not None and option.fits for option in least):
                    break
            else:  # more samples at once never need less, with gradients or without
                sizes = sizes if nothing_fits else sizes[:1]
            measurements = self.measurements[recomputed]
            measurements.sizes.extend(measure(size, as_bf16=measurements.as_bf16) for size in sizes[1:2])
            self.equal_layers = layers is not None
        keys = [key for key in axes.option_keys(batch_size=self.config.batch_size) if key[1] == recomputed]
        options = [self._option(key) for key in keys if key[0] in sizes]
        return [option for option in options if option is not None]

    def between_ends(self, ends: list[Option]) -> list[Option]:
        """Options with the fewest recomputed layers that hold the budget with the plan of all, or with the least state.
        Empty if layers differ, as a line is no upper bound then."""
        options: list[Option | None] = []
        for option in [option for option in ends if option.recomputed and option.fits] if self.equal_layers else []:
            size, most, release = option.key
            kept = self._option((size, 0, release))
            if kept is None:
                continue
            self.planner.footprint, self.planner.latency = self.footprint_and_latency(option.key)
            numbers = promising_recomputed_counts(
                self.planner,
                most=most,
                footprint=lambda number, size=size, release=release: self.footprint_and_latency(
                    (size, number, release)
                )[0],
                plan=self.planner.propose(),
                least_bytes=None if kept.fits or self.config.objective == "quality" else kept.peak_bytes,
            )
            options += [self._option((size, number, release)) for number in numbers]
        return [option for option in options if option is not None]

    def footprint_and_latency(self, key: tuple[int, int, bool]) -> tuple[Footprint, LatencyTable]:
        """Footprint and latency of an option, interpolated between none and all layers recomputed."""
        size, number, release = key
        numbers = [number] if number in self.measurements else [0, self.num_layers]
        ends = [self._footprint(self.measurements[each], micro_batch=size, release=release) for each in numbers]
        latency = self._latency(size, recomputed=number)
        if len(ends) == 1:
            return ends[0], latency
        kept = params_keeping_activations(self.task, recomputed=number)
        return interpolate(*ends, share=number / self.num_layers, not_recomputed=kept), latency

    def _option(self, key: tuple[int, int, bool]) -> Option | None:
        """The option's plan; None if it is unknown what gradient release would leave."""
        _, recomputed, release = key
        footprint, latency = self.footprint_and_latency(key)
        if release and not footprint.intervals:
            return None
        return make_option(
            self.planner,
            footprint=footprint,
            batch_size=self.config.batch_size,
            recomputed=recomputed,
            num_layers=self.num_layers,
            latency=latency,
            release=release,
        )

    def _measure(
        self, runner: MicroBatchRunner, size: int, *, accumulation: int, layers: LayerStack | None, as_bf16: bool
    ) -> MicroBatchMeasurement:
        """Measures the network, extrapolated from a few layers if all are equal."""
        run = partial(runner.measure, size, accumulation=accumulation, timed=False)
        with cast_to_bf16(self.session.bf16_params if as_bf16 else {}):
            if layers is not None:
                footprints: list[Footprint] = []
                for depth in (SHALLOW, DEEP):
                    with layers.truncated(depth):
                        footprints.append(run(merge_intervals=False).footprint)
                sizes = {n: p.numel() * p.element_size() for n, p in self.task.named_parameters() if p.requires_grad}
                footprint = extrapolated(*footprints, layers=layers, sizes=sizes)
                if footprint is not None:
                    return MicroBatchMeasurement(micro_batch=size, footprint=footprint)
            return run()

    def _forward_flops(self, runner: MicroBatchRunner, size: int, *, layers: LayerStack | None) -> int:
        """FLOPs of a forward pass of `size` samples, extrapolated from two layers if all are equal."""

        def count(depth: int | None) -> int:
            cut = nullcontext() if layers is None or depth is None else layers.truncated(depth)
            with cut, FlopCounterMode(display=False) as counter:
                runner.run_forward(size)
            return counter.get_total_flops()

        if layers is None:
            return count(None)
        one, two = count(1), count(2)
        return one + (layers.depth - 1) * (two - one)

    def _seconds(self, samples: int, *, recomputed: int) -> float:
        """Seconds of forward and backward: three forwards' work, and one more for recomputed layers."""
        passes = 3 + recomputed / max(self.num_layers, 1)
        return self.card.step_seconds(flops=passes * self.forward_flops * samples, moved_bytes=0)

    def _moving_s(self, num_bytes: float) -> float:
        return self.card.step_seconds(flops=0, moved_bytes=num_bytes)

    def _latency(self, micro_batch: int, *, recomputed: int) -> LatencyTable:
        """The latency table of a step, with every spec as fast as its bytes can be moved."""
        clips = bool(self.config.trainer.gradient_clip_val)
        upkeep = self.numel * upkeep_bytes(clips=clips, averages=self.task.ema is not None)
        count = self.config.batch_size // micro_batch
        passes_s = count * self._seconds(micro_batch, recomputed=recomputed)
        return LatencyTable(
            device=self.card.name,
            fixed_s=dict.fromkeys(self.per_element_s, 0.0),
            per_element_s=self.per_element_s,
            base_step_s=passes_s + self._moving_s(upkeep),
            reference_step_s=self.reference_s + self._moving_s(upkeep),
            assumed=tuple(self.per_element_s),
            hidden_s=0.0 if clips else hidden_seconds(passes_s, accumulation=count),
            link=self.card.link,
        )

    def _footprint(self, measurements: _CardMeasurements, *, micro_batch: int, release: bool) -> Footprint:
        """The footprint on the card, with its context, the allocator's reserve, and sampled gradients."""
        measured = upper_bound_at(measurements.sizes, micro_batch=micro_batch)
        if release:  # of weights in the format that was measured
            blocks = [
                in_bf16(block, names=self.bf16_savings if measurements.as_bf16 else ()) for block in self.planner.blocks
            ]
            measured = with_gradient_release(measured, blocks=blocks, grouped=True) or measured
        native = as_native(measured, savings=self.bf16_savings) if measurements.as_bf16 else measured
        return replace(
            native,
            device=self.card.name,
            micro_batch=micro_batch,
            context_bytes=self.card.context_bytes,
            reserve_bytes=memory_reserve_bytes(torch.device("cuda"), peak=measured.forward_backward_bytes)
            + self.card.workspace_bytes,
            profile_bytes=int(PROFILE_BYTES * self.numel),
            profile_temporary_bytes=int(PROFILE_BYTES * self.numel),
            step_temporary_bytes=self.temporaries,
            arrival_bytes=conversion_bytes(self.planner.specs.values(), device="cuda"),
            source="prior",
        )


def in_bf16(block: Block, *, names: Collection[str]) -> Block:
    params = (replace(info, dtype="bfloat16") if info.name in names else info for info in block.params)
    return replace(block, params=tuple(params))


def write_plan_totals(plan: Plan, *, config: RunConfig, device: str, rate: float, source: str, run_dir: Path) -> None:
    """Writes `plan.json`, of which a multirun makes its planned frontier. `rate`: predicted samples per second."""
    files.write_json(
        run_dir / "plan.json",
        {
            "schema": 1,
            "name": config.name,
            "budget": plan.budget.name,
            "device": device,
            **decision_of(config),
            "peak_bytes": plan.peak_bytes,
            "state_bytes": plan.allocation.state_bytes,
            "host_bytes": plan.host_bytes,
            "least_feasible_bytes": plan.least_feasible_bytes,
            "risk": plan.allocation.risk,
            "samples_per_s": rate,
            "binding": plan.binding,
            "footprint": source,
        },
    )
