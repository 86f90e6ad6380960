"""Fronts of a race of samplers on seeds that chose nothing: points are trained again, and their means count.

    python -m experiments.benchmarks.sampler_held_out RACE FOLDER OUT.csv --tasks vision --seeds 0 1 2 3 4
    # time not recorded, CPU -> OUT.csv

RACE is the folder of `sampler_race.py`. A front found in single runs holds runs that were lucky; what somebody gets who
trains its points again is the hypervolume of their means. Points that several studies have in common, baselines above
all, are trained once. Seeds come first, so that time that runs out costs seeds and not points; killed, the same command
goes on, with the same RACE. OUT.csv: the paired difference to random's, of the means (`held out`) and of the fronts
as they were found.
"""

import argparse
import os
import shlex
from collections.abc import Collection, Iterable, Mapping
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any

from optuna.trial import FrozenTrial, TrialState

from baoc.frontier.pareto import pareto
from baoc.frontier.runs import find_runs
from baoc.tracking.files import write_csv
from experiments.benchmarks.fronts import run_until, study_of
from experiments.benchmarks.sampler_race import (
    AXES,
    TASKS,
    about,
    costs_of,
    read_trials,
    study_config,
    summary,
    volumes,
)

Words = tuple[str, ...]
Study = tuple[str, str, int]  # task, sampler, seed


def front_of(trials: Iterable[FrozenTrial]) -> dict[Words, tuple[float, float]]:
    """(quality, share of AdamW's state) of the points of a study's front by their overrides; the first trial is AdamW's
    baseline."""
    trials = list(trials)
    if not trials or trials[0].state is not TrialState.COMPLETE:
        return {}
    costs = costs_of(trials, whole_bytes=trials[0].values[1])
    known = [(tuple(trial.user_attrs["words"]), cost) for trial, cost in zip(trials, costs, strict=False) if cost]
    best = pareto([cost for _, cost in known])
    return {words: cost for (words, cost), kept in zip(known, best, strict=True) if kept}


def words_of(task: str, point: Words, *, steps: int | None) -> list[str]:
    """A run of a study of this race, without its seed."""
    fixed = study_config(task, sampler="random", seed=0, trials=1, steps=steps).fixed
    return [*(word for word in fixed if not word.startswith("seed=")), *point]


def means(
    folder: Path, *, points: Mapping[tuple[str, Words], Iterable[str]], seeds: Collection[int]
) -> dict[tuple[str, Words], float]:
    """Over `seeds`, of the points (with the overrides of their runs) that were trained with each of them."""
    wanted = {point: frozenset(words) for point, words in points.items()}
    found: dict[tuple[str, Words], dict[int, float]] = {}
    for run in find_runs(folder):
        if run.result is None or run.result["quality"]["value"] is None or run.result["seed"] not in seeds:
            continue
        told = set(shlex.split(run.result["command"]))
        for point, words in wanted.items():
            if words <= told:
                found.setdefault(point, {})[run.result["seed"]] = run.result["quality"]["value"]
    return {point: mean(values.values()) for point, values in found.items() if len(values) == len(set(seeds))}


def rows_of(
    fronts: Mapping[Study, Mapping[Words, tuple[float, float]]],
    *,
    again: Mapping[tuple[str, Words], float],
    reference: str,
) -> list[dict[str, Any]]:
    """By task, sampler, axis and how a front is scored: only pairs of which every point was trained again."""
    whole = {study for study, front in fronts.items() if front and all((study[0], words) in again for words in front)}
    rows = []
    for axis, told in product(AXES, ("held out", "as found")):
        found: dict[Study, dict[int, float]] = {}
        for study in sorted(whole):
            task = study[0]
            points = [(again[task, words] if told == "held out" else q, m) for words, (q, m) in fronts[study].items()]
            value = volumes(points, worst=TASKS[task][2], axis=axis, after=(len(points),))[len(points)]
            found[study] = {0: value}
        for row in summary(found, reference=reference):
            row.pop("trials")
            size = mean(len(fronts[study]) for study in whole if study[:2] == (row["task"], row["sampler"]))
            rows.append({"state_axis": axis, "fronts": told, "points_per_front": size} | row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("race", type=Path, help="folder of the studies")
    parser.add_argument("folder", type=Path, help="of the runs")
    parser.add_argument("out", type=Path)
    parser.add_argument("--tasks", nargs="+", default=["vision"], choices=list(TASKS))
    parser.add_argument("--samplers", nargs="+", default=["tpe", "random"])
    parser.add_argument("--reference", default="random")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4], help="of the studies")
    parser.add_argument("--held-out", type=int, nargs="+", default=[1000, 1001, 1002], help="seeds of the runs")
    parser.add_argument("--steps", type=int, help="of a run; by task if not given")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seconds", type=int, default=0, help="0: as long as it takes")
    parser.add_argument("--collect", action="store_true", help="start nothing")
    given = parser.parse_args()
    studies = product(given.tasks, given.samplers, given.seeds)
    fronts = {(t, name, seed): front_of(read_trials(given.race / t / f"{name}_{seed}")) for t, name, seed in studies}
    order = dict.fromkeys((study[0], words) for study, front in fronts.items() for words in front)
    points = {point: words_of(*point, steps=given.steps) for point in order}
    if not given.collect:
        runs = [[*words, f"seed={seed}"] for seed in given.held_out for words in points.values()]
        run_until(study_of(runs, workers=given.workers), folder=given.folder, seconds=given.seconds)
    again = means(given.folder, points=points, seeds=given.held_out)
    rows = rows_of(fronts, again=again, reference=given.reference)
    told = {"held_out_seeds": len(set(given.held_out))} | about([given.folder])
    if rows:
        write_csv(given.out, [row | told for row in rows])
    for row in rows:
        print(row, flush=True)


if __name__ == "__main__":
    main()
