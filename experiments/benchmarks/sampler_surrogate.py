"""Samplers against random draws on surrogates of recorded trials: many pairs in minutes, and what is possible at all.

    python -m experiments.benchmarks.sampler_surrogate OUT.csv --pairs 40 TRIALS.csv [TRIALS.csv ...]

TRIALS.csv are `sampler_race_trials.csv` of races. The logarithm of the quality is a polynomial of budget, learning
rate, risk and matching (ridge) plus a Gaussian process of the rest; each pair of studies runs on another draw of its
posterior, so that a sampler is not fitted to one surface, with independent noise of the fitted size. Nothing on a
surrogate is a claim about real runs: it says which sampler is worth racing, and how many pairs would tell it.

`tpe` is the sampler of studies, `tpe, Optuna's rules` the one before it, `oracle` knows the surrogate's best settings
for the budgets that random search draws.
"""

import argparse
import csv
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import numpy as np
import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution
from optuna.samplers import BaseSampler, TPESampler
from optuna.trial import TrialState, create_trial
from scipy.optimize import minimize

from baoc.frontier.pareto import hypervolume
from baoc.sweep.sampling import make_sampler, point_from_overrides
from baoc.sweep.study_config import StudyConfig
from baoc.tracking.files import write_csv
from experiments.benchmarks.sampler_race import TASKS, study_config

AFTER = (20, 30, 40)  # trials, baselines among them
CELLS = (16, 24)  # of the grid over budget and learning rate that a surface is drawn on
WHOLE_BYTES = 1e6  # of fp32 AdamW's state; only ratios matter
RIDGE = 0.05
Params = Mapping[str, Any]
Make = Callable[[StudyConfig, int], BaseSampler]


