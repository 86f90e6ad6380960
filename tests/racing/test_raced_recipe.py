"""What a race chose is taken by run.py under the name `raced`, and by the other doors from its file."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from baoc import BaocOptimizer, BaocStrategy
from baoc.config.compose import compose
from baoc.config.from_hydra import from_hydra
from baoc.config.schema import RunConfig
from baoc.core.recipes import RECIPES, recipe_node
from baoc.data import build_data
from baoc.errors import BadInputError
from baoc.models import build_model
from baoc.racing.records import race_family, resolve_raced_recipe
from baoc.tracking.files import write_json
from tests.support.tiny import tiny_trainer

LIBRARY = Path("outputs/races")
CHOSEN = "foam8_lean"  # which no door takes by itself at this budget
NODE = recipe_node(RECIPES[CHOSEN])
SPEC = build_data("digits", task="vision", batch_size=2).spec


class Holder(L.LightningModule):
    """Somebody's module around the network of `model=vit`."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = network()

    def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
        images, labels = batch
        return functional.cross_entropy(self.inner(images), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def network() -> nn.Module:
    return build_model("vit", spec=SPEC, size="tiny", seed=0)


def given(*words: str) -> RunConfig:
    return from_hydra(compose(["model=vit", "model.size=tiny", "budget=state_25", "device=cpu", *words]))


def leave_race(name: str = "vit_tiny.json", *words: str, recipe: Any = NODE) -> str:
    """The file of a race of this network, of which those who look it up read this."""
    content = {
        "schema": 1, "choice": CHOSEN, "lr": 6e-3, "recipe": recipe, "told": f"{CHOSEN}: told", "claim": "the claim",
        "verdict": {}, "family": race_family(given(*words), size="tiny"), "budget": "state_25",
    }  # fmt: skip
    write_json(LIBRARY / name, content)
    return str(LIBRARY / name)


def by_command(recipe: str) -> Any:
    return resolve_raced_recipe(given(f"recipe={recipe}")).recipe


def by_optimizer(recipe: str) -> Any:
    return BaocOptimizer(network(), budget="state_25", recipe=recipe).reallocator.planner.settings.recipe


def by_strategy(recipe: str) -> Any:
    strategy = BaocStrategy(budget="state_25", device="cpu", recipe=recipe, plan_only=True)
    data = [(torch.zeros(2, SPEC.channels, SPEC.image_size, SPEC.image_size), torch.zeros(2, dtype=torch.long))]
    tiny_trainer(strategy=strategy, max_steps=1).fit(Holder(), data)
    assert strategy.reallocator is not None
    return strategy.reallocator.planner.settings.recipe


DOORS = pytest.mark.parametrize("door", [by_command, by_optimizer, by_strategy])


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.slow
@DOORS
def test_the_file_of_a_race_is_a_recipe_at_every_door(door: Callable[[str], Any]):
    assert replace(door(leave_race()), share=None) == replace(RECIPES[CHOSEN], share=None)
    with pytest.raises(BadInputError, match=r"plan.json is a race that chose a plan by block.*leave recipe out, and"):
        door(leave_race("plan.json", recipe=None))


def test_the_newest_race_of_the_family_is_taken(capsys: pytest.CaptureFixture[str]):
    leave_race()
    assert replace(by_command("raced"), share=None) == replace(RECIPES[CHOSEN], share=None)
    assert f"recipe=raced takes {CHOSEN}: told the claim" in " ".join(capsys.readouterr().out.split())


def test_without_a_race_it_is_said_which_there_are():
    there = "Race with mode=race in place of recipe=raced, or name a recipe"
    with pytest.raises(BadInputError, match=rf"no race in outputs/races is of .*; there is none yet. {there}"):
        by_command("raced")
    leave_race("other.json", "budget=state_50")
    with pytest.raises(BadInputError, match=rf"at budget state_25 .*; there are races of vit tiny on digits.* {there}"):
        by_command("raced")


@pytest.mark.parametrize("door", [by_optimizer, by_strategy])
def test_the_other_doors_ask_for_the_file(door: Callable[[str], Any]):
    with pytest.raises(BadInputError, match=r'recipe="raced" is of run.py, .*: give the file of the race'):
        door("raced")
