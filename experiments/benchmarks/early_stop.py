"""What early stops save and cost: a study of 40 trials that all run to their end, then judged as if they were stopped.

    python -m experiments.benchmarks.early_stop FOLDER OUT.csv

Runs (or goes on with) the study in FOLDER, then replays its trials in their order under several rungs and margins.
Saved is the share of optimizer steps; kept is the share of the hypervolume of quality and state, a row along doublings
of the state and one along plain bytes (`state_axis`; rows of before this column are along bytes).
"""

import argparse
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

from optuna.trial import FrozenTrial

from baoc.config.environment import commit
from baoc.frontier.pareto import doublings, hypervolume
from baoc.sweep.early_stopping import find_dominating_trial, values_at_rung
from baoc.sweep.study import run_study
from baoc.sweep.study_config import read_study
from baoc.tracking.files import write_csv
from baoc.tracking.metrics import read_metrics

STEPS = 200
WAYS = {"quality": "minimize", "state_bytes": "minimize"}
STUDY: dict[str, Any] = {
    "name": "full",
    "objectives": WAYS,
    "sampler": "random",
    "n_trials": 40,
    "fixed": [
        "model=vit",
        "dataset=digits",
        "device=cpu",
        f"trainer.max_steps={STEPS}",
        "trainer.val_check_interval=25",
        "checkpoint.export=false",
    ],
    "space": {
        "budget": {"low": 1.0, "high": 60.0, "log": True, "format": "state_{:.3g}"},
        "allocator": {"choices": ["exact", "random"]},
        "risk": {"choices": ["statistics", "prior"], "when": {"allocator": "exact"}},
    },
    "baselines": [
        ["budget=unlimited", "allocator=uniform_adamw"],
        ["budget=unlimited", "allocator=uniform_adamw8bit"],
        ["budget=unlimited", "allocator=uniform_foam8bit_matched"],
    ],
}
RUNGS = ((25, 50, 100), (50, 100), (50, 100, 150))
MARGINS = (0.0, 0.05, 0.1, 0.2, 0.3)
LEAST = 4
AXES = ("log2", "bytes")  # of the state


def replay(trials: Sequence[FrozenTrial], *, folder: Path, rungs: Sequence[int], margin: float) -> list[dict[str, Any]]:
    """One pass in the order of the trials, each compared with what came before it; baselines run to their end. A row
    per axis of the state."""
    known: dict[int, list[tuple[int, Any]]] = {rung: [] for rung in rungs}
    steps, whole = 0, []
    for trial in trials:
        own = folder / f"{trial.number:04d}"
        rows = read_metrics(own)
        ended = 0
        for rung in rungs:
            values = values_at_rung(rows, rung=rung, folder=own, names=WAYS, metric="val/loss")
            assert values is not None, f"{own} did not validate at step {rung}"
            others = list(known[rung])
            known[rung].append((trial.number, values))
            free = trial.number >= len(STUDY["baselines"]) and len(others) >= LEAST
            if free and find_dominating_trial(values, others, objectives=WAYS, margin=margin) is not None:
                ended = rung
                break
        steps += ended or STEPS
        if not ended:
            whole.append(trial)
    told = {
        "rungs": " ".join(map(str, rungs)),
        "margin": margin,
        "ended": len(trials) - len(whole),
        "saved": round(1 - steps / (STEPS * len(trials)), 4),
    }
    return [told | {"state_axis": axis, "hypervolume_kept": kept(whole, of=trials, axis=axis)} for axis in AXES]


def kept(whole: Sequence[FrozenTrial], *, of: Sequence[FrozenTrial], axis: str) -> float:
    """The share of the hypervolume of all trials that those have which ran to their end; from the worst of all."""
    worst, most = (max(trial.values[at] for trial in of) for at in range(2))
    places = {"log2": lambda state: -doublings(state, up_to=most), "bytes": lambda state: state - most}
    own, all_of_it = (
        hypervolume([(t.values[0], places[axis](t.values[1])) for t in group], reference=(worst, 0.0))
        for group in (whole, of)
    )
    return round(own / all_of_it, 4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path)
    given = parser.parse_args()
    trials = run_study(read_study(STUDY), folder=given.folder).trials
    pairs = product(RUNGS, MARGINS)
    rows = [row for r, m in pairs for row in replay(trials, folder=given.folder, rungs=r, margin=m)]
    about = {"trials": len(trials), "steps": STEPS, "device": "2 shared x86-64 cores", "commit": commit()}
    write_csv(given.out, [row | about for row in rows])
    for row in rows:
        print(row)


if __name__ == "__main__":
    main()
