"""The course of a race without training: which runs it asks for, who leaves, and what a missing score does."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from baoc.core.recipes import Recipe
from baoc.errors import BadInputError, TrainingFailedError
from baoc.racing.course import (
    DIVERGED,
    DONE,
    FRESH,
    NO_FIT,
    OutOfTimeError,
    RaceOutcome,
    RaceSettings,
    Run,
    RunEnd,
    course,
)
from baoc.racing.entrants import Racer, RaceTarget
from baoc.racing.records import RaceScale, claim_text
from baoc.racing.verdict import Entrant

ADAMW = Entrant(name="adamw", state_bytes=100, uniform=True)
FOAM = Entrant(name="foam8", state_bytes=7, uniform=True)
PLAN = Entrant(name="plan", state_bytes=10, uniform=False)
CONTROL = Entrant(name="permuted", state_bytes=10, uniform=False, control=True)
EVERY = (ADAMW, FOAM, PLAN, CONTROL)
TARGET = RaceTarget(
    racers=(), size="tiny", num_params=9, state_bytes_adamw=100, data="some", num_train=0, batch_size=1, steps=400,
    lr=1e-3, quality="val/loss", higher_is_better=False,
)  # fmt: skip
GAPS = {"adamw": 0.0, "foam8": 0.2, "plan": -0.1, "permuted": 0.3}
SETTINGS = RaceSettings(
    rates=(0.3, 1.0, 3.0),
    rungs=(0.25, 0.5, 1.0),
    seeds=(100, 101, 102),
    fresh_seeds=(200, 201, 202, 203),
    steps=dict.fromkeys(GAPS, 400),
    margin=0.01,
    level=0.9,
)


def replace_settings(**changes: Any) -> RaceSettings:
    return replace(SETTINGS, **changes)


def score(run: Run) -> RunEnd:
    """Best at three times the rate; what a seed adds is shared, and a little is the entrant's own."""
    own = 0.001 * math.sin(17 * run.seed + len(run.entrant))
    return RunEnd(status=DONE, score=1 + GAPS[run.entrant] + 0.1 * abs(run.rate - 3) + 0.05 * math.cos(run.seed) + own)


def race(
    entrants: tuple[Entrant, ...] = EVERY, *, settings: RaceSettings = SETTINGS, score: Callable[[Run], RunEnd] = score
) -> tuple[RaceOutcome, list[list[Run]]]:
    going, asked, sent = course(entrants, settings=settings), [], None
    try:
        while True:
            asked.append(going.send(sent))
            sent = {run: score(run) for run in asked[-1]}
    except StopIteration as ended:
        return ended.value, asked


def test_a_race_goes_from_all_rates_on_short_runs_to_one_rate_on_fresh_seeds():
    found, asked = race()
    first, *middle, fresh = asked
    assert len(first) == 4 * 3 * 3 and {run.steps for run in first} == {100}
    assert [run.steps for stage in middle for run in stage[:1]] == [200, 400]
    assert all(run.rate == 3.0 for stage in middle for run in stage)  # two of three rates were dropped
    assert {run.entrant for run in fresh} == {"adamw", "plan"}  # foam8 and the control are clearly behind
    assert {run.seed for run in fresh} == set(SETTINGS.fresh_seeds) and {run.steps for run in fresh} == {400}
    assert found.verdict.choice == "plan" and found.verdict.rival == "adamw" and not found.ran_out_of_time
    assert found.dropped["foam8"].startswith("behind adamw") and "permuted" in found.dropped
    assert set(found.scores) == {0.25, 0.5, 1.0, FRESH}


def test_the_control_is_never_chosen_however_good_it_is():
    found, _ = race(score=lambda run: RunEnd(status=DONE, score=0.1) if run.entrant == "permuted" else score(run))
    assert found.verdict.choice == "plan"


