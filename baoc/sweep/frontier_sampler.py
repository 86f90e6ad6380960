"""A TPE sampler for quality-memory frontiers over a range of budgets.

Budgets are drawn evenly. The other settings are sampled by a single-objective TPE on quality residuals: a trial's
quality minus the trend of quality over memory. So every trial informs about a setting, whatever its budget. Optuna's
multi-objective TPE calls a tenth of the trials good, those on the front; of a study's 20 to 30 trials these are two or
three, too few to find a learning rate.
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
GOOD_SHARE = 0.4  # share of trials that TPE calls good; of fewer, the noise of single runs decides which
HEADROOM = 3.0  # budgets are drawn up to this multiple of the best trial's memory
FULL_RANGE_EVERY = 3  # every third trial draws its budget from the full range, as the best trial may be a poor one
QUADRATIC_FROM = 10  # number of trials from which the trend is quadratic instead of linear
NEW_TRIAL = create_trial(state=TrialState.RUNNING)  # stands for the trial that is being sampled
_ENDED = (TrialState.COMPLETE, TrialState.PRUNED)


class FrontierSampler(BaseSampler):
    """Sampler for one trial, with the trial's own `seed`. `objectives` maps names to minimize or maximize, `quality`
    among them.

    Two of three trials draw a budget below HEADROOM times the memory of the best trial: with more memory a trial would
    have to be better than all others to be on the front.
    """

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
        """Draws the budget, and settings that no earlier trial has."""
        drawn = self._random.sample_independent(study, trial, param_name, param_distribution)
        space = param_distribution
        if self._residual_study is None or param_name != BUDGET or not isinstance(space, FloatDistribution):
            return drawn
        # Map the drawn budget from the full range to the part of it in which a trial may be on the front
        low, high = budget_bounds(_others(study, trial), objectives=self.objectives, space=space)
        high = space.high if trial.number % FULL_RANGE_EVERY == 0 else high
        scale = math.log if space.log else float
        share = (scale(drawn) - scale(space.low)) / (scale(space.high) - scale(space.low))
        value = scale(low) + share * (scale(high) - scale(low))
        return min(max(math.exp(value) if space.log else value, low), high)

    def _make_residual_study(self, others: Sequence[FrozenTrial]) -> optuna.Study:
        """An in-memory study of all settings but the budget, whose objective is the quality residual; lower is better.
        Trials that violated a constraint, were pruned or still run get a value worse than all others. The latter keep
        parallel workers from sampling the same point."""
        trials = [trial for trial in others if trial.params and trial.state in (*_ENDED, TrialState.RUNNING)]
        feasible = [trial for trial in trials if is_feasible(trial)]
        residuals = quality_residuals([trial.values for trial in feasible], objectives=self.objectives)
        residual_of = {trial.number: value for trial, value in zip(feasible, residuals, strict=True)}
        worst = max(residuals, default=0.0) + 1.0
        study = optuna.create_study(study_name="quality residuals")
        for trial in trials:
            params = {key: value for key, value in trial.params.items() if key != BUDGET}
            distributions = {key: value for key, value in trial.distributions.items() if key != BUDGET}
            value = residual_of.get(trial.number, worst)
            study.add_trial(create_trial(params=params, distributions=distributions, value=value))
        return study


def _others(study: optuna.Study, trial: FrozenTrial) -> list[FrozenTrial]:
    return [other for other in study.get_trials(deepcopy=False) if other.number != trial.number]


def _make_tpe(seed: int) -> TPESampler:
    """A multivariate TPE; a univariate one would draw the likeliest choice of each setting in every trial."""
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


def quality_index_and_sign(objectives: Sequence[tuple[str, str]]) -> tuple[int, float]:
    """The index of quality among the objectives, and the factor by which lower is better."""
    index = [name for name, _ in objectives].index(QUALITY)
    return index, -1.0 if objectives[index][1] == "maximize" else 1.0


def is_feasible(trial: FrozenTrial) -> bool:
    return trial.state is TrialState.COMPLETE and not violates_constraint(trial)


def quality_residuals(values: Sequence[Sequence[float]], *, objectives: Sequence[tuple[str, str]]) -> list[float]:
    """Quality minus its least-squares trend over the other objectives, for each trial, negated if quality is maximized:
    lower is better. Objectives whose values are all positive are taken in logarithms.

    Args:
        values: one row per trial, one column per objective.
    """
    if not values:
        return []
    columns = [column if (column <= 0).any() else np.log(column) for column in np.array(values, dtype=float).T]
    quality, sign = quality_index_and_sign(objectives)
    rest = [column - column.mean() for i, column in enumerate(columns) if i != quality]
    powers = (1, 2) if len(values) >= QUADRATIC_FROM else (1,)
    inputs = np.stack([np.ones(len(values)), *[column**k for column in rest for k in powers]], axis=1)
    target = columns[quality] * sign
    return list(map(float, target - inputs @ np.linalg.lstsq(inputs, target, rcond=1e-6)[0]))


def budget_bounds(
    trials: Sequence[FrozenTrial], *, objectives: Sequence[tuple[str, str]], space: FloatDistribution
) -> tuple[float, float]:
    """(lowest, highest) budget to draw. The lowest is the largest one that was too small, below all that were met. The
    highest is HEADROOM times the memory of the best trial, baselines included."""
    feasible = [trial for trial in trials if is_feasible(trial)]
    with_budget = [trial for trial in feasible if BUDGET in trial.params]
    if not with_budget:
        return space.low, space.high
    smallest_met = min(trial.params[BUDGET] for trial in with_budget)
    too_small = [t.params[BUDGET] for t in trials if BUDGET in t.params and t.constraints.get("budget", 0.0) > 0]
    low = max([space.low, *[budget for budget in too_small if budget < smallest_met]])
    axis = next((i for i, (name, _) in enumerate(objectives) if name.endswith("_bytes")), None)
    if axis is None:
        return low, space.high
    quality, sign = quality_index_and_sign(objectives)
    best = min(feasible, key=lambda trial: sign * trial.values[quality])
    bytes_per_budget = float(np.median([trial.values[axis] / trial.params[BUDGET] for trial in with_budget]))
    if bytes_per_budget == 0:  # update rules without optimizer state
        return low, space.high
    return low, min(space.high, max(HEADROOM * best.values[axis] / bytes_per_budget, HEADROOM * low))
