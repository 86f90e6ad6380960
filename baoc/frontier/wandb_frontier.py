"""The frontier as its own W&B run, in the group of its runs: tables, scatter plots, parallel coordinates.

Logged if a run of the study or multirun logged to W&B, with the same settings and mode.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import yaml

from baoc.frontier.build import SweepFrontier
from baoc.frontier.comparable_runs import AXES
from baoc.frontier.pareto import Frontier, frontier_rows
from baoc.frontier.runs import CONFIG, read_study_file
from baoc.tracking.console import say
from baoc.tracking.wandb_run import open_run

JOB_TYPE = "frontier"
_PARALLEL_AXES = ("state_bytes", "peak_bytes", "samples_per_s", "quality")


def log_frontier(folder: Path, built: SweepFrontier) -> bool:
    """Logs the frontiers of a folder; returns whether there was something to log and W&B is enabled."""
    settings = _wandb_settings(folder)
    if settings is None or not any(frontier.points for frontier in built.frontiers):
        return False
    group = read_study_file(folder).get("name", folder.name)
    own: Any = SimpleNamespace(project=settings["project"], entity=settings["entity"], mode=settings["mode"])
    logger = open_run(
        own,
        run_dir=folder,
        name=f"frontier of {group}",
        config={
            "runs": sum(len(frontier.points) for frontier in built.frontiers),
            "failed": len(built.failed),
        },
        group=group,
        job_type=JOB_TYPE,
        tags=(JOB_TYPE, *sorted({frontier.points[0].task for frontier in built.frontiers if frontier.points})),
        say=say,
    )
    if logger is None:
        return False
    for frontier in built.frontiers:
        if frontier.points:
            _log_workload(logger.experiment, frontier)
    logger.finish(exit_code=0)
    return True


def _log_workload(run: Any, frontier: Frontier) -> None:
    import wandb

    rows = frontier_rows(frontier)
    name = f"{rows[0]['task']}_{rows[0]['model']}"
    columns: list[Any] = list(rows[0])
    table = wandb.Table(columns=columns, data=[[row[column] for column in columns] for row in rows])
    logged: dict[str, Any] = {f"frontier/{name}": table}
    for axis in AXES:
        title = f"{name}: quality over {axis}"
        logged[f"frontier/{name}_{axis}"] = wandb.plot.scatter(table, axis, "quality", title=title)
    logged[f"frontier/{name}_settings"] = wandb.Plotly(parallel(rows))
    run.log(logged)
    run.summary.update(
        {
            f"frontier/{name}_hypervolume_doublings": frontier.hypervolume,  # earlier versions logged it in bytes
            f"frontier/{name}_on_front": len(frontier.best),
            f"frontier/{name}_points": len(frontier.points),
        }
    )


def parallel(rows: Sequence[Mapping[str, Any]]) -> Any:
    """Parallel coordinates of a frontier's numbers, dominated points in grey."""
    import plotly.graph_objects as go

    dimensions = [{"label": name, "values": [row[name] for row in rows]} for name in _PARALLEL_AXES]
    line = {"color": [0 if row["dominated"] else 1 for row in rows], "colorscale": [[0, "#b8bcc2"], [1, "#0b6bcb"]]}
    return go.Figure(go.Parcoords(dimensions=dimensions, line=line | {"cmin": 0, "cmax": 1}))


def _wandb_settings(folder: Path) -> dict[str, Any] | None:
    """W&B settings of the first run that used it; None if none did."""
    for file in sorted(folder.rglob(CONFIG)):
        logger = (yaml.safe_load(file.read_text(encoding="utf-8")) or {}).get("logger", {})
        if isinstance(logger, dict) and "wandb" in (logger.get("names") or ()):
            return dict(logger["wandb"])
    return None
