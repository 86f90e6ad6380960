"""Which budget is to be in force: schedule, file and what relaxation left; and who is calm."""

from dataclasses import replace

import pytest

from baoc.config.dynamics import RelaxationConfig
from baoc.core.budgets import parse_budget
from baoc.errors import BadInputError
from baoc.planning.reallocation.budget_schedule import BudgetChange, BudgetSchedule, check_order
from baoc.planning.reallocation.relaxation import calm_blocks, lowered, offers
from baoc.types import Candidate, Cost, Profile, Risk
from tests.support.decision import stats
from tests.support.values import make_plan


def scheduled(base: str = "8gb", **changes: str) -> BudgetSchedule:
    """`step_5="6gb"`: an entry of a schedule."""
    entries = [
        BudgetChange(budget=parse_budget(budget), step=int(key.removeprefix("step_")))
        for key, budget in changes.items()
    ]
    return BudgetSchedule(parse_budget(base), changes=entries)


def test_a_schedule_counts_from_its_step_on() -> None:
    given = scheduled(step_5="6gb", step_9="2gb")
    assert [given.budget_at(step)[0].name for step in (0, 4, 5, 8, 9)] == ["8gb", "8gb", "6gb", "6gb", "2gb"]
    assert given.budget_at(8)[1] == "budget.schedule, step 5"


def test_a_file_takes_the_place_of_the_schedule_until_it_is_taken_back() -> None:
    given = scheduled(step_5="6gb")
    given.request(" 3gb\n")
    assert given.budget_at(7) == (parse_budget("3gb"), "the budget file asks for it")
    with pytest.raises(BadInputError, match="cannot read budget=lots"):
        given.request("lots")
    assert given.budget_at(7)[0].name == "3gb", "what cannot be read changes nothing"
    given.request("")
    assert given.budget_at(7)[0].name == "6gb"


def test_a_ceiling_is_not_passed_but_by_the_file() -> None:
    given = scheduled("state_50", step_5="state_10", step_9="state_50")
    given.ceiling = parse_budget("state_25")
    assert [given.budget_at(step)[0].name for step in (0, 5, 9)] == ["state_25", "state_10", "state_25"]
    given.request("state_50")
    assert given.budget_at(9)[0].name == "state_50"


def test_a_limit_on_host_memory_goes_on() -> None:
    given = BudgetSchedule(
        parse_budget({"memory": "8gb", "host_memory": "16gb"}), changes=scheduled(step_1="6gb").changes
    )
    assert given.budget_at(3)[0].host_memory_bytes == 16 * 2**30


def test_a_step_time_limit_goes_on() -> None:
    given = BudgetSchedule(parse_budget({"memory": "8gb", "step_time": 1.2}), changes=scheduled(step_1="6gb").changes)
    assert given.budget_at(3)[0].step_time == 1.2


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ([{"step": 8}, {"step": 4}], "step 4 after step 8"),
        ([{"step": 8}, {"step": 8}], "step 8 after step 8"),
    ],
)
def test_entries_that_take_back_what_came_before_are_refused(entries: list[dict[str, int]], said: str) -> None:
    schedule = [BudgetChange(budget=parse_budget("8gb"), **entry) for entry in entries]
    with pytest.raises(BadInputError, match=rf"budget\.schedule has {said}: list its entries in the order"):
        check_order(schedule)


# -- relaxation -------------------------------------------------------------------------------------------------------


def test_looks_are_due_from_a_step_on() -> None:
    settings = RelaxationConfig(from_step=10, every=4)
    assert [step for step in range(20) if settings.due(step)] == [10, 14, 18]
    assert not any(RelaxationConfig().due(step) for step in range(1000))


def test_calm_blocks_offer_their_next_cheaper_candidate() -> None:
    before = Profile(stats={name: stats(grad_rms=1.0) for name in "abc"})
    now = Profile(stats={"a": stats(grad_rms=0.4), "b": stats(grad_rms=0.6), "c": stats(grad_rms=0.1)})
    calm = calm_blocks(before, now, share=0.5)
    assert calm == {"a": pytest.approx(0.4), "c": pytest.approx(0.1)}

    def candidate(block: str, spec: str, state_bytes: int, risk: float) -> Candidate:
        return Candidate(block=block, spec=spec, cost=Cost(state_bytes=state_bytes), risk=Risk(total=risk))

    pool = {
        block: [
            candidate(block, "sign", 0, 1.0),
            candidate(block, "small", 10, 0.09 if block == "a" else 0.3),
            candidate(block, "adamw", 80, 0.0),
        ]
        for block in "abc"
    }
    plan = make_plan()
    plan = replace(plan, allocation=replace(plan.allocation, choices=dict.fromkeys("abc", "adamw"), state_bytes=240))
    found = offers(plan, pool, calm=calm, max_risk=0.1)
    assert {block: one.spec for block, one in found.items()} == {"a": "small"}, "c is calm, but small is risky there"
    plan = replace(plan, state_bytes_adamw=1000)
    lower = lowered(parse_budget("unlimited"), plan=plan, saved_bytes=70)
    assert lower.state_fraction is not None and int(lower.state_fraction * 1000) == 170
    assert lowered(parse_budget("8gb"), plan=replace(plan, peak_bytes=5000), saved_bytes=70).memory_bytes == 4930
