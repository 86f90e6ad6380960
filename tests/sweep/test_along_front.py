"""TPE over budgets: what counts as good, which budgets are drawn, and which baselines are points of the space."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import optuna
import pytest
from optuna.distributions import FloatDistribution
from optuna.trial import FrozenTrial, create_trial

from baoc.sweep.frontier_sampler import HEADROOM, STARTUP, budget_bounds, quality_residuals
from baoc.sweep.sampling import make_sampler, point_from_overrides, suggest, tpe_startup, uses_frontier_sampler
from baoc.sweep.study_config import StudyConfig, read_study

SPACE = {
    "budget": {"low": 1.0, "high": 60.0, "log": True, "format": "state_{:.3g}"},
    "lr": {"low": 1e-4, "high": 1.0, "log": True, "format": "{:.3g}"},
    "rule": {"choices": ["a", "b"]},
    "beta": {"low": 1, "high": 9, "when": {"rule": "b"}},
}
GIVEN = {"name": "s", "objectives": {"quality": "minimize", "state_bytes": "minimize"}, "space": SPACE, "seed": 3}
OBJECTIVES = tuple(GIVEN["objectives"].items())
BUDGETS = FloatDistribution(1.0, 60.0, log=True)


def config(**changes: Any) -> StudyConfig:
    return read_study({**GIVEN, **changes})


def point(at: float, values: Sequence[float] | None, **constraints: float) -> FrozenTrial:
    trial = create_trial(values=values or [1e30, 1e30], params={"budget": at}, distributions={"budget": BUDGETS})
    return trial if not constraints else _Bound(trial, constraints)  # type: ignore[return-value]


class _Bound:
    """A trial with constraints, which `create_trial` has no way to give."""

    def __init__(self, trial: FrozenTrial, constraints: dict[str, float]):
        self._trial, self.constraints = trial, constraints

    def __getattr__(self, name: str) -> Any:
        return getattr(self._trial, name)


def searched(given: StudyConfig, *, trials: int) -> list[FrozenTrial]:
    """A study of a function whose best lr is .01, whatever the budget; more memory is better, with noise."""
    study = optuna.create_study(directions=["minimize", "minimize"])
    noise = np.random.default_rng(given.seed).normal(0, 0.05, trials)
    for number in range(trials):
        study.sampler = make_sampler(given, number=number)
        trial = study.ask()
        suggest(trial, given)
        p = trial.params
        log_quality = 0.5 * math.log10(p["lr"] / 0.01) ** 2 - 0.3 * math.log10(p["budget"]) + 0.2 * (p["rule"] == "a")
        study.tell(trial, [math.exp(log_quality + noise[number]), p["budget"] * 1e4])
    return study.trials


def off(trials: Sequence[FrozenTrial]) -> float:
    """Decades from the best lr, on average."""
    return float(np.mean([abs(math.log10(trial.params["lr"] / 0.01)) for trial in trials]))


def test_a_setting_that_suits_every_budget_is_found_with_trials_at_all_budgets():
    tpe, random = (searched(config(sampler=name), trials=26) for name in ("tpe", "random"))
    first = [trial.params for trial in tpe[:STARTUP]]
    assert first == [trial.params for trial in random[:STARTUP]], "drawn alike, so that samplers can be paired"
    assert off(tpe[13:]) < 0.6 * off(random[13:]), (off(tpe[13:]), off(random[13:]))
    assert sum(trial.params["rule"] == "b" for trial in tpe[13:]) >= 8
    budgets = np.log([trial.params["budget"] for trial in tpe[13:]])
    assert budgets.std() > 0.5 * np.log([trial.params["budget"] for trial in random[13:]]).std(), "still spread"


def test_what_is_left_behind_the_trend_has_no_trend_and_ranks_by_what_is_better():
    memory = np.geomspace(1, 60, 12)
    good = np.arange(12) % 3 == 0
    quality = 0.8 * memory**-0.2 * np.where(good, 0.9, 1.1)
    left = np.array(quality_residuals(np.stack([quality, memory], 1).tolist(), objectives=OBJECTIVES))
    assert left[good].max() < left[~good].min()
    assert abs(np.polyfit(np.log(memory), left, 1)[0]) < 1e-9
    higher = (("quality", "maximize"), ("state_bytes", "minimize"))
    assert quality_residuals(np.stack([1 / quality, memory], 1).tolist(), objectives=higher) == pytest.approx(
        list(left)
    )
    assert quality_residuals([], objectives=OBJECTIVES) == []


def test_budgets_that_may_hold_a_point_of_the_front():
    def of(*trials: FrozenTrial) -> tuple[float, float]:
        return budget_bounds(trials, objectives=OBJECTIVES, space=BUDGETS)

    assert of() == (1.0, 60.0)
    best, worse = point(5.0, [0.5, 5e4]), point(40.0, [0.7, 4e5])
    assert of(best, worse) == (1.0, pytest.approx(HEADROOM * 5.0))
    baseline = create_trial(values=[0.4, 1.6e5], user_attrs={"overrides": ["allocator=uniform_foam8bit"]})
    assert of(best, worse, baseline) == (1.0, pytest.approx(HEADROOM * 16.0))
    assert of(best, point(50.0, [0.4, 5e5])) == (1.0, 60.0)
    assert of(best, point(2.0, None, budget=1.0)) == (2.0, pytest.approx(HEADROOM * 5.0)), "2 was too small"
    assert of(best, point(8.0, None, budget=1.0))[0] == 1.0, "not for its budget alone: 5 sufficed"
    assert of(best, point(2.0, None, diverged=1.0))[0] == 1.0, "not for its budget"
    assert of(point(5.0, [0.5, 0.0]), point(2.0, None, budget=1.0)) == (2.0, 60.0), "rules without states"


def test_a_baseline_that_is_a_point_of_the_space_is_one():
    space = config().space
    whole = ["budget=state_25", "rule=a", "lr=0.003"]
    assert point_from_overrides(whole, space) == {"budget": 25.0, "lr": 0.003, "rule": "a"}
    assert point_from_overrides(["budget=state_25", "rule=b", "lr=0.003", "beta=4"], space)["beta"] == 4
    for words in (
        ["budget=state_25"],
        [*whole, "allocator=random"],
        ["budget=unlimited", "rule=a", "lr=0.003"],
        ["budget=state_99", "rule=a", "lr=0.003"],
        ["budget=state_25", "rule=c", "lr=0.003"],
        ["budget=state_25", "rule=b", "lr=0.003", "beta=2.5"],
        [*whole, "beta=4"],
        [],
    ):
        assert point_from_overrides(words, space) == {}, words


def test_a_baseline_of_an_earlier_version_is_not_told_as_a_point_that_it_is_not():
    """Those were queued without their settings, which a sampler would draw now."""
    study = optuna.create_study(directions=["minimize", "minimize"])
    whole = ["budget=state_25", "rule=a", "lr=0.003"]
    for params in ({}, point_from_overrides(whole, config().space)):
        study.enqueue_trial(params, user_attrs={"overrides": whole})
        trial = study.ask()
        assert suggest(trial, config()) == whole and trial.params == params


def test_other_studies_keep_optunas_rules():
    assert uses_frontier_sampler(config()) and tpe_startup(config()) == STARTUP
    one = {"objectives": {"quality": "minimize"}}
    few = {"space": {**SPACE, "budget": {"choices": ["state_10", "state_25"]}}}
    for changes in (one, few):
        assert not uses_frontier_sampler(config(**changes))
