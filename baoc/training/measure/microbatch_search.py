"""Decides before training how the global batch is run: micro-batch and accumulation, recomputed layers (activation
checkpointing), released gradients, compiled layers; each with the plan of optimizer specs that fits beside it.

1. `decide` looks for a kept decision of the same network, batch, card and settings (`decision_cache`), and confirms it
   by one measurement of its bytes.
2. Else `MicroBatchSearch.explore` runs a few small micro-batches with no layer recomputed and with all. Bytes and
   seconds of the others are interpolated (`Measurements`).
3. `MicroBatchSearch.made` plans each option, a (micro-batch, recomputed layers, release), within the budget.
4. `planning.choice.choose_option` measures the options that promise most, as training will run them, and takes the best
   by `objective`, in about DECIDING_S seconds.
5. The table of options is printed and left as options.csv. Where none fits, the refusal names a budget that was tried.
"""

import gc
import io
import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, nullcontext, redirect_stdout, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic
from typing import Any

import torch
from torch import Tensor

from baoc.cache import cache_folder
from baoc.callbacks.generators import capture_rng, restore_rng
from baoc.config.schema import RunConfig
from baoc.core.budgets import resolve_auto
from baoc.core.catalogue import SPECS
from baoc.data.base import DataModule
from baoc.errors import BadInputError, BaocError, InfeasibleBudgetError
from baoc.models.switches import count_recomputed_layers, is_compiled, recomputable_layers, set_compiled, set_recomputed
from baoc.optim.shards import is_sharded, local_shard
from baoc.parallel import SINGLE_PROCESS, ranks
from baoc.planning.choice import EXTRAPOLATED_ERROR, OptionChoice, OptionMeasurer, choose_option
from baoc.planning.microbatch import (
    RATE_TOLERANCE,
    Axes,
    MicroBatchMeasurement,
    best_option,
    divisors,
    footprint_at,
    make_option,
    no_option_fits,
    option_rows,
    promising_recomputed_counts,
)
from baoc.planning.planner import Planner
from baoc.profiling import cap_device, clear_cache, context_bytes, describe, free_bytes, uncapped
from baoc.profiling.phase_timer import PhaseTimer
from baoc.profiling.step_time import specs_timed_first, time_specs
from baoc.tasks.base import Task
from baoc.tracking import console, files
from baoc.training.arriving_weights import must_wait, on_device_as_bf16
from baoc.training.decision_cache import Entry, key_of, load_decision, path_of, store_decision
from baoc.training.measure.benchmark_steps import FEW, WARM, WARM_RELEASED
from baoc.training.measure.measurements import Measurements, Way
from baoc.training.measure.microbatches import REHEARSED_S, TIMED_S, MicroBatchRunner
from baoc.training.measure.probe import upkeep_bytes
from baoc.training.resume import decision_of, with_decision, write_decision
from baoc.training.session import (
    Session,
    SessionSettings,
    largest_shards,
    least_confirmed_bytes,
    make_profiler,
    needs_confirmation,
    refuse_sharded,
)
from baoc.training.user_optimizer import widened
from baoc.types import Footprint, LatencyTable, OptimizerSpec, Option, Plan
from baoc.units import format_bytes

DECIDING_S = 12.0  # that it may take
LIMITED_S = 5.0  # what a latency table may take where a step_time limit needs it
FUSED_S = 0.5  # and where only fused AdamW is timed, by the byte of which all specs are taken to be as fast
COMPARING_S, LOOKING_S = 0.4, 0.6  # about what it takes beside steps to set up a comparison, or a look at bytes
# Fields of a footprint that do not depend on the micro-batch.
CONSTANT = ("step_temporary_bytes", "arrival_bytes", "profile_bytes", "profile_temporary_bytes")
VERIFIED = 6  # options that are measured at most for a refusal
COMPILING_S = 30.0  # about what it takes longer where compiled layers are searched, too
COMPILING_SHARE, MOST_COMPILING_S = 0.01, 100.0  # of a run, what compiling another size may take
COMPILED_GAIN = 0.1  # of a run's seconds, that compiled layers are taken to save before they are tried


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """What was chosen: `config` with it, and the latency table with the rest of its step, to plan the run with.

    `footprint`: by which it fits. A look at the same step from another layout of memory may take a page more.
    """

    config: RunConfig
    latency: LatencyTable
    option: Option
    footprint: Footprint | None = None


