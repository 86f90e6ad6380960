"""Decides before training how the global batch is run: micro-batch and accumulation, recomputed layers (activation
checkpointing), gradient release, compiled layers; each with the plan of optimizer specs that fits beside it.

1. `decide` looks for a cached decision of the same network, batch, card and settings (`decision_cache`), and confirms
   it by one measurement of its bytes.
2. Else `MicroBatchSearch.explore` measures a few small micro-batches, with no layer recomputed and with all.
   `Measurements` interpolates bytes and seconds of the others.
3. `MicroBatchSearch.plan_options` plans each option, a (micro-batch, recomputed layers, release), within the budget.
4. `planning.choice.choose_option` measures the most promising options as training will run them, and takes the best by
   `objective`, in about DECIDING_S seconds.
5. The table of options is printed and written as options.csv. If none fits, the refusal names a budget that was tried,
   and later processes go by it (`decision_cache.Least`).
"""

import gc
import io
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, redirect_stdout, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any

import torch
from torch import Tensor

from baoc.callbacks.generators import capture_rng, restore_rng
from baoc.config.schema import RunConfig
from baoc.core.budgets import resolve_auto
from baoc.core.catalogue import SPECS
from baoc.data.base import DataModule
from baoc.errors import BadInputError, BaocError, InfeasibleBudgetError
from baoc.models.switches import count_recomputed_layers, is_compiled, recomputable_layers, set_compiled, set_recomputed
from baoc.optim.shards import is_sharded
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
from baoc.profiling import cap_device, clear_cache, context_bytes, describe, free_bytes, uncapped
from baoc.profiling.memory import cap_suspended, least_budget_with_same_pages, least_confirmed_bytes
from baoc.profiling.phase_timer import PhaseTimer
from baoc.profiling.step_time import specs_timed_first
from baoc.tasks.base import Task
from baoc.tracking import console, files
from baoc.training.arriving_weights import must_wait, on_device_as_bf16
from baoc.training.decision_cache import (
    Entry,
    Least,
    key_of,
    least_key,
    load_decision,
    load_least,
    path_of,
    store_decision,
)
from baoc.training.measure.benchmark_steps import FEW, WARM, WARM_RELEASED
from baoc.training.measure.measurements import Measurements, OptionKey
from baoc.training.measure.microbatches import REHEARSED_S, TIMED_S, MicroBatchRunner
from baoc.training.measure.probe import upkeep_bytes
from baoc.training.resume import decision_of, with_decision, write_decision
from baoc.training.session import (
    Session,
    SessionSettings,
    confirms,
    keep_least,
    largest_shards,
    make_profiler,
    needs_confirmation,
    refuse_sharded,
)
from baoc.training.user_optimizer import widened
from baoc.types import Footprint, LatencyTable, OptimizerSpec, Option, Plan
from baoc.units import format_bytes

DECIDING_S = 12.0  # that a decision may take
COMPARING_S, BYTES_S = 0.4, 0.6  # about what a comparison, or a measurement of bytes, takes beside its steps
# Fields of a footprint that do not depend on the micro-batch: the profiler's, and temporaries of a step.
SIZE_INDEPENDENT = (
    "step_temporary_bytes",
    "arrival_bytes",
    "gathered_ranks",
    "profile_bytes",
    "profile_temporary_bytes",
)
MAX_VERIFIED = 6  # options that are measured for a refusal
COMPILING_S = 30.0  # about how much longer a decision takes that searches compiled layers too
COMPILING_SHARE, MAX_COMPILING_S = 0.01, 100.0  # of a run's seconds, and in all, that compiling more sizes may take
COMPILED_GAIN = 0.1  # of a run's seconds, what compiled layers are taken to save before they are measured


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """The chosen option, the configuration with it, the latency table to plan the run with, and the measurement by
    which it fits: the same step measured again may take one of the allocator's segments more."""

    config: RunConfig
    latency: LatencyTable
    option: Option
    footprint: Footprint | None = None


def axes_of(config: RunConfig, *, task: Task) -> Axes:
    """The values to search; a setting of the user's leaves one. Raises BadInputError for one that is impossible."""
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
    release_is_open = (
        ranks() is SINGLE_PROCESS
        and release is None
        and config.batch_size in sizes
        and config.optim.nonfinite != "skip_step"
    )
    return Axes(
        micro_batches=sizes,
        recomputed=open_numbers if pinned in (None, "auto") else (num_layers if pinned is True else int(pinned),),
        num_layers=num_layers,
        release=(False, True) if release_is_open else (bool(release),),
    )


