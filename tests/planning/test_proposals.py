"""What may be tried at a budget: everything fits it, and controls are told apart."""

from collections import Counter
from dataclasses import replace

import pytest

from baoc.core.measured import faded_rate, families
from baoc.core.recipes import RECIPES, find_recipe
from baoc.errors import InfeasibleBudgetError
from baoc.planning.measured import fitting_recipes, recipe_budget_bytes
from baoc.planning.planner import Planner, PlannerSettings
from baoc.planning.proposals import permute_specs, proposals
from baoc.types import Budget, ParamInfo, Role
from tests.support.planners import PARAMS
from tests.support.transformers import llama, within


def at(fraction: float, **settings: object) -> Planner:
    budget = Budget(name="some", state_fraction=fraction)
    return Planner(PARAMS, budget=budget, settings=PlannerSettings(**settings))  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("fraction", [0.1, 0.25, 1.0])
def test_every_proposal_is_within_the_budget(fraction: float):
    planner = at(fraction)
    made = proposals(planner)
    assert 2 <= len(made) <= 14 and len({one.name for one in made}) == len(made)
    for one in made:
        assert one.state_bytes <= fraction * planner.state_bytes_adamw
        assert set(one.choices) == {block.name for block in one.plan.blocks}
        assert one.recipe is None or one.tuning == one.recipe.tuning
        assert one.recipe is None or replace(one.recipe, lr={}) == replace(find_recipe(one.name), lr={})
    assert any(one.uniform and not one.control for one in made)


def test_a_recipe_brings_the_multiple_of_the_rate_at_which_it_measured_best():
    planner = at(1.0)
    family = planner.family or families()["language"][0]
    for asked in (None, [find_recipe("muon8"), find_recipe("slimadam")]):
        made = {one.name: one for one in proposals(planner, recipes=asked)}
        name = next(name for name in ("muon8", "muon8_lean") if name in made)  # the same here, and one of them races
        measured = family.recipe(name)
        rate = faded_rate(measured.rate, num_params=planner.num_params, measured=family.num_params)
        assert rate > 1 and (tuning := made[name].tuning) is not None
        assert {tuning.lr["muon"], tuning.lr["adamw"]} == {rate}
    assert made["slimadam"].tuning == find_recipe("slimadam").tuning  # nothing of it was measured


