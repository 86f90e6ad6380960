"""What was planned against its rivals, paired by seed: in the sampler races, and in runs of the product.

    python -m experiments.analysis.allocation_pairs  # seconds -> allocation_pairs.csv
    python -m experiments.analysis.allocation_pairs --product experiments/results/product_runs.csv  # seconds -> printed

Every study of a race trains the same baselines before its sampler proposes anything: the exact allocation and a random
feasible one at 25, 10 and 3 % of fp32 AdamW's state, and uniform specs. Both samplers of a seed share them, so each
seed counts once. Writes experiments/results/allocation_pairs.csv: the difference of validation quality (lower is
better), the half width of its 95 % interval, and the number of seeds in which the exact allocation is better.

`--product` prints what `budget=state_N` chose minus fp32 AdamW at the best of five rates (by the mean of the same
seeds, which favours AdamW), minus AdamW at the best rate of each seed by itself, minus the best uniform recipe that
fits the budget, minus every other recipe, and minus a random plan. Where an interval contains 0, it says which
difference is excluded.
"""

import argparse
import csv
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from statistics import mean
from typing import Any

from baoc.core.statistics import mean_interval, paired_difference
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


def product(rows: Iterable[Mapping[str, str]]) -> Iterator[str]:
    """A line per chosen plan and rival; `rows` are those of benchmarks/listed_runs."""
    values: dict[str, dict[str, dict[int, float]]] = {}
    of_label: dict[tuple[str, str], list[Mapping[str, str]]] = {}
    for row in rows:
        if row["status"] == "finite":
            seeds = values.setdefault(row["group"], {}).setdefault(row["label"], {})
            seeds[int(row["seed"])] = float(row["value"])
            of_label.setdefault((row["group"], row["label"]), []).append(row)
    for task, found in values.items():
        share = {label: mean(float(row["state_fraction"]) for row in of_label[task, label]) for label in found}
        step_ms = {label: mean(float(row["step_ms"]) for row in of_label[task, label]) for label in found}
        level = {label: mean(seeds.values()) for label, seeds in found.items()}
        rates = [label for label in found if label.startswith("adamw_")]
        uniform = [label for label in found if not label.startswith(("adamw_", "chosen_", "random_"))]
        adamw: dict[str, Mapping[int, float]] = {}
        best = min(rates, key=level.__getitem__, default=None)
        if best is not None:
            own_best = {seed: min(found[rate][seed] for rate in rates) for seed in found[best]}
            adamw = {best: found[best], "adamw at each seed's best rate": own_best}
        yield f"{task}: {'no AdamW' if best is None else f'{best} {level[best]:.4f}, the best of five rates'}"
        for label in sorted(name for name in found if name.startswith("chosen_")):
            budget = label.split("_")[1]  # of chosen_15_seconds too
            recipe = ", ".join(sorted({row["recipe"] for row in of_label[task, label]}))
            step = "" if best is None else f", a step takes {step_ms[label] / step_ms[best]:.2f} times AdamW's"
            yield f"  {label}: {recipe}, {share[label]:.1%} of the state, {level[label]:.4f}{step}"
            fits = [name for name in uniform if share[name] <= float(budget) / 100]
            rivals = dict(adamw)
            if fits:
                first = min(fits, key=level.__getitem__)
                rivals[f"{first} ({share[first]:.1%}, best uniform that fits)"] = found[first]
            rivals |= {f"{name} ({share[name]:.1%})": found[name] for name in uniform if not fits or name != first}
            rivals |= {name: found[name] for name in (f"random_{budget}",) if name in found}
            for name, theirs in rivals.items():
                yield f"    - {name}: {told_of(found[label], theirs)}"


def told_of(ours: Mapping[int, float], theirs: Mapping[int, float]) -> str:
    told = paired_difference(ours, theirs, level=0.95)
    better = sum(ours[seed] < theirs[seed] for seed in ours.keys() & theirs.keys())
    null = "" if told.excludes_zero else f", not told apart: more than {abs(told.mean) + told.half:.4f} is excluded"
    return f"{told.mean:+.4f} +- {told.half:.4f} (95 %, n {told.n}), better in {better}{null}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--product", type=Path, metavar="ROWS.csv", help="of benchmarks/listed_runs")
    given = parser.parse_args()
    if given.product is not None:
        with given.product.open(encoding="utf-8", newline="") as lines:
            print(*product(csv.DictReader(lines)), sep="\n")
        return
    rows = pairs(baselines(RESULTS / name for name in TABLES))
    write_csv(RESULTS / "allocation_pairs.csv", rows)
    for row in rows:
        print(*row.values(), sep="\t")


if __name__ == "__main__":
    main()
