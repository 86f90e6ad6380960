"""Races replayed on recorded runs: how often the choice is worse than the best uniform by more than what is claimed.

    python -m experiments.analysis.race_replay  # 12 seconds of a CPU core -> printed, with --csv there

The course is that of `mode=race` (`baoc.racing.course`), and scores are looked up instead of trained. Two sets
of raw rows serve, which differ in what they can show:

- `sampler_race_{tasks,fresh}_trials.csv`: plans at 25, 10 and 3 % of the state, random feasible allocations and three
  uniforms, 11 to 14 seeds at one rate and one length. A race has one rung, 3 seeds, and 6 fresh ones.
- `role_table.csv`, phase `confirm`: recipes, AdamW at five rates, mixtures and random plans on 8 seeds, with scores at
  a quarter, at half and at the end of the same run (in mid-decay, which a race's own rungs are not). A race has all
  rungs, 3 seeds and 6 fresh ones.

A race draws its seeds with replacement, so its scores are independent draws from the recorded ones, and the truth that
its choice is held against is their mean. What the recorded seeds do not show of others, this does not either.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from baoc.racing.course import DONE, RaceOutcome, RaceSettings, Run, RunEnd, course
from baoc.racing.verdict import Entrant
from baoc.tracking.files import write_csv
from experiments.benchmarks.shared import read_rows

RESULTS = Path(__file__).resolve().parents[1] / "results"
LEVEL = 0.9
MARGIN = 0.01
UNIFORMS = {"uniform_adamw": "adamw", "uniform_adamw8bit": "adamw8", "uniform_foam8bit_matched": "foam8"}
Values = Mapping[str, Mapping[int, float]]  # entrant -> seed -> score


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """Runs of one task: entrants, and scores by entrant, stage, rate and seed."""

    name: str
    entrants: tuple[Entrant, ...]
    scores: Mapping[tuple[str, float | str, float], Mapping[int, float]]
    rungs: tuple[float, ...]
    rates: tuple[float, ...]
    seeds: tuple[int, ...]

    def truth(self, entrant: str, rate: float) -> float:
        return fmean(self.scores[entrant, 1.0, rate].values())


def planned(rows: Sequence[Mapping[str, str]], *, task: str, budget: float) -> Recorded:
    """One task and budget of the sampler's races: the baselines of each study, which every seed has."""
    scores: dict[tuple[str, float | str, float], dict[int, float]] = {}
    sizes: dict[str, int] = {}
    for row in rows:
        if row["task"] != task or row["baseline"] != "True" or row["state"] != "COMPLETE" or row["violated"] == "True":
            continue
        name = UNIFORMS.get(row["allocator"])
        if name is None and row["budget"].removeprefix("state_") in (f"{budget:g}", f"{budget:.1f}"):
            name = {"exact": "plan", "random": "random"}.get(row["allocator"])
        if name is not None:
            scores.setdefault((name, 1.0, 1.0), {})[int(row["seed"])] = float(row["quality"])
            sizes[name] = int(float(row["state_bytes"]))
    limit = budget / 100 * sizes["adamw"]
    kept = {name: size for name, size in sizes.items() if size <= 1.02 * limit or name in ("adamw", "adamw8", "foam8")}
    entrants = tuple(
        Entrant(name=name, state_bytes=size, uniform=name in UNIFORMS.values(), control=name == "random")
        for name, size in kept.items()
    )
    shared = set.intersection(*(set(scores[name, 1.0, 1.0]) for name in kept))
    name = f"{task}, plan at {budget:g} %"
    return Recorded(
        name=name, entrants=entrants, scores=scores, rungs=(1.0,), rates=(1.0,), seeds=tuple(sorted(shared))
    )


def confirmed(rows: Sequence[Mapping[str, str]], *, task: str) -> Recorded:
    """What the role study ran on eight fresh seeds of one task; mixtures of rules are plans."""
    scores: dict[tuple[str, float | str, float], dict[int, float]] = {}
    sizes: dict[str, int] = {}
    for row in rows:
        if row["task"] != task or row["phase"] != "confirm":
            continue
        for stage, column in ((0.25, "choice_25"), (0.5, "choice_50"), (1.0, "value")):
            scores.setdefault((row["label"], stage, 1.0), {})[int(row["seed"])] = float(row[column])
        sizes[row["label"]] = int(row["state_bytes"])
    controls = ("random", "permuted")
    entrants = tuple(
        Entrant(
            name=name, state_bytes=size, uniform=not name.startswith((*controls, "choice_mixed")),
            control=name.startswith(controls),
        )
        for name, size in sizes.items()
    )  # fmt: skip
    seeds = tuple(sorted({seed for held in scores.values() for seed in held}))
    return Recorded(
        name=f"{task}, recipes", entrants=entrants, scores=scores, rungs=(0.25, 0.5, 1.0), rates=(1.0,), seeds=seeds
    )


