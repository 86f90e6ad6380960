"""Training of the small classifier with parameters in bf16."""

from pathlib import Path

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn

from baoc import BaocStrategy
from baoc.config.schema import ReallocationConfig
from baoc.optim import BlockwiseOptimizer
from baoc.planning.planner import PlannerSettings
from baoc.training.session import SessionSettings
from tests.support.classifier import QUIET, Classifier, loader


def strategy(*specs: str) -> BaocStrategy:
    settings = SessionSettings(
        planner=PlannerSettings(specs=specs, risk="statistics", keep_fp32_roles=("norm",)),
        reallocation=ReallocationConfig(mode="once", warmup_steps=6),
    )
    return BaocStrategy("state_50", settings=settings)


SPECS = ("adamw", "adamw_int8+split8", "lion_int8+split8", "sign+bf16_sr")


def run(folder: Path, *, steps: int, resume: bool) -> tuple[nn.Module, BlockwiseOptimizer]:
    module = Classifier()
    keep = ModelCheckpoint(dirpath=folder, every_n_train_steps=8, save_top_k=-1, filename="{step}")
    plan = strategy(*SPECS)
    arguments = {**QUIET, "enable_checkpointing": True}
    trainer = L.Trainer(strategy=plan, max_steps=steps, callbacks=[keep], precision="bf16-mixed", **arguments)
    trainer.fit(module, loader(), ckpt_path=str(folder / "step=8.ckpt") if resume else None)
    assert plan.reallocator is not None
    return module, plan.reallocator.optimizer
