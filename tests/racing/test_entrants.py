"""Entrants of a race from a planner on fake bytes, as a file; plans by block as recipes that the planner takes."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from baoc.config.compose import compose
from baoc.config.from_hydra import from_hydra
from baoc.core.budgets import parse_budget
from baoc.core.recipes import Recipe, recipe_from_node, recipe_node
from baoc.errors import BadInputError, InfeasibleBudgetError
from baoc.planning.planner import Planner, PlannerSettings
from baoc.planning.proposals import proposals
from baoc.racing.entrants import ENTRANTS_FILE, read_target, recipe_of, write_entrants
from baoc.types import ImageDataSpec, ParamInfo, Role
from tests.support.transformers import LARGE

DATA = ImageDataSpec(dataset="digits", image_size=8, channels=1, num_classes=10, num_train=1438, num_val=359)
SHAPES = {"embed": (Role.EMBEDDING, None), "head": (Role.HEAD, None)} | {
    f"layers.{depth}.{role.value}": (role, depth) for depth in range(2) for role in (Role.ATTENTION, Role.MLP)
}


def planner(budget: str) -> Planner:
    params = [
        ParamInfo(name=name, shape=(64, 64), dtype="float32", role=role, depth=depth)
        for name, (role, depth) in SHAPES.items()
    ]
    return Planner(params, budget=parse_budget(budget), settings=PlannerSettings())


def left(folder: Path, *, budget: str = "state_25", words: tuple[str, ...] = ()) -> None:
    config = from_hydra(compose(["model=vit", "optim.lr=0.003", f"budget={budget}", "race=auto", *words]))
    own = planner(budget)
    write_entrants(own, config=config, data=DATA, num_params=1000, quality=("val/loss", False), run_dir=folder)


def test_entrants_are_read_as_they_were_left(tmp_path: Path):
    left(tmp_path)
    found = read_target(tmp_path / ENTRANTS_FILE)
    names = [one.name for one in found.racers]
    assert {"muon8_lean", "plan"} <= set(names) and "adamw" not in names  # which does not fit
    assert (found.steps, found.lr, found.num_train, found.quality) == (400, 0.003, 1438, "val/loss")
    by_name = {one.name: one for one in found.racers}
    assert by_name["muon8_lean"].entrant.uniform and not by_name["plan"].entrant.control
    plan = by_name["plan"]
    again = planner("state_25").with_settings(replace(PlannerSettings(), allocator="recipe", recipe=plan.recipe))
    allocation = again.propose().allocation
    assert dict(allocation.choices) == dict(plan.recipe.blocks)
    assert allocation.state_bytes == plan.entrant.state_bytes


@pytest.mark.parametrize(
    ("settings", "block"),
    [
        ({}, "layer1.attention.qk"),  # as the recipe that measured best at this size names parts
        ({"risk": "prior"}, "layer1.attention"),
        ({"blocks_by": "layer_role"}, "layer1.attention"),
        ({"blocks_by": "layer_part"}, "layer1.mlp.in"),
        ({"blocks_by": "layer"}, "layer1"),
        ({"patterns": (("first.in", r"layers\.0\.mlp\..*"),)}, "layer1.attention.vo"),
        ({"patterns": (("first.in", r"layers\.0\..*"),), "risk": "prior"}, "first.in"),
    ],
)
def test_a_plan_by_block_is_planned_again_on_the_blocks_that_it_names(settings: Mapping[str, Any], block: str):
    given = {"risk": "measured", "family": "auto", "specs": ("adamw", "adamw_int8", "sign"), **settings}
    own = Planner(LARGE, budget=parse_budget("state_20"), settings=PlannerSettings(**given))
    by_block = [one for one in proposals(own) if one.recipe is None]
    assert by_block[0].name == "plan" and block in by_block[0].choices
    for one in by_block:
        recipe = recipe_from_node(recipe_node(recipe_of(one)))
        again = Planner(LARGE, budget=own.budget, settings=PlannerSettings(**given, recipe=recipe)).propose()
        assert again.allocation.choices == dict(one.choices)


def test_only_the_recipes_that_were_named_race(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    left(tmp_path, words=("race.recipes=[foam8_lean,adamw]",))
    target = read_target(tmp_path / ENTRANTS_FILE)
    assert [one.name for one in target.racers] == ["foam8_lean"] and target.left_out == ("adamw",)
    assert (
        "not raced, as the budget does not hold it or catalogue.specs lacks what it runs: adamw"
        in capsys.readouterr().out
    )
    with pytest.raises(BadInputError, match=r"there is no such recipe; did you mean muon8_lean or (?!muon8_lean )"):
        left(tmp_path, words=("race.recipes=[muon8_laen]",))


def test_a_budget_that_no_uniform_fits_names_what_would(tmp_path: Path):
    with pytest.raises(
        InfeasibleBudgetError, match=r"no uniform recipe fits budget state_25.*the smallest, adamw, keeps"
    ):
        left(tmp_path, words=("race.recipes=[adamw]",))


def test_a_run_without_an_end_cannot_be_raced_for(tmp_path: Path):
    with pytest.raises(BadInputError, match=r"a race needs to know how long the run is: give trainer.max_steps"):
        left(tmp_path, words=("trainer.max_steps=-1",))
    left(tmp_path, words=("trainer.max_steps=-1", "trainer.max_epochs=3"))
    assert read_target(tmp_path / ENTRANTS_FILE).steps == 3 * (1438 // 64)


def test_a_recipe_by_block_is_of_one_network():
    recipe = recipe_from_node(recipe_node(Recipe(name="mine", blocks={"layers.7.mlp": "muon_int8"})))
    assert recipe.blocks == {"layers.7.mlp": "muon_int8"}
    with pytest.raises(
        BadInputError, match=r"recipe mine names blocks that this network does not have \(layers.7.mlp\)"
    ):
        planner("state_25").with_settings(replace(PlannerSettings(), allocator="recipe", recipe=recipe))
    with pytest.raises(BadInputError, match=r"recipe.blocks.a=nonsense: there is no such optimizer spec"):
        Recipe(name="mine", blocks={"a": "nonsense"})
