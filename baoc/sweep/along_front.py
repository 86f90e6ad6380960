"""TPE for a frontier over budgets: budgets are spread, the rest is learned from quality ahead of its trend over memory.

Optuna's TPE for several objectives calls a tenth of the trials good, those on the front; of the 20 to 30 trials of a
study that is two or three, and which learning rate suits is learned from nothing else. Here a setting is good where
quality is better than what its memory explains, at whatever budget it was tried, so every trial says something of every
setting. Budgets are drawn evenly (in their logarithm), two of three up to a few times the memory of the best trial so
far: beyond that a point would have to be better than all others to be on the front.
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

BUDGET = "budget"  # the setting that is spread
QUALITY = "quality"
STARTUP = 3  # searched trials that are drawn at random; baselines that are points of the space come on top
GOOD = 0.4  # share of trials that TPE calls good: fewer are chosen by the noise of one run each
HEADROOM = 3.0  # budgets are drawn up to so many times the memory of the best trial,
WHOLE = 3  # but for every third trial: the best may be a good setting at a poor budget
CURVED = 10  # trials from which on the trend is a parabola, before that a line
ASKING = create_trial(state=TrialState.RUNNING)  # a trial of no number
_ENDED = (TrialState.COMPLETE, TrialState.PRUNED)


class AlongFront(BaseSampler):
    """For one trial: `seed` is its own. `objectives` maps names to minimize or maximize; one is `quality`."""

    def __init__(self, *, seed: int, objectives: Mapping[str, str]):
        self.objectives = tuple(objectives.items())
        self._random, self._tpe = RandomSampler(seed=seed), _tpe(seed)
        self._learned: optuna.Study | None = None

    def infer_relative_search_space(self, study: optuna.Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        others = [other for other in study.get_trials(deepcopy=False) if other.number != trial.number]
        if not _begun(others):
            return {}
        self._learned = self._study(others)
        return self._tpe.infer_relative_search_space(self._learned, ASKING)

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        return {} if self._learned is None else self._tpe.sample_relative(self._learned, ASKING, search_space)

    def sample_independent(
        self, study: optuna.Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        """The budget, and what no trial had yet."""
        drawn = self._random.sample_independent(study, trial, param_name, param_distribution)
        if self._learned is None or param_name != BUDGET or not isinstance(param_distribution, FloatDistribution):
            return drawn
        others = [other for other in study.get_trials(deepcopy=False) if other.number != trial.number]
        return self._budget(drawn, others, number=trial.number, space=param_distribution)

    def _budget(self, drawn: float, others: Sequence[FrozenTrial], *, number: int, space: FloatDistribution) -> float:
        """`drawn` from the whole range, brought to the part of it that may hold a point of the front."""
        low, high = bounds(others, objectives=self.objectives, space=space)
        high = space.high if number % WHOLE == 0 else high
        scale = math.log if space.log else float
        share = (scale(drawn) - scale(space.low)) / (scale(space.high) - scale(space.low))
        value = scale(low) + share * (scale(high) - scale(low))
        return min(max(math.exp(value) if space.log else value, low), high)

    def _study(self, others: Sequence[FrozenTrial]) -> optuna.Study:
        """Of one objective, in memory: what is left of each trial's quality behind the trend, lower is better. Trials
        that broke a constraint, were ended early or still run (so that workers do not all draw the same) are worst."""
        points = [trial for trial in others if trial.params and trial.state in (*_ENDED, TrialState.RUNNING)]
        good = [trial for trial in points if counts(trial)]
        left = behind([trial.values for trial in good], objectives=self.objectives)
        known = {trial.number: value for trial, value in zip(good, left, strict=True)}
        worst = max(left, default=0.0) + 1.0
        study = optuna.create_study(study_name="behind the trend")
        for trial in points:
            chosen = {key: value for key, value in trial.params.items() if key != BUDGET}
            ranges = {key: how for key, how in trial.distributions.items() if key != BUDGET}
            study.add_trial(create_trial(params=chosen, distributions=ranges, value=known.get(trial.number, worst)))
        return study


def _begun(others: Sequence[FrozenTrial]) -> bool:
    """Whether enough was drawn at random."""
    searched = [other for other in others if other.params and "overrides" not in other.user_attrs]
    return sum(other.state in _ENDED for other in searched) >= STARTUP


def _tpe(seed: int) -> TPESampler:
    """Settings jointly: each by itself, the likeliest choice of a setting is drawn every time, right or wrong."""
    with warnings.catch_warnings():  # the share of good trials is deprecated and goes with Optuna 6; `group` is new
        warnings.simplefilter("ignore")
        return TPESampler(
            seed=seed,
            n_startup_trials=0,
            multivariate=True,
            group=True,
            constant_liar=False,
            gamma=lambda n: math.ceil(GOOD * n),
        )


def quality_of(objectives: Sequence[tuple[str, str]]) -> tuple[int, float]:
    """Its place among the objectives, and what it is multiplied by so that lower is better."""
    at = [name for name, _ in objectives].index(QUALITY)
    return at, -1.0 if objectives[at][1] == "maximize" else 1.0


def counts(trial: FrozenTrial) -> bool:
    """Whether a trial has values, and met its constraints."""
    return trial.state is TrialState.COMPLETE and not any(value > 0 for value in trial.constraints.values())


def behind(values: Sequence[Sequence[float]], *, objectives: Sequence[tuple[str, str]]) -> list[float]:
    """What is left of quality (a row of `values` per trial) behind a least-squares trend over the other objectives;
    lower is better. In logarithms, where all values are above 0."""
    if not values:
        return []
    columns = [_scaled([row[i] for row in values]) for i in range(len(objectives))]
    quality, sign = quality_of(objectives)
    rest = [column - column.mean() for i, column in enumerate(columns) if i != quality]
    powers = (1, 2) if len(values) >= CURVED else (1,)
    inputs = np.stack([np.ones(len(values)), *[column**k for column in rest for k in powers]], axis=1)
    wanted = columns[quality] * sign
    return list(map(float, wanted - inputs @ np.linalg.lstsq(inputs, wanted, rcond=1e-6)[0]))


def _scaled(column: Sequence[float]) -> np.ndarray:
    numbers = np.array(column, dtype=float)
    return np.log(numbers) if (numbers > 0).all() else numbers


def bounds(
    trials: Sequence[FrozenTrial], *, objectives: Sequence[tuple[str, str]], space: FloatDistribution
) -> tuple[float, float]:
    """(lowest, highest) budget that is drawn: above budgets that were too small below all that sufficed, and up to
    HEADROOM times the memory of the best trial, baselines among them."""
    good = [trial for trial in trials if counts(trial)]
    points = [trial for trial in good if BUDGET in trial.params]
    if not points:
        return space.low, space.high
    sufficed = min(trial.params[BUDGET] for trial in points)
    small = [t.params[BUDGET] for t in trials if BUDGET in t.params and t.constraints.get("budget", 0.0) > 0]
    low = max([space.low, *[budget for budget in small if budget < sufficed]])
    axis = next((i for i, (name, _) in enumerate(objectives) if name.endswith("_bytes")), None)
    if axis is None:
        return low, space.high
    quality, sign = quality_of(objectives)
    best = min(good, key=lambda trial: sign * trial.values[quality])
    per_budget = float(np.median([trial.values[axis] / trial.params[BUDGET] for trial in points]))
    if per_budget == 0:  # rules without states
        return low, space.high
    return low, min(space.high, max(HEADROOM * best.values[axis] / per_budget, HEADROOM * low))
