"""A TPE sampler for quality-memory frontiers over a range of budgets.

Budgets are drawn evenly; the other settings are learned from the quality residual behind its trend over memory.
Optuna's multi-objective TPE calls a tenth of the trials good, those on the front: two or three of a study's 20 to 30
trials, too few to learn a learning rate from. Here a setting is good if quality is better than its memory explains, so
every trial says something about every setting at any budget.
"""

import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import optuna
from optuna.distributions import BaseDistribution, FloatDistribution
from optuna.samplers import BaseSampler, RandomSampler, TPESampler
from optuna.trial import FrozenTrial, TrialState, create_trial

from baoc.sweep.early_stopping import violates_constraint
from baoc.sweep.study_config import BASELINE_KEY

BUDGET = "budget"  # the setting that is drawn evenly
QUALITY = "quality"
STARTUP = 3  # random trials before TPE starts, not counting baselines
GOOD_SHARE = 0.4  # share of trials that TPE calls good; a smaller one is decided by the noise of single runs
HEADROOM = 3.0  # budgets are drawn up to this multiple of the best trial's memory
FULL_RANGE_EVERY = 3  # every third trial draws from the full range: the best setting may lie at a poor budget
QUADRATIC_FROM = 10  # number of trials from which the trend is quadratic instead of linear
NEW_TRIAL = create_trial(state=TrialState.RUNNING)  # stands for the trial that is being sampled
_ENDED = (TrialState.COMPLETE, TrialState.PRUNED)


