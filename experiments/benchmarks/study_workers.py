"""What breaks first with many workers: processes that draw, "train" for a while and tell, on one storage.

    python -m experiments.benchmarks.study_workers OUT.csv [--workers 10 50 200] [--storages sqlite journal URL...]

Workers are forked from this process, so that two hundred fit one machine; a trial sleeps instead of training, long
enough that the storage is asked as often as by two hundred workers with trials of that length.
"""

import argparse
import json
import os
import random
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from baoc.config.environment import commit
from baoc.sweep.storage import next_trial, open_storage, open_study, release_connections, storage_url, without_password
from baoc.sweep.study_config import StudyConfig, read_study
from baoc.sweep.workers import WorkerRegistry
from baoc.tracking.files import write_csv


def config(*, name: str, trials: int, storage: str) -> StudyConfig:
    given: dict[str, Any] = {
        "name": name,
        "objectives": {"quality": "minimize", "state_bytes": "minimize"},
        "space": {"x": {"low": 0.0, "high": 1.0}},
        "sampler": "random",
        "n_trials": trials,
        "storage": None if storage == "sqlite" else storage,
    }
    return read_study(given)


def work(given: StudyConfig, *, folder: Path, seconds: float, seed: int) -> list[float]:
    """One worker until no trial waits; the seconds that the storage took, per trial."""
    import optuna

    storage = open_storage(storage_url(given.storage, folder=folder))
    study = optuna.load_study(study_name=given.name, storage=storage)
    registry, rng, spent = WorkerRegistry(study), random.Random(seed), []
    release_connections(study._storage)
    time.sleep(rng.uniform(0, seconds))
    while True:
        began = time.monotonic()
        registry.beat(running=1)
        trial = next_trial(study, config=given, folder=folder)
        if trial is None:
            return spent
        x = trial.suggest_float("x", 0.0, 1.0)
        trial.set_user_attr("worker", registry.name)
        trial.set_user_attr("words", [f"x={x}"])
        release_connections(study._storage)
        asked = time.monotonic() - began
        time.sleep(rng.uniform(0.5, 1.5) * seconds)
        began = time.monotonic()
        trial.set_constraint("budget", 0.0)
        study.tell(trial.number, [x, 1.0])
        release_connections(study._storage)
        spent.append(asked + time.monotonic() - began)


def simulate(*, workers: int, storage: str, seconds: float, per_worker: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        given = config(name=f"w{workers}_{time.time():.0f}", trials=workers * per_worker, storage=storage)
        began = time.monotonic()
        open_study(given, folder=folder)
        made = time.monotonic() - began
        began = time.monotonic()
        processes = [_fork(given, folder=folder, seconds=seconds, seed=seed) for seed in range(workers)]
        codes = [os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) for process in processes]
        wall = time.monotonic() - began
        spent = [s for file in folder.glob("spent_*") for s in json.loads(file.read_text())]
        errors = [file.read_text().strip().splitlines()[-1][:120] for file in sorted(folder.glob("error_*"))]
        states = [trial.state.name for trial in open_study(given, folder=folder).trials]
    spent.sort()
    return {
        "storage": without_password(storage).split("?")[0],
        "workers": workers,
        "trials": len(states),
        "complete": states.count("COMPLETE"),
        "workers_failed": sum(code != 0 for code in codes),
        "first_error": errors[0] if errors else "",
        "seconds_to_make_the_study": round(made, 2),
        "wall_s": round(wall, 1),
        "ideal_wall_s": round(seconds * (per_worker + 0.5), 1),
        "storage_s_per_trial_median": round(median(spent), 3) if spent else None,
        "storage_s_per_trial_p95": round(spent[int(0.95 * len(spent))], 3) if spent else None,
    }


def _fork(given: StudyConfig, *, folder: Path, seconds: float, seed: int) -> int:
    process = os.fork()
    if process:
        return process
    code = 1
    try:
        spent = work(given, folder=folder, seconds=seconds, seed=seed)
        (folder / f"spent_{seed}").write_text(json.dumps(spent))
        code = 0
    except BaseException as error:
        (folder / f"error_{seed:03d}").write_text(f"{type(error).__name__}: {error}".replace("\n", " "))
    finally:
        os._exit(code)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--workers", type=int, nargs="+", default=[10, 50, 200])
    parser.add_argument("--storages", nargs="+", default=["sqlite", "journal"])
    parser.add_argument("--seconds", type=float, default=20.0, help="of a trial")
    parser.add_argument("--per-worker", type=int, default=2)
    given = parser.parse_args()
    rows = []
    for storage in given.storages:
        for workers in given.workers:
            row = simulate(workers=workers, storage=storage, seconds=given.seconds, per_worker=given.per_worker)
            about = {"seconds_per_trial": given.seconds, "device": f"{os.cpu_count()} shared x86-64 cores"}
            rows.append(row | about | {"load": round(os.getloadavg()[0], 1), "commit": commit()})
            write_csv(given.out, rows)
            print(rows[-1], flush=True)


if __name__ == "__main__":
    main()
