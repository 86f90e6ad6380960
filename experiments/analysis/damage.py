"""How well predicted risk ranks measured damage (docs/methods.md); every use of a risk model rests on this.

A run's damage is its quality minus that of fp32 AdamW everywhere (same seed, or the mean of its seeds). Its risk is the
sum of its final allocation's terms. `candidates.csv` keeps the terms apart, so that any weights can be judged later.
"""

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import numpy as np
import yaml
from numpy.typing import NDArray
from scipy.optimize import nnls

from baoc.errors import BadInputError
from baoc.frontier.comparable_runs import group_by_workload
from baoc.frontier.runs import RunFolder, find_runs, result_of
from baoc.tracking.files import read_json
from experiments.analysis.ranks import rank_correlation

REFERENCE = "uniform_adamw"
LEAST_RUNS = 5
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """One run: the predicted risk of its allocation by term, and its loss of quality (positive is worse)."""

    run: str
    terms: Mapping[str, float]
    damage: float
    state_bytes: int
    risk_model: str
    budget: str = ""
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """Spearman's rank correlation with the damage over `n` runs, and the probability of one as large by chance."""

    what: str
    rho: float
    p: float
    n: int

    @property
    def known(self) -> bool:
        """Whether its sign is known: noise is as large in 5 % of the draws."""
        return self.p <= 0.05

    def __str__(self) -> str:
        return f"{self.rho:+.2f} (p {self.p:.2g}), n {self.n}"


def damages(runs: Sequence[RunFolder]) -> list[Damage]:
    """The damage of every finished run with its own allocation, in the given order. Raises BadInputError if the runs
    are of several workloads or lengths, or none of them is the reference."""
    workloads = group_by_workload(runs)
    if len(workloads) != 1:
        raise BadInputError(
            f"damage is measured among runs of one task, model and data set, and there are {len(workloads)} kinds: "
            "give folders of one"
        )
    finished = workloads[0][1]
    results = [result_of(run) for run in finished]
    references: dict[int, list[float]] = {}
    for result in results:
        if result["allocator"] == REFERENCE and result["quality"]["value"] is not None:
            references.setdefault(result["seed"], []).append(result["quality"]["value"])
    if not references:
        raise BadInputError(
            f"no run is allocator={REFERENCE}, which damage is measured against: add one (budget=unlimited "
            f"allocator={REFERENCE}) to the folders"
        )
    lengths = sorted({result["num_steps"] for result in results})
    if len(lengths) > 1:
        raise BadInputError(
            f"damage is measured among runs of one length, and these have {', '.join(map(str, lengths))} steps: give "
            "folders of one"
        )
    whole = fmean(value for values in references.values() for value in values)
    found = []
    for run, result in zip(finished, results, strict=True):
        terms, model = terms_of(run.path)
        if result["allocator"].startswith("uniform_") or result["quality"]["value"] is None or not terms:
            continue
        reference = fmean(references[result["seed"]]) if result["seed"] in references else whole
        sign = -1.0 if result["quality"]["higher_is_better"] else 1.0
        found.append(
            Damage(
                run=run.name,
                terms=terms,
                damage=sign * (result["quality"]["value"] - reference),
                state_bytes=result["state_bytes"],
                risk_model=model,
                budget=str(result["budget"]["name"]),
                seed=int(result["seed"]),
            )
        )
    return found


def terms_of(folder: Path) -> tuple[dict[str, float], str]:
    """(risk terms, risk model) of a run's last allocation, summed over its blocks at weights of 1. Empty if the run
    kept no candidates. Weighted terms are divided by their weight; a term of weight 0 counts 0."""
    candidates, allocation = folder / "candidates.csv", folder / "allocation.json"
    if not candidates.is_file() or not allocation.is_file():
        return {}, ""
    plan = read_json(allocation)
    chosen = dict(plan["choices"])
    terms: dict[str, float] = {}
    with candidates.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if chosen.get(row["block"]) == row["spec"]:
                for key, value in row.items():
                    if key.startswith("risk/"):
                        terms[key.removeprefix("risk/")] = terms.get(key.removeprefix("risk/"), 0.0) + float(value or 0)
    weights = yaml.safe_load((folder / "config.yaml").read_text())["risk"]["weights"]
    unweighted = {name: value / w if (w := float(weights.get(name, 1.0))) else 0.0 for name, value in terms.items()}
    return unweighted, str(plan["risk_model"])


