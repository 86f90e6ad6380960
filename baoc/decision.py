"""One decision before training: micro-batch, accumulation, recomputed activations, weights and allocation together.

A few small micro-batches are tried, the rest follows on lines; every way to run the global batch is planned within the
budget, the best one by `objective` is tried itself, and the table of all of them is printed and left as options.csv.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from baoc.budgets import resolve_auto
from baoc.callbacks.resume import capture_rng, restore_rng
from baoc.config.schema import RunConfig
from baoc.data.base import DataModule
from baoc.data.token_cache import cache_folder
from baoc.errors import BadInputError
from baoc.models.switches import disable_checkpointing, enable_checkpointing
from baoc.online import SessionSettings, soon_timed, step_temporaries, time_specs
from baoc.online.assemble import make_profiler, narrow_params
from baoc.options import (
    Axes,
    Trial,
    best,
    divisors,
    footprint_at,
    make_option,
    none_fits,
    option_rows,
    released,
    seconds_at,
    spared_at,
)
from baoc.planner import Planner
from baoc.profiling import cap_device, clear_cache, context_bytes, describe, free_bytes, uncapped
from baoc.profiling.lowered import narrowed, narrowed_bytes
from baoc.resuming import choice_of, keep, settled
from baoc.strategy.probe import unwrapped, upkeep_bytes
from baoc.strategy.strategy import declared_blocks, widened
from baoc.strategy.trials import Trials, grow
from baoc.tasks.base import Task
from baoc.tracking import console, files
from baoc.types import Footprint, LatencyTable, Option

TRIALS_S = 6.0  # about what trials of one kind may take
LIMITED_S = 5.0  # what a latency table may take where a step_time limit needs it
FUSED_S = 0.5  # and where only fused AdamW is timed, by the byte of which all specs are taken to be as fast
VERIFIED = 6  # options that are tried themselves at most


@dataclass(frozen=True, slots=True, kw_only=True)
class Decided:
    """What was chosen: `config` with it, and the latency table with the rest of its step, to plan the run with."""

    config: RunConfig
    latency: LatencyTable
    option: Option


def axes_of(config: RunConfig, *, task: Task) -> Axes:
    """Pins of the user's leave one value each. Raises BadInputError where one cannot be had."""
    units = list(getattr(task.model, "checkpoint_units", ()))
    pinned = config.model.checkpointing
    if pinned and not units:
        raise BadInputError(
            f"model {config.model.name} names no parts whose activations could be recomputed: set "
            "model.checkpointing=false"
        )
    sizes = (config.micro_batch,) if isinstance(config.micro_batch, int) else tuple(divisors(config.batch_size))
    both = (False, True) if units else (False,)
    release = config.optim.release_gradients
    if release:
        sizes = (config.batch_size,)  # each backward is a step
    can = release is None and config.batch_size in sizes and config.optim.nonfinite != "skip_step"
    return Axes(
        micro_batches=sizes,
        checkpointing=both if pinned is None else (pinned,),
        release=(False, True) if can else (bool(release),),
    )


def decide(
    config: RunConfig, *, task: Task, data: DataModule, device: str, settings: SessionSettings, run_dir: Path
) -> Decided:
    """Micro-batch, checkpointing and release chosen; the network is left with its checkpointing set that way.

    Raises InfeasibleBudgetError where no option fits, with the least budget that one would need. Random numbers and
    the network's weights are as before.
    """
    generators = capture_rng()
    try:
        decision = _Decision(config, task=task, data=data, device=device, settings=settings)
        options, chosen = choose(decision.options(), objective=config.objective, tried=decision.options_after)
        leave(options, run_dir=run_dir, objective=config.objective)
        if chosen is None:
            raise none_fits(options, budget=decision.budget, axes=decision.axes)
        decision.switch(chosen.checkpointing)
    finally:
        restore_rng(generators)
    choice = choice_of(chosen)
    keep(choice, run_dir=run_dir)
    if chosen.release and config.optim.release_gradients is None:
        tell_release(config)
    data.batch_size, data.accumulate = chosen.micro_batch, chosen.accumulation
    return Decided(
        config=replace(settled(config, choice=choice), budget=decision.budget),
        latency=decision.latency(chosen.way, spared_s=chosen.spared_s),
        option=chosen,
    )


