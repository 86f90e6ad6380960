"""Training runs on the digits that tests start in their own process, and what such a run logged."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from baoc.config.schema import (
    CheckpointConfig,
    ModelConfig,
    ReallocationConfig,
    RiskConfig,
    RunConfig,
    TrainerConfig,
)
from baoc.core.budgets import parse_budget
from baoc.models import family_of
from baoc.tracking.metrics import read_metrics
from baoc.training import run as training
from baoc.training.measure.microbatches import REHEARSED_S
from baoc.types import RunResult

EVERY_STEP = CheckpointConfig(every_n_steps=1, keep=20)


@contextmanager
def brief(*, depth: int = 1) -> Iterator[None]:
    """Inside, the smallest vision transformer has `depth` layers in place of four, the small one four in place of
    twelve, and steps are timed for a moment: what tests hold depends on none of these, what they cost does."""
    settings: Any = {size: family_of("vit").sizes[size].settings for size in ("tiny", "small")}
    with (
        mock.patch.dict(settings["tiny"], depth=depth),
        mock.patch.dict(settings["small"], depth=4),
        mock.patch.dict(REHEARSED_S, cpu=0.05),
        mock.patch("baoc.training.session.RECORDED_TIMING_S", 0.05),
    ):
        yield


def config(**changes: Any) -> RunConfig:
    """Fourteen steps on the digits, reallocating after the sixth; a validation is two micro-batches."""
    arguments = {
        "name": "test",
        "device": "cpu",
        "batch_size": 32,
        "budget": parse_budget("state_25"),
        "model": ModelConfig(options={"dropout": 0.1}),
        "risk": RiskConfig(name="statistics"),
        "reallocation": ReallocationConfig(mode="once", warmup_steps=6),
        "trainer": TrainerConfig(
            max_steps=14,
            gradient_clip_val=1.0,
            enable_progress_bar=False,
            num_sanity_val_steps=0,
            log_every_n_steps=1,
            val_check_interval=7,
            limit_val_batches=2,
            check_val_every_n_epoch=None,
            enable_model_summary=False,
        ),
        "checkpoint": CheckpointConfig(every_n_steps=7),
    }
    return RunConfig(**(arguments | changes))


def run(run_dir: Path, **changes: Any) -> RunResult:
    run_dir.mkdir(parents=True, exist_ok=True)
    result = training.run(config(**changes), run_dir=run_dir, command="python run.py")
    assert result is not None
    return result


def logged(run_dir: Path) -> list[dict[str, Any]]:
    """metrics.jsonl without what depends on a clock."""
    clocks = ("time_s", "time/step_ms", "throughput/samples_per_s", "memory/rss_gib", "memory/peak_gib")
    return [{k: v for k, v in line.items() if k not in clocks} for line in read_metrics(run_dir)]
