"""What a study costs beyond its trials: a study of stubs, and real short trials beside the same run in this process.

    python -m experiments.benchmarks.study_overhead OUT.csv --trials 200 --real 14
    # 2 minutes of 2 CPU cores -> OUT.csv

Trials of the first are stubs that leave a result in no time; the cost of a trial is told of the second.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from statistics import mean, median, stdev

from baoc.config.environment import commit
from baoc.sweep import forkserver
from baoc.sweep.study import run_study
from baoc.sweep.study_config import read_study
from baoc.sweep.trial_process import COMMAND
from baoc.tracking.files import write_csv

# What a trial leaves, in no time.
STUB = """
import json, os, sys
words = dict(word.split("=", 1) for word in sys.argv[1:])
x = float(words["x"])
result = {"quality": {"value": (x - 0.3) ** 2}, "state_bytes": int(100 * x), "peak_bytes": 1, "samples_per_s": 1.0}
json.dump(result, open(os.path.join(words["hydra.run.dir"], "result.json"), "w"))
"""
# Training alone (baoc.training.run.run), by the clock and in processor time; composing counts as the study's.
TIMED = """
import json, sys, time
import baoc.training.run
from baoc.cli.main import main
run, kept = baoc.training.run.run, {}
def timed(config, *, run_dir, command):
    wall, cpu = time.monotonic(), time.process_time()
    result = run(config, run_dir=run_dir, command=command)
    kept.update(wall=time.monotonic() - wall, cpu=time.process_time() - cpu, folder=run_dir)
    return result
baoc.training.run.run = timed
code = main(sys.argv[1:], single=True)
told = {"wall": kept["wall"], "cpu": kept["cpu"], "process_cpu": time.process_time()}
(kept["folder"] / "seconds.json").write_text(json.dumps(told))
sys.exit(code)
"""


def stubs(*, trials: int, workers: int, storage: str | None) -> dict[str, object]:
    given = {
        "name": "stubs", "objectives": {"quality": "minimize", "state_bytes": "minimize"},
        "space": {"x": {"low": 0.0, "high": 1.0}}, "sampler": "random", "n_trials": trials, "workers": workers,
        "storage": storage,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        forkserver.preload(forkserver.PRELOAD)  # paid once, and part of the time
        began = time.monotonic()
        study = run_study(read_study(given), folder=folder, code=STUB)
        seconds = time.monotonic() - began
        states = {trial.state.name for trial in study.trials}
    return {
        "what": f"stubs, {storage or 'sqlite'}",
        "trials": trials,
        "workers": workers,
        "seconds": round(seconds, 2),
    } | {
        "seconds_per_trial": round(seconds / trials, 3),
        "states": " ".join(sorted(states)),
    }


def real(*, trials: int, steps: int) -> dict[str, object]:
    """What a study of short runs takes per trial beyond training, from the end of one trial to the end of the next.

    By the clock that holds what other processes on the machine take; in processor time, of the trial's process and of
    the study's, it does not. The first trial pays for the imports and is left out.
    """
    given = {
        "name": "real",
        "objectives": {"quality": "minimize", "state_bytes": "minimize"},
        "space": {"budget": {"low": 5.0, "high": 60.0, "format": "state_{:.3g}"}},
        "fixed": [f"trainer.max_steps={steps}", "device=cpu", "reallocation.warmup_steps=4"],
        "sampler": "random",
        "n_trials": trials,
        "workers": 1,
    }
    with tempfile.TemporaryDirectory() as folder:
        forkserver.preload(forkserver.PRELOAD)
        run_study(read_study(given | {"n_trials": 1}), folder=folder, code=TIMED)  # pays for the imports
        cpu = time.process_time()
        study = run_study(read_study(given), folder=folder, code=TIMED)
        cpu = (time.process_time() - cpu) / (trials - 1)
        told = [json.loads((Path(folder) / f"{t.number:04d}" / "seconds.json").read_text()) for t in study.trials[1:]]
        ends = [t.datetime_complete for t in study.trials if t.datetime_complete is not None]
        whole = [(b - a).total_seconds() for a, b in pairwise(ends)][
            1:
        ]  # between the two calls lies the second's start
        walls = [seconds - own["wall"] for seconds, own in zip(whole, told[1:], strict=True)]
        cpus = [own["process_cpu"] - own["cpu"] + cpu for own in told]
        alone = Path(folder) / "alone"
        words = [*study.trials[-1].user_attrs["words"], f"hydra.run.dir={alone}"]
        began_alone = time.monotonic()
        subprocess.run([sys.executable, "-c", COMMAND, *words], check=True, capture_output=True)
        fresh = time.monotonic() - began_alone
    return {
        "what": f"vit, {steps} steps",
        "trials": len(walls),
        "workers": 1,
        "seconds": round(sum(whole), 2),
        "seconds_per_trial": round(mean(whole), 3),
        "own_seconds_per_trial": round(median(own["wall"] for own in told), 3),
        "overhead_seconds_per_trial": round(mean(walls), 3),
        "overhead_seconds_sd": round(stdev(walls), 3),
        "overhead_seconds_median": round(median(walls), 3),
        "overhead_seconds_most": round(max(walls), 3),
        "overhead_cpu_seconds_per_trial": round(mean(cpus), 3),
        "overhead_cpu_seconds_sd": round(stdev(cpus), 3),
        "seconds_as_a_fresh_process": round(fresh, 3),
        "states": " ".join(sorted({trial.state.name for trial in study.trials})),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--real", type=int, default=22, help="trials of short real runs; the first two are not counted")
    parser.add_argument("--steps", type=int, default=20)
    given = parser.parse_args()
    storages = (None, "journal") if given.trials else ()
    rows = [stubs(trials=given.trials, workers=given.workers, storage=storage) for storage in storages]
    if given.real > 3:
        rows.append(real(trials=given.real, steps=given.steps))
    cores = f"{len(os.sched_getaffinity(0))} of {os.cpu_count()} x86-64 cores, load {os.getloadavg()[0]:.1f}"
    about = {"device": cores, "commit": commit()}
    write_csv(given.out, [row | about for row in rows])
    print(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