def replay(recorded: Recorded, *, rng: np.random.Generator) -> tuple[RaceOutcome, bool, bool, float]:
    """One race: its outcome, whether the claim is wrong, whether a plan was wrongly taken, and what it gained over the
    best uniform, as a share of its score."""
    fresh_seeds = 6 if len(recorded.seeds) > 6 else 0
    drawn = [int(seed) for seed in rng.choice(recorded.seeds, size=3 + fresh_seeds)]
    at = {100 + index: seed for index, seed in enumerate(drawn)}  # one that is drawn again is a seed of its own
    settings = RaceSettings(
        rates=recorded.rates,
        rungs=recorded.rungs,
        seeds=tuple(at)[:3],
        fresh_seeds=tuple(at)[3:],
        steps={entrant.name: 1000 for entrant in recorded.entrants},
        margin=MARGIN,
        level=LEVEL,
    )

    def score(run: Run) -> RunEnd:
        stage = 1.0 if isinstance(run.stage, str) else run.stage
        return RunEnd(status=DONE, score=recorded.scores[run.entrant, stage, run.rate][at[run.seed]])

    going, sent = course(recorded.entrants, settings=settings), None
    try:
        while True:
            asked = going.send(sent) if sent is not None else next(going)
            sent = {run: score(run) for run in asked}
    except StopIteration as ended:
        outcome: RaceOutcome = ended.value
    best = min(
        recorded.truth(entrant.name, rate)
        for entrant in recorded.entrants
        if entrant.uniform
        for rate in recorded.rates
    )
    choice, found = outcome.verdict.choice, outcome.verdict
    beyond = recorded.truth(choice, outcome.rates[choice]) - best
    mixed = choice not in {entrant.name for entrant in recorded.entrants if entrant.uniform}
    return outcome, beyond > max(found.margin, found.margin_held), mixed and beyond > 0, -beyond / best


def summary(recorded: Recorded, *, races: int, seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    outcomes = [replay(recorded, rng=rng) for _ in range(races)]
    choices = [outcome.verdict.choice for outcome, *_ in outcomes]
    common = max(sorted(set(choices)), key=choices.count)
    return {
        "races": recorded.name,
        "entrants": len(recorded.entrants),
        "seeds": len(recorded.seeds),
        "replayed": races,
        "wrong_claims": round(fmean(wrong for _, wrong, *_ in outcomes), 4),
        "plans_wrongly_taken": round(fmean(wrong for *_, wrong, _ in outcomes), 4),
        "most_chosen": common,
        "chosen_share": round(choices.count(common) / races, 3),
        "certain": round(fmean(outcome.verdict.is_certain for outcome, *_ in outcomes), 3),
        "gain_over_best_uniform": round(fmean(gain for *_, gain in outcomes), 5),
    }


def recorded_races() -> list[Recorded]:
    roles = read_rows(RESULTS / "role_table.csv")
    trials = [row for kind in ("tasks", "fresh") for row in read_rows(RESULTS / f"sampler_race_{kind}_trials.csv")]
    tasks = list(dict.fromkeys(row["task"] for row in trials))
    found = [planned(trials, task=task, budget=budget) for task in tasks for budget in (25.0, 10.0, 3.0)]
    return found + [confirmed(roles, task=task) for task in dict.fromkeys(row["task"] for row in roles)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--races", type=int, default=1000, help="replayed for each set")
    parser.add_argument("--csv", type=Path)
    given = parser.parse_args()
    rows = [summary(recorded, races=given.races) for recorded in recorded_races()]
    if given.csv is not None:
        write_csv(given.csv, rows)
    head = list(rows[0])
    widths = [max(len(key), *(len(str(row[key])) for row in rows)) for key in head]
    for cells in (head, *([row[key] for key in head] for row in rows)):
        print("  ".join(str(cell).ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip())


if __name__ == "__main__":
    sys.exit(main())
