"""Runs with `mode=plan` for a card that is absent."""

import json
from dataclasses import replace
from pathlib import Path

from baoc.config.schema import (
    CheckpointConfig,
    DatasetConfig,
    ModelConfig,
    RiskConfig,
    RunConfig,
    TaskConfig,
)
from baoc.core.budgets import parse_budget
from baoc.training import run as training
from tests.support.training_runs import config


def asked(budget: str, **changes: object) -> RunConfig:
    settings = RunConfig(
        name="planned",
        mode="plan",
        device="h100",
        batch_size=64,
        budget=parse_budget(budget),
        task=TaskConfig(name="vision"),
        model=ModelConfig(name="vit", size="small"),
        dataset=DatasetConfig(name="synthetic_images", options={"num_samples": 128, "num_classes": 10}),
        trainer=replace(config().trainer, precision="auto"),
        checkpoint=CheckpointConfig(),
        risk=RiskConfig(name="prior"),
    )
    return replace(settings, **changes)  # pyright: ignore[reportArgumentType]


def plan(run_dir: Path, settings: RunConfig) -> dict[str, object]:
    run_dir.mkdir(parents=True)
    assert training.run(settings, run_dir=run_dir, command="") is None
    return json.loads((run_dir / "plan.json").read_text())
