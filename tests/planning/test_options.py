"""Options of a decision: lines through trials, what release leaves of a footprint, and what each objective takes."""

import math
from contextlib import suppress
from dataclasses import replace
from functools import partial

import pytest

from baoc.core.catalogue import SPECS
from baoc.errors import BadInputError, InfeasibleBudgetError
from baoc.planning.microbatch import (
    MicroBatchMeasurement,
    best_option,
    divisors,
    footprint_at,
    interpolate,
    make_option,
    option_rows,
    peak_gradients_bytes,
    promising_recomputed_counts,
    seconds_at,
    smallest_number,
    upper_bound_at,
    with_gradient_release,
)
from baoc.planning.planner import Planner, PlannerSettings
from baoc.types import Block, Budget, Footprint, LatencyTable, Option, ParamInfo, PeakInterval, Plan, Role
from tests.support.planners import ADAMW, MIB, PARAMS, footprint, option


def trial(micro_batch: int, seconds: float = math.nan) -> MicroBatchMeasurement:
    return MicroBatchMeasurement(micro_batch=micro_batch, footprint=footprint(micro_batch), seconds=seconds)


def test_footprints_lie_on_a_line():
    assert footprint_at([trial(1), trial(2)], micro_batch=32) == footprint(32)
    assert footprint_at([trial(4), trial(1)], micro_batch=4) == footprint(4)
    alone = footprint_at([trial(4)], micro_batch=8)
    assert alone == replace(footprint(4), micro_batch=8)


def test_a_line_never_falls():
    """What the first trial held by chance is not taken off larger ones."""
    odd = replace(footprint(1), resident_bytes=9 * MIB)
    found = footprint_at([MicroBatchMeasurement(micro_batch=1, footprint=odd), trial(2)], micro_batch=64)
    assert found.resident_bytes == 9 * MIB


def test_trials_of_different_moments_promise_none():
    other = MicroBatchMeasurement(micro_batch=2, footprint=replace(footprint(2), intervals=footprint(2).intervals[:1]))
    assert footprint_at([trial(1), other], micro_batch=8).intervals == ()


def test_seconds_bend_where_they_were_seen_to_bend():
    """A GPU that is not busy takes the same time for 1 and 2 samples, and twice as long from 8 to 16."""
    timed = [trial(1, 1.0), trial(2, 1.0), trial(8, 4.0)]
    assert [seconds_at(timed, micro_batch=n) for n in (1, 2, 5, 8, 16)] == pytest.approx([1.0, 1.0, 2.5, 4.0, 8.0])
    assert math.isnan(seconds_at([trial(1)], micro_batch=4))
    assert seconds_at([trial(2, 0.5)], micro_batch=8) == 2.0


def test_a_batch_is_cut_into_whole_micro_batches():
    assert divisors(12) == [1, 2, 3, 4, 6, 12]


def one_block(name: str, *numels: int) -> Block:
    params = [ParamInfo(name=f"{name}.{i}", shape=(n,), dtype="float32", role=Role.MLP) for i, n in enumerate(numels)]
    return Block(name=name, params=tuple(params), role=Role.MLP)


def test_released_gradients_are_there_one_block_at_a_time():
    intervals = (
        PeakInterval(name="training", num_bytes=1000, gradients=None),
        PeakInterval(name="training", num_bytes=900, gradients=0),
        PeakInterval(name="training", num_bytes=950, gradients=2),
        PeakInterval(name="validation", num_bytes=800, gradients=None),
    )
    blocks = [one_block("a", 30), one_block("b", 20)]
    before = replace(footprint(1), intervals=intervals, resident_bytes=700, gradient_order=("b.0", "a.0"))
    found = with_gradient_release(before, blocks=blocks, grouped=False)
    assert found is not None
    assert [interval.num_bytes for interval in found.intervals] == [1000 - 200, 900, 950 - 80, 800 - 200]
    assert (found.forward_backward_bytes, found.validation_bytes, found.resident_bytes) == (900, 600, 620)
    assert with_gradient_release(replace(before, intervals=()), blocks=blocks, grouped=False) is None


