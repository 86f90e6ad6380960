"""A memory budget that a run says it met was met: every stretch is predicted and, on a CPU, measured."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from baoc.config.schema import CheckpointConfig, ReallocationConfig, RunConfig
from baoc.core.budgets import parse_budget
from baoc.profiling.footprint import SCALARS_BYTES
from baoc.training import run as training
from baoc.training.trainer import TRACK_EVERY_STEP
from baoc.types import RunResult
from tests.support.training_runs import config, run

pytestmark = pytest.mark.slow

STEPS = 10


def small(budget: str, *, steps: int = STEPS, **changes: Any) -> RunConfig:
    made = config(
        budget=parse_budget(budget),
        batch_size=8,
        reallocation=ReallocationConfig(mode="once", warmup_steps=7),
        checkpoint=CheckpointConfig(every_n_steps=4),
        **changes,
    )
    return replace(made, trainer=replace(made.trainer, max_steps=steps, limit_val_batches=1))


def trained(run_dir: Path, made: RunConfig) -> RunResult:
    run_dir.mkdir(parents=True, exist_ok=True)
    result = training.run(made, run_dir=run_dir, command="python run.py")
    assert result is not None
    return result


def least(run_dir: Path, **changes: Any) -> int:
    """The least feasible memory budget of the run."""
    run_dir.mkdir()
    training.run(replace(small("100gb", **changes), mode="plan"), run_dir=run_dir, command="python run.py")
    return json.loads((run_dir / "allocation.json").read_text())["least_feasible_bytes"]


def holds(result: RunResult) -> None:
    assert result.budget_met and result.budget_bytes is not None
    assert 0 < result.peak_bytes <= result.peak_bytes_predicted <= result.budget_bytes
    assert max(result.peak_by_stretch.values()) <= result.peak_bytes


def test_the_least_budget_is_held_in_one_go_and_across_a_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The decision comes in a step that is tracked by itself in the first run and among the first ones in the other."""
    budget = f"{least(tmp_path / 'plan')}b"
    plain = trained(tmp_path / "plain", small(budget))
    monkeypatch.setenv(TRACK_EVERY_STEP, "1")
    whole = trained(tmp_path / "whole", small(budget))
    first = trained(tmp_path / "first", small(budget, steps=6))
    second = trained(tmp_path / "second", small(budget, resume=str(tmp_path / "first")))
    for result in (plain, whole, first, second):
        holds(result)
    # Nothing is highest that an ordinary run does not look at: losses and logged values apart.
    assert abs(whole.peak_bytes - plain.peak_bytes) < SCALARS_BYTES
    assert {"training", "decision", "checkpoint", "final validation", "export"} <= plain.peak_by_stretch.keys()
    assert {"resume", "decision", "checkpoint"} <= second.peak_by_stretch.keys()
    assert plain.quality == whole.quality, "tracking changes no number"


def test_a_resume_holds_what_it_fills_and_nothing_of_the_file(tmp_path: Path) -> None:
    """At state_25 with averages: weights, states, averages and statistics, each once."""
    changes = {"budget": parse_budget("state_25"), "checkpoint": CheckpointConfig(every_n_steps=4)}
    run(tmp_path / "first", trainer=replace(config().trainer, max_steps=4, val_check_interval=100), **changes)
    saved = torch.load(tmp_path / "first" / "checkpoints" / "last.ckpt", weights_only=True)
    resumed = run(tmp_path / "second", resume=str(tmp_path / "first"), **changes)
    weights = sum(tensor.nbytes for tensor in saved["state_dict"].values())
    profile = json.loads((tmp_path / "second" / "footprint.json").read_text())["profile_bytes"]
    once = weights + resumed.state_bytes + profile
    assert once / 2 < resumed.peak_by_stretch["resume"] < 1.1 * once