class FrontierSampler(BaseSampler):
    """Sampler for one trial, seeded with the trial's own `seed`. `objectives` maps names to minimize or maximize; one
    of them is `quality`. Budgets are drawn evenly in their logarithm; two of three trials stay below HEADROOM times the
    memory of the best trial, since a larger one would have to beat all others to be on the front."""

    def __init__(self, *, seed: int, objectives: Mapping[str, str]):
        self.objectives = tuple(objectives.items())
        self._random, self._tpe = RandomSampler(seed=seed), _make_tpe(seed)
        self._residual_study: optuna.Study | None = None

    def infer_relative_search_space(self, study: optuna.Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        others = _others(study, trial)
        searched = [other for other in others if other.params and BASELINE_KEY not in other.user_attrs]
        if sum(other.state in _ENDED for other in searched) < STARTUP:
            return {}
        self._residual_study = self._make_residual_study(others)
        return self._tpe.infer_relative_search_space(self._residual_study, NEW_TRIAL)

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        if self._residual_study is None:
            return {}
        return self._tpe.sample_relative(self._residual_study, NEW_TRIAL, search_space)

    def sample_independent(
        self, study: optuna.Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        """Draws the budget, and settings that no trial has had yet."""
        drawn, space = self._random.sample_independent(study, trial, param_name, param_distribution), param_distribution
        if self._residual_study is None or param_name != BUDGET or not isinstance(space, FloatDistribution):
            return drawn
        # From the whole range to the part that may hold a point of the front
        low, high = budget_bounds(_others(study, trial), objectives=self.objectives, space=space)
        high = space.high if trial.number % FULL_RANGE_EVERY == 0 else high
        scale = math.log if space.log else float
        share = (scale(drawn) - scale(space.low)) / (scale(space.high) - scale(space.low))
        value = scale(low) + share * (scale(high) - scale(low))
        return min(max(math.exp(value) if space.log else value, low), high)

    def _make_residual_study(self, others: Sequence[FrozenTrial]) -> optuna.Study:
        """An in-memory study of one objective: each trial's quality residual behind the trend, lower is better. Trials
        that violated a constraint, were pruned or still run count as worst; the latter keep workers from all drawing
        the same point."""
        points = [trial for trial in others if trial.params and trial.state in (*_ENDED, TrialState.RUNNING)]
        feasible = [trial for trial in points if is_feasible(trial)]
        residuals = quality_residuals([trial.values for trial in feasible], objectives=self.objectives)
        known = {trial.number: value for trial, value in zip(feasible, residuals, strict=True)}
        worst = max(residuals, default=0.0) + 1.0
        study = optuna.create_study(study_name="quality residuals")
        for trial in points:
            chosen = {key: value for key, value in trial.params.items() if key != BUDGET}
            ranges = {key: distribution for key, distribution in trial.distributions.items() if key != BUDGET}
            study.add_trial(create_trial(params=chosen, distributions=ranges, value=known.get(trial.number, worst)))
        return study


def _others(study: optuna.Study, trial: FrozenTrial) -> list[FrozenTrial]:
    return [other for other in study.get_trials(deepcopy=False) if other.number != trial.number]


def _make_tpe(seed: int) -> TPESampler:
    """A multivariate TPE: univariate, it would draw the likeliest choice of each setting every time."""
    with warnings.catch_warnings():  # `gamma` is deprecated until Optuna 6, and `group` is experimental
        warnings.simplefilter("ignore")
        return TPESampler(
            seed=seed,
            n_startup_trials=0,
            multivariate=True,
            group=True,
            constant_liar=False,
            gamma=lambda n: math.ceil(GOOD_SHARE * n),
        )


def quality_objective(objectives: Sequence[tuple[str, str]]) -> tuple[int, float]:
    """The index of quality among the objectives, and the factor that makes lower better."""
    at = [name for name, _ in objectives].index(QUALITY)
    return at, -1.0 if objectives[at][1] == "maximize" else 1.0


def is_feasible(trial: FrozenTrial) -> bool:
    """Whether a trial has values and met its constraints."""
    return trial.state is TrialState.COMPLETE and not violates_constraint(trial)


def quality_residuals(values: Sequence[Sequence[float]], *, objectives: Sequence[tuple[str, str]]) -> list[float]:
    """Residuals of quality behind a least-squares trend over the other objectives, one per trial; lower is better.

    Objectives are taken in logarithms if all their values are positive.

    Args:
        values: one row per trial, one column per objective.
    """
    if not values:
        return []
    columns = [column if (column <= 0).any() else np.log(column) for column in np.array(values, dtype=float).T]
    quality, sign = quality_objective(objectives)
    rest = [column - column.mean() for i, column in enumerate(columns) if i != quality]
    powers = (1, 2) if len(values) >= QUADRATIC_FROM else (1,)
    inputs = np.stack([np.ones(len(values)), *[column**k for column in rest for k in powers]], axis=1)
    target = columns[quality] * sign
    return list(map(float, target - inputs @ np.linalg.lstsq(inputs, target, rcond=1e-6)[0]))


def budget_bounds(
    trials: Sequence[FrozenTrial], *, objectives: Sequence[tuple[str, str]], space: FloatDistribution
) -> tuple[float, float]:
    """(lowest, highest) budget to draw. The lowest is above budgets that were too small and below all that sufficed;
    the highest is HEADROOM times the memory of the best trial, baselines included."""
    feasible = [trial for trial in trials if is_feasible(trial)]
    points = [trial for trial in feasible if BUDGET in trial.params]
    if not points:
        return space.low, space.high
    smallest_met = min(trial.params[BUDGET] for trial in points)
    too_small = [t.params[BUDGET] for t in trials if BUDGET in t.params and t.constraints.get("budget", 0.0) > 0]
    low = max([space.low, *[budget for budget in too_small if budget < smallest_met]])
    axis = next((i for i, (name, _) in enumerate(objectives) if name.endswith("_bytes")), None)
    if axis is None:
        return low, space.high
    quality, sign = quality_objective(objectives)
    best = min(feasible, key=lambda trial: sign * trial.values[quality])
    per_budget = float(np.median([trial.values[axis] / trial.params[BUDGET] for trial in points]))
    if per_budget == 0:  # update rules without optimizer state
        return low, space.high
    return low, min(space.high, max(HEADROOM * best.values[axis] / per_budget, HEADROOM * low))
