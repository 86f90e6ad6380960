"""The planned frontier of a multirun with mode=plan: the predictions for each budget, without any run."""

import json
from pathlib import Path
from typing import Any

from baoc.tracking import console, files


def plans_of(folder: Path) -> list[dict[str, Any]]:
    """The plan.json of every job of a multirun, ordered by peak, with `dominated`. A plan is dominated if another one
    for the same device is at least as good in peak, risk and samples/s, and better in one."""
    found = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*/plan.json"))]
    for plan in found:
        plan["dominated"] = any(_dominates(other, plan) for other in found)
    return sorted(found, key=lambda plan: (plan["name"].rpartition("_")[0], plan["peak_bytes"]))


def planned_frontier(folder: Path) -> Path:
    """Prints the plans as a table, writes planned.csv and returns its path."""
    plans = plans_of(folder)
    console.print_planned(plans)
    path = folder / "planned.csv"
    files.write_csv(path, plans)
    return path


def _dominates(a: dict[str, Any], b: dict[str, Any]) -> bool:
    mine, theirs = ((plan["peak_bytes"], plan["risk"], -(plan["samples_per_s"] or 0.0)) for plan in (a, b))
    return a["device"] == b["device"] and mine != theirs and all(x <= y for x, y in zip(mine, theirs, strict=True))