def test_the_incumbent_stays_though_a_mixed_plan_is_far_ahead():
    found, _ = race(
        (ADAMW, PLAN), score=lambda run: RunEnd(status=DONE, score=score(run).score + 5 * (run.entrant == "adamw"))
    )
    assert "adamw" not in found.dropped and found.verdict.choice == "plan"


def test_a_recipe_that_does_not_fit_leaves():
    def tight(run: Run) -> RunEnd:
        return RunEnd(status=NO_FIT, message="least is 9 MiB\nmore") if run.entrant == "adamw" else score(run)

    found, asked = race(score=tight)
    assert "adamw" not in {run.entrant for run in asked[1]}
    assert found.dropped["adamw"] == "does not fit (least is 9 MiB)" and found.verdict.rival == "foam8"
    with pytest.raises(BadInputError, match=r"no candidate fits the budget \(adamw: does not fit \(least is 9 MiB\)\)"):
        race((ADAMW,), score=tight)


def test_a_divergence_at_one_rate_costs_the_rate_and_at_all_the_entrant():
    def hot(run: Run) -> RunEnd:
        diverged = run.rate == 3.0 or run.entrant == "foam8"
        return RunEnd(status=DIVERGED, score=math.inf) if diverged else score(run)

    found, _ = race(score=hot)
    assert found.rates["adamw"] == 1.0 and found.dropped["foam8"] == "it diverged"
    with pytest.raises(
        TrainingFailedError, match=r"no uniform recipe is left.*lower optim.lr, of which race.rates are multiples"
    ):
        race(score=lambda run: RunEnd(status=DIVERGED, score=math.inf))


def test_a_plan_that_diverges_on_fresh_seeds_is_not_taken():
    def late(run: Run) -> RunEnd:
        bad = run.stage == FRESH and run.entrant == "plan" and run.seed == 202
        return RunEnd(status=DIVERGED, score=math.inf) if bad else score(run)

    found, _ = race(score=late)
    assert found.verdict.choice == "adamw" and found.dropped["plan"] == "it diverged"


@pytest.mark.parametrize("stages", [1, 2, 3])
def test_a_race_out_of_time_decides_by_the_stages_that_ended(stages: int):
    going, sent = course(EVERY, settings=SETTINGS), None
    for _ in range(stages):
        asked = going.send(sent)
        sent = {run: score(run) for run in asked}
    going.send(sent)
    with pytest.raises(StopIteration) as ended:
        going.throw(OutOfTimeError())
    found: RaceOutcome = ended.value.value
    assert found.ran_out_of_time and found.rung == SETTINGS.rungs[stages - 1]
    assert found.verdict.choice == "adamw"  # a mixed plan is confirmed or not taken


def test_the_claim_of_the_only_uniform_names_the_plan_that_nothing_confirmed():
    outcome, _ = race((ADAMW, PLAN), settings=replace_settings(fresh_seeds=()))
    racers = tuple(Racer(entrant=one, recipe=Recipe(name=one.name)) for one in (ADAMW, PLAN))
    told = claim_text(
        outcome, target=replace(TARGET, racers=racers), scale=RaceScale(size="tiny", num_params=9, steps=400)
    )
    assert told.startswith(
        "adamw was the only uniform left at 9 parameters and 400 steps, and plan is not shown to beat"
    )


def test_out_of_time_before_the_first_rung_has_ended_is_no_verdict():
    going = course(EVERY, settings=SETTINGS)
    next(going)
    with pytest.raises(OutOfTimeError):
        going.throw(OutOfTimeError())


def test_equal_seconds_are_steps_of_each_entrants_own():
    _, asked = race(settings=replace_settings(steps={"adamw": 400, "foam8": 200, "plan": 300, "permuted": 300}))
    assert {(run.entrant, run.steps) for run in asked[0]} == {
        ("adamw", 100),
        ("foam8", 50),
        ("plan", 75),
        ("permuted", 75),
    }


def test_the_same_scores_lead_to_the_same_runs():
    assert race() == race()
    assert isinstance(race()[0].scores, Mapping)
