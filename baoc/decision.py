"""One decision before training: micro-batch, accumulation, recomputed activations, weights and allocation together.

A few small micro-batches are tried, the rest follows on lines; every way to run the global batch is planned within the
budget, the best one by `objective` is tried itself, and the table of all of them is printed and left as options.csv.
"""

import gc
import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from baoc.budgets import resolve_auto
from baoc.callbacks.resume import capture_rng, restore_rng
from baoc.config.schema import RunConfig
from baoc.data.base import DataModule
from baoc.errors import BadInputError, InfeasibleBudgetError
from baoc.models.switches import disable_checkpointing, enable_checkpointing
from baoc.online import SessionSettings, step_temporaries, time_specs
from baoc.online.assemble import make_profiler
from baoc.options import Trial, best, divisors, footprint_at, make_option, option_rows, seconds_at
from baoc.planner import Planner
from baoc.profiling import cap_device, context_bytes, describe, free_bytes, uncap_device
from baoc.strategy.probe import unwrapped
from baoc.strategy.strategy import declared_blocks, widened
from baoc.strategy.trials import Trials, grow
from baoc.tasks.base import Task
from baoc.tracking import console, files
from baoc.types import Budget, Footprint, Option
from baoc.units import format_bytes

TRIALS_S = 6.0  # about what trials of one kind may take
FUSED_S = 0.5  # and timing the optimizer step, which is taken to be that of fused AdamW for every option
VERIFIED = 6  # options that are tried themselves at most
DECISION = "decision.json"
STATE_ADVICE = "more catalogue.specs, such as '*', or fewer roles in catalogue.keep_fp32_roles"


@dataclass(frozen=True, slots=True, kw_only=True)
class Axes:
    """What is left open: micro-batches in question, and whether activations may be recomputed."""

    micro_batches: tuple[int, ...]
    checkpointing: tuple[bool, ...]


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
    return Axes(micro_batches=sizes, checkpointing=both if pinned is None else (pinned,))


def kept(checkpoint: Path | None) -> dict[str, Any]:
    """What the run of a checkpoint had decided: a resumed run goes on with it, whatever would be chosen today."""
    if checkpoint is None:
        return {}
    path = checkpoint.parent.parent / DECISION
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def keep(choice: dict[str, Any], *, run_dir: Path) -> None:
    """Leaves a decision in the run's folder, for runs that resume from it, be it that it was resumed itself."""
    files.write_json(run_dir / DECISION, choice)


def settled(config: RunConfig, *, choice: dict[str, Any]) -> RunConfig:
    """`config` with the values of a decision."""
    model = replace(config.model, checkpointing=choice["checkpointing"])
    return replace(config, micro_batch=choice["micro_batch"], model=model)


def decide(
    config: RunConfig, *, task: Task, data: DataModule, device: str, settings: SessionSettings, run_dir: Path
) -> RunConfig:
    """`config` with micro-batch and checkpointing chosen; the network is left with its checkpointing set that way.

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
    choice = {"micro_batch": chosen.micro_batch, "checkpointing": chosen.checkpointing}
    keep(choice, run_dir=run_dir)
    data.batch_size, data.accumulate = chosen.micro_batch, chosen.accumulation
    return replace(settled(config, choice=choice), budget=decision.budget)


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
        self.no_room: set[tuple[int, bool]] = set()  # micro-batch and checkpointing of what ran out of memory
        self.tried = {checkpointing: self._try(checkpointing) for checkpointing in self.axes.checkpointing}
        settings = widened(settings, device=device, budget=self.budget, precision=precision)
        if settings.planner.allocator == "exact":  # by prices, in milliseconds: the run itself is planned exactly
            settings = replace(settings, planner=replace(settings.planner, allocator="lagrangian"))
        self.planner = Planner(
            describe(task, optimizer_groups=task._groups()),
            budget=self.budget,
            settings=settings.planner,
            declared=declared_blocks(task, unwrapped(task)),
            footprint=next(iter(self.tried.values()))[0].footprint,
        )
        params = {name: param for name, param in task.named_parameters() if param.requires_grad}
        self.constant = _constant(self.planner, params, settings=settings, config=config)
        numel = sum(param.numel() for param in params.values())
        self.optimizer_s = time_specs([], device=self.where, num_elements=numel, max_s=FUSED_S).reference_step_s

    def switch(self, checkpointing: bool) -> None:
        disable_checkpointing(self.task.model)
        if checkpointing:
            enable_checkpointing(self.task.model, name=self.config.model.name)

    def _try(self, checkpointing: bool) -> list[Trial]:
        """Trials within the budget's cap; where the smallest has no room, that one without it, to say what it needs."""
        self.switch(checkpointing)
        sizes = list(self.axes.micro_batches)
        options: dict[str, Any] = {
            "accumulation": 2 if sizes[0] < self.config.batch_size else 1,
            "max_s": TRIALS_S,
            "context_bytes": context_bytes(self.where),
        }
        with suppress(torch.OutOfMemoryError):
            return grow(self.trials, sizes=sizes, **options)
        gc.collect()
        uncap_device(self.where)
        try:
            return grow(self.trials, sizes=sizes[:1], **options)
        finally:
            cap_device(self.where, budget=self.budget)

    def options(self) -> list[Option]:
        return [
            self._option(footprint_at(trials, micro_batch=size), checkpointing)
            for checkpointing, trials in self.tried.items()
            for size in self.axes.micro_batches
        ]

    def _option(self, footprint: Footprint, checkpointing: bool) -> Option:
        option = make_option(
            self.planner,
            footprint=self.constant(footprint),
            batch_size=self.config.batch_size,
            checkpointing=checkpointing,
            seconds=seconds_at(self.tried[checkpointing], micro_batch=footprint.micro_batch),
            optimizer_s=self.optimizer_s,
        )
        if (option.micro_batch, checkpointing) in self.no_room:
            return replace(option, risk=None, why="does not fit: out of memory when it was tried")
        return option

    def options_after(self, chosen: Option) -> list[Option]:
        """All options again, `chosen` having been tried as it would be run, for bytes and for seconds."""
        self.switch(chosen.checkpointing)
        try:
            trial = self.trials.run(
                chosen.micro_batch, accumulation=chosen.accumulation, context_bytes=context_bytes(self.where)
            )
        except torch.OutOfMemoryError:
            self.no_room.add((chosen.micro_batch, chosen.checkpointing))
        else:
            known = [t for t in self.tried[chosen.checkpointing] if t.micro_batch != chosen.micro_batch]
            self.tried[chosen.checkpointing] = [*known, trial]
        return self.options()


