"""Builds a run's Trainer with its strategy and callbacks, and turns its failures into errors that say what to do."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from textwrap import shorten
from traceback import walk_tb

import lightning as L
import torch
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.pytorch.loggers import Logger

from baoc.callbacks.budget_control import BudgetControl
from baoc.callbacks.checkpoint import SafeCheckpoint
from baoc.callbacks.generators import RngState
from baoc.callbacks.loss_guard import LossGuard
from baoc.callbacks.memory import MemoryMonitor
from baoc.callbacks.pictures import FinalPictures
from baoc.callbacks.preemption import Preemption
from baoc.callbacks.progress import RunProgress
from baoc.callbacks.sources import Sources
from baoc.callbacks.steps import StepMonitor
from baoc.callbacks.vote import StepVote
from baoc.config.schema import RunConfig
from baoc.core.budgets import parse_budget
from baoc.core.measured import AUTO
from baoc.errors import BaocError, BudgetBreachedError, CheckpointError
from baoc.parallel import SINGLE_PROCESS, local_world_size, ranks
from baoc.planning.allocators import ALLOCATORS
from baoc.planning.planner import PlannerSettings
from baoc.planning.reallocation.budget_schedule import BudgetChange
from baoc.profiling import context_bytes, current_context_bytes
from baoc.profiling.memory import LATE_MODULES_BYTES
from baoc.tasks.base import Task
from baoc.tracking.checkpoints import REMEDY
from baoc.tracking.console import say
from baoc.tracking.loggers import log_plan
from baoc.training.lightning import BaocDDPStrategy, BaocStrategy, BudgetedStrategy
from baoc.training.plan_files import Recorder
from baoc.training.resume import training_settings
from baoc.training.session import SessionSettings
from baoc.types import LatencyTable, Role

# Environment variable: if set, every step and phase on a CPU is measured, at several times the cost of a step.
TRACK_EVERY_STEP = "BAOC_TRACK_EVERY_STEP"


class LastValidation(L.Callback):
    """Remembers the step of the newest validation, so that the end of a run is validated once, not twice."""

    step = -1

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.step = trainer.global_step


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """A run's Trainer, and those of its callbacks and listeners that are asked for results."""

    trainer: L.Trainer
    strategy: BudgetedStrategy
    memory: MemoryMonitor
    steps: StepMonitor
    preemption: Preemption
    recorder: Recorder
    validation: LastValidation
    loggers: list[Logger]


def session_settings(config: RunConfig) -> SessionSettings:
    traits = ALLOCATORS[config.allocator.name].traits
    planner = PlannerSettings(
        specs=config.catalogue.specs,
        keep_fp32_roles=tuple(Role(role) for role in config.catalogue.keep_fp32_roles),
        blocks_by=config.blocks.by,
        patterns=config.blocks.patterns,
        risk=config.risk.name,
        risk_weights=config.risk.weights,
        allocator=config.allocator.name,
        seed=config.seed,
        recipe=config.recipe,
        family=None if config.model.pretrained or config.model.lora.rank else AUTO,  # trained from scratch, as measured
        from_conf=True,
    )
    matching = traits.matching if config.recipe is None else config.recipe.matching
    return SessionSettings(
        planner=planner,
        reallocation=config.reallocation,
        backend=config.optim.backend,
        nonfinite=config.optim.nonfinite,
        release=bool(config.optim.release_gradients),
        rms_matching=config.optim.matching if matching else False,
    )