def decide(
    config: RunConfig, *, task: Task, data: DataModule, device: str, settings: SessionSettings, run_dir: Path
) -> SearchResult:
    """Chooses micro-batch, recomputed layers, gradient release and compiling, and sets the network's layers so.

    Raises:
        InfeasibleBudgetError: No option fits; it names the least budget that one would need. On a GPU, and without
            fully_shard, an option was found to fit within that memory budget, if any was.
    """
    phases = PhaseTimer()
    with _restored(config, task=task, device=device) as stack:
        tell = stack.enter_context(console.progress_line(enabled=config.trainer.enable_progress_bar is not False))
        tell("deciding how a batch is run: a few small micro-batches")
        began = monotonic()
        search = MicroBatchSearch(
            config, task=task, data=data, device=device, settings=settings, stack=stack, phases=phases
        )
        with phases("the key"):
            cache_key = search.cache_key()
            entry, choice = search.ranks.broadcast_result(lambda: load_decision(cache_key)), None
            allowed = search.budget.memory_bytes
            kept_least = least_key(cache_key)
            may_be_kept = entry is None and allowed is not None and confirms(search.device, sharded=search.sharded)
            least = load_least(kept_least) if may_be_kept else None
            too_little = least is not None and (allowed or 0) < least.num_bytes
        # An earlier process refused or decided this step: one measurement confirms it. Else options are searched.
        if too_little and (named := search.named_again(least)) is not None:
            options = list(named.options)
        elif entry is not None and search.confirm(entry):
            options = list(entry.options)
        else:
            choice = search.search(began=began, tell=tell)
            entry, options = search.cache_entry(choice), list(choice.options)
            if entry is None and not too_little and (named := search.named_again(least)) is not None:
                options = [*(option for option in options if option.key != named.chosen.key), named.chosen]
                entry = replace(named, options=tuple(options))
            if entry is not None:
                store_decision(cache_key, entry)
        write_options(options, run_dir=run_dir, objective=config.objective)
        compile_s = search.measurements.compile_seconds(entry.chosen.key) if entry is not None else 0.0
        phases.seconds["else"] = max(0.0, monotonic() - began - phases.total_s)
        account: dict[str, Any] = {"kept": True}
        how = f": taken over from {path_of(cache_key)}, as its bytes were found again"
        if choice is None and entry is None:
            how = f": refused as before, by {path_of(kept_least)}"
        if choice is not None:
            rivals = [option.name for option in choice.rivals]
            account = {"measured": choice.num_measured, "won": choice.won, "left": rivals, "left_gain": choice.gain}
            how = measuring_summary(choice)
        account |= {"total_s": phases.total_s, "training_s": compile_s, "phases_s": phases.seconds}
        files.write_json(run_dir / "deciding.json", account)
        compiling = f"; {compile_s:.1f} s of it compiled what training runs" if compile_s else ""
        console.say(f"the decision took {phases.summary()}{compiling}{how}")
        if entry is None:
            refuse = partial(
                no_option_fits, options, budget=search.budget, axes=search.axes, specs=search.planner.specs
            )
            refusal = refuse()
            searched, sharded = search.device, search.sharded
            if choice is None and least is not None:
                raise refuse(least_bytes=least.num_bytes)
            if not needs_confirmation(searched, refusal, sharded=sharded):
                raise refusal
            del search
            stack.close()  # the device is as it was before
            named = format_bytes(refusal.least_feasible_bytes)
            console.say(f"no option fits budget {config.budget.name}: budgets around {named} are tried for the least")
            within: dict[int, Entry] = {}
            plan_at = partial(
                _least_peak, config, task=task, data=data, device=device, settings=settings, within=within
            )
            page_start = partial(least_budget_with_same_pages, searched)
            found = least_confirmed_bytes(refusal, plan_at=plan_at, page_start=page_start)
            if found is not None:
                decided = replace(within[found], options=tuple(options), run_s=math.inf)
                recomputed, footprint = decided.chosen.recomputed, decided.footprint
                kept = Least(num_bytes=found, footprint=footprint, recomputed=recomputed, entry=decided)
                keep_least(kept_least, kept, device=searched)
            raise refusal if found is None else refuse(least_bytes=found)
        budget = search.budget
    chosen = entry.chosen
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
        config=replace(with_decision(config, decision=decision_of(chosen)), budget=budget),
        latency=entry.latency,
        option=chosen,
        footprint=entry.footprint,
    )


@contextmanager
def _restored(config: RunConfig, *, task: Task, device: str) -> Iterator[ExitStack]:
    """Restores layers, random numbers and the device's cache when the stack closes, beside what callers add to it."""
    with ExitStack() as stack:  # closes in reverse: weights that were moved for measuring are restored first
        stack.callback(set_recomputed, task.model, count_recomputed_layers(task.model), name=config.model.name)
        stack.callback(set_compiled, task.model, is_compiled(task.model))
        stack.callback(restore_rng, capture_rng())
        stack.callback(gc.unfreeze)
        gc.freeze()  # else each emptying of caches walks all objects that were there before, .2 s each time
        stack.callback(clear_cache, torch.device(device))
        yield stack


