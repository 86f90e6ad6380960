"""Samplers against random draws on a surrogate of recorded vision trials: many pairs in a minute, and what is possible.

    python -m experiments.benchmarks.sampler_surrogate OUT.csv --pairs 60 TRIALS.csv [TRIALS.csv ...]

TRIALS.csv are `sampler_race_trials.csv` of races. The logarithm of the quality is fitted by least squares (a polynomial
in the logarithms of budget and learning rate, with risk and matching); draws get noise of the residual's size. Nothing
on a surrogate is a claim about real runs: it says which sampler is worth racing, and how many pairs would tell it.

`oracle` knows the surrogate's best settings for the budgets that random search draws. `trend` draws budgets as random
search does and the other settings by TPE on what is left of the quality behind its trend over budgets.
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
from optuna.samplers import RandomSampler, TPESampler
from optuna.trial import create_trial

from baoc.frontier import hypervolume
from baoc.sweep.sampling import TPE_STARTUP
from baoc.tracking.files import write_csv

SPACE: dict[str, BaseDistribution] = {
    "budget": FloatDistribution(1.0, 60.0, log=True),
    "risk": CategoricalDistribution(("statistics", "prior")),
    "optim.matching": CategoricalDistribution(("rms", "displacement")),
    "optim.lr": FloatDistribution(3e-4, 3e-2, log=True),
}
WORST = math.log(10)  # quality of knowing nothing
AFTER = (20, 30, 40)  # trials, baselines among them
Params = Mapping[str, Any]
Propose = Callable[[int, Params, Sequence[tuple[Params, float]]], Params]


class Surrogate:
    """Quality of settings, and its noise (standard deviation of the logarithm)."""

    def __init__(self, trials: Sequence[Mapping[str, str]]):
        searched = [row for row in trials if row["state"] == "COMPLETE" and row["baseline"] == "False"]
        # the first draws of paired studies are the same runs
        known = {tuple(row[key] for key in (*SPACE, "seed")): row for row in searched if row["violated"] != "True"}
        inputs = np.array([features(self._params(row)) for row in known.values()])
        outputs = np.log([float(row["quality"]) for row in known.values()])
        self.weights = np.linalg.lstsq(inputs, outputs, rcond=None)[0]
        left = outputs - inputs @ self.weights
        self.noise, self.explained, self.num_trials = (
            float(left.std()),
            float(1 - left.var() / outputs.var()),
            len(known),
        )
        first = min(int(row["seed"]) for row in trials)
        fixed = {row["trial"]: row for row in trials if row["baseline"] == "True" and int(row["seed"]) == first}
        whole = float(fixed["0"]["state_bytes"])  # the first baseline is fp32 AdamW
        self.baselines = [(float(row["quality"]), float(row["state_bytes"]) / whole) for row in fixed.values()]

    @staticmethod
    def _params(row: Mapping[str, str]) -> Params:
        numbers = {"budget": float(row["budget"].removeprefix("state_")), "optim.lr": float(row["optim.lr"])}
        return {**row, **numbers}

    def quality(self, params: Params, *, noise: float = 0.0) -> float:
        return min(math.exp(float(np.array(features(params)) @ self.weights) + noise), 3.0)

    def best(self, budget: float) -> Params:
        rates = np.exp(np.linspace(math.log(3e-4), math.log(3e-2), 40))
        every = [
            {"budget": budget, "risk": risk, "optim.matching": matching, "optim.lr": float(rate)}
            for risk in ("statistics", "prior")
            for matching in ("rms", "displacement")
            for rate in rates
        ]
        return min(every, key=self.quality)


def features(params: Params) -> list[float]:
    budget, rate = math.log(params["budget"] / 8), math.log(params["optim.lr"] / 3e-3)
    risk = 1.0 if params["risk"] == "prior" else -1.0
    matching = 1.0 if params["optim.matching"] == "displacement" else -1.0
    plain = [1.0, budget, budget**2, rate, rate**2, rate**3, budget * rate, budget * rate**2, budget**2 * rate]
    crossed = [risk * v for v in (1.0, budget, rate)] + [matching * v for v in (1.0, budget, rate, rate**2)]
    return [*plain, *crossed, risk * matching]


def study(surrogate: Surrogate, *, seed: int, propose: Propose | None) -> dict[int, float]:
    """Hypervolume after k trials; `propose(number, random point, finished)` gives what is tried, None: the point."""
    noise = np.random.default_rng([seed, 1]).normal(0.0, surrogate.noise, AFTER[-1])
    random = optuna.create_study(sampler=RandomSampler(seed=seed))
    costs, done, found = list(surrogate.baselines), list[tuple[Params, float]](), dict[int, float]()
    while len(costs) < AFTER[-1]:
        point: Params = random.ask(SPACE).params
        if propose is not None:
            point = propose(len(done), point, done)
        value = surrogate.quality(point, noise=float(noise[len(done)]))
        done.append((point, value))
        costs.append((value, point["budget"] / 100))
        if len(costs) in AFTER:
            found[len(costs)] = hypervolume([c for c in costs if c[0] < WORST], reference=(WORST, 1.0)) / WORST
    return found


def by_sampler(seed: int, *, startup: int = TPE_STARTUP, multivariate: bool = False) -> Propose:
    """TPE on both objectives."""

    def propose(number: int, point: Params, done: Sequence[tuple[Params, float]]) -> Params:
        if number < startup:
            return point
        sampler = TPESampler(seed=seed * 1000 + number, n_startup_trials=0, multivariate=multivariate)
        asked = optuna.create_study(directions=["minimize", "minimize"], sampler=sampler)
        asked.add_trials(
            [create_trial(params=dict(p), distributions=SPACE, values=[v, p["budget"]]) for p, v in done],
        )
        return asked.ask(SPACE).params

    return propose


def by_trend(seed: int, *, startup: int = TPE_STARTUP) -> Propose:
    def propose(number: int, point: Params, done: Sequence[tuple[Params, float]]) -> Params:
        if number < startup:
            return point
        budgets, values = (np.log(v) for v in zip(*[(p["budget"], v) for p, v in done], strict=True))
        powers = np.stack([budgets**k for k in range(2 if number < 10 else 3)], axis=1)
        left = values - powers @ np.linalg.lstsq(powers, values, rcond=None)[0]
        space = {key: how for key, how in SPACE.items() if key != "budget"}
        asked = optuna.create_study(sampler=TPESampler(seed=seed * 1000 + number, n_startup_trials=0))
        asked.add_trials(
            [
                create_trial(params={key: p[key] for key in space}, distributions=space, value=float(v))
                for (p, _), v in zip(done, left, strict=True)
            ]
        )
        return {**point, **asked.ask(space).params}

    return propose


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("trials", type=Path, nargs="+")
    parser.add_argument("--pairs", type=int, default=60)
    given = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    rows = [row for file in given.trials for row in csv.DictReader(file.open()) if row["task"] == "vision"]
    surrogate = Surrogate(rows)
    print(
        f"{surrogate.num_trials} trials, {surrogate.explained:.0%} explained, noise {surrogate.noise:.3f}", flush=True
    )
    chosen: dict[str, Callable[[int], Propose]] = {
        "tpe": by_sampler,
        "tpe, 10 random, jointly": lambda seed: by_sampler(seed, startup=10, multivariate=True),
        "trend": by_trend,
        "oracle": lambda _: lambda number, point, done: surrogate.best(point["budget"]),
    }
    random = {seed: study(surrogate, seed=seed, propose=None) for seed in range(given.pairs)}
    told = []
    for name, make in chosen.items():
        found = {seed: study(surrogate, seed=seed, propose=make(seed)) for seed in random}
        for k in AFTER:
            pairs = [found[seed][k] - random[seed][k] for seed in random]
            spread = stdev(pairs)
            own = {
                "sampler": name,
                "trials": k,
                "pairs": len(pairs),
                "difference": mean(pairs),
                "difference_sd": spread,
            }
            own |= {"t": mean(pairs) / (spread / math.sqrt(len(pairs))), "better_pairs": sum(p > 0 for p in pairs)}
            told.append(own | {"surrogate_trials": surrogate.num_trials, "noise": surrogate.noise})
            print(own, flush=True)
    write_csv(given.out, told)


if __name__ == "__main__":
    main()
