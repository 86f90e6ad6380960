"""Options of a decision: lines through trials, what release leaves of a footprint, and what each objective takes."""

import math
from dataclasses import replace

import pytest

from baoc.errors import BadInputError
from baoc.options import Trial, best, divisors, footprint_at, make_option, option_rows, released, seconds_at
from baoc.planner import Planner, PlannerSettings
from baoc.types import Budget, Footprint, Moment, Option
from tests.unit.test_planner import ADAMW, MIB, PARAMS


def footprint(micro_batch: int) -> Footprint:
    """Activations of 1 MiB per sample beside 4 MiB of weights and gradients."""
    peak = 4 * MIB + micro_batch * MIB
    return Footprint(
        device="cpu",
        micro_batch=micro_batch,
        weights_bytes=2 * MIB,
        gradients_bytes=2 * MIB,
        forward_backward_bytes=peak,
        validation_bytes=3 * MIB + micro_batch * 1000,
        resident_bytes=4 * MIB,
        moments=(Moment(name="training", num_bytes=peak, gradients=None), Moment(name="training", num_bytes=peak - 7)),
        gradient_order=("b", "a"),
    )


def trial(micro_batch: int, seconds: float = math.nan) -> Trial:
    return Trial(micro_batch=micro_batch, footprint=footprint(micro_batch), seconds=seconds)


def test_footprints_lie_on_a_line():
    assert footprint_at([trial(1), trial(2)], micro_batch=32) == footprint(32)
    assert footprint_at([trial(4), trial(1)], micro_batch=4) == footprint(4)
    alone = footprint_at([trial(4)], micro_batch=8)
    assert alone == replace(footprint(4), micro_batch=8)


def test_a_line_never_falls():
    """What the first trial held by chance is not taken off larger ones."""
    odd = replace(footprint(1), resident_bytes=9 * MIB)
    found = footprint_at([Trial(micro_batch=1, footprint=odd), trial(2)], micro_batch=64)
    assert found.resident_bytes == 9 * MIB


def test_trials_of_different_moments_promise_none():
    other = Trial(micro_batch=2, footprint=replace(footprint(2), moments=footprint(2).moments[:1]))
    assert footprint_at([trial(1), other], micro_batch=8).moments == ()


def test_seconds_bend_where_they_were_seen_to_bend():
    """A GPU that is not busy takes the same time for 1 and 2 samples, and twice as long from 8 to 16."""
    timed = [trial(1, 1.0), trial(2, 1.0), trial(8, 4.0)]
    assert [seconds_at(timed, micro_batch=n) for n in (1, 2, 5, 8, 16)] == pytest.approx([1.0, 1.0, 2.5, 4.0, 8.0])
    assert math.isnan(seconds_at([trial(1)], micro_batch=4))
    assert seconds_at([trial(2, 0.5)], micro_batch=8) == 2.0


def test_a_batch_is_cut_into_whole_micro_batches():
    assert divisors(12) == [1, 2, 3, 4, 6, 12]


def test_released_gradients_are_there_one_block_at_a_time():
    moments = (
        Moment(name="training", num_bytes=100, gradients=None),
        Moment(name="training", num_bytes=90, gradients=0),
        Moment(name="training", num_bytes=95, gradients=2),
        Moment(name="validation", num_bytes=80, gradients=None),
    )
    found = released(
        replace(footprint(1), moments=moments, resident_bytes=70), gradients={"a": 30, "b": 20}, held_bytes=30
    )
    assert [moment.num_bytes for moment in found.moments] == [50, 90, 75, 30]
    assert (found.forward_backward_bytes, found.validation_bytes, found.resident_bytes) == (90, 30, 50)


def option(micro_batch: int, *, rate: float, risk: float | None, checkpointing: bool = False) -> Option:
    return Option(
        micro_batch=micro_batch,
        accumulation=64 // micro_batch,
        checkpointing=checkpointing,
        release=False,
        weights="native",
        peak_bytes=micro_batch,
        state_bytes=1,
        samples_per_s=rate,
        risk=risk,
    )


SAFE, MIDDLE, FAST = (
    option(1, rate=100, risk=0.0),
    option(8, rate=290, risk=0.02),
    option(64, rate=300, risk=0.1),
)
OPTIONS = [SAFE, MIDDLE, FAST, option(32, rate=900, risk=None)]


@pytest.mark.parametrize(("objective", "chosen"), [("quality", SAFE), ("throughput", FAST), ("balanced", MIDDLE)])
def test_each_objective_takes_its_own(objective: str, chosen: Option):
    assert best(OPTIONS, objective=objective) == chosen


def test_of_options_without_risk_quality_takes_the_fastest():
    slow, fast = option(4, rate=10, risk=0.0), option(16, rate=20, risk=0.0)
    assert best([fast, slow], objective="quality") == fast
    unknown = [option(4, rate=math.nan, risk=0.0), option(16, rate=math.nan, risk=0.0)]
    assert best(unknown, objective="throughput") == unknown[1]


def test_of_rates_that_are_alike_throughput_takes_the_least_risk():
    near = option(32, rate=299, risk=0.01)
    assert best([FAST, near], objective="throughput") == near


def test_no_option_is_none_and_an_unknown_objective_is_refused():
    assert best([option(1, rate=1, risk=None)], objective="quality") is None
    with pytest.raises(BadInputError, match="unknown objective 'speed': choose one of quality, throughput, balanced"):
        best(OPTIONS, objective="speed")


def test_an_option_spends_what_a_small_micro_batch_leaves_on_state():
    """In 12 MiB eight samples leave room for AdamW's states, fifteen for hardly any, sixteen for none."""
    budget = Budget(name="m", memory_bytes=4 * MIB + 8 * MIB + ADAMW)
    planner = Planner(PARAMS, budget=budget, settings=PlannerSettings(), footprint=footprint(1))
    small, large, huge = (
        make_option(
            planner,
            footprint=footprint(size),
            batch_size=240,
            checkpointing=False,
            seconds=0.1 * size,
            optimizer_s=1.0,
        )
        for size in (8, 8 + 0, 16)
    )
    assert small.risk == 0 and small.peak_bytes == budget.memory_bytes and small.accumulation == 30
    assert small.samples_per_s == pytest.approx(240 / (30 * 0.8 + 1.0))
    assert large == small
    assert huge.risk is None and huge.why == "does not fit even with the least state"
    assert huge.peak_bytes > budget.memory_bytes
    tight = Planner(PARAMS, budget=Budget(name="t", memory_bytes=12 * MIB + ADAMW // 2), footprint=footprint(1))
    pressed = make_option(
        tight, footprint=footprint(8), batch_size=240, checkpointing=True, seconds=math.nan, optimizer_s=0.0
    )
    assert (pressed.risk or 0) > 0 and pressed.state_bytes <= ADAMW // 2 and math.isnan(pressed.samples_per_s)
    assert pressed.name == "30 x 8, recomputed activations"
    assert option_rows([pressed])[0]["option"] == pressed.name
