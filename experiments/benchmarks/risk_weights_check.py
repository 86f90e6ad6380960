"""Do the weights that a risk_weights study picked help on seeds that it did not see? Beside weights of 1, and chance.

    python -m experiments.benchmarks.risk_weights_check STUDY FOLDER OUT.csv --seeds 10 11 12 13 14 --budgets state_10

STUDY is the study's folder, FOLDER that of the new runs, which have the study's own fixed overrides; killed, the same
command goes on. OUT.csv gets rows per budget and over all: quality of the winner's weights less that of its rivals.
"""

import argparse
import math
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import yaml

from baoc.config import assets
from baoc.frontier.runs import find_runs
from baoc.sweep.status import load_study
from baoc.sweep.study import run_study
from baoc.sweep.study_config import StudyConfig, read_study
from baoc.tracking.files import write_csv
from experiments.analysis.calibrate import WEIGHT, winner_of
from experiments.benchmarks.fronts import paired

RIVALS = ("weights of 1", "random")


def study_of(
    fixed: Sequence[str],
    *,
    weights: Mapping[str, float],
    seeds: Sequence[int],
    budgets: Sequence[str],
    rivals: Sequence[str] = RIVALS,
    risk: str = "",
) -> StudyConfig:
    own = [f"risk={risk}"] if risk else [f"{WEIGHT}{term}={value:g}" for term, value in weights.items()]
    sets = [own, *([] if rival == RIVALS[0] else ["allocator=random"] for rival in rivals)]
    lists = [[*words, f"budget={budget}", f"seed={seed}"] for seed, budget, words in product(seeds, budgets, sets)]
    given: dict[str, Any] = {
        "name": "risk_weights_check",
        "objectives": {"quality": "minimize"},
        "space": {"seed": {"choices": [0]}},  # not searched: all trials are listed
        "sampler": "random",
        "fixed": list(fixed),
        "baselines": lists,
        "n_trials": len(lists),
    }
    return read_study(given)


def rows_of(folder: Path, *, weights: Mapping[str, float]) -> list[dict[str, Any]]:
    """Per budget, and over all of them (pairs are budgets and seeds)."""
    found: dict[str, dict[tuple[str, int], float]] = {"winner": {}, **{rival: {} for rival in RIVALS}}
    commits: dict[str, None] = {}
    for run in find_runs(folder):
        if run.result is None or run.result["quality"]["value"] is None:
            continue
        tried = any(
            math.isclose(float(run.settings.get(f"{WEIGHT}{term}", 1.0)), value) and value != 1
            for term, value in weights.items()
        )
        name = "random" if run.result["allocator"] == "random" else "winner" if tried else "weights of 1"
        found[name][run.result["budget"]["name"], run.result["seed"]] = run.result["quality"]["value"]
        commits[str(run.result["commit"])[:7]] = None
    told = []
    for budget in (*dict.fromkeys(budget for budget, _ in found["winner"]), "all"):
        for rival in (rival for rival in RIVALS if found[rival]):
            own, theirs = (
                {key: value for key, value in found[name].items() if budget in ("all", key[0])}
                for name in ("winner", rival)
            )
            numbered = {key: at for at, key in enumerate(sorted(set(own) | set(theirs)))}
            pairs = paired({numbered[k]: v for k, v in own.items()}, {numbered[k]: v for k, v in theirs.items()})
            told.append({"budget": budget, "rival": rival, **pairs, "commit": " ".join(commits)})
    return told


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("study", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(10, 15)))
    parser.add_argument("--budgets", nargs="+", default=["state_10", "state_3"])
    parser.add_argument("--risk", default="", help="weights of conf/risk/NAME.yaml instead of the winner's")
    parser.add_argument("--rivals", nargs="+", default=list(RIVALS), choices=RIVALS)
    parser.add_argument("--more", nargs="*", default=[], help="overrides on top of the study's, as other lengths")
    given = parser.parse_args()
    study, _, _ = load_study(given.study)
    if given.risk:
        weights = yaml.safe_load(assets.options("risk")[given.risk].read_text(encoding="utf-8"))["weights"]
    else:
        weights = winner_of(study, folder=given.study).weights
    print(dict(weights), flush=True)
    fixed = study.user_attrs["definition"]["fixed"]
    chosen = {"seeds": given.seeds, "budgets": given.budgets, "rivals": given.rivals, "risk": given.risk}
    run_study(study_of([*fixed, *given.more], weights=weights, **chosen), folder=given.folder)
    rows = rows_of(given.folder, weights=weights)
    write_csv(given.out, rows)
    for row in rows:
        print(row)


if __name__ == "__main__":
    main()
