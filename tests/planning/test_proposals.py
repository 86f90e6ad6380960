"""What may be tried at a budget: everything fits it, and controls are told apart."""

from collections import Counter

import pytest

from baoc.core.recipes import RECIPES
from baoc.errors import InfeasibleBudgetError
from baoc.planning.planner import Planner, PlannerSettings
from baoc.planning.proposals import permuted, proposals
from baoc.types import Budget
from tests.support.planners import PARAMS


def at(fraction: float, **settings: object) -> Planner:
    budget = Budget(name="some", state_fraction=fraction)
    return Planner(PARAMS, budget=budget, settings=PlannerSettings(**settings))  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("fraction", [0.1, 0.15, 0.25, 0.6, 1.0])
def test_every_proposal_is_within_the_budget(fraction: float):
    planner = at(fraction)
    made = proposals(planner)
    assert 2 <= len(made) <= 14 and len({one.name for one in made}) == len(made)
    for one in made:
        assert one.state_bytes <= fraction * planner.state_bytes_adamw
        assert set(one.choices) == {block.name for block in one.plan.blocks}
        assert one.recipe is None or (one.tuning == one.recipe.tuning and one.recipe == RECIPES[one.name])
    assert any(one.uniform and not one.control for one in made)


def test_the_control_runs_the_plan_s_specs_in_other_places_of_the_same_shapes():
    made = {one.name: one for one in proposals(at(0.1))}
    plan, control = made["plan"], made["permuted"]
    assert control.control and not control.uniform and control.state_bytes == plan.state_bytes
    assert Counter(control.choices.values()) == Counter(plan.choices.values()) and control.choices != plan.choices
    assert list(made)[-1] == "permuted"


def test_a_plan_that_is_the_same_everywhere_has_no_permutation():
    plan = at(1.0, specs=("adamw",)).propose()
    assert permuted(plan.blocks, plan.allocation.choices) is None


def test_a_budget_that_nothing_meets_is_refused_as_ever():
    with pytest.raises(InfeasibleBudgetError, match="least feasible"):
        proposals(at(1e-9, specs=("adamw",)))