def axes_of(config: RunConfig, *, task: Task) -> Axes:
    """Pins of the user's leave one value each. Raises BadInputError where one cannot be had."""
    num_layers = len(recomputable_layers(task.model))
    pinned = config.model.checkpointing
    if pinned and pinned != "auto" and not num_layers:
        raise BadInputError(
            f"model {config.model.name} names no parts whose activations could be recomputed: set "
            "model.checkpointing=false, or give the network a list of its layers as `checkpoint_units`"
        )
    sizes = (config.micro_batch,) if isinstance(config.micro_batch, int) else tuple(divisors(config.batch_size))
    open_numbers = (0, num_layers) if num_layers else (0,)
    release = config.optim.release_gradients
    if release:
        sizes = (config.batch_size,)  # each backward is a step
    can = (
        ranks() is SINGLE_PROCESS
        and release is None
        and config.batch_size in sizes
        and config.optim.nonfinite != "skip_step"
    )
    return Axes(
        micro_batches=sizes,
        recomputed=open_numbers if pinned in (None, "auto") else (num_layers if pinned is True else int(pinned),),
        num_layers=num_layers,
        release=(False, True) if can else (bool(release),),
    )


def decide(
    config: RunConfig,
    *,
    task: Task,
    data: DataModule,
    device: str,
    settings: SessionSettings,
    run_dir: Path,
    confirm: bool = True,
) -> SearchResult:
    """Micro-batch, recomputed layers and release chosen; the network is left with its layers set that way.

    Raises InfeasibleBudgetError where no option fits, with the least budget that one would need: on a GPU, unless
    `confirm` is False, one within which an option was found to fit; the layers are then as before, and without
    `confirm` they are so anyway. Random numbers and the network's weights are as before.
    """
    phases = PhaseTimer()
    with ExitStack() as visit:  # weights that a budget does not hold in full are back first, whatever comes of it
        visit.callback(set_recomputed, task.model, count_recomputed_layers(task.model), name=config.model.name)
        visit.callback(set_compiled, task.model, is_compiled(task.model))
        visit.callback(restore_rng, capture_rng())
        visit.callback(gc.unfreeze)
        visit.callback(clear_cache, torch.device(device))  # what was tried is no part of the run, nor was there before
        gc.freeze()  # caches are emptied before each trial; looking through what has been there takes .2 s each time
        tell = visit.enter_context(console.progress_line(enabled=config.trainer.enable_progress_bar is not False))
        tell("deciding how a batch is run: a few small micro-batches")
        began = monotonic()
        decision = MicroBatchSearch(
            config, task=task, data=data, device=device, settings=settings, visit=visit, phases=phases
        )
        with phases("the key"):
            key = decision.key()
            made, choice = decision.ranks.broadcast_result(lambda: load_decision(key)), None
        if made is None or not decision.confirms(made):
            choice = decision.search(began=began, tell=tell)
            made = decision.entry(choice)
            if made is not None:
                store_decision(key, made)
        options = [*choice.options] if choice is not None else [*made.options] if made is not None else []
        leave(options, run_dir=run_dir, objective=config.objective)
        account: dict[str, Any] = {"kept": True}
        if choice is not None:  # what measuring options won, and what was left
            left = [option.name for option in choice.rivals]
            account = {"measured": choice.num_measured, "won": choice.won, "left": left, "left_gain": choice.gain}
        own_s = decision.measurements.compiled_s(made.chosen.key) if made is not None else 0.0
        phases.seconds["else"] = max(0.0, monotonic() - began - phases.total_s)
        account |= {"total_s": phases.total_s, "training_s": own_s, "phases_s": phases.seconds}
        files.write_json(run_dir / "deciding.json", account)
        how = f": taken over from {path_of(key)}, as its bytes were found again" if choice is None else told(choice)
        own = f"; {own_s:.1f} s of it compiled what training runs" if own_s else ""
        console.say(f"the decision took {phases.summary()}{own}{how}")
        if made is None:
            told_by = {"budget": decision.budget, "axes": decision.axes, "specs": decision.planner.specs}
            refusal = no_option_fits(options, **told_by)
            if not (confirm and needs_confirmation(decision.where, refusal)):
                raise refusal
            del decision
            visit.close()  # the device is as it was before
            least_bytes = format_bytes(refusal.least_feasible_bytes)
            console.say(f"no option fits budget {config.budget.name}: whether one fits within {least_bytes} is tried")
            given: dict[str, Any] = {"task": task, "data": data, "device": device, "settings": settings}
            least = least_confirmed_bytes(
                refusal.least_feasible_bytes, plan_at=partial(_needed_within, config, **given)
            )
            raise refusal if least is None else no_option_fits(options, least_bytes=least, **told_by)
    chosen = made.chosen
    if confirm:
        take_option(chosen, task=task, data=data, name=config.model.name)
    write_decision(decision_of(chosen), run_dir=run_dir)
    if chosen.release and config.optim.release_gradients is None:
        clips = config.trainer.gradient_clip_val if config.trainer.gradient_clip_algorithm != "value" else None
        norm = f"; gradient_clip_val={clips:g} then clips by the norm of the step before" if clips else ""
        console.say(
            f"gradients are released in the backward pass, to hold budget {config.budget.name}{norm}. "
            "optim.release_gradients=false rules this out"
        )
    return SearchResult(
        config=replace(with_decision(config, choice=decision_of(chosen)), budget=decision.budget),
        latency=made.latency,
        option=chosen,
        footprint=made.footprint,
    )


