"""`python -m baoc.sweep.dashboard --entity E --project P`: the W&B workspace and report of a project, as code.

The same command creates or updates them. Without a key or a network they are validated and written as JSON.
"""

import argparse
import json
import sys
import warnings
from functools import cache
from pathlib import Path
from typing import Any

from baoc.errors import BadInputError
from baoc.frontier.commands import Arguments, command
from baoc.tracking.console import say
from baoc.tracking.files import read_json, write_text
from baoc.tracking.wandb_run import choose_mode

WORKSPACE, REPORT = "BAOC frontiers", "BAOC: what budgets buy"
GROUP = "Group"  # W&B's name of a run's group: its study or multirun
URLS_FILE = ".baoc_dashboard.json"  # URLs of the last call, which the next one updates
AXES = (
    ("memory/state_gib", "optimizer state, GiB"),
    ("memory/peak_gib", "peak memory, GiB"),
    ("throughput/samples_per_s", "samples/s"),
)
COLUMNS = (
    ("allocator.name", True),
    ("risk.name", True),
    ("memory/state_fraction", False),
    ("memory/peak_gib", False),
    ("throughput/samples_per_s", False),
    ("risk/total", False),
    ("quality", False),
)


def panels() -> dict[str, list[Any]]:
    """Panels by section, in order. Needs wandb-workspaces."""
    _, wr = _library()
    scatters = [
        wr.ScatterPlot(title=f"quality over {title}", x=wr.SummaryMetric(axis), y=wr.SummaryMetric("quality"))
        for axis, title in AXES
    ]
    risk = wr.ScatterPlot(
        title="quality over predicted risk", x=wr.SummaryMetric("risk/total"), y=wr.SummaryMetric("quality")
    )
    settings = [
        wr.ParallelCoordinatesPlotColumn(metric=wr.Config(name) if config else wr.SummaryMetric(name))
        for name, config in COLUMNS
    ]
    curves = [
        wr.LinePlot(title=key, x="trainer/global_step", y=[key], max_runs_to_show=40)
        for key in ("train/loss", "val/loss", "val/bpb", "val/mse", "memory/peak_gib", "time/step_ms")
    ]
    return {
        "Frontiers": [*scatters, wr.ParallelCoordinatesPlot(columns=settings, title="settings to quality")],
        "Risk and allocation": [risk, wr.ScalarChart(title="reallocations", metric="allocation/num_reallocations")],
        "Training curves": curves,
    }


def workspace(entity: str, project: str) -> Any:
    """A workspace with these sections over all runs of the project, grouped by study."""
    ws, _ = _library()
    return ws.Workspace(
        entity=entity,
        project=project,
        name=WORKSPACE,
        sections=[ws.Section(name=name, panels=found, is_open=True) for name, found in panels().items()],
        settings=ws.WorkspaceSettings(x_axis="trainer/global_step"),
        runset_settings=ws.RunsetSettings(groupby=[ws.Metric(GROUP)], order=[ws.Ordering(ws.Summary("quality"))]),
    )


def report(entity: str, project: str) -> Any:
    """A report with the same panels and an explanation of the points."""
    _, wr = _library()
    runs = wr.Runset(name="all runs", groupby=[GROUP])  # of the report's project; naming it would query a server
    blocks: list[Any] = [
        wr.H1(text=REPORT),
        wr.P(
            text="Each point is a run: its quality at the end, and the most memory it held. BAOC's allocations (exact, "
            "lagrangian) stand beside uniform optimizers (uniform_*) and random feasible allocations (random) "
            "under the same budgets; a claim is against both of these."
        ),
    ]
    for name, found in panels().items():
        blocks += [wr.H2(text=name), wr.PanelGrid(runsets=[runs], panels=found)]
    return wr.Report(
        entity=entity, project=project, title=REPORT, description="made by baoc.sweep.dashboard", blocks=blocks
    )


def publish(entity: str, project: str, *, out: Path) -> list[str]:
    """Creates or updates both on the server and returns their URLs; `out` keeps those of the last call."""
    kept = read_json(out / URLS_FILE) if (out / URLS_FILE).is_file() else {}
    key = f"{entity}/{project}"
    known = kept.get(key, {})
    made, page = workspace(entity, project), report(entity, project)
    if "workspace" in known:
        old = _library()[0].Workspace.from_url(known["workspace"])
        old.sections, old.settings, old.runset_settings = made.sections, made.settings, made.runset_settings
        made = old
    if "report" in known:
        old = _library()[1].Report.from_url(known["report"])
        old.blocks = page.blocks
        page = old
    made.save()
    page.save()
    kept[key] = {"workspace": made.url, "report": page.url}
    write_text(out / URLS_FILE, json.dumps(kept, indent=2) + "\n")
    return [made.url, page.url]


def write(entity: str, project: str, *, out: Path) -> list[Path]:
    """Writes both as JSON files into `out`."""
    files = []
    for name, made in (("workspace", workspace(entity, project)), ("report", report(entity, project))):
        file = out / f"wandb_{name}.json"
        sent = json.loads(made._to_model().model_dump_json(by_alias=True, exclude_none=True))  # validates every panel
        write_text(file, json.dumps(sent, indent=1) + "\n")
        files.append(file)
    return files


@cache
def _library() -> tuple[Any, Any]:
    """wandb-workspaces: its (workspaces, reports) modules."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # it uses an older pydantic's names
            import wandb_workspaces.reports.v2 as wr
            import wandb_workspaces.workspaces as ws
    except ImportError as error:
        raise BadInputError(f"a dashboard needs wandb-workspaces ({error}): pip install 'baoc[dashboard]'") from error
    return ws, wr


@command
def main(argv: Arguments = None) -> None:
    """Returns exit code 0, or 2 if wandb-workspaces is missing or the folder cannot be written."""
    parser = argparse.ArgumentParser(prog="python -m baoc.sweep.dashboard", description=__doc__)
    parser.add_argument("--entity", required=True, help="the user or team that the project belongs to")
    parser.add_argument("--project", required=True)
    parser.add_argument("--out", type=Path, default=Path("outputs"), help="where JSON and addresses go")
    parser.add_argument("--offline", action="store_true", help="only write the JSON")
    given = parser.parse_args(argv)
    mode, why = choose_mode("offline" if given.offline else "auto")
    if mode == "online":
        for url in publish(given.entity, given.project, out=given.out):
            say(url)
    else:
        for file in write(given.entity, given.project, out=given.out):
            say(f"{file} (not sent: {'--offline' if given.offline else why})")


if __name__ == "__main__":
    sys.exit(main())
