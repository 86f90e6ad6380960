"""Damage and risk terms of many runs as one small table, and how well risk ranks damage, budget by budget.

    python -m experiments.benchmarks.risk_table FOLDER OUT.csv [--study STUDY]    # runs below FOLDER -> OUT.csv
    python -m experiments.benchmarks.risk_table OUT.csv RANKS.csv --ranks         # rank correlations of such a table

With --study the trials of a risk_weights study and its winner are told as well. RANKS.csv has Spearman's correlation of
damage with risk at weights of 1, at fitted ones on seeds that were held out, and with fewer state bytes, for all runs
at equal budgets and for each budget alone.
"""

import argparse
import csv
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from baoc.errors import BadInputError
from baoc.frontier.runs import find_runs
from baoc.sweep.status import load_study
from baoc.tracking.files import write_csv
from experiments.analysis.calibrate import UNIT_WEIGHTS, winner_of
from experiments.analysis.damage import LEAST_RUNS, Damage, damages, held_out, ranks

PLAIN = [item.name for item in fields(Damage) if item.name != "terms"]
TERM = "term/"


def rows_of(found: Sequence[Damage]) -> list[dict[str, Any]]:
    return [
        {key: getattr(run, key) for key in PLAIN} | {f"{TERM}{k}": v for k, v in run.terms.items()} for run in found
    ]


def read_table(file: Path) -> list[Damage]:
    """What `rows_of` wrote."""
    with file.open(newline="", encoding="utf-8") as opened:
        rows = list(csv.DictReader(opened))
    return [
        Damage(
            run=row["run"],
            terms={key.removeprefix(TERM): float(v) for key, v in row.items() if key.startswith(TERM) and v},
            damage=float(row["damage"]),
            state_bytes=int(float(row["state_bytes"])),
            risk_model=row["risk_model"],
            budget=row["budget"],
            seed=int(row["seed"]),
        )
        for row in rows
    ]


def tell_study(folder: Path) -> None:
    """Every trial's weights and quality, and the winner beside weights of 1."""
    study, _, _ = load_study(folder)
    for trial in study.get_trials(deepcopy=False):
        words = [word.removeprefix("risk.weights.") for word in trial.user_attrs.get("words", ()) if "weights" in word]
        own = trial.user_attrs.get("overrides")
        print(trial.number, trial.state.name, trial.values, " ".join(words) if own is None else own, flush=True)
    try:
        print(winner_of(study, folder=folder), flush=True)
    except BadInputError as error:
        print(f"no winner: {error}", flush=True)


def rank_rows(found: Sequence[Damage]) -> list[dict[str, Any]]:
    """By budget, behind all runs together."""
    told = []
    for budget in ("all", *dict.fromkeys(run.budget for run in found)):
        own = [run for run in found if budget in ("all", run.budget)]
        if len(own) < LEAST_RUNS:
            continue
        fitted = held_out(own)
        every = [*ranks(own, weights={UNIT_WEIGHTS: {}}), *([] if fitted is None else [fitted])]
        told += [{"budget": budget} | asdict(rank) for rank in every]
    return told


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("source", type=Path, help="folder of runs, or a table of them")
    parser.add_argument("out", type=Path)
    parser.add_argument("--study", type=Path, help="of sweeps=risk_weights_*, whose trials are told")
    parser.add_argument("--ranks", action="store_true", help="`source` is a table, whose ranks are written")
    given = parser.parse_args()
    if given.study is not None:
        tell_study(given.study)
    rows = rank_rows(read_table(given.source)) if given.ranks else rows_of(damages(find_runs(given.source)))
    write_csv(given.out, rows)
    print(f"{len(rows)} rows in {given.out}", flush=True)
    for row in rank_rows(read_table(given.out)) if not given.ranks else rows:
        print({key: round(v, 3) if isinstance(v, float) else v for key, v in row.items()}, flush=True)


if __name__ == "__main__":
    main()
