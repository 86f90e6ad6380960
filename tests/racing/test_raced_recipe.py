"""`recipe=raced` through every door: the same race is found, and the same is said where there is none."""

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
from baoc.profiling import describe
from baoc.racing.entrants import network_of
from baoc.racing.records import LIBRARY, family_of, settle_recipe
from baoc.tracking.files import write_json
from tests.support.tiny import tiny_trainer

CHOSEN = "foam8_lean"  # which no door takes by itself at this budget
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


def leave_race(name: str = "vit_tiny.json", *words: str, net: nn.Module | None = None) -> None:
    """The file of a race of this network, of which those who look it up read this."""
    content = {
        "schema": 1, "choice": CHOSEN, "lr": 6e-3, "recipe": recipe_node(RECIPES[CHOSEN]), "told": f"{CHOSEN}: told",
        "claim": "the claim", "family": family_of(given(*words), size="tiny"), "budget": "state_25",
        "network": network_of(describe(net or network())),
    }  # fmt: skip
    write_json(LIBRARY / name, content)


def by_command() -> Any:
    return settle_recipe(given("recipe=raced")).recipe


def by_optimizer() -> Any:
    return BaocOptimizer(network(), budget="state_25", recipe="raced").reallocator.planner.settings.recipe


def by_strategy() -> Any:
    strategy = BaocStrategy(budget="state_25", device="cpu", recipe="raced", plan_only=True)
    data = [(torch.zeros(2, SPEC.channels, SPEC.image_size, SPEC.image_size), torch.zeros(2, dtype=torch.long))]
    tiny_trainer(strategy=strategy, max_steps=1).fit(Holder(), data)
    assert strategy.reallocator is not None
    return strategy.reallocator.planner.settings.recipe


DOORS = pytest.mark.parametrize("door", [by_command, by_optimizer, by_strategy])


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)


@DOORS
def test_the_newest_race_of_the_network_is_taken(door: Callable[[], Any], capsys: pytest.CaptureFixture[str]):
    leave_race()
    assert replace(door(), share=None) == replace(RECIPES[CHOSEN], share=None)
    said = " ".join(capsys.readouterr().out.split())
    assert f"recipe=raced takes {CHOSEN}: told the claim" in said
    assert door is by_command or ("it was raced on digits" in said and "best learning rate was 0.006" in said)


@DOORS
def test_without_a_race_every_door_says_the_same(door: Callable[[], Any]):
    there = "Race with mode=race in place of recipe=raced, or name a recipe"
    with pytest.raises(BadInputError, match=rf"no race in outputs/races is of .*; there is none yet. {there}"):
        door()
    leave_race("other.json", "budget=state_50", net=nn.Linear(3, 3))
    with pytest.raises(BadInputError, match=rf"at budget state_25 .*; there are races of vit tiny on digits.* {there}"):
        door()


@pytest.mark.parametrize("door", [by_optimizer, by_strategy])
def test_a_network_that_was_raced_on_two_data_sets_is_not_guessed_at(door: Callable[[], Any]):
    leave_race("one.json")
    leave_race("other.json", "dataset=images")
    with pytest.raises(BadInputError, match=r"vit tiny on images.*vit tiny on digits.*json.load\(open\('outputs/races"):
        door()