class Surrogate:
    """Quality of settings of one task: draws of surfaces, the size of the noise, and recorded baselines by seed."""

    def __init__(self, rows: Sequence[Mapping[str, str]], *, task: str, draws: int):
        self.config = study_config(task, sampler="tpe", seed=0, trials=AFTER[-1])
        self.worst = TASKS[task][2]
        ranges = {param.key: param for param in self.config.space}
        rate = ranges["optim.lr"]
        self.space: dict[str, BaseDistribution] = {
            "budget": FloatDistribution(ranges["budget"].low, ranges["budget"].high, log=True),
            "risk": CategoricalDistribution(("statistics", "prior")),
            "optim.matching": CategoricalDistribution(("rms", "displacement")),
            "optim.lr": FloatDistribution(rate.low, rate.high, log=True),
        }
        own = [row for row in rows if row["task"] == task and row["state"] == "COMPLETE" and row["violated"] != "True"]
        # the first draws of paired studies are the same runs
        keys = ("budget", "risk", "optim.matching", "optim.lr", "seed")
        searched = {(*[r[k] for k in keys], r["quality"][:6]): r for r in own if r["baseline"] == "False"}
        points = np.array([self.unit(_settings(row)) for row in searched.values()])
        self.num_trials = len(points)
        self._fit(points, np.log([float(row["quality"]) for row in searched.values()]), draws=draws)
        self.baselines = []
        for seed in sorted({row["seed"] for row in own}):
            fixed = {row["trial"]: row for row in own if row["seed"] == seed and row["baseline"] == "True"}
            whole = float(fixed["0"]["state_bytes"])  # the first baseline is fp32 AdamW
            self.baselines.append([(float(r["quality"]), float(r["state_bytes"]) / whole) for r in fixed.values()])
        self.defaults = [
            point for words in self.config.baselines if (point := point_from_overrides(words, self.config.space))
        ]

    def unit(self, params: Params) -> list[float]:
        """Budget and learning rate in their logarithm, risk and matching, each from 0 to 1."""
        place = []
        for key in ("budget", "optim.lr"):
            how = self.space[key]
            assert isinstance(how, FloatDistribution)
            place.append(math.log(params[key] / how.low) / math.log(how.high / how.low))
        return [*place, float(params["risk"] == "prior"), float(params["optim.matching"] == "displacement")]

    def _fit(self, points: np.ndarray, outputs: np.ndarray, *, draws: int) -> None:
        """`points` [n, 4], `outputs` [n]: surfaces [draws, risk, matching, budget, rate], and their noise."""
        inputs = features(points)
        weights = np.linalg.solve(inputs.T @ inputs + RIDGE * np.eye(inputs.shape[1]), inputs.T @ outputs)
        left = outputs - inputs @ weights

        def covariance(a: np.ndarray, b: np.ndarray, logs: np.ndarray) -> np.ndarray:
            away = ((a[:, None] - b[None]) / np.exp(logs[1:5])) ** 2
            return np.exp(2 * logs[0]) * np.exp(-0.5 * away.sum(-1))

        def cost(logs: np.ndarray) -> float:
            """Negative log likelihood, with lengths drawn to .7 of a range."""
            own = covariance(points, points, logs) + (np.exp(2 * logs[5]) + 1e-6) * np.eye(len(points))
            lower = np.linalg.cholesky(own)
            solved = np.linalg.solve(lower, left)
            prior = ((logs[1:5] - math.log(0.7)) ** 2).sum() / 2
            return float(0.5 * solved @ solved + np.log(np.diag(lower)).sum() + prior)

        start = np.log([left.std(), 0.5, 0.5, 1.0, 1.0, 0.7 * left.std()])
        limits = [(-6, 1), *[(math.log(0.12), math.log(5))] * 4, (math.log(0.01), 0)]
        logs = minimize(cost, start, method="L-BFGS-B", bounds=limits).x
        self.noise = float(np.exp(logs[5]))
        budgets, rates = (np.linspace(0, 1, n) for n in CELLS)
        grid = np.array([(b, rate, r, m) for r in (0, 1) for m in (0, 1) for b in budgets for rate in rates])
        across = covariance(grid, points, logs)
        own = covariance(points, points, logs) + self.noise**2 * np.eye(len(points))
        middle = features(grid) @ weights + across @ np.linalg.solve(own, left)
        spread = covariance(grid, grid, logs) - across @ np.linalg.solve(own, across.T)
        lower = np.linalg.cholesky(spread + 1e-5 * np.eye(len(grid)))
        random = np.random.default_rng(0).normal(size=(draws, len(grid)))
        self.surfaces = (middle + random @ lower.T).reshape(draws, 2, 2, *CELLS)

    def log_quality(self, params: Params, *, draw: int) -> float:
        """Bilinear between the cells of a draw's grid."""
        budget, rate, risk, matching = self.unit(params)
        cells = self.surfaces[draw % len(self.surfaces), int(risk), int(matching)]
        x, y = budget * (CELLS[0] - 1), rate * (CELLS[1] - 1)
        i, j = min(int(x), CELLS[0] - 2), min(int(y), CELLS[1] - 2)
        (a, b), (c, d) = cells[i : i + 2, j : j + 2]
        return float((a * (1 - y + j) + b * (y - j)) * (1 - x + i) + (c * (1 - y + j) + d * (y - j)) * (x - i))

    def quality(self, params: Params, *, draw: int, noise: float) -> float:
        return min(math.exp(self.log_quality(params, draw=draw) + noise), 1.3 * self.worst)

    def best(self, budget: float, *, draw: int) -> Params:
        how = self.space["optim.lr"]
        assert isinstance(how, FloatDistribution)
        rates = np.exp(np.linspace(math.log(how.low), math.log(how.high), CELLS[1]))
        every = [
            {"budget": budget, "risk": risk, "optim.matching": matching, "optim.lr": float(rate)}
            for risk in ("statistics", "prior")
            for matching in ("rms", "displacement")
            for rate in rates
        ]
        return min(every, key=lambda params: self.log_quality(params, draw=draw))


def _settings(row: Mapping[str, str]) -> Params:
    return {**row, "budget": float(row["budget"].removeprefix("state_")), "optim.lr": float(row["optim.lr"])}


def features(points: np.ndarray) -> np.ndarray:
    """[n, 4] from 0 to 1 -> [n, 16]."""
    b, rate, r, m = (2 * points[:, i] - 1 for i in range(4))
    plain = [np.ones_like(b), b, b * b, rate, rate * rate, rate**3, b * rate, b * rate * rate]
    crossed = [r, m, r * b, m * b, r * rate, m * rate, m * rate * rate, r * m]
    return np.stack([*plain, *crossed], axis=1)


