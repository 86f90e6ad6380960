"""Samples a trial's settings from the study's seed, the trial's number and the finished trials.

Random and grid studies therefore try the same set of trials whatever is killed and on however many workers, and a trial
that is killed before it starts gets the same settings again.
"""

from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np
import optuna
from optuna.samplers import BaseSampler
from optuna.trial import FrozenTrial, Trial

from baoc.sweep.frontier_sampler import BUDGET, STARTUP, FrontierSampler
from baoc.sweep.study_config import BASELINE_KEY, Param, StudyConfig

TPE_STARTUP = 5  # random trials of Optuna's own TPE


def make_sampler(config: StudyConfig, *, number: int) -> BaseSampler:
    """The sampler of `config.sampler`, seeded for one trial. All but random and grid use violated constraints. All but
    `FrontierSampler` need a study that is wrapped into `SearchedTrials`."""
    seed = int(np.random.SeedSequence([config.seed, number]).generate_state(1)[0])
    if config.sampler in ("random", "grid"):  # a grid's points are enqueued by `initial_trials`
        return optuna.samplers.RandomSampler(seed=seed)
    if config.sampler == "nsgaii":
        return optuna.samplers.NSGAIISampler(seed=seed)
    if config.sampler == "gp":
        return optuna.samplers.GPSampler(seed=seed, warn_independent_sampling=False)
    if uses_frontier_sampler(config):
        return FrontierSampler(seed=seed, objectives=config.objectives)
    return optuna.samplers.TPESampler(seed=seed, n_startup_trials=TPE_STARTUP, constant_liar=config.workers > 1)


def uses_frontier_sampler(config: StudyConfig) -> bool:
    """Whether TPE is a `FrontierSampler`: quality among several objectives, over a range of budgets."""
    ranged = any(param.key == BUDGET and not param.choices for param in config.space)
    return ranged and "quality" in config.objectives and len(config.objectives) > 1


def tpe_startup(config: StudyConfig) -> int:
    """Number of trials that TPE draws at random before it samples; baselines do not count."""
    return STARTUP if uses_frontier_sampler(config) else TPE_STARTUP


def initial_trials(config: StudyConfig) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """(fixed params, user attributes) of every trial by number: baselines, then points of a grid, or else trials whose
    params are sampled. The list has `n_trials` entries; a grid may have fewer."""
    trials: list[tuple[dict[str, Any], dict[str, Any]]] = [
        (point_from_overrides(overrides, config.space), {BASELINE_KEY: list(overrides)})
        for overrides in config.baselines
    ]
    trials += [(point, {}) for point in grid_points(config)]
    if config.sampler != "grid":
        trials += [({}, {})] * max(config.n_trials - len(trials), 0)
    return trials[: config.n_trials]


def grid_points(config: StudyConfig) -> list[dict[str, Any]]:
    """Every combination of choices, the last setting changing fastest; empty for other samplers than grid."""
    if config.sampler != "grid":
        return []
    points: list[dict[str, Any]] = []
    for values in product(*(param.choices for param in config.space)):
        point: dict[str, Any] = {}
        for param, value in zip(config.space, values, strict=True):
            if param.is_active(point):
                point[param.key] = value
        if point not in points:
            points.append(point)
    return points


def point_from_overrides(overrides: Sequence[str], space: Sequence[Param]) -> dict[str, Any]:
    """The point of the space that a baseline's overrides describe: they set every active setting to a value of its
    domain, and nothing else. {} for other baselines, which samplers do not see."""
    texts = dict(override.split("=", 1) for override in overrides if "=" in override)
    point: dict[str, Any] = {}
    for param in space:
        if not param.is_active(point):
            continue
        value = param.value_of(texts.get(param.key))
        if value is None:
            return {}
        point[param.key] = value
    return point if set(texts) == set(point) and len(overrides) == len(point) else {}


def suggest(trial: Trial, config: StudyConfig) -> list[str]:
    """A trial's overrides: those of its baseline, or one per active setting. Stores the params in the trial."""
    baseline = trial.user_attrs.get(BASELINE_KEY)
    if baseline is not None:
        if trial._cached_frozen_trial.system_attrs.get("fixed_params"):  # it is a point of the space
            for param in config.space:
                if param.is_active(trial.params):
                    _suggest(trial, param)
        return list(baseline)
    chosen: dict[str, Any] = {}
    overrides: list[str] = []
    for param in config.space:
        if param.is_active(chosen):
            chosen[param.key] = _suggest(trial, param)
            overrides.append(param.override(chosen[param.key]))
    return overrides


def _suggest(trial: Trial, param: Param) -> Any:
    if param.choices:
        return trial.suggest_categorical(param.key, list(param.choices))
    if isinstance(param.low, int) and isinstance(param.high, int):
        return trial.suggest_int(param.key, param.low, param.high, log=param.log, step=int(param.step or 1))
    return trial.suggest_float(param.key, param.low, param.high, log=param.log, step=param.step)


class SearchedTrials:
    """A study without baselines outside the space, for samplers. A multivariate sampler uses the settings that all
    trials have in common; with such baselines there are none, and it would sample each setting alone, or fail."""

    def __init__(self, study: optuna.Study):
        self._study = study

    def __getattr__(self, name: str) -> Any:
        return getattr(self._study, name)

    def get_trials(self, *args: Any, **options: Any) -> list[FrozenTrial]:
        trials = self._study._get_trials(*args, **options)
        return [trial for trial in trials if trial.params or BASELINE_KEY not in trial.user_attrs]

    _get_trials = get_trials
    trials = property(get_trials)
