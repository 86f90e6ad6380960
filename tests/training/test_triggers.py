"""When a run thinks again: counted in steps, and for drift in statistics, never by a clock."""

from dataclasses import replace

import pytest

from baoc.config.schema import ReallocationConfig
from baoc.errors import BadInputError
from baoc.training.session import SessionSettings
from baoc.training.triggers import drift, is_due
from baoc.types import Profile
from tests.support.planners import STATS


def profile(**changes: float) -> Profile:
    return Profile(stats={"a": replace(STATS, **changes)})


def fires(
    mode: str,
    *,
    step: int,
    last: int = 0,
    now: Profile | None = None,
    reference: Profile | None = None,
    watched_from: int = 0,
) -> bool:
    settings = ReallocationConfig(mode=mode, warmup_steps=10, interval=5, drift_threshold=0.5)
    return is_due(
        settings,
        step=step,
        last_decision=last,
        profile=lambda: now or profile(),
        reference=reference,
        watched_from=watched_from,
    )


def test_off_never_once_once_and_interval_again():
    assert not any(fires("off", step=step) for step in range(30))
    assert min(step for step in range(30) if fires("once", step=step)) == 10
    assert not fires("once", step=20, last=10)
    assert min(step for step in range(11, 30) if fires("interval", step=step, last=10)) == 15


def test_drift_looks_every_interval_and_fires_on_what_moved():
    moved = profile(grad_rms=10.0, noise=20.0)
    assert fires("drift", step=10)
    assert not fires("drift", step=14, last=10, now=moved, reference=profile())
    assert fires("drift", step=15, last=10, now=moved, reference=profile())
    assert not fires("drift", step=15, last=10, now=profile(grad_rms=1.1), reference=profile())
    looked = [step for step in range(11, 26) if fires("drift", step=step, last=10, now=moved, reference=profile())]
    assert looked == [15, 20, 25], "nor is a profile made at each step after the first look"


@pytest.mark.parametrize(
    ("mode", "last"), [("once", 0), ("interval", 0), ("interval", 90), ("drift", 0), ("drift", 90)]
)
def test_a_resumed_run_that_starts_its_statistics_anew_warms_up_again(mode: str, last: int):
    """And drift, which has nothing to compare with, then decides."""
    assert min(step for step in range(101, 130) if fires(mode, step=step, last=last, watched_from=100)) == 110


def test_drift_is_the_mean_log_ratio_and_leaves_out_what_is_not_known():
    assert drift(profile(), profile()) == 0
    assert drift(profile(), profile(grad_rms=2.718281828459045)) == pytest.approx(1 / 3)
    assert drift(profile(noise=float("nan")), profile(grad_rms=2.718281828459045)) == pytest.approx(1 / 2)
    assert drift(Profile(stats={}), profile()) == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mode": "often"}, r"reallocation.mode=often is not allowed: it must be off\|once\|interval\|drift"),
        ({"warmup_steps": 1}, "reallocation.warmup_steps=1 is not allowed: it must be 2 or more"),
        ({"min_gain": 1.0}, "reallocation.min_gain=1.0 is not allowed: it must be at least 0 and below 1"),
    ],
)
def test_settings_that_make_no_sense_are_refused(changes, message):
    with pytest.raises(BadInputError, match=message):
        SessionSettings(reallocation=ReallocationConfig(**changes))
