"""Budgets as limits, what is refused and how, room for the temporaries of a step, and segments that move together."""

from dataclasses import replace

import pytest

from baoc.errors import BadInputError, InfeasibleBudgetError
from baoc.planning.messages import too_small
from baoc.planning.planner import Planner, PlannerSettings
from baoc.types import Budget, Footprint, LatencyTable
from tests.support.planners import ADAMW, MIB, NO_TEMPORARIES, PARAMS

FOOTPRINT = Footprint(
    device="cpu",
    micro_batch=8,
    weights_bytes=MIB,
    gradients_bytes=MIB,
    forward_backward_bytes=8 * MIB,
    validation_bytes=MIB,
    resident_bytes=2 * MIB,
    profile_bytes=MIB,
    step_temporary_bytes=NO_TEMPORARIES,
)


def planner(budget: Budget, *, footprint: Footprint | None = None, **settings: object) -> Planner:
    return Planner(
        PARAMS,
        budget=budget,
        settings=PlannerSettings(**settings),  # pyright: ignore[reportArgumentType]
        footprint=footprint,
    )


def memory(num_bytes: int) -> Budget:
    return Budget(name=f"{num_bytes}b", memory_bytes=num_bytes)


def test_a_memory_budget_leaves_state_what_the_step_does_not_need():
    plan = planner(memory(9 * MIB + ADAMW), footprint=FOOTPRINT).propose()
    assert plan.limits.state_bytes == ADAMW
    assert set(plan.allocation.choices.values()) == {"adamw"} and not plan.binding
    assert plan.peak_bytes == 9 * MIB + ADAMW == plan.most_useful_bytes
    tight = planner(memory(9 * MIB + ADAMW - 1), footprint=FOOTPRINT).propose()
    assert tight.binding and tight.allocation.state_bytes < ADAMW and tight.peak_bytes <= 9 * MIB + ADAMW - 1


def test_a_spec_whose_step_needs_much_is_done_without_or_paid_for():
    hungry = replace(FOOTPRINT, step_temporary_bytes={**NO_TEMPORARIES, "adamw": 20 * MIB})
    cheap = planner(memory(9 * MIB + ADAMW), footprint=hungry).propose()
    assert "adamw" not in cheap.allocation.choices.values() and cheap.peak_bytes <= 9 * MIB + ADAMW
    assert cheap.binding and cheap.most_useful_bytes == 23 * MIB + ADAMW
    rich = planner(memory(23 * MIB + ADAMW), footprint=hungry).propose()
    assert set(rich.allocation.choices.values()) == {"adamw"} and rich.peak_bytes == 23 * MIB + ADAMW


