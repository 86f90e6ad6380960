"""The loggers of one run, chosen by conf/logger: metrics.jsonl always, metrics.csv and W&B on request.

Also what is logged once per run (the allocation as a table, the result as summary scalars) and how loggers are closed,
so that a job that fails never leaves a run open for the next job to log into.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from lightning.pytorch.loggers import Logger

from baoc.errors import unknown_name
from baoc.tracking.console import plan_rows, say
from baoc.tracking.files import REALLOCATIONS_FILE, read_jsonl
from baoc.tracking.jsonl import CsvLogger, JsonlLogger
from baoc.tracking.wandb_run import WandbRunLogger, WandbSettings, open_run
from baoc.types import Plan, RunResult
from baoc.units import gib

NAMES = ("jsonl", "csv", "wandb")
REALLOCATION_COLUMNS = (
    *("step", "trigger", "risk_before", "risk_after", "block", "from", "to", "states"),
    *("bytes_before", "bytes_after", "update_rms_ratio", "why"),
)


class LoggerSettings(Protocol):
    """What `make_loggers` reads of conf/logger."""

    @property
    def names(self) -> Sequence[str] | None: ...
    @property
    def wandb(self) -> WandbSettings: ...


def make_loggers(
    settings: LoggerSettings,
    *,
    run_dir: str | Path,
    name: str,
    config: Mapping[str, Any],
    group: str | None = None,
    job_type: str | None = None,
    tags: Sequence[str] = (),
    say: Callable[[str], None] = say,
) -> list[Logger]:
    """Loggers for a Lightning Trainer, `metrics.jsonl` first. `config` as plain containers goes to W&B.

    Raises BadInputError for an unknown name, before anything is opened.
    """
    names = tuple(settings.names or ())
    for given in names:
        if given not in NAMES:
            raise unknown_name(given, what="logger", allowed=NAMES)
    run_dir = Path(run_dir)
    loggers: list[Logger] = [JsonlLogger(run_dir, name=name)]
    if "csv" in names:
        loggers.append(CsvLogger(run_dir, name=name))
    if "wandb" in names:
        run = open_run(
            settings.wandb,
            run_dir=run_dir,
            name=name,
            config=config,
            group=group,
            job_type=job_type,
            tags=tags,
            say=say,
        )
        loggers += [run] if run is not None else []
    return loggers


def log_plan(loggers: Sequence[Logger], *, plan: Plan, key: str = "allocation") -> None:
    """The allocation as a W&B table: one row per block."""
    rows = plan_rows(plan)
    columns = ["block", "role", "parameters", "spec", "state_bytes", "risk", "why"]
    data = [[row.block, row.role, row.num_params, row.spec, row.state_bytes, row.risk, row.why] for row in rows]
    for logger in _wandb(loggers):
        logger.log_table(key, columns=columns, data=data)


def log_reallocations(loggers: Sequence[Logger], *, run_dir: Path) -> None:
    """The decisions so far as a W&B table, from reallocations.jsonl: a row per moved block, or per decision to stay."""
    path, open_runs = run_dir / REALLOCATIONS_FILE, _wandb(loggers)
    if not open_runs or not path.is_file():
        return
    data = [row for event in read_jsonl(path) for row in _event_rows(event)]
    for logger in open_runs:
        logger.log_table("reallocations", columns=list(REALLOCATION_COLUMNS), data=data)


def _event_rows(event: Mapping[str, Any]) -> list[list[Any]]:
    of_event = [event["step"], event["trigger"], event["risk_before"], event["risk_after"]]
    if not event["moves"]:
        size = [event["state_bytes_before"], event["state_bytes_after"], None]
        return [[*of_event, None, None, None, None, *size, event["why"]]]
    ratios = event["update_rms_ratio"]
    rows = []
    for move in event["moves"]:
        states = ", ".join(f"{state} {fate}" for state, fate in move["kept"].items())
        size = [move["bytes_before"], move["bytes_after"], ratios.get(move["block"])]
        rows.append(
            [*of_event, move["block"], move["source"], move["target"], states, *size, f"{event['why']}; {move['why']}"]
        )
    return rows


def log_picture(loggers: Sequence[Logger], *, key: str, path: Path) -> None:
    """An image file, where W&B is in use and Pillow is there, which it reads images with."""
    for logger in _wandb(loggers) if find_spec("PIL") is not None else ():
        logger.log_image(key, images=[str(path)])


def log_summary(loggers: Sequence[Logger], *, result: RunResult) -> None:
    """The result as summary scalars: what scatter plots over runs need."""
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
        held = result.peak_bytes if result.budget.get("kind") == "memory" else result.state_bytes
        values["budget/slack_gib"] = gib(result.budget_bytes - held)
    for logger in _wandb(loggers):
        logger.log_summary({key: value for key, value in values.items() if value is not None})


def finish_loggers(loggers: Sequence[Logger], *, exit_code: int = 0) -> None:
    """Closes what is still open; any exit code but 0 marks a W&B run failed. Safe to call twice."""
    for logger in loggers:
        if isinstance(logger, WandbRunLogger):
            logger.finish(exit_code=exit_code)
        else:
            logger.finalize("success" if exit_code == 0 else "failed")


@contextmanager
def finishing(loggers: Sequence[Logger]) -> Iterator[None]:
    """Closes `loggers` at the end of the block, as failed if it ends by an error, with that error's exit code."""
    try:
        yield
    except BaseException as error:
        code = 130 if isinstance(error, KeyboardInterrupt) else getattr(error, "exit_code", 1)  # BaocError has one
        finish_loggers(loggers, exit_code=code)
        raise
    finish_loggers(loggers)


def _wandb(loggers: Sequence[Logger]) -> list[WandbRunLogger]:
    return [logger for logger in loggers if isinstance(logger, WandbRunLogger) and not logger.closed]
