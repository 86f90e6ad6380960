"""Kills a study at random, workers and trials alike (SIGKILL), until it is done, and compares it with one left alone.

    python -m experiments.benchmarks.study_kills OUT.csv --kills 100  # time not recorded, CPU -> OUT.csv
    python -m experiments.benchmarks.study_kills OUT.csv --real --kills 20  # the same -> OUT.csv

Trials are stubs of a second; `--real`: runs of a tiny ViT, of which each has to reach the very value of the one left
alone and to tell of each step once.
"""

import argparse
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from baoc.config.environment import commit
from baoc.sweep.storage import open_study
from baoc.sweep.study import run_study
from baoc.sweep.study_config import StudyConfig, read_study
from baoc.sweep.trial_process import COMMAND
from baoc.tracking.files import write_csv
from baoc.tracking.metrics import read_metrics

# A trial of a second that leaves a checkpoint on its way, its process id, and a line per result.
STUB = """
import json, os, sys, time
words = dict(word.split("=", 1) for word in sys.argv[1:])
folder, x = words["hydra.run.dir"], float(words["x"])
open(folder + "/process", "w").write(str(os.getpid()))
time.sleep(0.4)
open(folder + "/last.ckpt", "w").close()
time.sleep(0.6)
open(folder + "/results", "a").write("result\\n")
result = {"quality": {"value": (x - 0.3) ** 2}, "state_bytes": int(100 * x), "peak_bytes": 1, "samples_per_s": 1.0}
json.dump(result, open(folder + "/result.json.part", "w"))
os.replace(folder + "/result.json.part", folder + "/result.json")
"""


RUN = (
    "model=vit", "device=cpu", "budget=state_25", "batch_size=16", "model.dropout=0.1", "trainer.max_steps=12",
    "trainer.limit_val_batches=1", "trainer.val_check_interval=3", "trainer.log_every_n_steps=1", "checkpoint.keep=2",
    "trainer.enable_progress_bar=false", "trainer.num_sanity_val_steps=0", "checkpoint.every_n_steps=1",
    "checkpoint.export=false",
)  # fmt: skip


def config(*, trials: int, kills: int, storage: str | None, real: bool = False) -> StudyConfig:
    runs: dict[str, Any] = {
        "space": {"optim.lr": {"low": 1e-4, "high": 1e-2, "log": True}},
        "baselines": [["optim.lr=0.001"], ["optim.lr=0.01"]],
        "fixed": list(RUN),
    }
    given: dict[str, Any] = {
        "name": "killed",
        "objectives": {"quality": "minimize", "state_bytes": "minimize"},
        "space": {"x": {"low": 0.0, "high": 1.0}},
        "baselines": [["x=0.25"], ["x=1"]],
        "sampler": "random",
        "n_trials": trials,
        "workers": 2,
        "retries": kills,  # every kill may hit the same trial
        "storage": storage,
        **(runs if real else {}),
    }
    return read_study(given)


def code_of(study: StudyConfig) -> str:
    """The program of a trial."""
    return COMMAND if study.fixed else STUB


def run(folder: Path, *, given: StudyConfig, kills: int, seed: int, processes: int = 2) -> dict[str, Any]:
    """Kills up to `kills` times with `processes` workers on one study, then lets it finish; what was killed and how
    it ended.

    A worker that was killed is started again at once. Fewer are killed if all trials have ended before.
    """
    rng = random.Random(seed)
    killed = {"killed_workers": 0, "killed_trials": 0}
    command = [sys.executable, "-m", "experiments.benchmarks.study_kills", "--work", str(folder)]
    command += ["--trials", str(given.n_trials), "--kills", str(kills), "--storage", given.storage or ""]
    command += ["--real"] if given.fixed else []
    workers: list[subprocess.Popen[bytes]] = []
    folder.mkdir(exist_ok=True)
    while sum(killed.values()) < kills:
        workers = [worker for worker in workers if worker.poll() is None]
        workers += [_start(command) for _ in range(processes - len(workers))]
        if not _wait_for_trial(folder, trials=given.n_trials):
            break  # all have ended
        time.sleep(rng.uniform(0.0, 6.0 if given.fixed else 1.5))
        trials = _living(folder)
        if trials and rng.random() < 0.5:
            killed["killed_trials"] += _kill(rng.choice(trials))
        else:
            killed["killed_workers"] += _kill(rng.choice(workers).pid)
    for worker in workers:
        worker.wait()
    last = _start(command)
    assert last.wait() == 0, "the last worker failed"
    return killed | compare(folder, given=given)


