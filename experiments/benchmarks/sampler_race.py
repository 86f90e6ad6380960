"""Does a sampler that learns find a better front than random draws, at equal trials? Whole studies of short real runs.

    python -m experiments.benchmarks.sampler_race FOLDER OUT --tasks vision --seeds 0 1 2 3 4 --seconds 400
    # 7 minutes (--seconds), CPU -> sampler_race_trials.csv, sampler_race.csv, sampler_race_quality.csv

Every study is sweeps/frontier_TASK.yaml as it stands (space, baselines), without early stops, with fewer steps and with
one worker unless told otherwise. A study's seed is that of its draws and of its runs, so that samplers are paired.
Killed or out of time, the same command goes on. Written at every end of a study: OUT/sampler_race_trials.csv (every
trial), OUT/sampler_race.csv (hypervolume after k trials, and its paired difference to random's) and
OUT/sampler_race_quality.csv (the same of the median quality that a study's own trials reached: one lucky trial decides
a hypervolume, and no median). The hypervolume of the studies' own objectives has `state_axis` share; along doublings
of the state, as budgets are drawn, it is log2. `sampler_held_out.py` scores the same fronts on other seeds.
"""

import argparse
import math
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from itertools import product
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

import optuna
import yaml
from optuna.trial import FrozenTrial, TrialState

from baoc.config.environment import commit
from baoc.frontier.pareto import MAX_DOUBLINGS, doublings, hypervolume
from baoc.frontier.runs import STUDY_FILE
from baoc.sweep import forkserver
from baoc.sweep.early_stopping import violates_constraint
from baoc.sweep.sampling import tpe_startup
from baoc.sweep.storage import open_storage, storage_url
from baoc.sweep.study import run_study
from baoc.sweep.study_config import StudyConfig, read_study
from baoc.tracking.files import read_json, write_csv
from experiments.benchmarks.fronts import paired

ROOT = Path(__file__).resolve().parents[2]
COMMON = ("device=cpu", "checkpoint.export=false", "logger=jsonl")
# task -> (steps of a short run, what else it needs, quality of knowing nothing). That quality (the logarithm of ten
# classes; eight bits per byte; predicting no noise at all) and the state of fp32 AdamW are the reference point, chosen
# before any run. Vision's loss falls steeply around step 60: there seeds move it as much as learning rates do (six
# seeds, sd .03 to .13 of .76, at .0015 and .005 alike); at 120 steps rates count (.38 and .20, sd .07 and .03).
# Language: more steps of fewer tokens, as rates hardly differ at 60 (4.11 bits at .001, 4.13 at .003).
TASKS: dict[str, tuple[int, tuple[str, ...], float]] = {
    "vision": (120, ("reallocation.warmup_steps=20",), math.log(10)),
    "language": (120, ("batch_size=8", "dataset.sequence_length=64", "dataset.max_val_sequences=256"), 8.0),
    "diffusion": (120, ("task.num_samples=0",), 1.0),
}
AFTER = (10, 15, 20, 24, 25, 30, 35, 40, 60)  # trials
AXES = ("share", "log2")


def study_config(
    task: str, *, sampler: str, seed: int, trials: int, steps: int | None = None, workers: int = 1
) -> StudyConfig:
    told = yaml.safe_load((ROOT / "sweeps" / f"frontier_{task}.yaml").read_text())["hydra"]["sweeper"]
    short, more, _ = TASKS[task]
    length = [f"trainer.max_steps={steps or short}", f"trainer.val_check_interval={steps or short}", f"seed={seed}"]
    own: dict[str, Any] = {
        "name": f"{task}_{sampler}_{seed}", "sampler": sampler, "seed": seed, "n_trials": trials, "workers": workers,
        "early_stop": {}, "fixed": [*told["fixed"], *COMMON, *more, *length],
    }  # fmt: skip
    return read_study({**told, **own})


def one_study(config: StudyConfig, *, folder: Path) -> None:
    """In this process, until it is done or told to end."""
    run_study(config, folder=folder)


