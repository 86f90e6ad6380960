"""What a race leaves: `race.csv` (one row a run) and `race.json` (the verdict), kept in a library for recipe=raced."""

import math
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from baoc.config.environment import commit, package_versions
from baoc.config.options import hash_own_code
from baoc.config.race import RaceConfig
from baoc.config.resolve import choose_device
from baoc.config.schema import RunConfig
from baoc.core.budgets import AUTO
from baoc.core.own_code import short_name
from baoc.core.recipes import BY_RACE, RACED, Recipe, recipe_from_node, recipe_node
from baoc.errors import BadInputError
from baoc.models import choose_size
from baoc.racing.course import FRESH, RaceOutcome
from baoc.racing.entrants import RaceTarget
from baoc.tracking import console, files
from baoc.types import Budget, to_plain

RACE_FILE, RUNS_FILE = "race.json", "race.csv"
SCHEMA = 1
EPOCHS_APART = 2.0  # a run that sees its data so many times more often than the race is outside of what was measured


@dataclass(frozen=True, slots=True, kw_only=True)
class RaceScale:
    """The network and the horizon that a race was run at; `field` is that of the target."""

    size: str
    num_params: int
    steps: int
    equal_seconds: bool = False
    one_rate: bool = False  # for all entrants


def epochs(steps: int, field: RaceTarget) -> float:
    """How often a run of these steps sees its data; 0 for a stream."""
    return steps * field.batch_size / field.num_train if field.num_train else 0.0


def is_raced_recipe(recipe: Recipe | None) -> bool:
    """Whether `recipe=raced` was given: the name alone, which a file of that name would not be."""
    return recipe is not None and recipe.name == RACED and not recipe.specs and not recipe.blocks


def race_family(config: RunConfig, *, size: str) -> dict[str, Any]:
    """What a race's result holds for: the network up to its seed, its data, the user's own code, and the budget.

    The data set that is made of the interpreter's own library differs between versions of Python.
    """
    model: dict[str, Any] = to_plain(config.model)
    model["size"] = size
    dataset: dict[str, Any] = to_plain(config.dataset)
    if config.dataset.name == "pysource":
        dataset["python"] = f"{sys.version_info[0]}.{sys.version_info[1]}"
    own = {"code": code} if (code := hash_own_code(config)) else {}
    return {"task": config.task.name, "model": model, "dataset": dataset, "budget": _limits_of(config.budget), **own}


def _limits_of(budget: Budget) -> dict[str, Any]:
    """What a budget limits, under whatever name; `auto` is what is free on a device and no limit of its own."""
    if budget.name == AUTO:
        return to_plain(replace(budget, memory_bytes=None))
    limits: dict[str, Any] = to_plain(budget)
    limits.pop("name")
    return limits


def claim(outcome: RaceOutcome, *, field: RaceTarget, measured: RaceScale) -> str:
    """What may be said of the choice, in one sentence, with probability, size and horizon."""
    found = outcome.verdict
    steps = round(outcome.rung * measured.steps)
    where = f"{measured.num_params:,} parameters and {steps:,} steps"
    if field.num_train:
        where += f" ({epochs(steps, field):.1f} epochs)"
    where += ", each at one learning rate" if measured.one_rate else ""
    beyond = ""
    if (measured.size, steps) != (field.size, field.steps):
        seen = f" ({epochs(field.steps, field):.1f} epochs)" if field.num_train else ""
        beyond = f"; not measured at {field.num_params:,} parameters and {field.steps:,} steps{seen}, which the run has"
    gone = {found.choice, *outcome.dropped, *(one.name for one in field.racers if one.entrant.control)}
    beside = [name for name in outcome.scores.get(outcome.rung, {}) if name not in gone]
    if found.rival is None and beside:
        return (
            f"{found.choice} was the only uniform left at {where}, and {', '.join(beside)} is not shown to beat it on "
            f"fresh seeds; nothing more is claimed{beyond}"
        )
    if found.rival is None and outcome.dropped:
        return (
            f"{found.choice} alone was left at {where}: the others were clearly behind, diverged or did not fit{beyond}"
        )
    if found.rival is None:
        return f"nothing is claimed of {found.choice}, the only recipe of the race"
    if not math.isfinite(found.margin_held):
        return f"nothing is claimed of {found.choice} at {where}: it was compared on too few seeds{beyond}"
    held = max(found.margin_held, found.margin if found.is_certain else 0.0)
    more = "" if found.is_certain else f", which is more than the margin of {found.margin:.3g} that was asked for"
    return (
        f"P({found.choice} is worse than the best uniform tried by more than {held:.3g} of {field.quality}) <= "
        f"{1 - found.level:.2g} at {where}{more}{beyond}"
    )


