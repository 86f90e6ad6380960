"""The entrants of a race in a file: `mode=plan race=auto` writes them beside the plan, and the race reads them.

The plan is made on the device that trains, after a step was measured there. Entrants are the recipes that fit the
budget, the allocator's plan, and its permutation as a control (`baoc.planning.proposals`). A plan becomes a recipe that
names its blocks.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from baoc.config.schema import RunConfig
from baoc.core.recipes import FALLBACK, RECIPES, Recipe, Tuning, find_recipe, recipe_node
from baoc.errors import BadInputError, CheckpointError, InfeasibleBudgetError
from baoc.planning.planner import Planner
from baoc.planning.proposals import Proposal, proposals
from baoc.racing.verdict import Entrant
from baoc.tracking import console, files
from baoc.types import DataSpec, read_plain
from baoc.units import format_bytes

ENTRANTS_FILE = "entrants.json"
SCHEMA = 1
_ENTRANT_KEYS = tuple(field.name for field in fields(Entrant))


@dataclass(frozen=True, slots=True, kw_only=True)
class Racer:
    entrant: Entrant
    recipe: Recipe

    @property
    def name(self) -> str:
        return self.entrant.name


@dataclass(frozen=True, slots=True, kw_only=True)
class RaceTarget:
    """The run that a race chooses a recipe for: its entrants, network, data and length.

    Args:
        num_params: all parameters of the network, frozen ones too.
        state_bytes_adamw: state of fp32 AdamW, of which shares of state are taken.
        num_train: training examples; 0 for a stream.
        steps: of the run.
        lr: learning rate of fp32 AdamW; an entrant's rates are multiples of it.
        left_out: recipes of race.recipes that are no entrants; not kept by earlier versions.
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
    left_out: tuple[str, ...] = ()


def write_entrants(
    planner: Planner, *, config: RunConfig, data: DataSpec, num_params: int, quality: tuple[str, bool], run_dir: Path
) -> None:
    """Writes the entrants at the planner's budget into `run_dir`, and prints their names.

    Raises:
        BadInputError: a recipe of race.recipes does not exist, or the run has no known number of steps.
        InfeasibleBudgetError: none of them fits the budget.
    """
    requested = [find_recipe(name) for name in config.race.recipes] or None
    entrants = proposals(planner, recipes=requested, seed=config.seed)
    if requested is not None:
        entrants = [entrant for entrant in entrants if entrant.recipe is not None]
    racing = {entrant.name for entrant in entrants}
    left_out = [recipe.name for recipe in requested or () if recipe.name not in racing]
    say_left_out(left_out)
    if not any(entrant.uniform for entrant in entrants):
        raise _nothing_fits(planner, recipes=requested or list(RECIPES.values()))
    steps = config.trainer.max_steps
    if steps < 1 and config.trainer.max_epochs and data.num_train:
        steps = config.trainer.max_epochs * max(data.num_train // config.batch_size, 1)
    if steps < 1:
        raise BadInputError("a race needs to know how long the run is: give trainer.max_steps")
    assert config.optim.lr is not None
    content: dict[str, Any] = {
        "schema": SCHEMA,
        "racers": [
            {key: getattr(entrant, key) for key in _ENTRANT_KEYS} | {"recipe": recipe_node(recipe_of(entrant))}
            for entrant in entrants
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
        "left_out": left_out,
    }
    files.write_json(run_dir / ENTRANTS_FILE, content)
    console.say(f"a race would try {', '.join(entrant.name for entrant in entrants)}")


def say_left_out(names: Sequence[str]) -> None:
    if names:
        console.say(
            f"not raced, as the budget does not hold it or catalogue.specs lacks what it runs: {', '.join(names)}"
        )


def recipe_of(proposal: Proposal) -> Recipe:
    """The recipe of a proposal; a plan becomes one that names its blocks."""
    tuning = proposal.tuning or Tuning()
    if proposal.recipe is not None:
        return replace(proposal.recipe, lr=tuning.lr, betas=tuning.betas)
    description = "the allocator's plan with its specs permuted" if proposal.control else "the allocator's plan"
    return Recipe(
        name=proposal.name,
        description=description,
        blocks=dict(proposal.choices),
        lr=tuning.lr,
        betas=tuning.betas,
        fallback=(FALLBACK,),
        matching=proposal.matching,
    )


def _nothing_fits(planner: Planner, *, recipes: Sequence[Recipe]) -> InfeasibleBudgetError:
    """The error that names the smallest uniform recipe and the state that it needs."""
    from baoc.planning.allocators.recipe import recipe_bytes

    sizes = {recipe.name: recipe_bytes(planner.blocks, recipe=recipe) for recipe in recipes}
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
    content = files.read_record(path, {"racers": list})
    if content.get("schema") != SCHEMA:
        raise CheckpointError(f"{path} has schema {content.get('schema')}, and this version reads {SCHEMA}: race anew")
    try:
        racers = [
            Racer(entrant=read_plain(Entrant, row), recipe=find_recipe(row["recipe"])) for row in content["racers"]
        ]
        target = read_plain(RaceTarget, {**content, "racers": []}, partial=True)
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{path} holds no entrants of a race ({error}): it was damaged; remove it to have them planned again"
        ) from error
    return replace(target, racers=tuple(racers))