def ranks(found: Sequence[Damage], *, weights: Mapping[str, Mapping[str, float]], seed: int = 0) -> list[Rank]:
    """Rank correlations with the damage: of the total risk under each set of weights, of each term, and of fewer bytes.
    Bytes are the baseline that any risk must beat. "At equal budgets" subtracts from both their mean over the runs of a
    budget, as an allocator compares specs within a budget. Raises BadInputError for fewer than LEAST_RUNS runs."""
    if len(found) < LEAST_RUNS:
        raise BadInputError(
            f"{len(found)} runs have an allocation of their own and a quality: ranking needs at least {LEAST_RUNS}, "
            "better 30"
        )
    damage = np.array([run.damage for run in found])
    terms = sorted({name for run in found for name in run.terms})
    columns = {f"total, {name}": totals(found, weights=own) for name, own in weights.items()}
    equal = equal_budgets(found)
    within = [
        _rank(f"{what}, at equal budgets", equal @ column, equal @ damage, seed=seed)
        for what, column in columns.items()
        if len(equal) and np.ptp(equal @ column) > 1e-12 * np.abs(column).max()
    ]
    columns["fewer state bytes"] = np.array([-float(run.state_bytes) for run in found])
    columns |= {f"term {name}": np.array([run.terms.get(name, 0.0) for run in found]) for name in terms}
    return [
        *[_rank(what, column, damage, seed=seed) for what, column in columns.items() if np.ptp(column) > 0],
        *within,
    ]


def totals(found: Sequence[Damage], *, weights: Mapping[str, float]) -> Floats:
    """The total risk of each run, [runs]; a term without a weight has weight 1."""
    return np.array([sum(weights.get(term, 1.0) * value for term, value in run.terms.items()) for run in found])


def equal_budgets(found: Sequence[Damage]) -> Floats:
    """A matrix [runs kept, runs] that subtracts the mean over the runs of the same budget. Runs that are alone in their
    budget are left out."""
    names = np.array([run.budget for run in found])
    same = (names[:, None] == names[None, :]).astype(np.float64)
    counts = same.sum(1)
    return (np.eye(len(found)) - same / counts[:, None])[counts > 1]


def fit(found: Sequence[Damage], *, ridge: float = 0.1, least: float = 0.05) -> dict[str, float]:
    """Weights with which the total risk fits the damage at equal budgets, by non-negative least squares.

    Terms are scaled to their spread. `ridge` limits the influence of single runs. Weights have mean 1, since an
    allocator uses their ratios only, and are at least `least`: a term that did no harm here may do some elsewhere.
    Terms that do not vary are left out. Empty if no term correlates with damage.
    """
    equal = equal_budgets(found)
    names = sorted({name for run in found for name in run.terms})
    terms = np.array([[run.terms.get(name, 0.0) for name in names] for run in found]).reshape(len(found), len(names))
    centred = equal @ terms
    spread = centred.std(0) if len(centred) else np.zeros(len(names))
    varies = spread > 1e-9 * np.abs(terms).max(0, initial=1e-30)
    if not varies.any():
        return {}
    matrix = centred[:, varies] / spread[varies]
    size = int(varies.sum())
    stacked = np.vstack([matrix, np.sqrt(ridge * len(matrix)) * np.eye(size)])
    solved, _ = nnls(stacked, np.concatenate([equal @ [run.damage for run in found], np.zeros(size)]))
    weights = solved / spread[varies]
    if not weights.any():
        return {}
    scaled = np.maximum(weights / weights.mean(), least)
    return {name: float(weight) for name, weight in zip(np.array(names)[varies], scaled, strict=True)}


def held_out(found: Sequence[Damage], *, seed: int = 0) -> Rank | None:
    """The rank correlation of fitted weights at equal budgets, each training seed left out of the fit in turn. None for
    fewer than two seeds, or if nothing could be fitted."""
    seeds = sorted({run.seed for run in found})
    predicted, damage = [], []
    for one in seeds if len(seeds) > 1 else ():
        weights = fit([run for run in found if run.seed != one])
        rest = [run for run in found if run.seed == one]
        equal = equal_budgets(rest)
        if not weights or not len(equal):
            continue
        scale = totals([run for run in found if run.seed != one], weights=weights).std() or 1.0
        predicted += list(equal @ totals(rest, weights=weights) / scale)
        damage += list(equal @ np.array([run.damage for run in rest]))
    if len(predicted) < LEAST_RUNS:
        return None
    what = "total, fitted weights, seeds held out, at equal budgets"
    return _rank(what, np.array(predicted), np.array(damage), seed=seed)


def _rank(what: str, predicted: Floats, damage: Floats, *, seed: int) -> Rank:
    found = rank_correlation(predicted.tolist(), damage.tolist(), seed=seed)
    return Rank(what=what, rho=found.rho, p=found.p, n=found.n)


def damages_below(folders: Sequence[Path]) -> list[Damage]:
    """`damages` of all runs at or below the folders."""
    return damages([run for folder in folders for run in find_runs(folder)])