def _least_peak(
    config: RunConfig,
    memory_bytes: int,
    *,
    task: Task,
    data: DataModule,
    device: str,
    settings: SessionSettings,
    within: dict[int, Entry],
) -> int:
    """Peak bytes of the smallest plan of any option that was measured within `memory_bytes`, until one fits. The
    decision for it joins those `within` each budget. Raises InfeasibleBudgetError if none fits."""
    config = replace(config, budget=replace(config.budget, memory_bytes=memory_bytes))
    with _restored(config, task=task, device=device) as stack, redirect_stdout(io.StringIO()):
        search = MicroBatchSearch(
            config,
            task=task,
            data=data,
            device=device,
            settings=settings,
            stack=stack,
            phases=PhaseTimer(),
            max_s=0.0,
        )
        choice = search.search(began=monotonic(), tell=lambda _: None)
        refusal, least = None, 0
        if (entry := search.cache_entry(choice)) is None:
            refusal = no_option_fits(choice.options, budget=search.budget, axes=search.axes, specs=search.planner.specs)
        else:
            least, within[memory_bytes] = search.least_peak(), entry
        del search, choice  # else what they keep on the device would be there when the next budget is measured
    if refusal is not None:
        raise refusal
    return least


def device_of(device: str) -> torch.device:
    """This process's device; `device` is cuda or cpu."""
    return torch.device("cuda", torch.cuda.current_device()) if device == "cuda" else torch.device("cpu")


def take_option(option: Option, *, task: Task, data: DataModule, name: str) -> None:
    """Sets layers and batch sizes as an option has them. `name`: of the network, in messages."""
    set_recomputed(task.model, option.recomputed, name=name)
    set_compiled(task.model, option.compiled)
    data.batch_size, data.accumulate = option.micro_batch, option.accumulation


