"""Who races at a budget, as values in a file: `mode=plan race=auto` leaves them beside the plan, a race reads them.

They are found on the device that trains, where a step was measured: recipes that fit the whole budget, the allocator's
plan, and its permutation as a control (`baoc.planning.proposals`). Each is a recipe, a plan one by block.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from baoc.config.schema import RunConfig
from baoc.core.recipes import FALLBACK, RECIPES, Recipe, Tuning, find_recipe, recipe_from_node, recipe_node
from baoc.errors import BadInputError, CheckpointError, InfeasibleBudgetError
from baoc.planning.planner import Planner
from baoc.planning.proposals import Proposal, proposals
from baoc.racing.rules import Entrant
from baoc.tracking import console, files
from baoc.types import DataSpec
from baoc.units import format_bytes

ENTRANTS_FILE = "entrants.json"
SCHEMA = 1
_ENTRANT = tuple(field.name for field in fields(Entrant))


@dataclass(frozen=True, slots=True, kw_only=True)
class Racer:
    """An entrant and the recipe that it runs."""

    entrant: Entrant
    recipe: Recipe

    @property
    def name(self) -> str:
        return self.entrant.name


@dataclass(frozen=True, slots=True, kw_only=True)
class RaceTarget:
    """The entrants at a budget, and what a race needs to know of the network and its data.

    Args:
        num_params: of the network, trained or not.
        state_bytes_adamw: of fp32 AdamW, which shares of state are told by.
        num_train: examples of the training part; 0 for a stream.
        steps: of the run.
        lr: learning rate of fp32 AdamW, which an entrant's rates are multiples of.
    """

    racers: tuple[Racer, ...]
    size: str
    num_params: int
    state_bytes_adamw: int
    data: str
    num_train: int
    batch_size: int
    steps: int
    lr: float
    quality: str
    higher_is_better: bool


def write_entrants(
    planner: Planner, *, config: RunConfig, data: DataSpec, num_params: int, quality: tuple[str, bool], run_dir: Path
) -> None:
    """Writes the entrants at the planner's budget into the run folder, and says who they are.

    Raises:
        BadInputError: a recipe of race.recipes does not exist, or the run has no end to take shares of.
        InfeasibleBudgetError: none of them fits the budget.
    """
    asked = [find_recipe(name) for name in config.race.recipes] or None
    found = proposals(planner, recipes=asked, seed=config.seed)
    found = [one for one in found if asked is None or one.recipe is not None]
    missing = [recipe.name for recipe in asked or () if recipe.name not in {one.name for one in found}]
    if missing:
        console.say(
            f"not raced, as the budget does not hold it or catalogue.specs lacks what it runs: {', '.join(missing)}"
        )
    if not any(one.uniform for one in found):
        raise _nothing_fits(planner, asked=asked or list(RECIPES.values()))
    steps = config.trainer.max_steps
    if steps < 1 and config.trainer.max_epochs and data.num_train:
        steps = config.trainer.max_epochs * max(data.num_train // config.batch_size, 1)
    if steps < 1:
        raise BadInputError("a race needs to know how long the run is: give trainer.max_steps")
    assert config.optim.lr is not None
    content: dict[str, Any] = {
        "schema": SCHEMA,
        "racers": [
            {key: getattr(one, key) for key in _ENTRANT} | {"recipe": recipe_node(recipe_of(one))} for one in found
        ],
        "size": config.model.size,
        "num_params": num_params,
        "state_bytes_adamw": planner.state_bytes_adamw,
        "data": str(data),
        "num_train": data.num_train,
        "batch_size": config.batch_size,
        "steps": steps,
        "lr": config.optim.lr,
        "quality": quality[0],
        "higher_is_better": quality[1],
    }
    files.write_json(run_dir / ENTRANTS_FILE, content)
    console.say(f"a race would try {', '.join(one.name for one in found)}")


def recipe_of(proposal: Proposal) -> Recipe:
    """What a proposal runs, as one value; a plan by block is a recipe that names its blocks."""
    tuning = proposal.tuning or Tuning()
    if proposal.recipe is not None:
        return replace(proposal.recipe, lr=tuning.lr, betas=tuning.betas)
    told = "the allocator's plan with its specs permuted" if proposal.control else "the allocator's plan"
    return Recipe(
        name=proposal.name,
        description=told,
        blocks=dict(proposal.choices),
        lr=tuning.lr,
        betas=tuning.betas,
        fallback=(FALLBACK,),
        matching=proposal.matching,
    )


def _nothing_fits(planner: Planner, *, asked: Sequence[Recipe]) -> InfeasibleBudgetError:
    """No uniform recipe fits: the smallest one, and what it would need."""
    from baoc.planning.allocators.recipe import recipe_bytes

    sizes = {recipe.name: recipe_bytes(planner.blocks, recipe=recipe) for recipe in asked}
    least = min(sizes, key=lambda name: sizes[name])
    share = sizes[least] / planner.state_bytes_adamw
    return InfeasibleBudgetError(
        f"no uniform recipe fits budget {planner.budget.name}, and a race's choice is held against the best of them: "
        f"the smallest, {least}, keeps {format_bytes(sizes[least])} of state ({share:.1%} of fp32 AdamW's). Give a "
        "larger budget, or other race.recipes",
        budget_bytes=0,
        least_feasible_bytes=sizes[least],
    )


def read_target(path: Path) -> RaceTarget:
    """The entrants that `write_entrants` wrote. Raises CheckpointError if the file is damaged or of a later version."""
    content: dict[str, Any] = files.read_json(path)
    if content.get("schema") != SCHEMA:
        raise CheckpointError(f"{path} has schema {content.get('schema')}, and this version reads {SCHEMA}: race anew")
    racers = []
    for row in content["racers"]:
        entrant = Entrant(**{key: row[key] for key in _ENTRANT})
        racers.append(Racer(entrant=entrant, recipe=recipe_from_node(row["recipe"])))
    own = [field.name for field in fields(RaceTarget) if field.name != "racers"]
    return RaceTarget(racers=tuple(racers), **{key: content[key] for key in own})