def _needed_within(config: RunConfig, num_bytes: int, **given: Any) -> int:
    """`num_bytes`, if an option fits within so many; raises InfeasibleBudgetError. What is decided is kept, and found
    again by a run with this budget."""
    budget = replace(config.budget, memory_bytes=num_bytes)
    with TemporaryDirectory() as folder, redirect_stdout(io.StringIO()):
        decide(replace(config, budget=budget), run_dir=Path(folder), confirm=False, **given)
    return num_bytes


def device_of(device: str) -> torch.device:
    """This process's device, of the kind `cuda` or `cpu`."""
    return torch.device("cuda", torch.cuda.current_device()) if device == "cuda" else torch.device("cpu")


def take_option(option: Option, *, task: Task, data: DataModule, name: str) -> None:
    """Sets the layers of a network, called `name` in messages, and its data as an option has them."""
    set_recomputed(task.model, option.recomputed, name=name)
    set_compiled(task.model, option.compiled)
    data.batch_size, data.accumulate = option.micro_batch, option.accumulation


class MicroBatchSearch:
    """What was tried for one run, and options made of it. The task is on the device as long as `visit` lasts.

    Ranks that have parts of the task decide in step: what is measured, and rank 0's clock, are the same on all of them.
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        task: Task,
        data: DataModule,
        device: str,
        settings: SessionSettings,
        visit: ExitStack,
        phases: PhaseTimer,
    ):
        self.config, self.task, self.phases = config, task, phases
        self.constant: dict[bool, dict[str, Any]] = {}
        self.explored: dict[int, tuple[list[MicroBatchMeasurement], bool]] = {}
        self.where = device_of(device)
        self.sharded = any(map(is_sharded, task.parameters()))
        self.ranks = ranks() if self.sharded else SINGLE_PROCESS
        self.budget = resolve_auto(config.budget, free_bytes=free_bytes(self.where))
        self.axes = axes_of(config, task=task)
        precision = str(config.trainer.precision or "32-true")
        settings = widened(settings, device=device, budget=self.budget, precision=precision)
        self.params = {name: param for name, param in task.named_parameters() if param.requires_grad}
        refuse_sharded(self.params, budget=self.budget, settings=settings)
        with phases("the network's blocks"):
            self.session = Session(
                largest_shards(describe(task, optimizer_groups=task._groups()), params=self.params),
                params=self.params,
                budget=self.budget,
                settings=settings,
                betas=config.optim.betas,
                device=self.where,
                module=task,
                ranks=self.ranks,
            )
        with phases("device and weights"):
            capped, waits = self._bring(self.session.bf16_params, visit=visit)
        self.new_measurements = partial(
            Measurements,
            config,
            task=task,
            trials=self._trials(data, precision=precision),
            where=self.where,
            budget=self.budget,
            axes=self.axes,
            bf16_params={} if waits else self.session.bf16_params,
            bf16_savings=self.session.bf16_savings,
            capped=capped,
        )
        self.begin(compiled=config.model.compile is True)
        settings = self.session.settings
        if settings.planner.allocator == "exact":  # by prices, in milliseconds: the run itself is planned exactly
            settings = replace(settings, planner=replace(settings.planner, allocator="lagrangian"))
        self.settings = settings

    def begin(self, *, compiled: bool) -> None:
        """Nothing is tried yet, with layers compiled or as they are."""
        self.measurements: Measurements = self.new_measurements(compiled=compiled, explored=self.explored)
        self.footprints: dict[Way, Footprint] = {}
        self._plans: dict[Way, tuple[Footprint | None, Plan | InfeasibleBudgetError]] = {}

    def search(self, *, began: float, tell: Callable[[str], None]) -> OptionChoice:
        """The best option, in the time that there is since `began` by the clock. With compile=auto, compiled layers are
        searched after the others where a run is long enough to repay it. Where they fail, a row says so."""
        self.begin(compiled=self.config.model.compile is True)  # whatever a kept decision was confirmed by
        if self.measurements.compiled:
            found = self.compiled(began=began, tell=tell)
            if isinstance(found, OptionChoice):
                return found
            self.begin(compiled=False)
            choice = self.searched(began=monotonic(), tell=tell)
            return replace(choice, options=[*choice.options, found]) if choice.chosen is not None else choice
        choice, before = self.searched(began=began, tell=tell), (self.measurements, self.footprints)
        if choice.chosen is None or not self.may_compile(choice.chosen):
            return choice
        self.begin(compiled=True)
        found = self.compiled(began=monotonic(), tell=tell)
        if not isinstance(found, OptionChoice):
            found = replace(choice, chosen=None, options=[found])
        both = [option for option in (choice.chosen, found.chosen) if option is not None]
        if best_option(both, objective=self.config.objective) is found.chosen:
            return replace(found, options=[*(replace(o, chosen=False) for o in choice.options), *found.options])
        self.measurements, self.footprints = before
        return replace(choice, options=[*choice.options, *(replace(o, chosen=False) for o in found.options)])

    def compiled(self, *, began: float, tell: Callable[[str], None]) -> OptionChoice | Option:
        """What is found of compiled layers, or why nothing is: whatever compiling or trying them raised."""
        try:
            return self.searched(began=began, tell=tell)
        except BaocError:
            raise
        except Exception as error:
            why = f"compiled layers fail: {type(error).__name__}: {(str(error).strip() or '-').splitlines()[0][:200]}"
        clear_cache(self.where)
        console.say(f"{why}; layers run as they are")
        return self._unplanned((self.axes.micro_batches[0], 0, False), why=why)

    def may_compile(self, chosen: Option) -> bool:
        """Whether compiled layers are open, and may repay what it takes to try them in a run with this option."""
        run_s = run_seconds(self.config, chosen.samples_per_s)
        return compile_is_open(self) and COMPILED_GAIN * run_s >= DECIDING_S + COMPILING_S

    def searched(self, *, began: float, tell: Callable[[str], None]) -> OptionChoice:
        """The best option with layers as they are, or compiled."""
        self.explore()
        race = OptionMeasurer(
            measure=partial(self.measured, tell=tell),
            cost_s=self.cost_s,
            remaining_s=lambda: self.ranks.broadcast_number(began + DECIDING_S + self.compiling_s() - monotonic()),
            run_s=partial(run_seconds, self.config),
        )
        choice = choose_option(self.options(), objective=self.config.objective, measurer=race)
        if choice.chosen is None:
            choice = choose_option(self.least_measured(choice.options), objective=self.config.objective, measurer=race)
        return choice

    def compiling_s(self) -> float:
        """What a decision of compiled layers may take longer: what training with one of them compiles anyway, and more
        in a run that is long by what was tried."""
        if not self.measurements.compiled:
            return 0.0
        own_s = max(map(self.measurements.compiled_s, self.measurements.rehearsed), default=0.0)
        trials = [trial for trials in self.measurements.tried.values() for trial in trials if trial.seconds > 0]
        run_s = min((run_seconds(self.config, trial.micro_batch / trial.seconds) for trial in trials), default=0.0)
        return own_s + min(COMPILING_SHARE * run_s, MOST_COMPILING_S)

    def explore(self) -> None:
        """A few micro-batches of each kind, and what else options are made of."""
        self.measurements.in_16_bits.clear()  # what a decision of before had room with says nothing of today
        kinds, most = self.axes.recomputed, self.axes.num_layers
        if self.measurements.compiled and kinds != (most,):  # of both ends: what compiled layers keep is between them
            for end in (most, 0):
                with nullcontext() if end in kinds else suppress(Exception):  # a pin stays, whatever others raise
                    self.measurements.explore(end)
            kinds = tuple(number for number in kinds if not self.measurements.reaches(number))
        for recomputed in kinds:
            if self.measurements.compiled or not (recomputed and self._roomy()):
                self.measurements.explore(recomputed)
        self._plan_by(self.measurements.tried[min(self.measurements.tried)][0].footprint)
        beyond = self.measurements.capped and not self.measurements.any_room
        if self.constant:
            return
        with self.phases("the profiler"), uncapped(self.where, budget=self.budget) if beyond else nullcontext():
            constant = {
                release: self._constant(replace(self.settings, release=release)) for release in self.axes.release
            }
        self.table = self._table()  # which may find no room: then both are made anew
        self.constant = constant

    def _plan_by(self, footprint: Footprint) -> None:
        planner = self.settings.planner
        given = {"budget": self.budget, "settings": planner, "declared": self.session.declared}
        self.planner = Planner(self.session.infos, footprint=footprint, **given)
        self.blocks = [[self.params[param.name] for param in block.params] for block in self.planner.blocks]

    # -- what was decided before --------------------------------------------------------------------------------------

    def key(self) -> dict[str, Any]:
        """All that the decision rests on, see `decision_cache`."""
        batches = self.measurements.trials.batches
        return key_of(self.config, network=self.task.model, batches=batches, budget=self.budget, device=self.where)

    def confirms(self, kept: Entry) -> bool:
        """Whether a decision of before is enough for a run as long as this one, and what it chose takes the bytes that
        it took, as one look at it within the cap says."""
        chosen, before = kept.chosen, kept.footprint
        if kept.run_s < run_seconds(self.config, chosen.samples_per_s):
            return False
        with self.phases("plans of the options"):
            self._plan_by(before)
        self.begin(compiled=chosen.compiled)
        self.measurements.in_16_bits |= {chosen.key} if kept.in_16_bits else set()
        try:
            trial = self.measurements.look_at(chosen.key, blocks=self.blocks)
        except BaocError:
            raise
        except Exception:  # of a compiler, which may raise any; then it is decided anew
            if not chosen.compiled:
                raise
            return False
        if trial is None:
            return False
        fixed = {name: getattr(before, name) for name in CONSTANT}
        context = int(self.ranks.all_reduce_max(max(trial.footprint.context_bytes, context_bytes(self.where)))[0])
        found = replace(trial.footprint, context_bytes=context, **fixed)
        self.planner.footprint, self.planner.latency = found, kept.latency
        with suppress(InfeasibleBudgetError), self.phases("plans of the options"):
            self.planner.propose()
            return found.peak_bytes(state_bytes=0) <= (1 + RATE_TOLERANCE) * before.peak_bytes(state_bytes=0)
        return False

    def entry(self, choice: OptionChoice) -> Entry | None:
        """What was chosen, to be kept; None where nothing fits."""
        chosen = choice.chosen
        if chosen is None:
            return None
        # Compiled layers were not searched, as the run is short
        unsought = compile_is_open(self) and not any(option.compiled for option in choice.options)
        run_s = run_seconds(self.config, chosen.samples_per_s) if choice.rivals or unsought else math.inf
        return Entry(
            chosen=chosen,
            options=tuple(choice.options),
            footprint=self.footprints[chosen.key],
            latency=self.latency(chosen.key),
            run_s=run_s,
            in_16_bits=chosen.key in self.measurements.in_16_bits,
        )

    # -- options ------------------------------------------------------------------------------------------------------

    def _constant(self, settings: SessionSettings) -> dict[str, Any]:
        """Fields of a footprint that do not depend on the micro-batch: the profiler, and temporaries of a step."""
        make_profiler(self.planner, self.params, settings=settings, betas=self.config.optim.betas)
        assert self.planner.footprint is not None
        found = self.session.largest_on_ranks(self.session.complete(self.planner.footprint))
        return {name: getattr(found, name) for name in CONSTANT}

    def _trials(self, data: DataModule, *, precision: str) -> MicroBatchRunner:
        with self.phases("first batches"):
            batch = next(iter(data.make_train_loader(limit=None)))
            val_batch = next(iter(data.val_dataloader()), None)
        given = {"device": self.where, "precision": precision, "phases": self.phases}
        return MicroBatchRunner(self.task, batch=batch, val_batch=val_batch, **given)

    def _bring(self, bf16_params: Mapping[str, Tensor], *, visit: ExitStack) -> tuple[bool, bool]:
        """The task comes to the device: whether within a cap, and whether with those weights in 16 bits from the
        beginning."""
        try:
            cap_device(self.where, budget=self.budget)
        except BadInputError:  # the context alone takes the budget
            self.task.to(self.where)
            return False, False
        if self.sharded:
            return True, False  # each rank's part is there
        context = context_bytes(self.where)
        waits = must_wait(self.task, device=self.where, budget=self.budget, context_bytes=context)
        given = bf16_params if waits else {}
        there = on_device_as_bf16(
            self.task, bf16_params=given, device=self.where, budget=self.budget, context_bytes=context
        )
        visit.enter_context(there)
        return True, bool(given)

    def _roomy(self) -> bool:
        """Whether the whole batch fits at once with all activations kept and fp32 AdamW's states beside them, so that
        there is nothing to be had by computing some again."""
        whole = (self.config.batch_size, 0, False)
        kept = self.measurements.tried.get(0)
        if kept is None or 0 in self.measurements.measured_in_bf16 or whole[0] not in self.axes.micro_batches:
            return False
        if self.budget.memory_bytes is None:
            return True
        footprint = footprint_at(kept, micro_batch=whole[0])
        return footprint.peak_bytes(state_bytes=3 * footprint.weights_bytes) <= self.budget.memory_bytes

    def _table(self) -> LatencyTable:
        """Seconds of the optimizer's specs, and of a step with fused AdamW by the fastest way of those tried."""
        specs = list(self.planner.specs.values())
        if not self.measurements.any_room:  # nothing will be run, and there is no room to time anything
            return LatencyTable(device=str(self.where), fixed_s={}, per_element_s={})
        limited = self.budget.step_time is not None
        with self.phases("the latency table"):
            table = time_specs(
                specs,
                device=self.where,
                num_elements=sum(local_shard(param).numel() for param in self.params.values()),
                num_tensors=len(self.params),
                upkeep_bytes=upkeep_bytes(clips=False, averages=self.task.ema is not None),
                needed=specs_timed_first(specs, device=self.where) if limited else (),
                max_s=LIMITED_S if limited else FUSED_S,
                cache_dir=cache_folder(),
            )
        table = replace(self.ranks.broadcast(table), device=str(self.where))
        tried = self.measurements.tried.items()
        known = [(trial, kind) for kind, trials in tried for trial in trials]
        timed = [(trial, kind) for trial, kind in known if not math.isnan(trial.seconds)] or known
        trial, recomputed = min(timed, key=lambda pair: pair[0].seconds / pair[0].micro_batch)
        way = trial.micro_batch, recomputed, False
        if limited and way not in self.measurements.no_room:  # options are held against it, so it is timed as they are
            self.measurements.try_out(way, blocks=self.blocks, specs=[SPECS["adamw"]] * len(self.blocks))
        return replace(table, reference_step_s=table.reference_step_s + self.measurements.seconds(way))

    def latency(self, way: Way) -> LatencyTable:
        """The table with all but the optimizer's part of a step of this option."""
        return replace(self.table, base_step_s=self.table.base_step_s + self.measurements.seconds(way))

    def options(self) -> list[Option]:
        options = self.made()
        if not any(option.fits for option in options) and self.measurements.measure_again_in_bf16():
            options = self.made()
        return options

    def made(self) -> list[Option]:
        self.context = int(
            self.ranks.all_reduce_max(context_bytes(self.where))[0]
        )  # has grown by the kernels of what was tried since
        ways = [
            way for way in self.axes.option_keys(batch_size=self.config.batch_size) if self.measurements.reaches(way[1])
        ]
        with self.phases("plans of the options"):
            if not self.table.fixed_s:  # for want of room: bytes alone decide whether there may be some
                self.planner.budget = replace(self.budget, step_time=None)
            ends: dict[Way, Option] = {}
            for way in sorted(ways, key=self.measurements.seconds):
                option = self.too_slow(way, than=ends.values()) or self._option(way)
                ends |= {} if option is None else {way: option}
            partly = [self._option(way) for way in self._partly(ends)]
        options = [*ends.values(), *(option for option in partly if option is not None)]
        return sorted(options, key=lambda option: (option.recomputed, option.micro_batch, option.release))

    def _partly(self, ends: Mapping[Way, Option]) -> list[Way]:
        """Ways with a number of recomputed layers between the ends that may be better than these, and what was tried of
        such."""
        most = max(self.measurements.tried)
        found: list[Way] = []
        for size, number, release in [way for way in ends if way[1] == most > 0]:
            kept, plan = ends.get((size, 0, release)), self._plans.get((size, most, release), (None, None))[1]
            if kept is None or not self.measurements.has_room((size, most, release)):
                continue
            numbers = promising_recomputed_counts(
                self.planner,
                most=most,
                footprint=lambda number, size=size, release=release: self._footprint((size, number, release)),
                plan=plan if isinstance(plan, Plan) else None,
                least_bytes=None if kept.fits or self.config.objective == "quality" else kept.peak_bytes,
            )
            measured = self.measurements.rehearsed.keys() | self.measurements.compared.keys()
            tried = {way[1] for way in measured if (way[0], way[2]) == (size, release)} - {0, most}
            out = max((n for n in range(most) if not self.measurements.has_room((size, n, release))), default=0)
            step = max(1, most // 8)  # past a number that ran out of memory against its prediction
            numbers = {number if number > out else out + step for number in numbers}
            near = {n for n in numbers if self._no_faster(n, than=tried, size=size, release=release)}
            found += [(size, number, release) for number in tried | (numbers - near) if number < most]
        return found

    def _no_faster(self, number: int, *, than: Collection[int], size: int, release: bool) -> bool:
        """Whether a larger number that was tried, and has room, takes about as long."""
        room = [n for n in than if n > number and (size, n, release) not in self.measurements.no_room]
        seconds = self.measurements.seconds((size, number, release))
        return any(self.measurements.seconds((size, n, release)) <= (1 + RATE_TOLERANCE) * seconds for n in room)

    def _footprint(self, way: Way) -> Footprint | None:
        """None where it is not known what released gradients would leave."""
        footprint = self.measurements.footprint(way, blocks=self.planner.blocks)
        if footprint is None:
            return None
        context = max(footprint.context_bytes, self.context)
        return replace(footprint, context_bytes=context, **self.constant[way[2]])

    def too_slow(self, way: Way, *, than: Collection[Option]) -> Option | None:
        """This way without a plan where the rate alone counts and it cannot be the best, as far as promises may err."""
        seconds = self.measurements.seconds(way)
        fitting_s = min((option.step_s for option in than if option.fits), default=math.inf)
        counts = self.config.objective != "throughput" or self.budget.step_time is not None  # more than its rate
        slow = (1 - EXTRAPOLATED_ERROR) * seconds > (
            1 + EXTRAPOLATED_ERROR
        ) * fitting_s  # not where seconds are not known
        if counts or way in self.measurements.rehearsed or not slow:
            return None
        return self._unplanned(way, why="not planned: too slow by its promise", seconds=seconds)

    def _unplanned(self, way: Way, *, why: str, seconds: float = math.nan) -> Option:
        return Option(
            micro_batch=way[0],
            accumulation=self.config.batch_size // way[0],
            recomputed=way[1],
            num_layers=self.axes.num_layers,
            release=way[2],
            samples_per_s=self.config.batch_size / seconds,
            step_s=seconds,
            why=why,
            compiled=self.measurements.compiled,
        )

    def _option(self, way: Way) -> Option | None:
        footprint = self._footprint(way)
        if footprint is None:
            return None
        self.footprints[way] = footprint
        option = make_option(
            self.planner,
            footprint=footprint,
            batch_size=self.config.batch_size,
            recomputed=way[1],
            num_layers=self.axes.num_layers,
            latency=self.latency(way),
            release=way[2],
            propose=partial(self.proposed, way),
        )
        tried = way in self.measurements.rehearsed and self.measurements.is_measured(way)
        compared = way in self.measurements.compared and not tried
        option = replace(option, tried=tried, compared=compared, compiled=self.measurements.compiled)
        if not self.measurements.has_room(way):
            why = "does not fit: out of memory when it was tried"  # whatever time or host memory it is given
            return replace(option, risk=None, fastest_s=math.nan, least_host_bytes=None, why=why)
        return option

    def proposed(self, way: Way) -> Plan:
        """The planner's plan; that of before where seconds have no part in it and its bytes are as they were, or more
        by what the context has grown and that leaves it room."""
        footprint, memory = self.planner.footprint, self.budget.memory_bytes
        made, found = self._plans.get(way, (None, None))
        grown = footprint.context_bytes - made.context_bytes if made and footprint else 0
        alike = made is not None and replace(made, context_bytes=made.context_bytes + grown) == footprint
        room = math.inf if memory is None or not isinstance(found, Plan) else memory - found.peak_bytes
        if found is None or not alike or not 0 <= grown <= room or self.planner.budget.step_time is not None:
            try:
                found = self.planner.propose()
            except InfeasibleBudgetError as error:
                found = error.with_traceback(None)
        elif isinstance(found, Plan):
            least = found.least_feasible_bytes + grown
            found = replace(found, peak_bytes=found.peak_bytes + grown, least_feasible_bytes=least)
        else:
            found.least_feasible_bytes += grown
        self._plans[way] = footprint, found
        if isinstance(found, InfeasibleBudgetError):
            raise found
        return found

    def least_measured(self, options: list[Option]) -> list[Option]:
        """The options where none fits, the one of fewest bytes having been measured as it would be run, as a refusal
        names it, and the same bytes are asked for by a run with that budget; it may even fit, as lines are above."""
        slow = any(not math.isnan(option.fastest_s) for option in options)
        if slow or self.budget.memory_bytes is None or not self.measurements.capped:
            return options
        for _ in range(VERIFIED):
            least = min(options, key=lambda option: (option.peak_bytes, not self.measurements.is_measured(option.key)))
            if self.measurements.is_measured(least.key):
                break
            with self.phases("the least option"):
                if not self.measurements.measure(least.key, blocks=self.blocks):
                    break
            options = self.made()
        return options

    def _stepped_by(self, way: Way) -> list[OptimizerSpec]:
        """For each block what the plan of a way steps most blocks with, as each spec more is compiled for a second and
        changes little of what the host does; nothing where there is no plan."""
        _, plan = self._plans.get(way, (None, None))
        if not isinstance(plan, Plan):
            return []
        ((most, _),) = Counter(plan.allocation.choices.values()).most_common(1)
        return [self.planner.specs[most]] * len(self.planner.blocks)

    def measured(self, option: Option, *, tell: Callable[[str], None]) -> list[Option]:
        """All options again, this one having been compared or, if it was or its layers are compiled, tried as it would
        be run."""
        blind = not self.measurements.any_room
        tries = option.compared or option.compiled or blind
        tell(f"deciding how a batch is run: {'trying' if tries else 'comparing'} {option.name}")
        measure = self.measurements.try_out if tries else self.measurements.compare
        measure(option.key, blocks=self.blocks, specs=self._stepped_by(option.key))
        if blind and self.measurements.any_room:
            self.planner.budget, self.table = self.budget, self._table()
        return self.options()

    def cost_s(self, option: Option, tried: bool) -> float:
        """About the seconds that it takes to compare an option, or to try one."""
        micro_s = option.step_s / option.accumulation if option.step_s > 0 else 0.0
        if not tried and not option.compiled:
            return COMPARING_S + (2 * option.step_s if option.release else max(3 * micro_s, TIMED_S + micro_s))
        looks_s = 0.0 if self.measurements.is_measured(option.key) else LOOKING_S + 3 * micro_s
        step_s = micro_s * min(option.accumulation, FEW)
        warm_s = (WARM_RELEASED if option.release else WARM) * step_s
        rehearsed_s = COMPARING_S + warm_s + max(REHEARSED_S[self.where.type], step_s)
        return self.measurements.compiling_s(option.micro_batch) + looks_s + rehearsed_s


def run_seconds(config: RunConfig, rate: float) -> float:
    """Of a run at `rate` samples per second, as far as its limits tell; without one it is taken to be endless."""
    limits = []
    if config.trainer.max_steps > 0:
        limits.append(config.trainer.max_steps * config.batch_size / rate)
    if config.trainer.max_time is not None:
        days, hours, minutes, seconds = map(int, config.trainer.max_time.split(":"))
        limits.append(86400 * days + 3600 * hours + 60 * minutes + seconds)
    return min(limits, default=math.inf)


def told(choice: OptionChoice) -> str:
    """What measuring options won, and what was left, in words."""
    said = f"; options were measured {choice.num_measured} time{'s' if choice.num_measured != 1 else ''}"
    if choice.won > 0:
        said += f", which won {choice.won:.1%} over the one that promised most"
    if choice.rivals:
        count = f"{len(choice.rivals)} option{'s' if len(choice.rivals) > 1 else ''}"
        said += f"; {count} left unmeasured could be up to {choice.gain:.0%} faster, by what is promised and its error"
    return said


def leave(options: Sequence[Option], *, run_dir: Path, objective: str) -> None:
    """The table on the terminal and options.csv in the run folder."""
    files.write_csv(run_dir / "options.csv", option_rows(options))
    console.print_options(options, objective=objective)


def compile_is_open(decision: MicroBatchSearch) -> bool:
    """Whether a run that is long enough has compiled layers searched, too."""
    is_open = decision.config.model.compile == "auto" and decision.where.type == "cuda" and decision.measurements.capped
    return is_open and decision.axes.num_layers > 0 and not decision.sharded
