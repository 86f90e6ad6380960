"""`mode=plan` for a GPU that is not in this machine: bytes are counted from shapes, seconds from data-sheet values.

1. `fake_` puts fake tensors in the place of the network's. Forward and backward of a small micro-batch run on them;
   nothing is allocated or computed (`MicroBatchRunner` with `emulate_cuda`, which rounds as CUDA's allocator does).
2. `_CardOptions` makes a footprint on the card of them, and seconds of operations and bytes by the card's rates.
3. Each micro-batch, number of recomputed layers and release of gradients is planned; `best` chooses by `objective`.
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
from baoc.optim.offload import weight_conversion_bytes
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
from baoc.planning.planner import Planner
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
PROFILE_BYTES = 0.2  # per parameter, of the gradients' samples


def card_of(config: RunConfig) -> Card | None:
    """The card that a plan is made for where there is no device to try: the one that was named, or a default for a
    network that this machine without a GPU could not train."""
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
    """Puts fake tensors of this machine's CPU in the place of a module's tensors, which may be on meta; ties stay."""
    made: dict[int, nn.Parameter] = {}
    for child in module.modules():
        for name, param in child._parameters.items():
            if param is None:
                continue
            if id(param) not in made:
                empty = torch.empty_strided(param.shape, param.stride(), dtype=param.dtype, device="cpu")
                made[id(param)] = nn.Parameter(empty, requires_grad=param.requires_grad)
            child._parameters[name] = made[id(param)]
        for name, buffer in child._buffers.items():
            if buffer is not None:
                child._buffers[name] = torch.empty_strided(
                    buffer.shape, buffer.stride(), dtype=buffer.dtype, device="cpu"
                )


def fake_batch(batch: Any) -> Any:
    """Fake tensors of a real batch's shapes; to be called inside a FakeTensorMode."""
    return apply_to_collection(batch, Tensor, lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype))