class MicroBatchSearch:
    """The measurements and planned options of one run. The task is on the device until `stack` closes.

    Under fully_shard all ranks search together: they share measurements and rank 0's clock. `max_s`: seconds for
    measuring which option is fastest, by default DECIDING_S; with 0, the first option that fits is enough, and layers
    are not compiled.
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        task: Task,
        data: DataModule,
        device: str,
        settings: SessionSettings,
        stack: ExitStack,
        phases: PhaseTimer,
        max_s: float | None = None,
    ):
        self.config, self.task, self.phases = config, task, phases
        self.max_s = DECIDING_S if max_s is None else max_s
        self.size_independent: dict[bool, dict[str, Any]] = {}
        self.explored: dict[int, tuple[list[MicroBatchMeasurement], bool]] = {}
        self.device = device_of(device)
        self.sharded = any(map(is_sharded, task.parameters()))
        self.ranks = ranks() if self.sharded else SINGLE_PROCESS
        self.budget = resolve_auto(config.budget, free_bytes=free_bytes(self.device))
        self.axes = axes_of(config, task=task)
        precision = str(config.trainer.precision or "32-true")
        settings = widened(settings, device=device, budget=self.budget, precision=precision)
        self.params = {name: param for name, param in task.named_parameters() if param.requires_grad}
        refuse_sharded(self.params, budget=self.budget, settings=settings)
        with phases("the network's blocks"):
            self.session = Session(
                largest_shards(describe(task, optimizer_groups=task.optimizer_groups()), params=self.params),
                params=self.params,
                budget=self.budget,
                settings=settings,
                betas=config.optim.betas,
                device=self.device,
                module=task,
                ranks=self.ranks,
            )
        with phases("device and weights"):
            capped, waits = self._move_task_to_device(self.session.bf16_params, stack=stack)
        with phases("first batches"):
            batches = {
                "batch": next(iter(data.make_train_loader(limit=None))),
                "val_batch": next(iter(data.val_dataloader()), None),
            }
        self._new_measurements = partial(
            Measurements,
            config,
            task=task,
            runner=MicroBatchRunner(task, **batches, device=self.device, precision=precision, phases=phases),
            device=self.device,
            budget=self.budget,
            axes=self.axes,
            bf16_params={} if waits else self.session.bf16_params,
            bf16_savings=self.session.bf16_savings,
            capped=capped,
        )
        self.reset(compiled=config.model.compile is True)
        planner = self.session.settings.planner
        if planner.allocator == "exact":  # options are planned in milliseconds; the run itself exactly
            planner = replace(planner, allocator="lagrangian")
        self.session.settings = self.settings = replace(self.session.settings, planner=planner)

    def reset(self, *, compiled: bool) -> None:
        """Forgets all options, to search with layers compiled or as they are."""
        self.measurements: Measurements = self._new_measurements(compiled=compiled, explored=self.explored)
        self.footprints: dict[OptionKey, Footprint] = {}
        self._plans: dict[OptionKey, tuple[Footprint | None, Plan | InfeasibleBudgetError]] = {}

    def search(self, *, began: float, tell: Callable[[str], None]) -> OptionChoice:
        """Returns the best option found within `max_s` since `began`.

        With compile=auto, compiled layers are searched too if the run is long enough to repay it. If they fail, an
        option says why.
        """
        self.reset(compiled=self.config.model.compile is True)  # a cached decision may have been confirmed with another
        if self.measurements.compiled:
            compiled = self._search_compiled(began=began, tell=tell)
            if isinstance(compiled, OptionChoice):
                return compiled
            self.reset(compiled=False)
            choice = self._search_once(began=monotonic(), tell=tell)
            return replace(choice, options=[*choice.options, compiled]) if choice.chosen is not None else choice
        choice, before = self._search_once(began=began, tell=tell), (self.measurements, self.footprints)
        if choice.chosen is None or not self.may_compile(choice.chosen):
            return choice
        self.reset(compiled=True)
        compiled = self._search_compiled(began=monotonic(), tell=tell)
        if not isinstance(compiled, OptionChoice):
            compiled = replace(choice, chosen=None, options=[compiled])
        both = [option for option in (choice.chosen, compiled.chosen) if option is not None]
        if best_option(both, objective=self.config.objective) is compiled.chosen:
            return replace(compiled, options=[*(replace(o, chosen=False) for o in choice.options), *compiled.options])
        self.measurements, self.footprints = before
        return replace(choice, options=[*choice.options, *(replace(o, chosen=False) for o in compiled.options)])

    def _search_compiled(self, *, began: float, tell: Callable[[str], None]) -> OptionChoice | Option:
        """Searches compiled layers. If compiling or running them fails, returns an option that says why."""
        try:
            return self._search_once(began=began, tell=tell)
        except BaocError:
            raise
        except Exception as error:
            why = f"compiled layers fail: {type(error).__name__}: {(str(error).strip() or '-').splitlines()[0][:200]}"
        clear_cache(self.device)
        console.say(f"{why}; layers run as they are")
        return self._unplanned((self.axes.micro_batches[0], 0, False), why=why)

    def may_compile(self, chosen: Option) -> bool:
        """True if compiled layers are open, and a run with this option is long enough to repay searching them."""
        if not self.max_s:
            return False
        run_s = run_seconds(self.config, chosen.samples_per_s)
        return compile_is_open(self) and COMPILED_GAIN * run_s >= DECIDING_S + COMPILING_S

    def _search_once(self, *, began: float, tell: Callable[[str], None]) -> OptionChoice:
        """The best option with layers as they are, or with compiled ones, see `reset`."""
        self.explore()
        measurer = OptionMeasurer(
            measure=partial(self.measure_option, tell=tell),
            cost_s=self.measuring_seconds,
            remaining_s=lambda: self.ranks.broadcast_number(
                began + self.max_s + self._extra_compiling_seconds() - monotonic()
            ),
            run_s=partial(run_seconds, self.config),
        )
        choice = choose_option(self.options(), objective=self.config.objective, measurer=measurer)
        if choice.chosen is None:
            choice = choose_option(
                self.least_measured(choice.options), objective=self.config.objective, measurer=measurer
            )
        return choice

    def _extra_compiling_seconds(self) -> float:
        """How much longer a search of compiled layers may take: what training compiles anyway; in long runs more."""
        if not self.measurements.compiled:
            return 0.0
        own_s = max(map(self.measurements.compile_seconds, self.measurements.rehearsed_s), default=0.0)
        trials = [trial for trials in self.measurements.small.values() for trial in trials if trial.seconds > 0]
        run_s = min((run_seconds(self.config, trial.micro_batch / trial.seconds) for trial in trials), default=0.0)
        return own_s + min(COMPILING_SHARE * run_s, MAX_COMPILING_S)

    def explore(self) -> None:
        """Measures a few micro-batches with none and with all layers recomputed, and what else plans need."""
        self.measurements.fits_only_in_bf16.clear()  # of a cached decision
        numbers, most = self.axes.recomputed, self.axes.num_layers
        if self.measurements.compiled and numbers != (most,):  # both ends: compiled layers lie between them
            for end in (most, 0):
                with nullcontext() if end in numbers else suppress(Exception):  # a number that the user set stays
                    self.measurements.explore(end)
            numbers = tuple(number for number in numbers if not self.measurements.covers(number))
        for recomputed in numbers:
            if self.measurements.compiled or not (recomputed and self._fits_with_adamw()):
                self.measurements.explore(recomputed)
        self.plan_by(self.measurements.small[min(self.measurements.small)][0].footprint)
        if self.size_independent:
            return
        no_room = self.measurements.capped and not self.measurements.any_room
        with self.phases("the profiler"), uncapped(self.device, budget=self.budget) if no_room else nullcontext():
            constant: dict[bool, dict[str, Any]] = {}
            for release in self.axes.release:
                settings = replace(self.settings, release=release)
                make_profiler(self.planner, self.params, settings=settings, betas=self.config.optim.betas)
                assert self.planner.footprint is not None
                footprint = self.session.largest_on_ranks(self.session.complete(self.planner.footprint))
                constant[release] = {name: getattr(footprint, name) for name in SIZE_INDEPENDENT}
        self.table = self._table()  # may run out of memory: both are then made anew
        self.size_independent = constant

    def plan_by(self, footprint: Footprint) -> None:
        self.planner = self.session.planner_for(footprint, budget=self.budget)
        self.blocks = [[self.params[param.name] for param in block.params] for block in self.planner.blocks]

    # -- cached decisions ---------------------------------------------------------------------------------------------

    def cache_key(self) -> dict[str, Any]:
        """Everything that the decision rests on, see `decision_cache`."""
        batches = self.measurements.runner.batches
        return key_of(self.config, network=self.task.model, batches=batches, budget=self.budget, device=self.device)

    def confirm(self, entry: Entry) -> bool:
        """True if a cached decision is good enough for this run, and its option still takes its bytes."""
        before = entry.footprint
        if entry.run_s < run_seconds(self.config, entry.chosen.samples_per_s):
            return False
        if (footprint := self._measured_again(entry)) is None:
            return False
        self.planner.latency = entry.latency
        for nearest in (footprint, self.session.known_or_measured(footprint, known=before)):
            self.planner.footprint = nearest
            with suppress(InfeasibleBudgetError), self.phases("plans of the options"):
                self.planner.propose()
                return nearest is before or footprint.peak_bytes(state_bytes=0) <= (
                    1 + RATE_TOLERANCE
                ) * before.peak_bytes(state_bytes=0)
        return False

    def named_again(self, least: Least | None) -> Entry | None:
        """The decision within the budget that a refusal named, if it is of this very step, by one measurement in it."""
        entry = least.entry if least is not None else None
        if least is None or entry is None:
            return None
        with cap_suspended(self.device):
            try:
                cap_device(self.device, budget=replace(self.budget, memory_bytes=least.num_bytes))
            except BadInputError:  # the CUDA context alone exceeds it by now
                return None
            footprint = self._measured_again(entry)
            clear_cache(self.device)
        return entry if footprint is not None and least.is_of(footprint) else None

    def _measured_again(self, entry: Entry) -> Footprint | None:
        """The footprint of a cached decision's option within the cap; None if it has no room, or is not compiled."""
        chosen, before = entry.chosen, entry.footprint
        with self.phases("plans of the options"):
            self.plan_by(before)
        self.reset(compiled=chosen.compiled)
        self.measurements.fits_only_in_bf16 |= {chosen.key} if entry.in_16_bits else set()
        try:
            measurement = self.measurements.measure_within_cap(chosen.key, blocks=self.blocks)
        except BaocError:
            raise
        except Exception:  # of a compiler, which may raise any; then it is decided anew
            if not chosen.compiled:
                raise
            return None
        if measurement is None:
            return None
        fixed = {name: getattr(before, name) for name in SIZE_INDEPENDENT}
        context = int(
            self.ranks.all_reduce_max(max(measurement.footprint.context_bytes, context_bytes(self.device)))[0]
        )
        return replace(measurement.footprint, context_bytes=context, **fixed)

    def cache_entry(self, choice: OptionChoice) -> Entry | None:
        """The chosen option for the cache; None if nothing fits."""
        chosen = choice.chosen
        if chosen is None:
            return None
        # Compiled layers were not searched because the run is short.
        unsought = compile_is_open(self) and not any(option.compiled for option in choice.options)
        run_s = run_seconds(self.config, chosen.samples_per_s) if choice.rivals or unsought else math.inf
        return Entry(
            chosen=chosen,
            options=tuple(choice.options),
            footprint=self.footprints[chosen.key],
            latency=self.latency(chosen.key),
            run_s=run_s,
            in_16_bits=chosen.key in self.measurements.fits_only_in_bf16,
        )

    # -- options ------------------------------------------------------------------------------------------------------

    def _move_task_to_device(self, bf16_params: Mapping[str, Tensor], *, stack: ExitStack) -> tuple[bool, bool]:
        """Moves the task to the device until `stack` closes. Returns (a cap is set, the weights came in bf16)."""
        try:
            cap_device(self.device, budget=self.budget)
        except BadInputError:  # the CUDA context alone exceeds the budget
            self.task.to(self.device)
            return False, False
        if self.sharded:
            return True, False  # each rank's part is there
        context = context_bytes(self.device)
        waits = must_wait(self.task, device=self.device, budget=self.budget, context_bytes=context)
        given = bf16_params if waits else {}
        there = on_device_as_bf16(
            self.task, bf16_params=given, device=self.device, budget=self.budget, context_bytes=context
        )
        stack.enter_context(there)
        return True, bool(given)

    def _fits_with_adamw(self) -> bool:
        """True if the whole batch fits at once with all activations and fp32 AdamW's states, so recomputing gains
        nothing. The states take twice the bytes of fp32 weights; three times leaves a margin."""
        size, measurements = self.config.batch_size, self.measurements.small.get(0)
        if measurements is None or 0 in self.measurements.measured_in_bf16 or size not in self.axes.micro_batches:
            return False
        if self.budget.memory_bytes is None:
            return True
        footprint = footprint_at(measurements, micro_batch=size)
        return footprint.peak_bytes(state_bytes=3 * footprint.weights_bytes) <= self.budget.memory_bytes

    def _table(self) -> LatencyTable:
        """The latency table: seconds of the optimizer's specs, and of the fastest option's step with fused AdamW."""
        specs = list(self.planner.specs.values())
        if not self.measurements.any_room:  # there is no room to time anything, and nothing will be run
            return LatencyTable(device=str(self.device), fixed_s={}, per_element_s={})
        limited = self.budget.step_time is not None
        needed = specs_timed_first(specs, device=self.device) if limited else set[str]()
        with self.phases("the latency table"):
            upkeep = upkeep_bytes(clips=False, averages=self.task.ema is not None)
            table = self.session.spec_table(specs, needed, upkeep_bytes=upkeep)
        table = replace(self.ranks.broadcast(table), device=str(self.device))
        pairs = [(measured, number) for number, sizes in self.measurements.small.items() for measured in sizes]
        timed = [pair for pair in pairs if not math.isnan(pair[0].seconds)] or pairs
        measurement, recomputed = min(timed, key=lambda pair: pair[0].seconds / pair[0].micro_batch)
        key = measurement.micro_batch, recomputed, False
        # Options are held against this step, so it is timed as they are.
        if limited and key not in self.measurements.out_of_memory:
            self.measurements.try_out(key, blocks=self.blocks, specs=[SPECS["adamw"]] * len(self.blocks))
        return replace(table, reference_step_s=table.reference_step_s + self.measurements.seconds(key))

    def latency(self, key: OptionKey) -> LatencyTable:
        """The latency table with the rest of this option's step."""
        return replace(self.table, base_step_s=self.table.base_step_s + self.measurements.seconds(key))

    def options(self) -> list[Option]:
        options = self.plan_options()
        if not any(option.fits for option in options) and self.measurements.measure_again_in_bf16():
            options = self.plan_options()
        return options

    def plan_options(self) -> list[Option]:
        # It has grown by the kernels of what was tried since.
        self.context = int(self.ranks.all_reduce_max(context_bytes(self.device))[0])
        keys = [
            key for key in self.axes.option_keys(batch_size=self.config.batch_size) if self.measurements.covers(key[1])
        ]
        with self.phases("plans of the options"):
            if not self.table.fixed_s:  # for want of room: bytes alone decide whether there may be some
                self.planner.budget = replace(self.budget, step_time=None)
            ends: dict[OptionKey, Option] = {}
            for key in sorted(keys, key=self.measurements.seconds):
                option = self.option_if_too_slow(key, than=ends.values()) or self._option(key)
                ends |= {} if option is None else {key: option}
            partly = [self._option(key) for key in self._between_ends(ends)]
        options = [*ends.values(), *(option for option in partly if option is not None)]
        return sorted(options, key=lambda option: (option.recomputed, option.micro_batch, option.release))

    def _between_ends(self, ends: Mapping[OptionKey, Option]) -> list[OptionKey]:
        """Keys between none and all layers recomputed: those that may be better than both ends, and measured ones."""
        most = max(self.measurements.small)
        keys: list[OptionKey] = []
        for size, number, release in [key for key in ends if key[1] == most > 0]:
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
            measured = self.measurements.rehearsed_s.keys() | self.measurements.compared_s.keys()
            tried = {key[1] for key in measured if (key[0], key[2]) == (size, release)} - {0, most}
            out = max((n for n in range(most) if not self.measurements.has_room((size, n, release))), default=0)
            step = max(1, most // 8)  # past a number that ran out of memory against its prediction
            numbers = {number if number > out else out + step for number in numbers}
            near = {n for n in numbers if self._is_no_faster(n, than=tried, size=size, release=release)}
            keys += [(size, number, release) for number in tried | (numbers - near) if number < most]
        return keys

    def _is_no_faster(self, number: int, *, than: Collection[int], size: int, release: bool) -> bool:
        """True if a larger number of recomputed layers, that was measured and has room, takes about as long."""
        room = [n for n in than if n > number and (size, n, release) not in self.measurements.out_of_memory]
        seconds = self.measurements.seconds((size, number, release))
        return any(self.measurements.seconds((size, n, release)) <= (1 + RATE_TOLERANCE) * seconds for n in room)

    def _footprint(self, key: OptionKey) -> Footprint | None:
        """The option's footprint; None if it is unknown what gradient release would leave."""
        footprint = self.measurements.footprint(key, blocks=self.planner.blocks)
        if footprint is None:
            return None
        context = max(footprint.context_bytes, self.context)
        return replace(footprint, context_bytes=context, **self.size_independent[key[2]])

    def option_if_too_slow(self, key: OptionKey, *, than: Collection[Option]) -> Option | None:
        """The option without a plan, if the rate alone counts and it is too slow, by more than EXTRAPOLATED_ERROR."""
        seconds = self.measurements.seconds(key)
        fitting_s = min((option.step_s for option in than if option.fits), default=math.inf)
        rate_alone_counts = self.config.objective == "throughput" and self.budget.step_time is None
        least_s, most_fitting_s = (1 - EXTRAPOLATED_ERROR) * seconds, (1 + EXTRAPOLATED_ERROR) * fitting_s
        slow = least_s > most_fitting_s  # False if seconds are unknown
        if not rate_alone_counts or key in self.measurements.rehearsed_s or not slow:
            return None
        return self._unplanned(key, why="not planned: too slow by its promise", seconds=seconds)

    def _unplanned(self, key: OptionKey, *, why: str, seconds: float = math.nan) -> Option:
        size, recomputed, release = key
        return Option(
            micro_batch=size,
            accumulation=self.config.batch_size // size,
            recomputed=recomputed,
            num_layers=self.axes.num_layers,
            release=release,
            samples_per_s=self.config.batch_size / seconds,
            step_s=seconds,
            why=why,
            compiled=self.measurements.compiled,
        )

    def _option(self, key: OptionKey) -> Option | None:
        footprint = self._footprint(key)
        if footprint is None:
            return None
        self.footprints[key] = footprint
        option = make_option(
            self.planner,
            footprint=footprint,
            batch_size=self.config.batch_size,
            recomputed=key[1],
            num_layers=self.axes.num_layers,
            latency=self.latency(key),
            release=key[2],
            propose=partial(self.propose, key),
        )
        tried = key in self.measurements.rehearsed_s and self.measurements.is_measured(key)
        compared = key in self.measurements.compared_s and not tried
        option = replace(option, tried=tried, compared=compared, compiled=self.measurements.compiled)
        if not self.measurements.has_room(key):
            why = "does not fit: out of memory when it was tried"  # whatever time or host memory it is given
            return replace(option, risk=None, fastest_s=math.nan, least_host_bytes=None, why=why)
        return option

    def propose(self, key: OptionKey) -> Plan:
        """Plans an option, or adjusts its earlier plan or refusal if seconds play no part and the footprint differs by
        a context that has grown within the room that is left. Raises InfeasibleBudgetError."""
        footprint, memory = self.planner.footprint, self.budget.memory_bytes
        old_footprint, plan = self._plans.get(key, (None, None))
        grown = footprint.context_bytes - old_footprint.context_bytes if old_footprint and footprint else 0
        same = (
            old_footprint is not None
            and replace(old_footprint, context_bytes=old_footprint.context_bytes + grown) == footprint
        )
        room = math.inf if memory is None or not isinstance(plan, Plan) else memory - plan.peak_bytes
        if plan is None or not same or not 0 <= grown <= room or self.planner.budget.step_time is not None:
            try:
                plan = self.planner.propose()
            except InfeasibleBudgetError as error:
                plan = error.with_traceback(None)
        elif isinstance(plan, Plan):
            least = plan.least_feasible_bytes + grown
            plan = replace(plan, peak_bytes=plan.peak_bytes + grown, least_feasible_bytes=least)
        else:
            plan.least_feasible_bytes += grown
        self._plans[key] = footprint, plan
        if isinstance(plan, InfeasibleBudgetError):
            raise plan
        return plan

    def least_peak(self) -> int:
        """Peak bytes of the smallest plan of any option that has room."""
        return min(
            plan.least_feasible_bytes
            for key, (_, plan) in self._plans.items()
            if isinstance(plan, Plan) and self.measurements.has_room(key)
        )

    def least_measured(self, options: list[Option]) -> list[Option]:
        """If no option fits, measures the one that needs the fewest bytes, as a refusal names it; it may even fit."""
        slow = any(not math.isnan(option.fastest_s) for option in options)
        if slow or self.budget.memory_bytes is None or not self.measurements.capped:
            return options
        for _ in range(MAX_VERIFIED):
            least = min(options, key=lambda option: (option.peak_bytes, not self.measurements.is_measured(option.key)))
            if self.measurements.is_measured(least.key):
                break
            with self.phases("the least option"):
                if not self.measurements.measure_outside_cap(least.key, blocks=self.blocks):
                    break
            options = self.plan_options()
        return options

    def _specs_for_timing(self, key: OptionKey) -> list[OptimizerSpec]:
        """For each block the spec that most blocks of the option's plan have; nothing without a plan. One spec, as each
        further one compiles for a second and changes little of the host's work."""
        _, plan = self._plans.get(key, (None, None))
        if not isinstance(plan, Plan):
            return []
        ((most, _),) = Counter(plan.allocation.choices.values()).most_common(1)
        return [self.planner.specs[most]] * len(self.planner.blocks)

    def measure_option(self, option: Option, *, tell: Callable[[str], None]) -> list[Option]:
        """Measures an option, and returns all options planned again. At first it is compared; if it was before, or its
        layers are compiled, it is measured as training would run it."""
        blind = not self.measurements.any_room
        tries = option.compared or option.compiled or blind
        tell(f"deciding how a batch is run: {'trying' if tries else 'comparing'} {option.name}")
        measure = self.measurements.try_out if tries else self.measurements.compare
        measure(option.key, blocks=self.blocks, specs=self._specs_for_timing(option.key))
        if blind and self.measurements.any_room:
            self.planner.budget, self.table = self.budget, self._table()
        return self.options()

    def measuring_seconds(self, option: Option, tried: bool) -> float:
        """About how many seconds it takes to compare an option, or if `tried` to measure it as training runs it."""
        micro_s = option.step_s / option.accumulation if option.step_s > 0 else 0.0
        if not tried and not option.compiled:
            return COMPARING_S + (2 * option.step_s if option.release else max(3 * micro_s, TIMED_S + micro_s))
        bytes_s = 0.0 if self.measurements.is_measured(option.key) else BYTES_S + 3 * micro_s
        step_s = micro_s * min(option.accumulation, FEW)
        warm_s = (WARM_RELEASED if option.release else WARM) * step_s
        rehearsed_s = COMPARING_S + warm_s + max(REHEARSED_S[self.device.type], step_s)
        return self.measurements.remaining_compile_seconds(option.micro_batch) + bytes_s + rehearsed_s


def run_seconds(config: RunConfig, rate: float) -> float:
    """Seconds of a run at `rate` samples per second, by its limits; infinite without a limit."""
    limits = []
    if config.trainer.max_steps > 0:
        limits.append(config.trainer.max_steps * config.batch_size / rate)
    if config.trainer.max_time is not None:
        days, hours, minutes, seconds = map(int, config.trainer.max_time.split(":"))
        limits.append(86400 * days + 3600 * hours + 60 * minutes + seconds)
    return min(limits, default=math.inf)


def measuring_summary(choice: OptionChoice) -> str:
    """How often options were measured, what that gained, and what may be better, as text."""
    said = f"; options were measured {choice.num_measured} time{'s' if choice.num_measured != 1 else ''}"
    if choice.won > 0:
        said += f", which won {choice.won:.1%} over the one that promised most"
    if choice.rivals:
        count = f"{len(choice.rivals)} option{'s' if len(choice.rivals) > 1 else ''}"
        said += f"; {count} left unmeasured could be up to {choice.gain:.0%} faster, by what is promised and its error"
    return said


def write_options(options: Sequence[Option], *, run_dir: Path, objective: str) -> None:
    files.write_csv(run_dir / "options.csv", option_rows(options))
    console.print_options(options, objective=objective)


def compile_is_open(search: MicroBatchSearch) -> bool:
    """True if compiled layers are searched too when a run is long enough."""
    is_open = search.config.model.compile == "auto" and search.device.type == "cuda" and search.measurements.capped
    return is_open and search.axes.num_layers > 0 and not search.sharded
