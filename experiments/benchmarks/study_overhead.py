"""What a study costs beyond its trials: a study of stubs, and real short trials beside the same run in this process.

python -m experiments.benchmarks.study_overhead OUT.csv [--trials 200] [--workers 2] [--real 6]
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from baoc.config.environment import commit
from baoc.sweep import children
from baoc.sweep.study import run_study
from baoc.sweep.study_config import read_study
from baoc.sweep.trial import COMMAND
from baoc.tracking.files import write_csv

# What a trial leaves, in no time.
STUB = """
import json, os, sys
words = dict(word.split("=", 1) for word in sys.argv[1:])
x = float(words["x"])
result = {"quality": {"value": (x - 0.3) ** 2}, "state_bytes": int(100 * x), "peak_bytes": 1, "samples_per_s": 1.0}
json.dump(result, open(os.path.join(words["hydra.run.dir"], "result.json"), "w"))
"""
# The time of training alone (baoc.train.run); composing the configuration counts as the study's.
TIMED = """
import sys, time
import baoc.train
from baoc.config.cli import main
run = baoc.train.run
def timed(config, *, run_dir, command):
    began = time.monotonic()
    result = run(config, run_dir=run_dir, command=command)
    (run_dir / "seconds").write_text(str(time.monotonic() - began))
    return result
baoc.train.run = timed
sys.exit(main(sys.argv[1:]))
"""


def stubs(*, trials: int, workers: int, storage: str | None) -> dict[str, object]:
    given = {
        "name": "stubs",
        "objectives": {"quality": "minimize", "state_bytes": "minimize"},
        "space": {"x": {"low": 0.0, "high": 1.0}},
        "sampler": "random",
        "n_trials": trials,
        "workers": workers,
        "storage": storage,
    }
    with tempfile.TemporaryDirectory() as folder:
        children.preload(children.PRELOAD)  # paid once, and part of the time
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
    """Wall time per trial of a study of short runs, less what training took in their own processes."""
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
        run_study(read_study(given | {"n_trials": 1}), folder=folder, code=TIMED)  # pays for the imports
        began = time.monotonic()
        study = run_study(read_study(given), folder=folder, code=TIMED)
        seconds = time.monotonic() - began
        own = [float((Path(folder) / f"{t.number:04d}" / "seconds").read_text()) for t in study.trials[1:]]
        alone = Path(folder) / "alone"
        words = [*study.trials[-1].user_attrs["words"], f"hydra.run.dir={alone}"]
        began_alone = time.monotonic()
        subprocess.run([sys.executable, "-c", COMMAND, *words], check=True, capture_output=True)
        fresh = time.monotonic() - began_alone
    return {
        "what": f"vit, {steps} steps",
        "trials": trials - 1,
        "workers": 1,
        "seconds": round(seconds, 2),
        "seconds_per_trial": round(seconds / (trials - 1), 3),
        "own_seconds_per_trial": round(median(own), 3),
        "overhead_seconds_per_trial": round((seconds - sum(own)) / (trials - 1), 3),
        "seconds_as_a_fresh_process": round(fresh, 3),
        "states": " ".join(sorted({trial.state.name for trial in study.trials})),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--real", type=int, default=6)
    parser.add_argument("--steps", type=int, default=20)
    given = parser.parse_args()
    rows = [stubs(trials=given.trials, workers=given.workers, storage=storage) for storage in (None, "journal")]
    if given.real > 1:
        rows.append(real(trials=given.real, steps=given.steps))
    about = {"device": f"{os.cpu_count()} shared x86-64 cores, load {os.getloadavg()[0]:.1f}", "commit": commit()}
    write_csv(given.out, [row | about for row in rows])
    print(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