def share(source: Path, folder: Path, *, trials: int) -> None:
    """The first runs of `source` as those of `folder`, whose trials of the same numbers then need not run.

    TPE's first draws are random ones, and both samplers are seeded by study and number; `check` sees that they agree.
    """
    for number in range(trials):
        mine, theirs = folder / f"{number:04d}", source / f"{number:04d}"
        if (theirs / "result.json").is_file() and not mine.exists():
            shutil.copytree(theirs, mine)


def num_shared(task: str, *, sampler: str, reference: str) -> int:
    """First trials that are the same with both samplers: the baselines, and a start with random draws."""
    if sampler == reference:
        return 0
    config = study_config(task, sampler=sampler, seed=0, trials=1)
    start = tpe_startup(config) if (sampler, reference) == ("tpe", "random") else 0
    return len(config.baselines) + start


def check(trials: Iterable[FrozenTrial], *, folder: Path) -> None:
    """Raises RuntimeError where a result is of other settings than its trial's."""
    for trial in trials:
        file = folder / f"{trial.number:04d}" / "result.json"
        if trial.state is TrialState.COMPLETE and file.is_file():
            command = shlex.split(read_json(file)["command"])
            if not set(trial.user_attrs["words"]) <= set(command):
                raise RuntimeError(f"{file} is not of trial {trial.number}: {trial.user_attrs['words']}")


def start_study(words: Sequence[str], *, folder: Path, end: float, source: Path, shared: int) -> str:
    """One study in a process of its own, ended with a checkpoint when time is over; its last lines where it failed."""
    if time.monotonic() > end:
        return "no time"
    folder.mkdir(parents=True, exist_ok=True)
    share(source, folder, trials=shared)
    alone = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "experiments.benchmarks.sampler_race", str(folder), str(folder), "--study", *words]
    with (folder / "study.log").open("w") as log:
        process = subprocess.Popen(command, cwd=ROOT, env=alone, stdout=log, stderr=log, text=True)
        try:
            process.wait(timeout=max(end - time.monotonic(), 0.1))
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()
            return "out of time"
    lines = (folder / "study.log").read_text().strip().splitlines()
    return "done" if process.returncode == 0 else f"exit {process.returncode}: {lines[-1] if lines else ''}"


def read_trials(folder: Path) -> tuple[FrozenTrial, ...]:
    """Of a study that may be incomplete; none where it has not begun."""
    if not (folder / STUDY_FILE).is_file():
        return ()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    storage = open_storage(storage_url(None, folder=folder))
    return tuple(optuna.load_study(study_name=read_json(folder / STUDY_FILE)["name"], storage=storage).trials)


def costs_of(trials: Iterable[FrozenTrial], *, whole_bytes: float) -> list[tuple[float, float] | None]:
    """(quality, share of AdamW's state) of ended trials by number; None for one that counts for nothing."""
    found: list[tuple[float, float] | None] = []
    for trial in trials:
        if not trial.state.is_finished():
            break  # workers go by number: behind it is no more than they have begun
        good = trial.state is TrialState.COMPLETE and not violates_constraint(trial)
        found.append((trial.values[0], trial.values[1] / whole_bytes) if good else None)
    return found


def place(share: float, *, axis: str) -> float:
    """Of a share of AdamW's state, from 0 to 1: itself, or by doublings (log2), where a 128th and less is 0."""
    return share if axis == "share" else 1.0 - doublings(share, up_to=1.0) / MAX_DOUBLINGS


def volumes(
    costs: Sequence[tuple[float, float] | None], *, worst: float, axis: str = "share", after: Sequence[int] = AFTER
) -> dict[int, float]:
    """Hypervolume after k trials, as a share of the box between nothing and the reference, for each k that was
    reached; baselines count as trials."""
    points = [None if cost is None else (cost[0], place(cost[1], axis=axis)) for cost in costs]
    known = {k: [point for point in points[:k] if point is not None] for k in after if k <= len(points)}
    return {k: hypervolume(kept, reference=(worst, 1.0)) / worst for k, kept in known.items()}