def assemble_trainer(
    config: RunConfig,
    *,
    task: Task,
    settings: SessionSettings,
    device: str,
    run_dir: Path,
    loggers: list[Logger],
    latency: LatencyTable | None,
    sources: Mapping[str, str],
) -> Parts:
    """Builds Lightning's Trainer with the strategy, the monitors, and the recorder as the strategy's listener.
    `latency`: of the micro-batch decision or the resumed run. `sources`: hashes that checkpoints keep."""
    recorder = Recorder(run_dir)
    memory = MemoryMonitor(config.budget, every_step=bool(os.environ.get(TRACK_EVERY_STEP)))
    memory.predicted = lambda: recorder.peak_bytes_predicted
    devices, vote = config.trainer.devices, StepVote()
    steps = StepMonitor(leave_out=lambda: memory.tracked, batch_size=config.micro_batch_size * devices)
    monitor, higher = task.quality
    checkpoint = SafeCheckpoint(
        run_dir,
        every_n_steps=config.checkpoint.every_n_steps,
        every_minutes=config.checkpoint.every_minutes,
        keep=config.checkpoint.keep,
        monitor=monitor,
        mode="max" if higher else "min",
        meta={"name": config.name, "seed": config.seed, "settings": training_settings(config)},
        track=memory.track,
        vote=vote,
    )
    alone = ranks() is SINGLE_PROCESS
    make = partial(BaocStrategy, device=device) if alone else BaocDDPStrategy
    if config.trainer.strategy == "fsdp":
        from baoc.training.fully_sharded import BaocFSDPStrategy

        make = partial(BaocFSDPStrategy, reshard_after_forward=config.trainer.reshard_after_forward)
    strategy = make(
        config.budget,
        settings=settings,
        latency=latency,
        plan_only=config.mode == "plan",
        record_latency=True,
        verbose=False,  # the recorder tells more
        plan_listeners=[
            recorder.planned,
            lambda _, plan: log_plan(loggers, plan=plan),
            lambda *_: say(strategy.layers_summary) if strategy.layers_summary else None,
            lambda _, plan: watch_memory(memory, task=task, strategy=strategy, predicted_bytes=plan.peak_bytes),
        ],
        reallocation_listeners=[recorder.reallocated, lambda _, plan, __: log_plan(loggers, plan=plan)],
    )
    strategy.resume_listeners.append(recorder.resumed)
    control = BudgetControl(
        schedule=[
            BudgetChange(budget=parse_budget(entry.budget), step=entry.step) for entry in config.dynamics.schedule
        ],
        run_dir=run_dir,
        memory=memory,
        vote=vote,
    )
    validation = LastValidation()
    preemption = Preemption(checkpoint, vote=vote)
    callbacks: list[L.Callback] = [
        RngState(),
        Sources(sources),
        vote,
        preemption,
        control,
        LossGuard(patience=config.faults.patience, vote=vote),
        steps,
        memory,
        validation,
        FinalPictures(run_dir, track=memory.track),
        checkpoint,
        *([] if config.trainer.enable_progress_bar is False else [RunProgress()]),
    ]
    trainer = L.Trainer(
        strategy=strategy,
        accelerator=device if device == "cpu" else "cuda",
        devices=(local := local_world_size(devices)),
        num_nodes=devices // local,
        plugins=[LightningEnvironment()],  # else Lightning refuses a Slurm job of several tasks that runs one by itself
        accumulate_grad_batches=config.accumulation,
        logger=loggers,
        callbacks=callbacks,
        default_root_dir=run_dir,
        **config.trainer.arguments(),
    )
    return Parts(
        trainer=trainer,
        strategy=strategy,
        memory=memory,
        steps=steps,
        preemption=preemption,
        recorder=recorder,
        validation=validation,
        loggers=loggers,
    )


def watch_memory(memory: MemoryMonitor, *, task: Task, strategy: BudgetedStrategy, predicted_bytes: int) -> None:
    """Gives the memory monitor the plan's numbers, and has it track migrations and averages."""
    assert strategy.reallocator is not None
    device = strategy.root_device
    memory.context_bytes, memory.predicted_bytes = current_context_bytes(device), predicted_bytes
    if device.type == "cuda":  # of the measurements before the plan, in which weights were not in its formats yet
        memory.probe_peak_bytes = torch.cuda.max_memory_reserved(device) + context_bytes(device) + LATE_MODULES_BYTES
    memory.budget_bytes = strategy.budget.memory_bytes  # budget=auto has a limit only now
    memory.budget_name = strategy.budget.name  # after a resume it is the one that was in force
    profiler = strategy.reallocator.profiler
    get_buffers = [part.buffers for part in (profiler, task.ema) if part is not None]
    memory.extra_tensors = lambda: [buffers() for buffers in get_buffers]
    strategy.reallocator.memory_phase = memory.track
    strategy.reallocator.peak_listeners.append(memory.note_peak)
    if task.ema is not None and memory.every_step:
        task.ema.tracked = lambda: memory.track("averaging")
    memory.track_resume()


@contextmanager
def explained_failures(device: str) -> Iterator[None]:
    """Inside, errors of training become errors that say what to do, such as for a checkpoint of another model."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise BudgetBreachedError(
            f"{device} has no memory left for this run within its budget: lower micro_batch, or give a larger "
            f"budget ({str(error).splitlines()[0]})"
        ) from error
    except RuntimeError as error:
        if "stateful loaders" in str(error):
            raise CheckpointError(
                "the checkpoint has a position in the data, and this run's loader takes none: resume with the data "
                "settings of the first run, trainer.overfit_batches too"
            ) from error
        if "Error(s) in loading state_dict" not in str(error):
            raise
        first = shorten(str(error).splitlines()[1], width=200, placeholder=" ...")  # of names there may be hundreds
        raise CheckpointError(
            "the checkpoint is of another model: its tensors have other names or shapes "
            f"({first}); resume with the model and dataset of that run, or without"
        ) from error
    except (KeyError, TypeError, AttributeError, ValueError, IndexError, AssertionError) as error:
        if isinstance(error, BaocError) or not _while_restoring(error):
            raise
        raise CheckpointError(
            f"the checkpoint cannot be restored ({type(error).__name__}: {shorten(str(error), width=200)}): a part of "
            f"it is damaged, or of another version of Lightning; {REMEDY}"
        ) from error


def _while_restoring(error: BaseException) -> bool:
    """Whether Lightning was filling the run from a checkpoint when the error was raised."""
    calls = [(frame.f_globals.get("__name__", ""), frame.f_code.co_name) for frame, _ in walk_tb(error.__traceback__)]
    return any(module.endswith(".checkpoint_connector") and "restore" in name for module, name in calls)