def plan_for(
    card: Card, config: RunConfig, *, task: Task, data: DataModule, settings: SessionSettings, run_dir: Path
) -> None:
    """The plan of `config` on `card`, with its options, in the run folder; `task` may be on meta and becomes fake.

    Recomputed activations that are left open are tried where nothing fits without them. Raises InfeasibleBudgetError
    where no option fits.
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
    chosen, made = None, _CardOptions(card, config, task=task, batch=batch, settings=settings, budget=budget)
    for recomputed in axes.recomputed:
        options += made.options(axes, recomputed=recomputed)
        chosen = best_option(options, objective=config.objective)
        if chosen is not None:
            break
    if chosen is not None and chosen.recomputed and len(axes.recomputed) > 1:
        options += made.partly(options)
        chosen = best_option(options, objective=config.objective)
        assert chosen is not None
    if chosen is None:  # a refusal names the least of all options
        options = [o for kind in axes.recomputed for o in made.options(axes, recomputed=kind, hopeless=True)]
        chosen = best_option(options, objective=config.objective)
    write_options(
        [replace(option, chosen=option is chosen) for option in options], run_dir=run_dir, objective=config.objective
    )
    if chosen is None:
        raise no_option_fits(options, budget=budget, axes=axes, specs=made.planner.specs)
    made.planner.footprint, made.planner.latency = made.assumed(chosen.key)
    plan = made.planner.propose()
    Recorder(run_dir).planned(made.planner, plan)
    console.say(
        f"planned for {card.name} ({card.description}), which is not here: bytes are counted from shapes, risks are "
        "priors by role, rates are approximate"
    )
    config = with_decision(config, choice=decision_of(chosen))
    write_plan_line(plan, config=config, device=card.name, rate=chosen.samples_per_s, source="prior", run_dir=run_dir)


def planned_axes(config: RunConfig, *, task: Task) -> Axes:
    """What is left open, as it would be in a run on a card: where that decides nothing, neither does its plan."""
    axes = axes_of(config, task=task)
    if needs_microbatch_search(config, device="cuda"):
        return axes
    recomputed = (0,) if config.model.checkpointing is None else axes.recomputed  # auto is always decided
    return replace(axes, recomputed=recomputed, release=(bool(config.optim.release_gradients),))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Looks:
    """Measurements with one number of recomputed layers; `as_bf16`: with bf16 weights where a plan may keep them."""

    trials: list[MicroBatchMeasurement]
    as_bf16: bool


class _CardOptions:
    """The options that a fake network has on a card."""

    def __init__(
        self, card: Card, config: RunConfig, *, task: Task, batch: Any, settings: SessionSettings, budget: Budget
    ):
        self.card, self.config, self.task, self.batch = card, config, task, batch
        self.session = Session(  # of fake tensors on this machine's CPU; the card is in the footprint and the latency
            describe(task, optimizer_groups=task._groups()),
            params=dict(task.named_parameters()),
            budget=budget,
            settings=settings,
            betas=config.optim.betas,
            device=torch.device("cpu"),
            module=task,
        )
        self.numel = sum(info.numel for info in self.session.infos)
        self.num_layers = len(recomputable_layers(task.model))
        self.looks: dict[int, _Looks] = {}  # by recomputed layers
        self.alike = True  # whether layers are, so that a line is above the numbers between
        self.forward_flops = math.nan  # of one sample
        self.reference_s = math.nan  # of a step with fused AdamW
        self.planner = Planner(
            self.session.infos,
            budget=replace(budget, memory_bytes=None, state_fraction=None),
            settings=self.session.settings.planner,
            declared=self.session.declared,
        )
        self.planner.budget = budget
        self.bf16_savings = self.session.bf16_savings
        trained = [param for param in task.parameters() if param.requires_grad]
        largest = max(trained, key=lambda param: param.numel())
        there = list(self.planner.specs.values())
        eager = [spec for spec in there if not has_kernel(with_placement(spec, Placement.DEVICE))]
        hidden = self.session.hidden or trained
        self.temporaries = {
            spec.name: temporary_bytes(spec, params=hidden if RULE_INFOS[spec.rule].hidden_only else trained)
            for spec in there
            if spec not in eager
        }
        self.temporaries |= step_temporaries(eager, params=[largest]) if eager else {}
        self.lines = {
            spec.name: self._moving_s(bytes_moved_per_element(spec))
            for spec in device_specs(self.planner.specs.values())
        }

    def options(self, axes: Axes, *, recomputed: int, hopeless: bool = False) -> list[Option]:
        """The options of one kind; those of larger micro-batches only where the smallest one fits, or `hopeless`."""
        sizes = axes.micro_batches
        set_recomputed(self.task.model, recomputed, name=self.config.model.name)
        precision = str(self.config.trainer.precision or "32-true")
        accumulation = 2 if sizes[0] < self.config.batch_size else 1
        with FakeTensorMode(allow_non_fake_inputs=True):
            trials = MicroBatchRunner(
                self.task,
                batch=self.batch,
                val_batch=None,
                device=torch.device("cpu"),
                precision=precision,
                emulate_cuda=True,
            )
            layers = find_layer_stack(self.task, layers=recomputable_layers(self.task.model))
            tried = partial(self._tried, trials, accumulation=accumulation, layers=layers)
            memory = self.planner.budget.memory_bytes
            needed = weights_bytes(self.task) + self.card.context_bytes + LATE_MODULES_BYTES  # to look in full
            no_room = memory is not None and needed > memory
            # As on the card, what has no room in full is looked at with weights in 16 bits where a plan may keep such.
            only_as_bf16 = hopeless or all_specs_use_bf16_weights(self.session.settings.planner) or no_room
            whole = [] if self.bf16_savings and only_as_bf16 else [False]
            for as_bf16 in [*whole, *([True] if self.bf16_savings else [])]:
                looks = _Looks(trials=[tried(sizes[0], as_bf16=as_bf16)], as_bf16=as_bf16)
                self.looks[recomputed] = looks
                if math.isnan(self.forward_flops):
                    self.forward_flops = self._forward_flops(trials, sizes[0], layers=layers) / sizes[0]
                    whole_s = self._seconds(self.config.batch_size, recomputed=recomputed)
                    self.reference_s = whole_s + self._moving_s(FUSED_BYTES * self.numel)
                least = [] if hopeless else [self._option((sizes[0], recomputed, kind)) for kind in axes.release]
                if any(option is not None and option.fits for option in least):
                    break
            else:  # more samples at once never need less, with gradients or without
                sizes = sizes if hopeless else sizes[:1]
            looks = self.looks[recomputed]
            looks.trials.extend(tried(size, as_bf16=looks.as_bf16) for size in sizes[1:2])
            self.alike = layers is not None
        ways = [way for way in axes.option_keys(batch_size=self.config.batch_size) if way[1] == recomputed]
        options = [self._option(way) for way in ways if way[0] in sizes]
        return [option for option in options if option is not None]

    def partly(self, ends: list[Option]) -> list[Option]:
        """Options with a number of recomputed layers between none and all where all do: the fewest that hold the budget
        with the plan of all, or with the least state. None where layers differ, as no line is above them then."""
        made: list[Option | None] = []
        for option in [option for option in ends if option.recomputed and option.fits] if self.alike else []:
            size, most, release = option.key
            kept = self._option((size, 0, release))
            if kept is None:
                continue
            self.planner.footprint, self.planner.latency = self.assumed(option.key)
            numbers = promising_recomputed_counts(
                self.planner,
                most=most,
                footprint=lambda number, size=size, release=release: self.assumed((size, number, release))[0],
                plan=self.planner.propose(),
                least_bytes=None if kept.fits or self.config.objective == "quality" else kept.peak_bytes,
            )
            made += [self._option((size, number, release)) for number in numbers]
        return [option for option in made if option is not None]

    def assumed(self, way: tuple[int, int, bool]) -> tuple[Footprint, LatencyTable]:
        """Footprint and latency of a way; of a number between on the line from none to all recomputed layers."""
        size, number, release = way
        numbers = [number] if number in self.looks else [0, self.num_layers]
        ends = [self._footprint(self.looks[each], micro_batch=size, release=release) for each in numbers]
        latency = self._latency(size, recomputed=number)
        if len(ends) == 1:
            return ends[0], latency
        kept = params_keeping_activations(self.task, recomputed=number)
        return interpolate(*ends, share=number / self.num_layers, not_recomputed=kept), latency

    def _option(self, way: tuple[int, int, bool]) -> Option | None:
        """None where it is not known what released gradients would leave."""
        _, recomputed, release = way
        footprint, latency = self.assumed(way)
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

    def _tried(
        self, trials: MicroBatchRunner, size: int, *, accumulation: int, layers: LayerStack | None, as_bf16: bool
    ) -> MicroBatchMeasurement:
        """A trial of the whole network, made of those of a few of its layers where that comes to the same."""
        run = partial(trials.measure, size, accumulation=accumulation, timed=False)
        with cast_to_bf16(self.session.bf16_params if as_bf16 else {}):
            if layers is not None:
                found: list[Footprint] = []
                for depth in (SHALLOW, DEEP):
                    with layers.truncated(depth):
                        found.append(run(merge_intervals=False).footprint)
                sizes = {n: p.numel() * p.element_size() for n, p in self.task.named_parameters() if p.requires_grad}
                footprint = extrapolated(*found, layers=layers, sizes=sizes)
                if footprint is not None:
                    return MicroBatchMeasurement(micro_batch=size, footprint=footprint)
            return run()

    def _forward_flops(self, trials: MicroBatchRunner, size: int, *, layers: LayerStack | None) -> int:
        """Of a forward pass of `size` samples; each layer does what the one before it did."""

        def count(depth: int | None) -> int:
            cut = nullcontext() if layers is None or depth is None else layers.truncated(depth)
            with cut, FlopCounterMode(display=False) as counter:
                trials.run_forward(size)
            return counter.get_total_flops()

        if layers is None:
            return count(None)
        one, two = count(1), count(2)
        return one + (layers.depth - 1) * (two - one)

    def _seconds(self, samples: int, *, recomputed: int) -> float:
        """Of forward and backward, which is two forwards, and one more where activations are computed again."""
        passes = 3 + recomputed / max(self.num_layers, 1)
        return self.card.step_seconds(flops=passes * self.forward_flops * samples, moved_bytes=0)

    def _moving_s(self, num_bytes: float) -> float:
        return self.card.step_seconds(flops=0, moved_bytes=num_bytes)

    def _latency(self, micro_batch: int, *, recomputed: int) -> LatencyTable:
        """Of a step in micro-batches, every spec as fast as its bytes can be moved."""
        clips = bool(self.config.trainer.gradient_clip_val)
        upkeep = self.numel * upkeep_bytes(clips=clips, averages=self.task.ema is not None)
        count = self.config.batch_size // micro_batch
        passes_s = count * self._seconds(micro_batch, recomputed=recomputed)
        return LatencyTable(
            device=self.card.name,
            fixed_s=dict.fromkeys(self.lines, 0.0),
            per_element_s=self.lines,
            base_step_s=passes_s + self._moving_s(upkeep),
            reference_step_s=self.reference_s + self._moving_s(upkeep),
            assumed=tuple(self.lines),
            hidden_s=0.0 if clips else hidden_seconds(passes_s, accumulation=count),
            link=self.card.link,
        )

    def _footprint(self, looks: _Looks, *, micro_batch: int, release: bool) -> Footprint:
        """As it would be on the card: its context, what the allocator reserves more, and the gradients' samples."""
        looked = upper_bound_at(looks.trials, micro_batch=micro_batch)
        if release:  # by weights as they were looked at
            blocks = [in_bf16(block, names=self.bf16_savings if looks.as_bf16 else ()) for block in self.planner.blocks]
            looked = with_gradient_release(looked, blocks=blocks, grouped=True) or looked
        found = as_native(looked, savings=self.bf16_savings) if looks.as_bf16 else looked
        return replace(
            found,
            device=self.card.name,
            micro_batch=micro_batch,
            context_bytes=self.card.context_bytes,
            reserve_bytes=memory_reserve_bytes(torch.device("cuda"), peak=looked.forward_backward_bytes)
            + self.card.workspace_bytes,
            profile_bytes=int(PROFILE_BYTES * self.numel),
            profile_temporary_bytes=int(PROFILE_BYTES * self.numel),
            step_temporary_bytes=self.temporaries,
            arrival_bytes=weight_conversion_bytes(self.planner.specs.values(), device="cuda"),
            source="prior",
        )


def in_bf16(block: Block, *, names: Collection[str]) -> Block:
    """The block with the parameters of these names in bf16."""
    params = (replace(info, dtype="bfloat16") if info.name in names else info for info in block.params)
    return replace(block, params=tuple(params))


def write_plan_line(plan: Plan, *, config: RunConfig, device: str, rate: float, source: str, run_dir: Path) -> None:
    """`plan.json`: the plan in one line of numbers, from which a multirun makes its planned frontier.

    `rate`: predicted samples per second.
    """
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
