"""The frontier as a W&B run of its own, in the group of the runs it is made of: tables, scatters, parallel coordinates.

Made where a run of the study or multirun logged to W&B, with the same settings, online or offline as they were.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import yaml

from baoc.frontier.folders import SweepFrontier
from baoc.frontier.kinds import AXES
from baoc.frontier.pareto import Frontier, frontier_rows
from baoc.frontier.runs import CONFIG, about_study
from baoc.tracking.console import say
from baoc.tracking.wandb_run import open_run

JOB_TYPE = "frontier"
_NUMBERS = ("state_bytes", "peak_bytes", "samples_per_s", "quality")


def log_frontier(folder: Path, found: SweepFrontier) -> bool:
    """Whether there was something to log, and W&B is not disabled."""
    settings = _settings_of(folder)
    if settings is None or not any(frontier.points for frontier in found.frontiers):
        return False
    group = about_study(folder).get("name", folder.name)
    own: Any = SimpleNamespace(project=settings["project"], entity=settings["entity"], mode=settings["mode"])
    logger = open_run(
        own,
        run_dir=folder,
        name=f"frontier of {group}",
        config={"runs": sum(len(frontier.points) for frontier in found.frontiers), "failed": len(found.failed)},
        group=group,
        job_type=JOB_TYPE,
        tags=(JOB_TYPE, *sorted({frontier.points[0].task for frontier in found.frontiers if frontier.points})),
        say=say,
    )
    if logger is None:
        return False
    for frontier in found.frontiers:
        if frontier.points:
            _log(logger.experiment, frontier)
    logger.finish(exit_code=0)
    return True


def _log(run: Any, frontier: Frontier) -> None:
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
            f"frontier/{name}_hypervolume_doublings": frontier.hypervolume,  # of bytes, not bytes as of old
            f"frontier/{name}_on_front": len(frontier.best),
            f"frontier/{name}_points": len(frontier.points),
        }
    )


def parallel(rows: Sequence[Mapping[str, Any]]) -> Any:
    """Parallel coordinates of a frontier's numbers, dominated points in grey."""
    import plotly.graph_objects as go

    dimensions = [{"label": name, "values": [row[name] for row in rows]} for name in _NUMBERS]
    line = {"color": [0 if row["dominated"] else 1 for row in rows], "colorscale": [[0, "#b8bcc2"], [1, "#0b6bcb"]]}
    return go.Figure(go.Parcoords(dimensions=dimensions, line=line | {"cmin": 0, "cmax": 1}))


def _settings_of(folder: Path) -> dict[str, Any] | None:
    """W&B's settings of the first run that used it."""
    for file in sorted(folder.rglob(CONFIG)):
        logger = (yaml.safe_load(file.read_text(encoding="utf-8")) or {}).get("logger", {})
        if isinstance(logger, dict) and "wandb" in (logger.get("names") or ()):
            return dict(logger["wandb"])
    return None
