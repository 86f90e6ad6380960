"""The loggers of one run, as conf/logger selects them: metrics.jsonl always, metrics.csv and W&B on request.

Loggers are closed after a failure too: a later job of the same process would log into a W&B run that is still open.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger

from baoc.tracking.console import say
from baoc.tracking.jsonl import JsonlLogger
from baoc.tracking.rows import plan_rows
from baoc.tracking.wandb_run import WandbRunLogger, open_run
from baoc.types import Plan, RunResult
from baoc.units import gib

CSV_EVERY_S = 10.0


def make_loggers(
    names: Sequence[str],
    *,
    wandb: Mapping[str, Any],
    run_dir: str | Path,
    name: str,
    config: Mapping[str, Any],
    group: str | None = None,
    job_type: str | None = None,
    tags: Sequence[str] = (),
    say: Callable[[str], None] = say,
) -> list[Logger]:
    """Loggers for a Lightning Trainer, `metrics.jsonl` first.

    Args:
        names: `csv` and `wandb`, or one of them.
        wandb: project, entity and mode of W&B.
        config: the run's settings as plain containers, for W&B.
    """
    run_dir = Path(run_dir)
    csv_every_s = CSV_EVERY_S if "csv" in names else None
    loggers: list[Logger] = [JsonlLogger(run_dir, name=name, csv_every_s=csv_every_s)]
    if "wandb" in names:
        run = open_run(
            **wandb, run_dir=run_dir, name=name, config=config, group=group, job_type=job_type, tags=tags, say=say
        )
        loggers += [run] if run is not None else []
    return loggers


def log_plan(loggers: Sequence[Logger], *, plan: Plan) -> None:
    """Logs the allocation as a W&B table, one row per block."""
    rows = plan_rows(plan)
    columns = ["block", "role", "parameters", "spec", "state_bytes", "risk", "why"]
    data = [[row.block, row.role, row.num_params, row.spec, row.state_bytes, row.risk, row.why] for row in rows]
    for logger in _open_wandb_loggers(loggers):
        logger.log_table("allocation", columns=columns, data=data)


def log_picture(loggers: Sequence[Logger], *, key: str, path: Path) -> None:
    """Logs an image file to W&B, if Pillow is installed."""
    for logger in _open_wandb_loggers(loggers) if find_spec("PIL") is not None else ():
        logger.log_image(key, images=[str(path)])


def log_summary(loggers: Sequence[Logger], *, result: RunResult) -> None:
    """Logs the result to W&B as summary values, which its plots over runs use."""
    values: dict[str, Any] = {
        result.quality.name: result.quality.value,
        "quality": result.quality.value,
        "memory/peak_gib": gib(result.peak_bytes),
        "memory/state_gib": gib(result.state_bytes),
        "memory/state_fraction": result.state_bytes / max(result.state_bytes_adamw, 1),
        "time/step_ms": result.step_ms,
        "throughput/samples_per_s": result.samples_per_s,
        "risk/total": result.risk_total,
        "budget/met": result.budget_met,
        "budget/binding": result.binding,
        "allocation/gap": result.allocation_gap,
        "allocation/num_reallocations": result.num_reallocations,
        **result.metrics,
    }
    if result.budget_bytes is not None:
        used_bytes = result.peak_bytes if result.budget.get("kind") == "memory" else result.state_bytes
        if not result.budget_met or used_bytes <= result.budget_bytes:  # else the peak is of an earlier, larger budget
            values["budget/slack_gib"] = gib(result.budget_bytes - used_bytes)
    if result.peak_by_rank:
        values["ranks"] = result.num_ranks
        values |= {f"memory/peak_gib_rank_{rank}": gib(peak) for rank, peak in enumerate(result.peak_by_rank)}
    for logger in _open_wandb_loggers(loggers):
        logger.log_summary({key: value for key, value in values.items() if value is not None})


def finish_loggers(loggers: Sequence[Logger], *, exit_code: int = 0) -> None:
    """Closes open loggers; an exit code other than 0 marks the W&B run as failed. May be called twice."""
    for logger in loggers:
        if isinstance(logger, WandbRunLogger):
            logger.finish(exit_code=exit_code)
        else:
            logger.finalize("success" if exit_code == 0 else "failed")


@contextmanager
def finishing(loggers: Sequence[Logger]) -> Iterator[None]:
    """Closes `loggers` at the end of the block; after an error marks them as failed with that error's exit code."""
    try:
        yield
    except BaseException as error:
        code = 130 if isinstance(error, KeyboardInterrupt) else getattr(error, "exit_code", 1)  # of a BaocError
        finish_loggers(loggers, exit_code=code)
        raise
    finish_loggers(loggers)


def _open_wandb_loggers(loggers: Sequence[Logger]) -> list[WandbRunLogger]:
    return [logger for logger in loggers if isinstance(logger, WandbRunLogger) and not logger.closed]