def trial_rows(task: str, *, sampler: str, seed: int, trials: Sequence[FrozenTrial]) -> list[dict[str, Any]]:
    keys = ("budget", "allocator", "risk", "optim.matching", "optim.lr")
    rows = []
    for trial in trials:
        if not trial.state.is_finished():
            continue
        values = dict(zip(("quality", "state_bytes"), trial.values or (None, None), strict=False))
        words = trial.user_attrs.get("words", [])
        own: dict[str, Any] = {"task": task, "sampler": sampler, "seed": seed, "trial": trial.number}
        own |= {"state": trial.state.name, "violated": violates_constraint(trial)} | values
        given = dict(word.split("=", 1) for word in words)
        own |= {key: trial.params.get(key, given.get(key)) for key in keys}
        own["baseline"] = "overrides" in trial.user_attrs
        own["seconds"] = round(trial.duration.total_seconds(), 2) if trial.duration else None
        rows.append(own)
    return rows


def summary(found: Mapping[tuple[str, str, int], Mapping[int, float]], *, reference: str) -> list[dict[str, Any]]:
    """A row per task, sampler and k: mean and spread over seeds, and the paired difference to the reference's."""
    rows = []
    for task, sampler, k in sorted({(t, s, k) for (t, s, _), own in found.items() for k in own}):
        own = {seed: v[k] for (t, s, seed), v in found.items() if (t, s) == (task, sampler) and k in v}
        base = {seed: v[k] for (t, s, seed), v in found.items() if (t, s) == (task, reference) and k in v}
        against = paired(own, base)
        rows.append(
            {
                "task": task,
                "sampler": sampler,
                "trials": k,
                "studies": len(own),
                "hypervolume": mean(own.values()),
                "hypervolume_sd": stdev(own.values()) if len(own) > 1 else None,
                "rival": reference,
                **{key: against[key] for key in ("n", "difference", "difference_sd", "t")},
                "better_pairs": sum(own[seed] > base[seed] for seed in own if seed in base),
            }
        )
    return rows


def median_quality(trials: Iterable[FrozenTrial], *, first: int) -> float | None:
    """Of the trials from number `first` on that count; None where there is none."""
    own = [t for t in trials if t.number >= first and t.state is TrialState.COMPLETE and not violates_constraint(t)]
    return median(trial.values[0] for trial in own) if own else None


def quality_rows(medians: Mapping[tuple[str, str], Mapping[int, float]], *, reference: str) -> list[dict[str, Any]]:
    """A row per task and sampler; below 0 is better than the reference's."""
    rows = []
    for (task, sampler), own in medians.items():
        base = medians.get((task, reference), {})
        told = {"task": task, "sampler": sampler, "studies": len(own), "median_quality": mean(own.values())}
        better = sum(own[seed] < base[seed] for seed in own if seed in base)
        rows.append({**told, "rival": reference, **paired(own, base), "better_pairs": better})
    return rows


def about(folders: Iterable[Path]) -> dict[str, str]:
    """Machines, versions and commits of the runs of studies; of this process where none says so."""
    told = [read_json(file) for folder in folders for file in sorted(folder.glob("*/env.json"))]
    cores = [f"{env['device']['cpu_count']} x86-64 cores, torch {env['versions']['torch']}" for env in told]
    device = " or ".join(dict.fromkeys(cores)) or f"{os.cpu_count()} x86-64 cores"
    commits = dict.fromkeys(str(env["commit"])[:7] for env in told if env["commit"] not in (None, "unknown"))
    return {"device": f"{device}, one thread a run", "commit": " ".join(commits) or commit()}