def study(surrogate: Surrogate, *, seed: int, sampler: str, make: Make | None) -> dict[int, float]:
    """Hypervolume after k trials, of the box between nothing and `worst`; without `make` the oracle."""
    config = study_config(surrogate.config.name.split("_")[0], sampler=sampler, seed=seed, trials=AFTER[-1])
    noise = np.random.default_rng([seed, 1]).normal(0.0, surrogate.noise, AFTER[-1] + len(surrogate.defaults))
    told = optuna.create_study(directions=["minimize", "minimize"])
    costs = list(surrogate.baselines[seed % len(surrogate.baselines)])
    for quality, share in costs:
        told.add_trial(
            create_trial(values=[quality, share * WHOLE_BYTES], user_attrs={"overrides": ["allocator=fixed"]})
        )
    found: dict[int, float] = {}

    def tell(params: Params, number: int, attributes: Mapping[str, Any]) -> None:
        values = [surrogate.quality(params, draw=seed, noise=float(noise[number])), params["budget"] / 100]
        costs.append((values[0], values[1]))
        given = {"params": dict(params), "distributions": surrogate.space, "user_attrs": dict(attributes)}
        told.add_trial(create_trial(values=[values[0], values[1] * WHOLE_BYTES], **given))
        if len(costs) in AFTER:
            good = [cost for cost in costs if cost[0] < surrogate.worst]
            found[len(costs)] = hypervolume(good, reference=(surrogate.worst, 1.0)) / surrogate.worst

    for number, point in enumerate(surrogate.defaults):
        tell(point, number, {"overrides": ["a default"]})
    number = len(surrogate.defaults)
    while len(costs) < AFTER[-1]:
        told.sampler = make_sampler(config, number=number + 9) if make is None else make(config, number + 9)
        asked = told.ask(surrogate.space)
        told.tell(asked, state=TrialState.FAIL)  # its answer is added as a trial of its own
        params = asked.params if make is not None else surrogate.best(asked.params["budget"], draw=seed)
        tell(params, number, {})
        number += 1
    return found


def of_optuna(config: StudyConfig, number: int) -> BaseSampler:
    """Five random draws, then TPE on both objectives, each setting by itself."""
    seed = int(np.random.SeedSequence([config.seed, number]).generate_state(1)[0])
    return TPESampler(seed=seed, n_startup_trials=5 + 3, constant_liar=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("trials", type=Path, nargs="+")
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--tasks", nargs="+", default=["vision", "language"], choices=list(TASKS))
    given = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    rows = [row for file in given.trials for row in csv.DictReader(file.open())]
    as_it_is: Make = lambda config, number: make_sampler(config, number=number)  # noqa: E731
    chosen: dict[str, tuple[str, Make | None]] = {
        "tpe": ("tpe", as_it_is),
        "tpe, Optuna's rules": ("tpe", of_optuna),
        "oracle": ("random", None),
    }
    told: list[dict[str, Any]] = []
    for task in given.tasks:
        surrogate = Surrogate(rows, task=task, draws=given.pairs)
        print(f"{task}: {surrogate.num_trials} trials, noise {surrogate.noise:.3f}", flush=True)
        seeds = range(given.pairs)
        random = [study(surrogate, seed=seed, sampler="random", make=as_it_is) for seed in seeds]
        for name, (sampler, make) in chosen.items():
            found = [study(surrogate, seed=seed, sampler=sampler, make=make) for seed in seeds]
            for k in AFTER:
                pairs = [own[k] - theirs[k] for own, theirs in zip(found, random, strict=True)]
                own = {"task": task, "sampler": name, "trials": k, "pairs": len(pairs), "difference": mean(pairs)}
                own |= {"difference_sd": stdev(pairs), "better_pairs": sum(p > 0 for p in pairs)}
                told.append(own | {"surrogate_trials": surrogate.num_trials, "noise": surrogate.noise})
                print(own, flush=True)
            write_csv(given.out, told)


if __name__ == "__main__":
    main()