def test_a_planner_with_another_budget_leaves_this_one_as_it_was():
    mine, tight = planner(memory(9 * MIB + ADAMW), footprint=FOOTPRINT), memory(9 * MIB + ADAMW // 4)
    plan = mine.propose()
    assert mine.with_budget(tight).propose() == planner(tight, footprint=FOOTPRINT).propose() != plan
    assert mine.propose() == plan and mine.budget == plan.budget


def test_a_step_that_a_footprint_does_not_know_is_no_step_without_temporaries():
    known = replace(FOOTPRINT, step_temporary_bytes={"adamw": 7 * MIB, "lion": 9 * MIB})
    peaks = [known.peak_bytes(state_bytes=0, specs=specs) for specs in (("adamw",), ("adamw@streamed", "lion"))]
    assert peaks == [2 * MIB + 7 * MIB + MIB, 2 * MIB + 9 * MIB + MIB]
    with pytest.raises(ValueError, match=r"^the footprint has no temporaries of sign, muon: it knows adamw, lion$"):
        known.peak_bytes(state_bytes=0, specs=("sign@streamed", "adamw", "muon"))


def test_every_budget_from_the_least_on_is_met_however_much_room_other_specs_steps_need():
    """With each spec the peak is another one: more levels of room than are looked at."""
    names = sorted(planner(memory(2**40), footprint=FOOTPRINT).specs)
    needs = {name: 6 * MIB + MIB * (2 if name == "adamw" else 4 + at) for at, name in enumerate(names)}
    needs |= dict.fromkeys(("column_norm", "sign"), 8 * MIB + 1)
    crowded = replace(FOOTPRINT, step_temporary_bytes=needs)
    least = planner(memory(2**40), footprint=crowded).propose().least_feasible_bytes
    for budget in (least, least + 1, least + 2**18, least + 2 * MIB, least + 20 * MIB):
        plan = planner(memory(budget), footprint=crowded).propose()
        assert plan.peak_bytes <= budget and plan.least_feasible_bytes == least
    with pytest.raises(InfeasibleBudgetError, match=f"{least} bytes"):
        planner(memory(least - 1), footprint=crowded).propose()


def test_where_the_least_needs_a_step_that_passes_the_budget_the_refusal_tells_its_bytes():
    """AdamW's steps have room and its state has none; sign has next to no state, and no room for its steps."""
    room = replace(FOOTPRINT, step_temporary_bytes={**NO_TEMPORARIES, "sign": 6 * MIB + 20_000})
    given = {"footprint": room, "specs": ("adamw", "sign"), "keep_fp32_roles": ()}
    with pytest.raises(InfeasibleBudgetError, match="the least feasible is") as refused:
        planner(memory(9 * MIB + 10_000), **given).propose()
    least = refused.value.least_feasible_bytes
    assert 9 * MIB + 20_000 <= least < 9 * MIB + ADAMW
    assert set(planner(memory(least), **given).propose().allocation.choices.values()) == {"sign"}


@pytest.mark.parametrize(
    ("share", "said"), [(0.5, " (budget=state_50) with"), (1, " (budget=state_100) with"), (1.5, " with")]
)
def test_a_refusal_names_no_budget_that_is_refused(share: float, said: str):
    least = int(share * ADAMW)
    refusal = too_small(planner(Budget(name="state_1", state_fraction=0.01)), allowed_bytes=1, least_bytes=least)
    assert f"({least} bytes){said} allocator=" in str(refusal)


def test_all_of_adamw_s_state_is_enough_for_adamw_where_tensors_are_padded():
    odd = [replace(p, shape=(63, 61)) for p in PARAMS]
    plan = Planner(odd, budget=Budget(name="state_100", state_fraction=1.0)).propose()
    assert set(plan.allocation.choices.values()) == {"adamw"} and not plan.binding
    assert plan.allocation.state_bytes == plan.state_bytes_adamw > sum(8 * p.numel + 4 for p in odd)


def test_infeasible_names_the_least_and_the_least_is_feasible():
    with pytest.raises(InfeasibleBudgetError, match="What would lower it: a smaller micro_batch") as caught:
        planner(memory(MIB), footprint=FOOTPRINT).propose()
    least = caught.value.least_feasible_bytes
    assert planner(memory(least), footprint=FOOTPRINT).propose().peak_bytes <= least
    with pytest.raises(InfeasibleBudgetError):
        planner(memory(least - 1), footprint=FOOTPRINT).propose()


def test_a_memory_budget_without_a_footprint_is_refused():
    with pytest.raises(BadInputError, match="limits device memory, which needs a footprint: give a probe"):
        planner(memory(MIB))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"risk": "shadow"}, "risk=shadow was removed: .* choose risk=measured, the default, or risk=statistics"),
        ({"risk": "luck"}, "unknown risk 'luck': choose one of measured, prior, statistics"),
        ({"allocator": "oracle"}, "unknown allocator 'oracle': choose one of exact, lagrangian"),
        ({"specs": ("adamv",)}, "no optimizer spec is called or matches 'adamv'"),
    ],
)
def test_unknown_names_are_refused_with_what_there_is(settings, message):
    with pytest.raises(BadInputError, match=message):
        planner(Budget(name="unlimited"), **settings)


def test_a_step_time_limit_is_of_the_whole_step():
    table = LatencyTable(
        device="cpu",
        fixed_s={"adamw": 0.0, "sign": 0.0},
        per_element_s={"adamw": 2e-6, "sign": 1e-6},
        base_step_s=0.1,
        reference_step_s=0.12,
    )
    elements = sum(p.numel for p in PARAMS)
    budget = Budget(name="fast", step_time=(0.1 + 1.5e-6 * elements) / 0.12)
    chosen = Planner(PARAMS, budget=budget, settings=PlannerSettings(specs=("adamw", "sign")), latency=table).propose()
    assert set(chosen.allocation.choices.values()) == {"adamw", "sign"}
    assert chosen.allocation.step_s <= 1.5e-6 * elements + 1e-9


def test_a_saved_allocation_is_adopted_if_it_fits_and_replaced_if_not():
    half = planner(Budget(name="state_50", state_fraction=0.5))
    saved = half.propose()
    assert half.resume_plan(saved.allocation.choices, risk="prior", profile=None, gap=0.0).allocation == replace(
        saved.allocation, gap=0.0
    )
    earlier = half.resume_plan(saved.allocation.choices, risk="shadow", profile=None, gap=0.0)
    assert earlier.risk_model in ("prior", "measured"), "a risk of earlier versions: by today's"
    less = planner(Budget(name="state_10", state_fraction=0.1)).resume_plan(
        saved.allocation.choices, risk="prior", profile=None
    )
    assert less.allocation.choices != saved.allocation.choices
    assert less.allocation.state_bytes <= 0.1 * ADAMW


def test_the_plan_of_least_state_ignores_the_budget():
    assert planner(Budget(name="unlimited")).least_state_plan().allocation.state_bytes == 8 * len(PARAMS)