def collect(given: argparse.Namespace) -> list[dict[str, Any]]:
    found: dict[str, dict[tuple[str, str, int], dict[int, float]]] = {axis: {} for axis in AXES}
    rows: list[dict[str, Any]] = []
    medians: dict[tuple[str, str], dict[int, float]] = {}
    for task, sampler, seed in product(given.tasks, given.samplers, given.seeds):
        trials = read_trials(given.folder / task / f"{sampler}_{seed}")
        check(trials, folder=given.folder / task / f"{sampler}_{seed}")
        rows += trial_rows(task, sampler=sampler, seed=seed, trials=trials)
        first = max(num_shared(task, sampler=name, reference=given.reference) for name in given.samplers)
        middle = median_quality(trials, first=first)
        if middle is not None:
            medians.setdefault((task, sampler), {})[seed] = middle
        # the first baseline is fp32 AdamW everywhere
        if trials and trials[0].state is TrialState.COMPLETE:
            costs = costs_of(trials, whole_bytes=trials[0].values[1])
            for axis in AXES:
                found[axis][task, sampler, seed] = volumes(costs, worst=TASKS[task][2], axis=axis)
    told = [{"state_axis": axis} | row for axis in AXES for row in summary(found[axis], reference=given.reference)]
    told_by = {
        task: about(given.folder / task / f"{sampler}_{seed}" for sampler, seed in product(given.samplers, given.seeds))
        for task in given.tasks
    }
    given.out.mkdir(parents=True, exist_ok=True)
    if rows:
        write_csv(given.out / "sampler_race_trials.csv", rows)
        write_csv(given.out / "sampler_race.csv", [row | told_by[row["task"]] for row in told])
        quality = quality_rows(medians, reference=given.reference)
        write_csv(given.out / "sampler_race_quality.csv", [row | told_by[row["task"]] for row in quality])
    return told


def race(given: argparse.Namespace) -> None:
    """All studies, a few seeds at a time, so that what is cut off by time is whole pairs."""
    end = time.monotonic() + given.seconds
    first = sorted(given.samplers, key=lambda name: name != given.reference)
    groups = [given.seeds[at : at + given.workers] for at in range(0, len(given.seeds), given.workers)]
    jobs = {}
    with ThreadPoolExecutor(given.workers) as pool:
        for task, seeds in product(given.tasks, groups):
            for sampler, seed in product(first, seeds):
                words = [task, sampler, str(seed), "--trials", str(given.trials)]
                words += ["--study-workers", str(given.study_workers)]
                words += ["--steps", str(given.steps)] if given.steps else []
                folder = (given.folder / task / f"{sampler}_{seed}").absolute()
                shared = num_shared(task, sampler=sampler, reference=given.reference)
                source = folder.parent / f"{given.reference}_{seed}"
                job = pool.submit(start_study, words, folder=folder, end=end, source=source, shared=shared)
                jobs[job] = f"{task} {sampler} {seed}"
        for job in as_completed(jobs):
            print(f"{jobs[job]}: {job.result()}", flush=True)
            collect(given)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="of the studies")
    parser.add_argument("out", type=Path, help="of the CSVs")
    parser.add_argument("--tasks", nargs="+", default=["vision"], choices=list(TASKS))
    parser.add_argument("--samplers", nargs="+", default=["tpe", "random"])
    parser.add_argument("--reference", default="random")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(5)))
    parser.add_argument("--trials", type=int, default=40)
    parser.add_argument("--steps", type=int, help="of a run; by task if not given")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="studies at a time")
    parser.add_argument("--study-workers", type=int, default=1, help="trials at a time of each study")
    parser.add_argument("--seconds", type=float, default=math.inf)
    parser.add_argument("--study", nargs=3, metavar=("TASK", "SAMPLER", "SEED"), help="run this one alone, in FOLDER")
    given = parser.parse_args()
    if given.study:
        forkserver.end_with_parent()  # a race that is killed leaves no study behind
        task, sampler, seed = given.study
        length = {"trials": given.trials, "steps": given.steps, "workers": given.study_workers}
        config = study_config(task, sampler=sampler, seed=int(seed), **length)
        one_study(config, folder=given.folder)
        return
    race(given)
    for row in collect(given):
        print(row)


if __name__ == "__main__":
    main()