@pytest.mark.parametrize("decades", [0, 1, 3])
def test_a_race_runs_a_measured_recipe_at_the_rates_of_the_measured_choice(decades: int):
    given = {"risk": "measured", "family": "auto", "from_conf": True, "blocks_by": "layer_part"}
    settings = PlannerSettings(**given)  # pyright: ignore[reportArgumentType]
    planner = Planner(llama(), budget=Budget(name="some", state_fraction=0.3), settings=settings)
    newest = families()["language"][-1]
    recipe = next(row.recipe for row in newest.ranked(1.0) if row.recipe.lr)  # with a multiple of a role
    row = replace(newest.recipe(recipe.name), rate=3.0)
    size = max(planner.num_params // 10**decades, 1)
    recipes = tuple(row if one.name == row.name else one for one in newest.recipes)
    planner.family = replace(newest, recipes=recipes, num_params=size)
    (entrant,) = [one for one in proposals(planner, recipes=[recipe]) if one.name == recipe.name]
    (choice,) = [one for one in fitting_recipes(planner, family=planner.family) if one.measured is row]
    assert entrant.tuning == choice.recipe.tuning and entrant.tuning is not None
    of_role = entrant.tuning.lr["attention_qk"]
    assert of_role == pytest.approx(recipe.lr["attention_qk"] ** max(1 - decades / 2, 0), rel=1e-4)


def test_the_control_runs_the_plan_s_specs_in_other_places_of_the_same_shapes():
    made = {one.name: one for one in proposals(at(0.1))}
    plan, control = made["plan"], made["permuted"]
    assert control.control and not control.uniform and control.state_bytes == plan.state_bytes
    assert Counter(control.choices.values()) == Counter(plan.choices.values()) and control.choices != plan.choices
    assert list(made)[-1] == "permuted"


def test_a_plan_that_is_the_same_everywhere_has_no_permutation():
    plan = at(1.0, specs=("adamw",)).propose()
    assert permute_specs(plan.blocks, plan.allocation.choices) is None


def test_a_budget_that_nothing_meets_is_refused_as_ever():
    with pytest.raises(InfeasibleBudgetError, match="least feasible"):
        proposals(at(1e-9, specs=("adamw",)))


def test_a_network_of_no_measured_kind_is_offered_first_what_measured_best_of_each_rule_elsewhere():
    names = [one.name for one in proposals(at(1.0))]
    assert names[0].startswith("muon8") and names[1].startswith("foam8_lean")
    assert {"adafactor_m8", "adamw8"} <= set(names)


def test_a_recipe_by_parts_is_not_raced_where_the_network_does_not_tell_them_apart():
    """As of an LSTM, whose matrices would all run the fallback of a recipe that names attention and mlp alone."""
    shape = {"shape": (256, 64), "dtype": "float32", "role": Role.OTHER}
    params = [ParamInfo(name=f"rnn.weight_{part}_l0", **shape) for part in ("ih", "hh")]
    budget = Budget(name="some", state_fraction=0.3)
    made = proposals(Planner(params, budget=budget, settings=PlannerSettings(risk="measured", family="auto")), most=99)
    assert {"muon_int8", "muon_int4"} <= {spec for one in made for spec in one.choices.values()}
    assert all(one.recipe is None or all(map(one.recipe.names_spec_for, one.plan.blocks)) for one in made)
    assert "muon_int8" in made[0].choices.values()


def test_a_recipe_by_parts_is_proposed_where_it_fits_on_blocks_by_part_alone():
    """On blocks by role `slimadam8` runs AdamW on attention, which takes more than the budget."""
    settings = PlannerSettings(specs=("*",), risk="measured", family="auto")
    planner = Planner(llama(), budget=Budget(name="some", state_fraction=0.16), settings=settings)
    limit, recipe = planner.limits().state_bytes, RECIPES["slimadam8"]
    assert limit is not None and (recipe_budget_bytes(recipe, planner=planner) or 0) > limit
    assert "slimadam8" in [one.name for one in proposals(planner, recipes=[recipe], most=99)]


def test_a_recipe_is_uniform_whatever_runs_where_its_rule_does_not_apply():
    """A race compares uniforms at every rung: FOAM, which folds four neighbours but no three colours, is one."""
    shapes = ((16, 3, 1, 1), (32, 16, 1, 1))
    params = [
        ParamInfo(name=f"{depth}.weight", shape=shape, dtype="float32", role=Role.CONV, depth=depth)
        for depth, shape in enumerate(shapes)
    ]
    made = proposals(Planner(params, budget=Budget(name="some", state_fraction=1.0)), most=99)
    foam = next(one for one in made if one.name.startswith("foam8"))
    assert len(set(foam.choices.values())) > 1 and foam.uniform


def test_recipes_that_run_the_same_on_a_network_are_one_unless_they_are_named():
    """Without embedding and head, what a lean recipe runs there does not tell it from another."""
    pairs = [("muon8", "muon8_lean"), ("foam8", "foam8_lean"), ("muon8_m90", "muon8_lean_m90")]
    names = [one.name for one in proposals(at(1.0), most=99)]
    assert [len({*pair} & {*names}) for pair in pairs] == [1, 1, 1]
    named = [find_recipe(name) for name in pairs[0]]
    assert [one.name for one in proposals(at(1.0), recipes=named)][:2] == ["muon8", "muon8_lean"]


def test_a_recipe_that_was_asked_for_by_name_says_the_rate_at_which_it_measured_best():
    settings = PlannerSettings(risk="measured", family="language", allocator="recipe", recipe=find_recipe("muon8"))
    budget = Budget(name="some", state_fraction=1.0)
    told = Planner(llama(), budget=budget, settings=settings).propose().basis
    assert told is not None and "at the learning rate as given; it measured best at " in told.text
    for more, by, text in (
        ({"lr": {"muon": 1.5}}, "recipe", "muon8 (changed): the recipe that was asked for"),
        ({"lr": {"muon": 1.5}, "source": "race: muon8: 1.9 against"}, "race", "muon8: 1.9 against"),
    ):
        own = replace(settings, recipe=replace(find_recipe("muon8"), **more))
        told = Planner(llama(), budget=budget, settings=own).propose().basis
        assert told is not None and (told.by, told.text) == (by, text)


def test_every_recipe_is_planned_once(monkeypatch: pytest.MonkeyPatch):
    planned: list[str] = []
    settings = PlannerSettings(risk="measured", family="language")
    planner = Planner(llama(), budget=Budget(name="some", state_fraction=1.0), settings=settings)
    propose = Planner.propose

    def counted(self: Planner, **more: object):
        planned.extend([] if self.settings.recipe is None else [self.settings.recipe.name])
        return propose(self, **more)  # pyright: ignore[reportArgumentType]

    plan = planner.propose()
    monkeypatch.setattr(Planner, "propose", counted)
    made = proposals(planner, most=99)
    own = Counter(planned)
    assert {one.name for one in made} - {"plan", "permuted"} <= set(own)
    assert all(own[name] <= 1 + (name == plan.allocation.allocator) for name in own), own


# -- with a measured table ---------------------------------------------------------------------------------------------


def test_the_table_s_best_recipes_come_first_where_the_network_is_of_a_measured_kind():
    budget = Budget(name="some", state_fraction=0.25)
    settings = PlannerSettings(risk="measured", family="language")
    names = [one.name for one in proposals(Planner(llama(), budget=budget, settings=settings))]
    assert names[0] == "muon8_lean_m90" and names[1].startswith("foam8_lean")  # a race of few compares rules
    assert "muon8_lean" in names and "foam8_lean" in names and len(names) <= 14


@pytest.mark.slow
def test_a_recipe_that_fits_only_with_other_weights_or_on_the_host_is_proposed_so():
    recipe = replace(RECIPES["muon8_lean"], weights="bf16_sr")
    tight = within(2**40, recipe=recipe, blocks_by="layer_part").propose().peak_bytes  # as the choice cuts them here

    def made(**more: object) -> dict[str, set[str]]:
        return {one.name: set(one.choices.values()) for one in proposals(within(tight, family="language", **more))}  # pyright: ignore

    assert "muon8_lean" not in made()
    assert "muon_int8+bf16_sr" in made(measured_specs=("*+bf16_sr",))["muon8_lean"]
    assert "muon_int8+split8@streamed" in made(host_bytes=2**36)["muon8_lean"]
