"""The frontier as its own W&B run, in the group of its runs: a table for each workload, and frontier.html.

Logged if a run of the study or multirun logged to W&B, with the same settings and mode.
"""

from pathlib import Path
from typing import Any, cast

import yaml

from baoc.frontier.build import SweepFrontier
from baoc.frontier.pareto import frontier_rows
from baoc.frontier.runs import CONFIG, read_study_file
from baoc.tracking.console import say
from baoc.tracking.loggers import finishing
from baoc.tracking.wandb_run import open_run

JOB_TYPE = "frontier"


def log_frontier(folder: Path, built: SweepFrontier) -> bool:
    """Logs the frontiers of a folder; returns False if none of its runs logged to W&B, or W&B is disabled."""
    settings = _wandb_settings(folder)
    if settings is None or not any(frontier.points for frontier in built.frontiers):
        return False
    group = read_study_file(folder).get("name", folder.name)
    logger = open_run(
        **settings,
        run_dir=folder,
        name=f"frontier of {group}",
        config={"runs": sum(len(frontier.points) for frontier in built.frontiers), "failed": len(built.failed)},
        group=group,
        job_type=JOB_TYPE,
        tags=(JOB_TYPE, *sorted({frontier.points[0].task for frontier in built.frontiers if frontier.points})),
        say=say,
        kept="frontier.csv and frontier.html hold what it has",
    )
    if logger is None:
        return False
    import wandb

    run = logger.experiment
    with finishing([logger]):
        for frontier in built.frontiers:
            if not frontier.points:
                continue
            rows = frontier_rows(frontier)
            name, columns = f"{rows[0]['task']}_{rows[0]['model']}", cast(list[Any], list(rows[0]))
            run.log({f"frontier/{name}": wandb.Table(columns=columns, data=[list(row.values()) for row in rows])})
            run.summary[f"frontier/{name}_hypervolume_doublings"] = frontier.hypervolume
            run.summary[f"frontier/{name}_on_front"] = len(frontier.best)
            run.summary[f"frontier/{name}_points"] = len(frontier.points)
        if (page := folder / "frontier.html").is_file():
            run.log({"frontier/page": wandb.Html(str(page), inject=False)})
    return True


def _wandb_settings(folder: Path) -> dict[str, Any] | None:
    """W&B settings of the first run that used it; None if none did."""
    for file in sorted(folder.rglob(CONFIG)):
        logger = (yaml.safe_load(file.read_text(encoding="utf-8")) or {}).get("logger", {})
        if isinstance(logger, dict) and "wandb" in (logger.get("names") or ()):
            return {key: logger["wandb"][key] for key in ("project", "entity", "mode")}
    return None