def tell_release(config: RunConfig) -> None:
    """What released gradients change is said where nobody asked for them."""
    clip = config.trainer.gradient_clip_val
    norm = (
        f"; gradient_clip_val={clip:g} then clips by the norm of the step before"
        if clip and config.trainer.gradient_clip_algorithm != "value"
        else ""
    )
    console.say(
        f"gradients are released in the backward pass, to hold budget {config.budget.name}{norm}. "
        "optim.release_gradients=false rules this out"
    )


class _Decision:
    """What was tried for one run, and options made of it."""

    def __init__(self, config: RunConfig, *, task: Task, data: DataModule, device: str, settings: SessionSettings):
        self.config, self.task = config, task
        self.where = torch.device("cuda", torch.cuda.current_device()) if device == "cuda" else torch.device("cpu")
        self.budget = resolve_auto(config.budget, free_bytes=free_bytes(self.where))
        cap_device(self.where, budget=self.budget)
        task.to(self.where)
        self.axes = axes_of(config, task=task)
        precision = str(config.trainer.precision or "32-true")
        self.trials = Trials(
            task,
            batch=next(iter(data.make_train_loader(limit=None))),
            val_batch=next(iter(data.val_dataloader()), None),
            device=self.where,
            precision=precision,
        )
        settings = widened(settings, device=device, budget=self.budget, precision=precision)
        infos, declared = describe(task, optimizer_groups=task._groups()), declared_blocks(task, unwrapped(task))
        self.params = {name: param for name, param in task.named_parameters() if param.requires_grad}
        self.narrow = narrow_params(infos, params=self.params, settings=settings, declared=declared)
        self.less = narrowed_bytes(self.narrow)
        self.narrowed: set[bool] = set()  # checkpointing whose trials have such weights in 16 bits, to stay in the cap
        self.no_room: set[tuple[int, bool, bool]] = set()  # options that ran out of memory when they were tried
        self.tried = {checkpointing: self._try(checkpointing) for checkpointing in self.axes.checkpointing}
        self.released: dict[bool, Trial] = {}  # of the whole batch, by checkpointing
        if settings.planner.allocator == "exact":  # by prices, in milliseconds: the run itself is planned exactly
            settings = replace(settings, planner=replace(settings.planner, allocator="lagrangian"))
        self.planner = Planner(
            infos,
            budget=self.budget,
            settings=settings.planner,
            declared=declared,
            footprint=next(iter(self.tried.values()))[0].footprint,
        )
        self.blocks = [[self.params[param.name] for param in block.params] for block in self.planner.blocks]
        self.constant = {
            release: _constant(
                self.planner, self.params, settings=replace(settings, release=release), config=self.config
            )
            for release in self.axes.release
        }
        self.rehearsed: dict[tuple[int, bool, bool], float] = {}  # seconds of a step but for the optimizer's part
        self.table = self._table()

    def _table(self) -> LatencyTable:
        """Seconds of the optimizer's specs, and of a step with fused AdamW by the fastest way of those tried."""
        specs = list(self.planner.specs.values())
        limited = self.budget.step_time is not None
        table = time_specs(
            specs,
            device=self.where,
            num_elements=sum(param.numel() for param in self.params.values()),
            num_tensors=len(self.params),
            upkeep_bytes=upkeep_bytes(clips=False, averages=self.task.ema is not None),
            needed=soon_timed(specs, device=self.where) if limited else (),
            max_s=LIMITED_S if limited else FUSED_S,
            cache_dir=cache_folder(),
        )
        known = [(trial, checkpointing) for checkpointing, trials in self.tried.items() for trial in trials]
        trial, checkpointing = min(known, key=lambda pair: pair[0].seconds / pair[0].micro_batch)
        way = trial.micro_batch, checkpointing, False
        seconds = self.config.batch_size // trial.micro_batch * trial.seconds
        if limited and way not in self.no_room:  # options are held against it, so it is timed as they are
            self.switch(checkpointing)
            with suppress(torch.OutOfMemoryError), narrowed(self.narrow if checkpointing in self.narrowed else {}):
                seconds = self.rehearsed[way] = self._rehearse(way)
        return replace(table, reference_step_s=table.reference_step_s + seconds)

    def latency(self, way: tuple[int, bool, bool], *, spared_s: float = 0.0) -> LatencyTable:
        """The table with all but the optimizer's part of a step of this option, less what its plan's weights spare."""
        count = self.config.batch_size // way[0]
        seconds = self.rehearsed.get(way, count * seconds_at(self._trials(way), micro_batch=way[0]))
        return replace(self.table, base_step_s=self.table.base_step_s + seconds - spared_s)

    def _rehearse(self, way: tuple[int, bool, bool]) -> float:
        """Seconds of a step of this option, all but the optimizer's part, as training will take them."""
        given = self.config.trainer
        clip = (None, None) if way[2] else (given.gradient_clip_val, given.gradient_clip_algorithm)
        return self.trials.rehearsed(
            way[0],
            per_step=self.config.batch_size // way[0],
            clip=clip,
            released=self.blocks if way[2] else (),
        )

    def _trials(self, way: tuple[int, bool, bool]) -> list[Trial]:
        """What is known of options like this one."""
        _, checkpointing, release = way
        known = self.released.get(checkpointing) if release else None
        return [known] if known is not None else self.tried[checkpointing]

    def switch(self, checkpointing: bool) -> None:
        disable_checkpointing(self.task.model)
        if checkpointing:
            enable_checkpointing(self.task.model, name=self.config.model.name)

    def _try(self, checkpointing: bool) -> list[Trial]:
        """Trials of several micro-batches within the budget's cap: with weights in full, and where that is too little,
        all of them with weights of 16 bits where a plan may keep such. Where not even one sample has room, its bytes
        are looked at outside of the cap, for a refusal to name what would fit; then it is no option."""
        self.switch(checkpointing)
        grown = partial(
            grow,
            partial(self._look, checkpointing),
            sizes=list(self.axes.micro_batches),
            max_s=TRIALS_S,
            fits=self._may_fit,
        )
        with suppress(_TooTight, torch.OutOfMemoryError):
            return self._timed_narrow(grown())
        clear_cache(self.where)
        self.narrowed.add(checkpointing)
        with narrowed(self.narrow):
            with suppress(torch.OutOfMemoryError):
                return grown()
            clear_cache(self.where)
            least = self.axes.micro_batches[0]
            self.no_room |= {(least, checkpointing, release) for release in self.axes.release}
            with uncapped(self.where, budget=self.budget):
                return [self._look(checkpointing, least)]

    def _look(self, checkpointing: bool, size: int) -> Trial:
        """One trial. Raises _TooTight where it ran out of memory with weights in full, else torch.OutOfMemoryError."""
        run = partial(
            self.trials.run,
            size,
            accumulation=2 if self.axes.micro_batches[0] < self.config.batch_size else 1,
            context_bytes=context_bytes(self.where),
            per_step=self.config.batch_size // size,
        )
        if checkpointing in self.narrowed or not self.narrow:
            return run(narrowed=self.less)
        with suppress(torch.OutOfMemoryError):
            return run()
        clear_cache(self.where)
        raise _TooTight

    def _timed_narrow(self, trials: list[Trial]) -> list[Trial]:
        """The trials, of which the largest two are timed again with weights of 16 bits where a plan may keep such."""
        if not self.narrow:
            return trials
        with narrowed(self.narrow):
            for at in sorted(range(len(trials)), key=lambda at: trials[at].micro_batch)[-2:]:
                size = trials[at].micro_batch
                with suppress(torch.OutOfMemoryError):
                    seconds = self.trials.timed(size, per_step=self.config.batch_size // size)
                    trials[at] = replace(trials[at], narrow_s=seconds)
        return trials

    def _may_fit(self, footprint: Footprint) -> bool:
        """Whether some allocation might hold the budget: one without states, with weights of 16 bits where there are
        such."""
        if self.budget.memory_bytes is None:
            return True
        saved = (footprint.weights_bytes + footprint.gradients_bytes) // 2 if self.narrow else 0
        return footprint.peak_bytes(state_bytes=0) - saved <= self.budget.memory_bytes

    def options(self) -> list[Option]:
        made = [self._option(way) for way in self.axes.ways(batch_size=self.config.batch_size)]
        return [option for option in made if option is not None]

    def _option(self, way: tuple[int, bool, bool]) -> Option | None:
        """None where it is not known what released gradients would leave."""
        size, checkpointing, release = way
        footprint = self._footprint(way)
        if footprint is None:
            return None
        option = make_option(
            self.planner,
            footprint=self.constant[release](footprint),
            batch_size=self.config.batch_size,
            checkpointing=checkpointing,
            latency=self.latency(way),
            release=release,
            spared_s=self.config.batch_size // size * spared_at(self._trials(way), micro_batch=size),
            spared_bytes=sum(self.less.values()),
        )
        option = replace(option, tried=way in self.rehearsed and self._footprint_known(way))
        if way in self.no_room:
            return replace(option, risk=None, why="does not fit: out of memory when it was tried")
        return option

    def _footprint(self, way: tuple[int, bool, bool]) -> Footprint | None:
        size, checkpointing, release = way
        if release and checkpointing in self.released:
            return self.released[checkpointing].footprint
        found = footprint_at(self.tried[checkpointing], micro_batch=size)
        return released(found, blocks=self.planner.blocks) if release else found

    def _footprint_known(self, way: tuple[int, bool, bool]) -> bool:
        size, checkpointing, release = way
        if release:
            return checkpointing in self.released
        return size in [trial.micro_batch for trial in self.tried[checkpointing]]

    def options_after(self, chosen: Option) -> list[Option]:
        """All options again, `chosen` having been tried as it would be run, for bytes and for seconds."""
        way = chosen.way
        self.switch(chosen.checkpointing)
        run = partial(
            self.trials.run,
            chosen.micro_batch,
            accumulation=chosen.accumulation,
            context_bytes=context_bytes(self.where),
            released=self.blocks if chosen.release else (),
        )
        trial = self._tried(run, way=way)
        if trial is None:
            self.no_room.add(way)
        elif chosen.release:
            self.released[chosen.checkpointing] = trial
        else:
            known = [t for t in self.tried[chosen.checkpointing] if t.micro_batch != chosen.micro_batch]
            self.tried[chosen.checkpointing] = [*known, trial]
        return self.options()

    def _tried(self, run: Callable[..., Trial], *, way: tuple[int, bool, bool]) -> Trial | None:
        """A trial and a rehearsal within the cap, weights in full unless those of its kind are not, else in 16 bits;
        None where there is no room so."""
        narrow = way[1] in self.narrowed
        known = (
            next((t for t in self._trials(way) if t.micro_batch == way[0]), None)
            if self._footprint_known(way)
            else None
        )
        if not narrow:
            with suppress(torch.OutOfMemoryError):
                trial = known or self._timed_narrow([run()])[0]
                self.rehearsed[way] = self._rehearse(way)
                return trial
            clear_cache(self.where)
        if not self.narrow:
            return None
        with suppress(torch.OutOfMemoryError), narrowed(self.narrow):
            trial = (known if narrow else None) or run(narrowed=self.less)
            self.rehearsed[way] = self._rehearse(way)
            return trial
        clear_cache(self.where)
        return None


class _TooTight(Exception):
    """Weights in full, with what a trial needs beside them, are more than the budget."""


def choose(
    options: Sequence[Option], *, objective: str, tried: Callable[[Option], list[Option]]
) -> tuple[list[Option], Option | None]:
    """The options, and the best one among those that were tried at their own micro-batch.

    Small micro-batches leave a GPU idle, so lines through them promise too many samples per second: the best option is
    `tried`, which may make it less than the best, until the best one was, or VERIFIED more were that found room: one
    that did not is no answer yet.
    """
    options, found_room = list(options), 0
    while found_room < VERIFIED and (found := best(options, objective=objective)) is not None and not found.tried:
        options = tried(found)
        found_room += any(option.fits for option in options if option.way == found.way)
    chosen = best([option for option in options if option.tried], objective=objective)
    if chosen is None:
        return options, None
    marked = replace(chosen, chosen=True)
    return [marked if option == chosen else option for option in options], marked


def leave(options: Sequence[Option], *, run_dir: Path, objective: str) -> None:
    """The table on the terminal and options.csv in the run folder."""
    files.write_csv(run_dir / "options.csv", option_rows(options))
    console.print_options(options, objective=objective)


def _constant(
    planner: Planner, params: dict[str, Any], *, settings: SessionSettings, config: RunConfig
) -> Callable[[Footprint], Footprint]:
    """Puts into a footprint what does not depend on the micro-batch: the profiler, and temporaries of a step."""
    temporaries = step_temporaries(planner.specs.values(), params=params.values())
    make_profiler(planner, params, settings=settings, betas=config.optim.betas)
    assert planner.footprint is not None
    profile, sampled = planner.footprint.profile_bytes, planner.footprint.profile_temporary_bytes
    return lambda footprint: replace(
        footprint, step_temporary_bytes=temporaries, profile_bytes=profile, profile_temporary_bytes=sampled
    )