def told(outcome: RaceOutcome, *, field: RaceTarget) -> str:
    """The choice beside the best other uniform: share of state, means, difference, n."""
    found = outcome.verdict
    stages = [outcome.scores.get(stage, {}) for stage in (outcome.rung, FRESH)]  # the last rung's seeds, and fresh ones
    means = {
        name: [score for scores in stages for score in scores.get(name, {}).values()]
        for name in (found.choice, found.rival)
        if name is not None
    }
    sign = -1 if field.higher_is_better else 1
    state = next(one.entrant.state_bytes for one in field.racers if one.name == found.choice)
    own = means[found.choice]
    spread = f" ({stdev(own):.2g})" if len(own) > 1 else ""
    text = f"{found.choice}: {state / field.state_bytes_adamw:.1%} of AdamW's state; {sign * fmean(own):.4g}{spread}"
    if found.rival is None or found.difference is None:
        return text
    return f"{text} against {found.rival} {sign * fmean(means[found.rival]):.4g}: {found.difference}"


def record(
    outcome: RaceOutcome, *, config: RunConfig, field: RaceTarget, measured: RaceScale, seconds: float, command: str
) -> dict[str, Any]:
    """The content of race.json."""
    found, racers = outcome.verdict, {one.name: one for one in field.racers}
    rate = outcome.rates[found.choice]
    recipe = racers[found.choice].recipe
    same = measured.size == field.size
    sign = -1 if field.higher_is_better else 1
    said, claimed = told(outcome, field=field), claim(outcome, field=field, measured=measured)
    recipe = replace(recipe, source=f"{BY_RACE}{said}; {claimed}")  # which plans that run it tell
    return {
        "schema": SCHEMA,
        "choice": found.choice,
        "rate": rate,
        "lr": rate * field.lr,
        # a plan by block is of one network; on another size its run allocates anew
        "recipe": recipe_node(recipe) if same or not recipe.blocks else None,
        "told": said,
        "claim": claimed,
        "verdict": to_plain(found) | {"is_certain": found.is_certain},
        "cut": outcome.ran_out_of_time,
        "family": race_family(config, size=field.size),
        "budget": config.budget.name,
        "quality": field.quality,
        "higher_is_better": field.higher_is_better,
        "measured": {
            "size": measured.size,
            "num_params": measured.num_params,
            "steps": round(outcome.rung * measured.steps),
            "epochs": epochs(round(outcome.rung * measured.steps), field),
            "equal_seconds": measured.equal_seconds,
        },
        "target": {"size": field.size, "num_params": field.num_params, "steps": field.steps, "data": field.data},
        "entrants": [
            {
                "name": one.name,
                "state_bytes": one.entrant.state_bytes,
                "state_share": one.entrant.state_bytes / field.state_bytes_adamw,
                "uniform": one.entrant.uniform,
                "control": one.entrant.control,
                "rate": outcome.rates.get(one.name),
                "left": outcome.dropped.get(one.name, ""),
                "stages": {
                    stage_name(stage): _summary(scores[one.name].values(), sign=sign)
                    for stage, scores in outcome.scores.items()
                    if one.name in scores
                },
            }
            for one in field.racers
        ],
        "seconds": seconds,
        "commit": commit(),
        "versions": package_versions(),
        "command": command,
    }


