"""Exact, random and 8-bit FOAM allocations of the sampler races, paired by seed.

    python -m experiments.analysis.allocation_pairs

Every study of a race trains the same baselines before its sampler proposes anything: the exact allocation and a random
feasible one at 25, 10 and 3 % of fp32 AdamW's state, and uniform specs. Both samplers of a seed share them, so each
seed counts once. Writes experiments/results/allocation_pairs.csv: the difference of validation quality (lower is
better), the half width of its 95 % interval, and the number of seeds in which the exact allocation is better.
"""

import csv
from collections.abc import Iterable
from pathlib import Path
from statistics import mean
from typing import Any

from baoc.core.statistics import mean_interval
from baoc.tracking.files import write_csv

RESULTS = Path(__file__).resolve().parents[1] / "results"
TABLES = ("sampler_race_tasks_trials.csv", "sampler_race_fresh_trials.csv")
UNIFORM = {"adamw": "uniform_adamw", "foam8bit": "uniform_foam8bit_matched"}
PERCENTS = (25, 10, 3)


def baselines(tables: Iterable[Path]) -> dict[tuple[str, int], dict[str, float]]:
    """(task, seed) -> configuration -> quality. The configurations are exact_N, random_N and the names of UNIFORM."""
    found: dict[tuple[str, int], dict[str, list[float]]] = {}
    for table in tables:
        with table.open(encoding="utf-8", newline="") as lines:
            for row in csv.DictReader(lines):
                if row["baseline"] != "True" or row["violated"] == "True":
                    continue
                qualities = found.setdefault((row["task"], int(row["seed"])), {})
                qualities.setdefault(configuration(row), []).append(float(row["quality"]))
    return {study: {name: mean(values) for name, values in named.items()} for study, named in found.items()}


def configuration(row: dict[str, str]) -> str:
    if row["allocator"] in ("exact", "random"):
        return f"{row['allocator']}_{float(row['budget'].removeprefix('state_')):g}"
    return next((name for name, allocator in UNIFORM.items() if allocator == row["allocator"]), row["allocator"])


def pairs(found: dict[tuple[str, int], dict[str, float]]) -> list[dict[str, Any]]:
    rows = []
    for task in ("vision", "language", "diffusion"):
        for percent in PERCENTS:
            for rival in (f"random_{percent}", *UNIFORM):
                seeds = [qualities for (own, _), qualities in sorted(found.items()) if own == task]
                differences = [qualities[f"exact_{percent}"] - qualities[rival] for qualities in seeds]
                told = mean_interval(differences, level=0.95)
                rows.append(
                    {
                        "task": task,
                        "state_percent": percent,
                        "rival": rival.split("_")[0],
                        "n": told.n,
                        "difference": round(told.mean, 5),
                        "sd": round(told.sd, 5),
                        "half_95": round(told.half, 5),
                        "better": sum(difference < 0 for difference in differences),
                    }
                )
    return rows


def main() -> None:
    rows = pairs(baselines(RESULTS / name for name in TABLES))
    write_csv(RESULTS / "allocation_pairs.csv", rows)
    for row in rows:
        print(*row.values(), sep="\t")


if __name__ == "__main__":
    main()
