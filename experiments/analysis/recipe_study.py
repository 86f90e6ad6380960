"""What the rows of benchmarks/recipe_study.py say: each recipe at its own best rate and beta2 beside tuned AdamW.

    python -m experiments.analysis.recipe_study ROWS.csv [SUMMARY.csv]

A setting is a beta2 and a rate. A recipe's best one has the least mean of `choice` over seeds; `value`, of data that
chose nothing, is told of it. Only seeds that every setting of every recipe has are used. Intervals are of differences
paired by seed (Student's t, 90 %); the setting was chosen on the same seeds, so they are somewhat too kind to each.
"""

import argparse
import math
from collections.abc import Iterable, Mapping, Sequence
from csv import DictReader
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from baoc.core.statistics import mean_interval
from baoc.tracking.files import write_csv

REFERENCE = "adamw"
LEVEL = 0.90
FEW = 6  # seeds below which an interval decides nothing
Row = Mapping[str, str]
Setting = tuple[float, float]  # beta2, factor of the rate


def read_rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(DictReader(file))


def summarise(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """One row per phase, task and recipe."""
    groups = list(dict.fromkeys((row["phase"], row["task"]) for row in rows))
    return [
        told
        for phase, task in groups
        for told in _of_task([row for row in rows if (row["phase"], row["task"]) == (phase, task)])
    ]


def _of_task(rows: Sequence[Row]) -> list[dict[str, Any]]:
    runs = _by_recipe(rows)
    seeds = whole_seeds(rows)
    best = {recipe: best_setting(runs[recipe], seeds) for recipe in runs} if seeds else {}
    told: list[dict[str, Any]] = []
    for recipe, (beta2, factor) in best.items():
        factors = sorted({other for _, other in runs[recipe]})
        own = [runs[recipe][beta2, factor][seed] for seed in seeds]
        values = [float(row["value"]) for row in own]
        told.append(
            {
                "phase": own[0]["phase"], "task": own[0]["task"], "recipe": recipe,
                "state_fraction": own[0]["state_fraction"], "n": len(seeds), "settings": len(runs[recipe]),
                "beta2": beta2, "factor": factor, "lr": own[0]["lr"],
                "edge": factor in (factors[0], factors[-1]) and len(factors) > 1,
                "value": round(mean(values), 5), "sd": round(stdev(values), 5) if len(values) > 1 else "",
                "accuracy": round(mean(float(row["accuracy"]) for row in own), 5),
                **_difference(values, best, runs, seeds), "failed": _failed(rows, recipe),
            }
        )  # fmt: skip
    return told


def _difference(
    values: Sequence[float], best: Mapping[str, Setting], runs: Any, seeds: Sequence[str]
) -> dict[str, Any]:
    if REFERENCE not in best:
        return {"difference": "", "half_width": "", "better": ""}
    reference = [float(runs[REFERENCE][best[REFERENCE]][seed]["value"]) for seed in seeds]
    paired = [own - other for own, other in zip(values, reference, strict=True)]
    told = mean_interval(paired, level=LEVEL)
    return {
        "difference": round(told.mean, 5),
        "half_width": round(told.half, 5) if told.n > 1 else "",
        "better": sum(one < 0 for one in paired),
    }


def _failed(rows: Sequence[Row], recipe: str) -> int:
    return sum(row["status"] != "finite" for row in rows if row["recipe"] == recipe)


def _by_recipe(rows: Iterable[Row]) -> dict[str, dict[Setting, dict[str, Row]]]:
    """Recipe -> setting -> seed -> row, of runs that came to their end, diverged ones included."""
    runs: dict[str, dict[Setting, dict[str, Row]]] = {}
    for row in rows:
        if row["status"] != "error":
            setting = (float(row["beta2"]), float(row["factor"]))
            runs.setdefault(row["recipe"], {}).setdefault(setting, {})[row["seed"]] = row
    return runs


def whole_seeds(rows: Sequence[Row]) -> list[str]:
    """Those that every setting of every recipe has; rows are of one phase and task."""
    held = [set(seeds) for settings in _by_recipe(rows).values() for seeds in settings.values()]
    return sorted(set.intersection(*held)) if held else []


def best_setting(settings: Mapping[Setting, Mapping[str, Row]], seeds: Sequence[str]) -> Setting:
    return min(settings, key=lambda setting: choice_of(settings[setting], seeds))


def choice_of(runs: Mapping[str, Row], seeds: Sequence[str]) -> float:
    values = [float(runs[seed]["choice"]) if runs[seed]["status"] == "finite" else math.inf for seed in seeds]
    return mean(values)


def longer(rows: Sequence[Row], *, recipes: int = 2, rates: int = 3) -> list[tuple[str, str, float, float]]:
    """(task, recipe, beta2, factor) of the long phase, by a rule that was fixed before the first run.

    AdamW, and the two other recipes whose ranks by `choice`, each at its best setting, have the least mean over tasks;
    each in each task at its best beta2, at its best rate there and the two next to it (at an edge: the two inward).
    """
    short = [row for row in rows if row["phase"] == "short"]
    tasks = {task: [row for row in short if row["task"] == task] for task in dict.fromkeys(r["task"] for r in short)}
    best: dict[tuple[str, str], Setting] = {}
    ranks: dict[str, list[int]] = {}
    for task, own in tasks.items():
        runs, seeds = _by_recipe(own), whole_seeds(own)
        if not seeds:
            continue
        best |= {(task, recipe): best_setting(runs[recipe], seeds) for recipe in runs}
        others = [recipe for recipe in runs if recipe != REFERENCE]
        others.sort(key=lambda r: choice_of(runs[r][best[task, r]], seeds))
        for rank, recipe in enumerate(others):
            ranks.setdefault(recipe, []).append(rank)
    chosen = [REFERENCE, *sorted(ranks, key=lambda recipe: mean(ranks[recipe]))[:recipes]]
    found = []
    for (task, recipe), (beta2, factor) in best.items():
        factors = sorted({float(row["factor"]) for row in tasks[task]})
        first = min(max(factors.index(factor) - rates // 2, 0), max(len(factors) - rates, 0))
        if recipe in chosen:
            found += [(task, recipe, beta2, rate) for rate in factors[first : first + rates]]
    return found


def table(told: Sequence[Mapping[str, Any]]) -> str:
    if not told:
        return "no seed has every setting of every recipe yet: no table"
    lines = [
        f"{'phase':5s} {'task':10s} {'recipe':12s} {'state':>6s} {'beta2':>6s} {'rate':>8s} {'value':>9s} "
        f"{'accuracy':>8s} {'minus AdamW':>20s} {'better':>7s} {'failed':>6s}  n"
    ]
    for row in told:
        width = "" if row["half_width"] == "" else f" +- {row['half_width']:.4f}"
        difference = "" if row["difference"] == "" else f"{row['difference']:+.4f}{width}"
        accuracy = "" if math.isnan(row["accuracy"]) else f"{row['accuracy']:.4f}"
        lines.append(
            f"{row['phase']:5s} {row['task']:10s} {row['recipe']:12s} {float(row['state_fraction']):6.1%} "
            f"{row['beta2']:6.3f} {float(row['lr']):7.1e}{'*' if row['edge'] else ' '} {row['value']:9.4f} "
            f"{accuracy:>8s} {difference:>20s} {row['better']!s:>7s} {row['failed']:6d}  {row['n']}"
        )
    least = min(row["n"] for row in told)
    lines.append("*: the best rate is at an edge of the grid, so a better one may lie beyond.")
    lines.append("value: of held-out data that chose nothing; differences are paired by seed, 90 % intervals (t).")
    if least < FEW:
        lines.append(f"n {least}: this decides nothing; it says what is worth more seeds.")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", type=Path)
    parser.add_argument("out", type=Path, nargs="?")
    given = parser.parse_args()
    told = summarise(read_rows(given.rows))
    if given.out is not None and told:
        write_csv(given.out, told)
    print(table(told))


if __name__ == "__main__":
    main()
