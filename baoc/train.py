"""One run: RunConfig in, a run folder and a RunResult out. The only place that knows all stages by name.

`run` reads top to bottom as README's "One run as data"; what a stage does is in the module it calls.
"""

import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

import lightning as L
import torch

from baoc.callbacks import MemoryMonitor, RngState, SafeCheckpoint, StepMonitor, progress_bar
from baoc.config.schema import RunConfig
from baoc.data import build_data
from baoc.environment import commit, prepare_cpu
from baoc.errors import BadInputError, BudgetBreachedError, TrainingFailedError
from baoc.models import build_model
from baoc.online import ReallocationSettings, SessionSettings
from baoc.planner import PlannerSettings
from baoc.recorder import Recorder
from baoc.strategy import BaocStrategy
from baoc.tasks import build_task
from baoc.tracking import console, files, load_checked, make_loggers, resolve_resume
from baoc.types import Quality, Role, RunResult, to_plain

RESULT_SCHEMA = 1
VERSIONED = ("torch", "lightning", "transformers", "numpy", "scipy", "hydra-core")


def run(config: RunConfig, *, run_dir: Path, command: str) -> RunResult | None:
    """Runs `config` and leaves every value of the run in `run_dir`. None for mode=plan and mode=eval.

    Raises BaocError children only for what a user can mend; see README, "Exit codes".
    """
    device = choose_device(config.device)
    if device == "cpu":
        prepare_cpu()
    L.seed_everything(config.seed, workers=True, verbose=False)
    checkpoint = resolve_resume(config.resume, run_root=run_dir.parent) if config.resume else None
    data = build_data(
        config.dataset.name,
        path=config.dataset.path,
        batch_size=config.micro_batch_size,
        accumulate=config.accumulation,
        seed=config.seed,
    )
    model = build_model(config.model.name, size=config.model.size, data=data.spec, options=config.model.options)
    task = build_task(config.task.name, model=model, optim=config.optim, options=config.task)
    console.print_startup(
        config=config, device=device, num_params=sum(p.numel() for p in model.parameters()), data=data.spec
    )
    recorder = Recorder(run_dir)
    strategy = BaocStrategy(
        config.budget,
        device=device,
        settings=session_settings(config),
        plan_listeners=[recorder.planned],
        reallocation_listeners=[recorder.reallocated],
    )
    return None
