"""The planned frontier of a multirun with mode=plan: the predictions for each budget, before any run."""

from pathlib import Path
from typing import Any

from baoc.frontier.pareto import pareto
from baoc.frontier.runs import NUMBER, find_runs, setting_labels
from baoc.tracking import console, files


def read_plans(folder: Path) -> list[dict[str, Any]]:
    """The plan.json of every job of a multirun, ordered by peak, with `dominated` and the `settings` it differs in.

    A plan is dominated if another one for the same device is at least as good in peak, risk and samples/s, and better
    in one of them.
    """
    paths = sorted(folder.glob("*/plan.json"))
    fields = {"device": str, "name": str, "peak_bytes": int, "risk": (int, float), "samples_per_s": NUMBER}
    plans = [files.read_record(path, fields) for path in paths]
    runs = find_runs(folder)
    labels = {run.path: label for run, label in zip(runs, setting_labels(runs), strict=True)}
    for path, plan in zip(paths, plans, strict=True):
        plan["settings"] = labels.get(path.parent, "")
    for device in {plan["device"] for plan in plans}:
        comparable = [plan for plan in plans if plan["device"] == device]
        on_front = pareto([(plan["peak_bytes"], plan["risk"], -(plan["samples_per_s"] or 0.0)) for plan in comparable])
        for plan, best in zip(comparable, on_front, strict=True):
            plan["dominated"] = not best
    return sorted(plans, key=lambda plan: (plan["name"].rpartition("_")[0], plan["peak_bytes"]))


def write_planned_frontier(folder: Path) -> Path:
    """Prints the plans as a table, writes planned.csv and returns its path."""
    plans = read_plans(folder)
    console.print_planned(plans)
    path = folder / "planned.csv"
    files.write_csv(path, plans)
    return path