def test_blocks_whose_gradients_come_in_turns_are_held_together():
    """The second part of `a` comes last, so `b` and `c` pass by beside its first one."""
    a, b, c = one_block("a", 1, 5), one_block("b", 3), one_block("c", 2)
    assert peak_gradients_bytes(["a.0", "b.0", "c.0", "a.1"], blocks=[a, b, c]) == 4 * 6
    assert peak_gradients_bytes(["a.0", "a.1", "b.0", "c.0"], blocks=[a, b, c]) == 4 * 6
    assert peak_gradients_bytes(["b.0", "a.0", "c.0"], blocks=[a, b, c]) == 4 * 3, "a.1 got none: the rest of a stays"


SAFE, MIDDLE, FAST = (
    option(1, rate=100, risk=0.0),
    option(8, rate=290, risk=0.02),
    option(64, rate=300, risk=0.1),
)
OPTIONS = [SAFE, MIDDLE, FAST, option(32, rate=900, risk=None)]


@pytest.mark.parametrize(("objective", "chosen"), [("quality", SAFE), ("throughput", FAST), ("balanced", MIDDLE)])
def test_each_objective_takes_its_own(objective: str, chosen: Option):
    assert best_option(OPTIONS, objective=objective) == chosen


def test_of_options_without_risk_quality_takes_the_fastest():
    slow, fast = option(4, rate=10, risk=0.0), option(16, rate=20, risk=0.0)
    assert best_option([fast, slow], objective="quality") == fast
    unknown = [option(4, rate=math.nan, risk=0.0), option(16, rate=math.nan, risk=0.0)]
    assert best_option(unknown, objective="throughput") == unknown[1]


def test_of_rates_that_are_alike_throughput_takes_the_least_risk():
    near = option(32, rate=299, risk=0.01)
    assert best_option([FAST, near], objective="throughput") == near


def test_no_option_is_none_and_an_unknown_objective_is_refused():
    assert best_option([option(1, rate=1, risk=None)], objective="quality") is None
    with pytest.raises(BadInputError, match="unknown objective 'speed': choose one of quality, throughput, balanced"):
        best_option(OPTIONS, objective="speed")


