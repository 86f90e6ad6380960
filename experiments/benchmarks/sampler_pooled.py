"""All pairs of several races of samplers together, from their tables of trials.

    python -m experiments.benchmarks.sampler_pooled OUT.csv experiments/results/sampler_race_tasks_trials.csv
    # seconds; any number of tables -> OUT.csv

Races of one sampler with different seeds: each pair counts once, after as many trials as it has. Seeds of two tables
may not overlap. OUT.csv is as `sampler_race.csv`, with the half width of the difference's 95 % interval.
"""

import argparse
import csv
from collections.abc import Sequence
from math import sqrt
from pathlib import Path
from typing import Any

from baoc.config.environment import commit
from baoc.core.statistics import student_quantile
from baoc.tracking.files import write_csv
from experiments.benchmarks.sampler_held_out import Study
from experiments.benchmarks.sampler_race import AXES, TASKS, summary, volumes


def studies_in(table: Path) -> dict[Study, list[tuple[float, float] | None]]:
    """(quality, share of AdamW's state) of every trial by number; None for one that counts for nothing. The first
    trial is AdamW's baseline."""
    rows: dict[Study, list[dict[str, str]]] = {}
    with table.open(encoding="utf-8", newline="") as lines:
        for row in csv.DictReader(lines):
            rows.setdefault((row["task"], row["sampler"], int(row["seed"])), []).append(row)
    found = {}
    for study, trials in rows.items():
        trials.sort(key=lambda row: int(row["trial"]))
        assert [int(row["trial"]) for row in trials] == list(range(len(trials))), f"{study} lacks a trial in {table}"
        whole = float(trials[0]["state_bytes"])
        found[study] = [_cost(row, whole=whole) for row in trials]
    return found


def _cost(row: dict[str, str], *, whole: float) -> tuple[float, float] | None:
    good = row["state"] == "COMPLETE" and row["violated"] != "True"
    return (float(row["quality"]), float(row["state_bytes"]) / whole) if good else None


def pooled(tables: Sequence[Path], *, reference: str) -> list[dict[str, Any]]:
    studies: dict[Study, list[tuple[float, float] | None]] = {}
    for table in tables:
        own = studies_in(table)
        both = sorted(set(own) & set(studies))
        if both:
            raise SystemExit(f"{table} has studies that a table before it has: {both[0]}")
        studies |= own
    rows = []
    for axis in AXES:
        found = {study: volumes(costs, worst=TASKS[study[0]][2], axis=axis) for study, costs in studies.items()}
        for row in summary(found, reference=reference):
            if row["sampler"] != reference:
                quantile = student_quantile(0.975, degrees=row["n"] - 1)
                half = quantile * row["difference_sd"] / sqrt(row["n"]) if row["n"] > 1 else None
                rows.append({"state_axis": axis, **row, "half_95": half})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("tables", type=Path, nargs="+")
    parser.add_argument("--reference", default="random")
    given = parser.parse_args()
    rows = pooled(given.tables, reference=given.reference)
    write_csv(given.out, [row | {"tables": " ".join(p.name for p in given.tables), "commit": commit()} for row in rows])
    for row in rows:
        print(row)


if __name__ == "__main__":
    main()
