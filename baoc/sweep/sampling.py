"""What a trial tries: its point of the space depends on the study's seed, the trial's number and what was finished.

So a trial that was killed before it began is drawn again as it was, and random and grid studies give the same set of
trials whatever was killed in between, and on however many workers.
"""

from collections.abc import Sequence
from itertools import product
from typing import Any, cast

import numpy as np
import optuna
from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler
from optuna.trial import FrozenTrial, Trial, TrialState

from baoc.sweep.along_front import BUDGET, STARTUP, AlongFront
from baoc.sweep.study_config import Param, StudyConfig

TPE_STARTUP = 5  # where it draws by Optuna's own rules


def make_sampler(config: StudyConfig, *, number: int) -> BaseSampler:
    """The sampler by name, seeded for one trial. All but random and grid learn from violated constraints."""
    seed = int(np.random.SeedSequence([config.seed, number]).generate_state(1)[0])
    if config.sampler in ("random", "grid"):  # the points of a grid are enqueued
        return optuna.samplers.RandomSampler(seed=seed)
    if config.sampler == "nsgaii":
        return _OfTheSpace(optuna.samplers.NSGAIISampler(seed=seed))
    if config.sampler == "gp":
        return _OfTheSpace(optuna.samplers.GPSampler(seed=seed, warn_independent_sampling=False))
    if along_a_front(config):
        return AlongFront(seed=seed, objectives=config.objectives)
    liar = config.workers > 1
    return _OfTheSpace(optuna.samplers.TPESampler(seed=seed, n_startup_trials=TPE_STARTUP, constant_liar=liar))


def along_a_front(config: StudyConfig) -> bool:
    """Whether TPE draws as `AlongFront`: quality beside other objectives, over a range of budgets."""
    ranged = any(param.key == BUDGET and not param.choices for param in config.space)
    return ranged and "quality" in config.objectives and len(config.objectives) > 1


def tpe_startup(config: StudyConfig) -> int:
    """Searched trials that TPE draws at random, as the random sampler would."""
    return STARTUP if along_a_front(config) else TPE_STARTUP


def queue(config: StudyConfig) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """(params, user attributes) of every trial in the order of their numbers: baselines, points of a grid, free ones.

    As long as the study is to be; a grid ends with its last point.
    """
    told: list[tuple[dict[str, Any], dict[str, Any]]] = [
        (point_of(words, config.space), {"overrides": list(words)}) for words in config.baselines
    ]
    told += [(point, {}) for point in grid(config)]
    if config.sampler != "grid":
        told += [({}, {})] * max(config.n_trials - len(told), 0)
    return told[: config.n_trials]


def grid(config: StudyConfig) -> list[dict[str, Any]]:
    """Every combination of choices for the grid sampler, the last setting changing first; else none."""
    if config.sampler != "grid":
        return []
    points: list[dict[str, Any]] = []
    for values in product(*(param.choices for param in config.space)):
        point: dict[str, Any] = {}
        for param, value in zip(config.space, values, strict=True):
            if param.matters(point):
                point[param.key] = value
        if point not in points:
            points.append(point)
    return points


def point_of(words: Sequence[str], space: Sequence[Param]) -> dict[str, Any]:
    """The point of the space that a baseline is: all settings that matter are given, as values that may be drawn, and
    nothing else is. Else none ({}): samplers do not see it."""
    given = dict(word.split("=", 1) for word in words if "=" in word)
    point: dict[str, Any] = {}
    for param in space:
        if not param.matters(point):
            continue
        value = param.value_of(given.get(param.key))
        if value is None:
            return {}
        point[param.key] = value
    return point if set(given) == set(point) and len(words) == len(point) else {}


def suggest(trial: Trial, config: StudyConfig) -> list[str]:
    """The overrides of a trial: its baseline's, or one per setting that matters beside the others."""
    own = trial.user_attrs.get("overrides")
    if own is not None:
        if trial._cached_frozen_trial.system_attrs.get("fixed_params"):  # a point of the space, queued as that
            for param in config.space:
                if param.matters(trial.params):
                    _suggest(trial, param)
        return list(own)
    chosen: dict[str, Any] = {}
    words: list[str] = []
    for param in config.space:
        if param.matters(chosen):
            chosen[param.key] = _suggest(trial, param)
            words.append(param.override(chosen[param.key]))
    return words


def _suggest(trial: Trial, param: Param) -> Any:
    if param.choices:
        return trial.suggest_categorical(param.key, list(param.choices))
    if isinstance(param.low, int) and isinstance(param.high, int):
        return trial.suggest_int(param.key, param.low, param.high, log=param.log, step=int(param.step or 1))
    return trial.suggest_float(param.key, param.low, param.high, log=param.log, step=param.step)


class _OfTheSpace(BaseSampler):
    """A sampler that sees no baselines without a point in the space: samplers that search settings jointly take those
    that all trials have in common, so they would search each alone, or fail."""

    def __init__(self, inner: BaseSampler):
        self.inner = inner

    def infer_relative_search_space(self, study: optuna.Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        return self.inner.infer_relative_search_space(_without_baselines(study), trial)

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        return self.inner.sample_relative(_without_baselines(study), trial, search_space)

    def sample_independent(
        self, study: optuna.Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        return self.inner.sample_independent(_without_baselines(study), trial, param_name, param_distribution)

    def before_trial(self, study: optuna.Study, trial: FrozenTrial) -> None:
        self.inner.before_trial(_without_baselines(study), trial)

    def after_trial(self, study: optuna.Study, trial: FrozenTrial, state: TrialState, values: Any) -> None:
        self.inner.after_trial(_without_baselines(study), trial, state, values)


def _without_baselines(study: optuna.Study) -> optuna.Study:
    return cast(optuna.Study, _Searched(study))


class _Searched:
    """A study of those trials only that have a point in the space (or may still get one)."""

    def __init__(self, study: optuna.Study):
        self._study = study

    def __getattr__(self, name: str) -> Any:
        return getattr(self._study, name)

    @property
    def trials(self) -> list[FrozenTrial]:
        return self.get_trials()

    def get_trials(self, *args: Any, **options: Any) -> list[FrozenTrial]:
        return [trial for trial in self._study.get_trials(*args, **options) if _searched(trial)]

    def _get_trials(self, *args: Any, **options: Any) -> list[FrozenTrial]:
        return [trial for trial in self._study._get_trials(*args, **options) if _searched(trial)]


def _searched(trial: FrozenTrial) -> bool:
    return bool(trial.params) or "overrides" not in trial.user_attrs