def choose(
    options: Sequence[Option], *, objective: str, tried: Callable[[Option], list[Option]]
) -> tuple[list[Option], Option | None]:
    """The options, and the best one among those that were tried at their own micro-batch.

    Small micro-batches leave a GPU idle, so lines through them promise too many samples per second: the best option is
    `tried`, which may make it less than the best, until one is still the best afterwards, or VERIFIED that fit were.
    """
    options, seen = list(options), set[tuple[int, bool]]()
    known: list[Option] = []
    while (found := best(options, objective=objective)) is not None:
        fitting = sum(option.fits for option in known)  # a try that found no room is no answer yet
        if (found.micro_batch, found.checkpointing) in seen or fitting == VERIFIED:
            break
        options = tried(found)
        seen.add((found.micro_batch, found.checkpointing))
        known = [option for option in options if (option.micro_batch, option.checkpointing) in seen]
    chosen = best(known, objective=objective)
    if chosen is None:
        return options, None
    marked = replace(chosen, chosen=True)
    return [marked if option == chosen else option for option in options], marked


def leave(options: Sequence[Option], *, run_dir: Path, objective: str) -> None:
    """The table on the terminal and options.csv in the run folder."""
    files.write_csv(run_dir / "options.csv", option_rows(options))
    console.print_options(options, objective=objective)


def none_fits(options: Sequence[Option], *, budget: Budget, axes: Axes) -> InfeasibleBudgetError:
    """The refusal where no option fits; it names the least budget, and what is pinned that could lower it."""
    least = min(options, key=lambda option: option.peak_bytes)
    if budget.memory_bytes is None:  # of states alone, which no micro-batch makes smaller
        return InfeasibleBudgetError(
            f"budget {budget.name} cannot be met by any of {len(options)} options: the least state takes "
            f"{least.peak_bytes} bytes, whatever the micro-batch. What would lower it: {STATE_ADVICE}",
            budget_bytes=0,
            least_feasible_bytes=least.peak_bytes,
            advice=(STATE_ADVICE,),
        )
    advice = ["a smaller model.size"]
    if len(axes.micro_batches) == 1 and axes.micro_batches[0] > 1:
        advice.insert(
            0, f"a smaller micro_batch than the {axes.micro_batches[0]} that was asked for, or micro_batch=auto"
        )
    if axes.checkpointing == (False,):
        advice.insert(0, "model.checkpointing=null, where the model can recompute activations")
    advice.append("more catalogue.specs, such as '*+split8', or fewer roles in catalogue.keep_fp32_roles")
    return InfeasibleBudgetError(
        f"budget {budget.name} cannot be met by any of {len(options)} options: it allows "
        f"{format_bytes(budget.memory_bytes or 0)} ({budget.memory_bytes} bytes), and the least that one takes is "
        f"{format_bytes(least.peak_bytes)}, {least.peak_bytes} bytes ({least.name}). What would lower it: "
        f"{'; '.join(advice)}",
        budget_bytes=budget.memory_bytes or 0,
        least_feasible_bytes=least.peak_bytes,
        advice=tuple(advice),
    )


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
