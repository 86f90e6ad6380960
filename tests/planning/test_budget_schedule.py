"""Which budget is to be in force: that of the schedule, or of the file."""

import pytest

from baoc.core.budgets import parse_budget
from baoc.errors import BadInputError
from baoc.planning.reallocation.budget_schedule import BudgetChange, BudgetSchedule, check_order


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