def compare(folder: Path, *, given: StudyConfig) -> dict[str, Any]:
    """The study in `folder` against the same one that nobody killed."""
    with tempfile.TemporaryDirectory() as other:
        alone = run_study(given, folder=other, code=code_of(given)).trials
        once = [_told(Path(other) / f"{trial.number:04d}", real=bool(given.fixed)) for trial in alone]
    study = open_study(given, folder=folder).trials
    told = [_told(folder / f"{trial.number:04d}", real=bool(given.fixed)) for trial in study]
    return {
        "trials": len(study),
        "complete": sum(trial.state.name == "COMPLETE" for trial in study),
        "same_points": [t.user_attrs["words"] for t in study] == [t.user_attrs["words"] for t in alone],
        "same_values": [t.values for t in study] == [t.values for t in alone],
        "trained_again": sum(map(len, told)) - sum(map(len, once)),  # a kill between a stub's line and its result
        "same_metrics": told == once,
    }


def _told(trial: Path, *, real: bool) -> list[object]:
    """What a trial has told: a run's metrics of each step, a stub's line for each time that it came to its end."""
    if not real:
        return list((trial / "results").read_text().splitlines())
    from experiments.benchmarks.kill_tries import CLOCKS  # with torch, which workers would import at each start

    return [{key: value for key, value in line.items() if key not in CLOCKS} for line in read_metrics(trial)]


def _wait_for_trial(folder: Path, *, trials: int) -> bool:
    """Until a trial is at work, as a kill of a worker that still imports tells nothing; False when all have ended."""
    while not _living(folder):
        if len(list(folder.glob("*/result.json"))) >= trials:
            return False
        time.sleep(0.05)
    return True


def _start(command: list[str]) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(command, stdout=subprocess.DEVNULL)


def _living(folder: Path) -> list[int]:
    """Process ids of trials without a result."""
    files = [*folder.glob("*/process"), *folder.glob("*/run.lock")]
    found: list[int] = []
    for file in files:
        with suppress(FileNotFoundError):  # a run takes its lock away
            told = re.search(r"\d+", file.read_text())
            if told and not (file.parent / "result.json").exists() and _is_trial(int(told[0])):
                found.append(int(told[0]))
    return found


def _is_trial(process: int) -> bool:
    """A process number may have come again; a trial leads its own session."""
    try:
        state, _, _, session = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[:4]
    except OSError:
        return False
    return state != "Z" and int(session) == process


def _kill(process: int) -> int:
    try:
        os.kill(process, signal.SIGKILL)
    except ProcessLookupError:
        return 0
    return 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, nargs="?")
    parser.add_argument("--work", type=Path, help="be one worker of the study in this folder")
    parser.add_argument("--trials", type=int, default=60)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--storage", default="")
    parser.add_argument("--real", action="store_true", help="trials are runs of a tiny ViT")
    given = parser.parse_args()
    study = config(trials=given.trials, kills=given.kills, storage=given.storage or None, real=given.real)
    if given.work is not None:
        run_study(study, folder=given.work, code=code_of(study))
        return
    with tempfile.TemporaryDirectory() as folder:
        told = run(Path(folder), given=study, kills=given.kills, seed=given.seed)
    about = {"trial": "run" if given.real else "stub", "storage": given.storage or "sqlite"}
    about |= {"seed": given.seed, "commit": commit()}
    print(told)
    if given.out is not None:
        write_csv(given.out, [told | about])


if __name__ == "__main__":
    main()
