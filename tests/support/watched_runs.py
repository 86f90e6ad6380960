"""Training runs with a callback that notes state bytes and budgets step by step, and the reallocations they wrote."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import pytest

from baoc.training import run as training
from baoc.training import trainer as assembly
from baoc.types import RunResult
from tests.support.training_runs import config

Hook = Callable[[L.Trainer], None]


class Watch(L.Callback):
    """Takes down the state bytes and the budget in force in each step, and does what a test asks at some."""

    def __init__(self, **at: Hook):
        self.at = {int(key.removeprefix("step_")): do for key, do in at.items()}
        self.state_bytes: dict[int, int] = {}
        self.budgets: dict[int, str] = {}

    def on_before_optimizer_step(self, trainer: L.Trainer, *_: Any) -> None:
        reallocator: Any = trainer.strategy.reallocator
        self.state_bytes[trainer.global_step] = reallocator.optimizer.state_bytes()
        self.budgets[trainer.global_step] = reallocator.planner.budget.name

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        do = self.at.get(trainer.global_step)
        if do is not None:
            do(trainer)


def run(run_dir: Path, monkeypatch: pytest.MonkeyPatch, watch: L.Callback | None = None, **changes: Any) -> RunResult:
    run_dir.mkdir(parents=True, exist_ok=True)
    settings = config(**changes)
    if watch is not None:  # in the place of the bar
        monkeypatch.setattr(assembly, "RunProgress", lambda: watch)
        settings = replace(settings, trainer=replace(settings.trainer, enable_progress_bar=True))
    result = training.run(settings, run_dir=run_dir, command="python run.py")
    assert result is not None
    return result


def events(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "reallocations.jsonl").read_text().splitlines()]