def test_an_option_spends_what_a_small_micro_batch_leaves_on_state():
    """In 12 MiB eight samples leave room for AdamW's states, fifteen for hardly any, sixteen for none."""
    budget = Budget(name="m", memory_bytes=4 * MIB + 8 * MIB + ADAMW)
    planner = Planner(PARAMS, budget=budget, settings=PlannerSettings(), footprint=footprint(1))
    small, large, huge = (
        make_option(
            planner, footprint=footprint(size), batch_size=240, recomputed=0, num_layers=0, latency=table(240 * 0.1)
        )
        for size in (8, 8 + 0, 16)
    )
    assert small.risk == 0 and small.peak_bytes == budget.memory_bytes and small.accumulation == 30
    assert small.step_s == pytest.approx(24 + 1.0)
    assert small.samples_per_s == pytest.approx(240 / small.step_s)
    assert large.key == small.key == (8, False, False) and large.peak_bytes == small.peak_bytes
    assert huge.risk is None and huge.why == "does not fit even with the least state"
    assert huge.peak_bytes > budget.memory_bytes
    tight = Planner(PARAMS, budget=Budget(name="t", memory_bytes=12 * MIB + ADAMW // 2), footprint=footprint(1))
    pressed = make_option(
        tight,
        footprint=footprint(8),
        batch_size=240,
        recomputed=4,
        num_layers=4,
        latency=replace(table(1.0), fixed_s={}),
    )
    assert (pressed.risk or 0) > 0 and pressed.state_bytes <= ADAMW // 2 and math.isnan(pressed.samples_per_s)
    assert pressed.name == "30 x 8, recomputed layers 4 of 4"
    assert option_rows([pressed])[0]["option"] == pressed.name
    unplanned = option_rows([replace(pressed, peak_bytes=0, state_bytes=0, risk=None)])[0]
    assert unplanned["peak_bytes"] is unplanned["state_bytes"] is None


def table(base_s: float) -> LatencyTable:
    """A step of `base_s` and one second for the optimizer, whatever it runs; fused AdamW takes 20 in all."""
    free = dict.fromkeys(SPECS, 0.0)
    return LatencyTable(
        device="m", fixed_s=free, per_element_s=free, step_s=1.0, base_step_s=base_s, reference_step_s=20.0
    )


def test_a_limit_on_time_rules_options_out_and_says_what_they_take():
    """A fifth more than 20 seconds: 22 of forward and backward leave room for the optimizer's one, 24 do not."""
    budget = Budget(name="m", memory_bytes=64 * MIB, step_time=1.2)
    planner = Planner(PARAMS, budget=budget, settings=PlannerSettings(), footprint=footprint(1))
    fits, slow = (
        make_option(
            planner, footprint=footprint(8), batch_size=240, recomputed=recomputes, num_layers=4, latency=table(base_s)
        )
        for recomputes, base_s in ((0, 22.0), (4, 24.0))
    )
    assert fits.fits and fits.step_s == pytest.approx(23.0) and math.isnan(fits.fastest_s)
    assert not slow.fits and slow.fastest_s == pytest.approx(25.0) and slow.reference_s == 20.0
    assert slow.why == "too slow: 2.5e+04 ms, 2.4e+04 ms allowed"
    assert best_option([fits, slow], objective="quality") == fits


def test_released_gradients_are_taken_where_nothing_else_fits_or_where_they_gain_something():
    plain, freed = option(64, rate=100, risk=0.1), replace(option(64, rate=100, risk=0.0), release=True)
    assert best_option([plain, freed], objective="quality") == plain, "never for quality where it is not needed"
    assert best_option([replace(plain, risk=None), freed], objective="quality") == freed
    assert best_option([plain, replace(freed, risk=0.1)], objective="throughput") == plain
    assert best_option([plain, freed], objective="throughput") == freed
    assert best_option([plain, replace(freed, risk=0.1)], objective="balanced") == plain
    assert freed.name == "1 x 64, released gradients"


def recomputing(kept: int, recomputed: int, *, number: int, layers: int = 8, gradients: int = 1000) -> Footprint:
    """The bytes of a step of alike layers that keep `kept` bytes each, or `recomputed` where they compute again, the
    first `number` of them, as each layer's backward begins, from the last to the first."""

    def before(layer: int) -> int:
        return sum(recomputed if other < number else kept for other in range(layer)) + kept

    names = [f"{layer}" for layer in reversed(range(layers))]
    moments = [
        PeakInterval(name="training", num_bytes=5000 + before(layer) + gradients * done, gradients=done)
        for done, layer in enumerate(reversed(range(layers)))
    ]
    peak = max(moment.num_bytes for moment in moments)
    validation = PeakInterval(name="validation", num_bytes=6000, gradients=None)
    return replace(
        footprint(8),
        weights_bytes=5000,
        gradients_bytes=gradients * layers,
        forward_backward_bytes=peak,
        validation_bytes=6000,
        resident_bytes=5000 + gradients * layers,
        intervals=(*moments, validation),
        gradient_order=tuple(names),
    )


@pytest.mark.parametrize("gradients", [10, 100, 1000, 5000])
@pytest.mark.parametrize("recomputed", [20, 400, 999])
def test_a_line_between_two_numbers_of_recomputed_layers_is_never_below_the_number_between(
    recomputed: int, gradients: int
):
    made = {n: recomputing(1000, recomputed, number=n, gradients=gradients) for n in range(9)}
    for low in range(9):
        for high in range(low + 1, 9):
            for number in range(low, high + 1):
                line = interpolate(made[low], made[high], share=(number - low) / (high - low))
                real = made[number]
                for saved in ({}, {"7": 500, "0": 300}):
                    found = line.peak_bytes(state_bytes=9, saved=saved)
                    assert found >= real.peak_bytes(state_bytes=9, saved=saved)
                assert len(line.intervals) == len(real.intervals)
    near = interpolate(made[0], made[8], share=4 / 8).peak_bytes(state_bytes=0)
    assert near <= made[4].peak_bytes(state_bytes=0) + 1000, "by a layer at most"


def test_intervals_that_begin_elsewhere_are_joined_where_either_begins():
    def merged(*counts: int, num_bytes: int) -> Footprint:
        intervals = [PeakInterval(name="training", num_bytes=num_bytes + n, gradients=n) for n in counts]
        return replace(footprint(8), intervals=tuple(intervals), gradient_order=tuple("abcdefgh"))

    line = interpolate(merged(0, 5, num_bytes=100), merged(0, 3, num_bytes=50), share=0.5)
    assert [(m.gradients, m.num_bytes) for m in line.intervals] == [(0, 75), (5, 79), (3, 77)]
    other = replace(merged(0, num_bytes=50), gradient_order=tuple("hgfedcba"))
    assert interpolate(merged(0, num_bytes=100), other, share=0.5).intervals == ()


def test_copies_of_layers_that_are_kept_stay_for_backward():
    copies = {"head": 5, "early": 30, "late": 40}
    fewer, more = (
        replace(
            footprint(8),
            intervals=(PeakInterval(name="training", num_bytes=n, copies={k: copies[k] for k in names}),),
        )
        for n, names in ((1000, ("head", "early", "late")), (500, ("head",)))
    )
    found = interpolate(fewer, more, share=0.5, not_recomputed=("late",))
    assert found.intervals[0].copies == {"head": 5, "late": 40}
    assert interpolate(fewer, more, share=0.5).intervals[0].copies == {"head": 5}


def test_one_small_trial_bounds_what_more_samples_take():
    small = MicroBatchMeasurement(
        micro_batch=2, footprint=replace(recomputing(1000, 20, number=0), micro_batch=2, weights_bytes=3000)
    )
    grown = upper_bound_at([small], micro_batch=8)
    assert grown.forward_backward_bytes == 3000 + 4 * (small.footprint.forward_backward_bytes - 3000)
    assert [m.num_bytes for m in grown.intervals[:2]] == [
        3000 + 4 * (m.num_bytes - 3000) for m in small.footprint.intervals[:2]
    ]
    assert upper_bound_at([small], micro_batch=2) == small.footprint


def test_fewest_is_the_smallest_number_that_fits():
    for answer in range(9):
        assert smallest_number(lambda number, answer=answer: number >= answer, most=8) == answer


def test_as_few_layers_are_recomputed_as_the_budget_has_room_for():
    """By trying all numbers: the fewest that hold the allocation of all recomputed, and the fewest that hold any."""
    of = partial(recomputing, 60_000, 400, gradients=1)
    room = of(number=4).peak_bytes(state_bytes=ADAMW)
    budget = Budget(name="m", memory_bytes=room)
    planner = Planner(PARAMS, budget=budget, settings=PlannerSettings(), footprint=of(number=0))
    plans: dict[int, Plan] = {}
    for number in range(9):
        planner.footprint = of(number=number)
        with suppress(InfeasibleBudgetError):
            plans[number] = planner.propose()
    as_good = min(n for n, plan in plans.items() if plan.allocation.risk <= plans[8].allocation.risk)
    given = {"most": 8, "footprint": lambda number: of(number=number)}
    least = planner_least(planner, of(number=0))
    found = promising_recomputed_counts(planner, **given, plan=plans[8], least_bytes=least)
    assert found == [min(plans), as_good] == [1, 4]
    assert promising_recomputed_counts(planner, **given, plan=None, least_bytes=None) == []
    planner.budget = Budget(name="none")
    assert promising_recomputed_counts(planner, **given, plan=plans[8], least_bytes=least) == []


def test_a_number_that_takes_more_than_its_line_is_corrected():
    """What 16-bit weights spare may be known of all recomputed layers and not of kept ones, so that the least between
    them lies above the line; the number that is offered has to fit."""
    of = partial(recomputing, 60_000, 400, gradients=1)

    def above(number: int) -> Footprint:
        found = of(number=number)
        more = 150_000 if 0 < number < 8 else 0
        intervals = tuple(replace(m, num_bytes=m.num_bytes + more) for m in found.intervals)
        return replace(found, intervals=intervals, forward_backward_bytes=found.forward_backward_bytes + more)

    budget = Budget(name="m", memory_bytes=300_000)
    planner = Planner(PARAMS, budget=budget, settings=PlannerSettings(), footprint=above(8))
    plan = planner.propose()
    found = promising_recomputed_counts(planner, most=8, footprint=above, plan=plan, least_bytes=485_048)
    fitting = [number for number in range(8) if planner_least(planner, above(number)) <= 300_000]
    assert fitting[0] == 6 and 6 in found, "the line says 4"


def planner_least(planner: Planner, footprint: Footprint) -> int:
    """What the allocation of least state takes."""
    budget, planner.footprint = planner.budget, footprint
    planner.budget = replace(budget, memory_bytes=1)
    with pytest.raises(InfeasibleBudgetError) as caught:
        planner.propose()
    planner.budget = budget
    return caught.value.least_feasible_bytes