def stage_name(stage: float | str) -> str:
    return stage if isinstance(stage, str) else f"{stage:.0%}"


def _summary(scores: Iterable[float], *, sign: int) -> dict[str, Any]:
    values = [sign * score for score in scores]
    finite = [value for value in values if math.isfinite(value)]
    return {
        "mean": fmean(finite) if len(finite) == len(values) else None,
        "sd": stdev(finite) if len(finite) == len(values) > 1 else None,
        "n": len(values),
    }


def keep(content: Mapping[str, Any], *, folder: Path, library: Path) -> None:
    """Writes race.json into the race's folder and into the library."""
    files.write_json(folder / RACE_FILE, content)
    family = content["family"]
    model, data = short_name(family["model"]["name"]), short_name(family["dataset"]["name"])
    name = f"{model}_{family['model']['size']}_{data}_{content['budget']}"
    files.write_json(library / f"{name}_{folder.resolve().parent.name}_{folder.name}.json", content)


def find_race(config: RunConfig, *, size: str, library: Path) -> dict[str, Any]:
    """The newest race of this family at this budget. Raises BadInputError, which names what there is."""
    wanted = to_plain(race_family(config, size=size))
    newest_last = sorted(library.glob("*.json"), key=lambda file: file.stat().st_mtime) if library.is_dir() else []
    kept = [content for file in newest_last if (content := files.read_json(file)).get("schema") == SCHEMA]
    found = [content for content in kept if content["family"] == wanted]
    if found:
        return found[-1]
    others = list(dict.fromkeys(_told_family(content, wanted=wanted) for content in kept))
    there = f"; there are races of {'; '.join(others[:5])}" if others else "; there is none yet"
    raise BadInputError(
        f"recipe=raced: no race in {library} is of {config.model.name} {size} on {config.dataset.name} at budget "
        f"{config.budget.name} with these settings{there}. Race with mode=race in place of recipe=raced, or name a "
        "recipe"
    )


def _told_family(content: Mapping[str, Any], *, wanted: Mapping[str, Any]) -> str:
    """What a race was of, and settings in which it differs from what is `wanted`."""
    family: Mapping[str, Any] = content["family"]
    name = f"{family['model']['name']} {family['model']['size']} on {family['dataset']['name']} at {content['budget']}"
    differs = [
        f"{group}.{key}={family[group].get(key)}"
        for group in ("model", "dataset")
        for key in family[group]
        if family[group].get(key) != wanted[group].get(key) and key not in ("name", "size")
    ]
    return f"{name} ({', '.join(differs[:3])})" if differs else name


def apply_choice(config: RunConfig, content: Mapping[str, Any]) -> RunConfig:
    """`config` with what a race chose: its recipe, and its learning rate unless one was given. It races no more."""
    config, lr = replace(config, race=RaceConfig()), config.optim.lr
    if lr is None:
        config = replace(config, optim=replace(config.optim, lr=float(content["lr"])))
    elif not math.isclose(lr, content["lr"]):
        console.say(f"optim.lr={lr:g} stays as it was given; the race's best was {content['lr']:g}")
    node = content["recipe"]
    if node is None:
        return replace(config, recipe=None, allocator=replace(config.allocator, name="exact"))
    return replace(config, recipe=recipe_from_node(node), allocator=replace(config.allocator, name="recipe"))


def resolve_raced_recipe(config: RunConfig) -> RunConfig:
    """`config` with the recipe of an earlier race where recipe=raced was given. Raises BadInputError if none fits."""
    if not is_raced_recipe(config.recipe):
        return config
    size = choose_size(config.model.name, size=config.model.size, device=choose_device(config.device)).size.name
    content = find_race(config, size=size, library=Path(config.race.library))
    console.say(f"recipe=raced takes {content['told']}\n{content['claim']}")
    return apply_choice(config, content)
