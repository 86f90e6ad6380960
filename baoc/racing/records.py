"""The record of a race: race.json with its verdict and claim, in its folder and in the library of recipe=raced."""

import math
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
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
from baoc.core.recipes import BY_RACE, RACED, find_recipe, recipe_node
from baoc.errors import BadInputError, OutputError
from baoc.models import choose_size
from baoc.racing.course import FRESH, RaceOutcome
from baoc.racing.entrants import RaceTarget
from baoc.tracking import console, files
from baoc.types import Budget, to_plain

RACE_FILE, RUNS_FILE = "race.json", "race.csv"
SCHEMA = 1
_RACE_FIELDS = {  # those of race.json that a later run reads
    **dict.fromkeys(("choice", "told", "claim", "budget", "family.model.name", "family.model.size"), str),
    **{"family.dataset.name": str, "lr": (int, float), "recipe": (dict, type(None))},
}
MAX_EPOCH_RATIO = 2.0  # a run with more epochs than so many times the race's is not covered by the race


@dataclass(frozen=True, slots=True, kw_only=True)
class RaceScale:
    """The network and number of steps that a race runs at, which may be smaller than those of its target."""

    size: str
    num_params: int
    steps: int
    equal_seconds: bool = False
    one_rate: bool = False  # all entrants run at one learning rate


def num_epochs(steps: int, target: RaceTarget) -> float:
    """Epochs of a run of `steps` steps; 0 for a stream."""
    return steps * target.batch_size / target.num_train if target.num_train else 0.0


def race_family(config: RunConfig, *, size: str) -> dict[str, Any]:
    """What two races must agree in to stand for each other: task, network, data, the user's own code, and budget."""
    model: dict[str, Any] = to_plain(config.model)
    model["size"] = size
    dataset: dict[str, Any] = to_plain(config.dataset)
    if config.dataset.name == "pysource":  # made of the interpreter's own library
        dataset["python"] = f"{sys.version_info[0]}.{sys.version_info[1]}"
    own = {"code": code} if (code := hash_own_code(config)) else {}
    return {"task": config.task.name, "model": model, "dataset": dataset, "budget": _limits_of(config.budget), **own}


def _limits_of(budget: Budget) -> dict[str, Any]:
    """The limits of a budget without its name. `auto` has no memory limit: it is what is free on a device."""
    if budget.name == AUTO:
        return to_plain(replace(budget, memory_bytes=None))
    limits: dict[str, Any] = to_plain(budget)
    limits.pop("name")
    return limits


def claim_text(outcome: RaceOutcome, *, target: RaceTarget, scale: RaceScale) -> str:
    """What is claimed of the choice, in one sentence, with probability, size and number of steps."""
    verdict = outcome.verdict
    steps = round(outcome.rung * scale.steps)
    where = f"{scale.num_params:,} parameters and {steps:,} steps"
    if target.num_train:
        where += f" ({num_epochs(steps, target):.1f} epochs)"
    where += ", each at one learning rate" if scale.one_rate else ""
    beyond = ""
    if (scale.size, steps) != (target.size, target.steps):
        epochs = f" ({num_epochs(target.steps, target):.1f} epochs)" if target.num_train else ""
        beyond = (
            f"; not measured at {target.num_params:,} parameters and {target.steps:,} steps{epochs}, which the run has"
        )
    excluded = {verdict.choice, *outcome.dropped, *(racer.name for racer in target.racers if racer.entrant.control)}
    rivals = [name for name in outcome.scores.get(outcome.rung, {}) if name not in excluded]
    if verdict.rival is None and rivals:
        return (
            f"{verdict.choice} was the only uniform left at {where}, and {', '.join(rivals)} is not shown to beat it "
            f"on fresh seeds; nothing more is claimed{beyond}"
        )
    if verdict.rival is None and outcome.dropped:
        return (
            f"{verdict.choice} alone was left at {where}: the others were clearly behind, diverged or did not fit"
            f"{beyond}"
        )
    if verdict.rival is None:
        return f"nothing is claimed of {verdict.choice}, the only recipe of the race"
    if not math.isfinite(verdict.margin_held):
        return f"nothing is claimed of {verdict.choice} at {where}: it was compared on too few seeds{beyond}"
    bound = max(verdict.margin_held, verdict.margin if verdict.is_certain else 0.0)
    more = "" if verdict.is_certain else f", which is more than the margin of {verdict.margin:.3g} that was asked for"
    return (
        f"P({verdict.choice} is worse than the best uniform tried by more than {bound:.3g} of {target.quality}) <= "
        f"{1 - verdict.level:.2g} at {where}{more}{beyond}"
    )


def summary_text(outcome: RaceOutcome, *, target: RaceTarget) -> str:
    """The choice against the best other uniform: share of state, means, difference, n."""
    verdict = outcome.verdict
    stages = [outcome.scores.get(stage, {}) for stage in (outcome.rung, FRESH)]  # the last rung's seeds, and fresh ones
    means = {
        name: [score for scores in stages for score in scores.get(name, {}).values()]
        for name in (verdict.choice, verdict.rival)
        if name is not None
    }
    sign = -1 if target.higher_is_better else 1
    state = next(racer.entrant.state_bytes for racer in target.racers if racer.name == verdict.choice)
    own = means[verdict.choice]
    spread = f" ({stdev(own):.2g})" if len(own) > 1 else ""
    text = f"{verdict.choice}: {state / target.state_bytes_adamw:.1%} of AdamW's state; {sign * fmean(own):.4g}{spread}"
    if verdict.rival is None or verdict.difference is None:
        return text
    return f"{text} against {verdict.rival} {sign * fmean(means[verdict.rival]):.4g}: {verdict.difference}"


def race_content(
    outcome: RaceOutcome, *, config: RunConfig, target: RaceTarget, scale: RaceScale, seconds: float, command: str
) -> dict[str, Any]:
    verdict = outcome.verdict
    rate = outcome.rates[verdict.choice]
    recipe = next(racer.recipe for racer in target.racers if racer.name == verdict.choice)
    same = scale.size == target.size
    sign = -1 if target.higher_is_better else 1
    summary = summary_text(outcome, target=target)
    claim = claim_text(outcome, target=target, scale=scale)
    recipe = replace(recipe, source=f"{BY_RACE}{summary}; {claim}")  # shown by plans that run it
    return {
        "schema": SCHEMA,
        "choice": verdict.choice,
        "rate": rate,
        "lr": rate * target.lr,
        # a recipe that names blocks suits one size only; on another size the run allocates
        "recipe": recipe_node(recipe) if same or not recipe.blocks else None,
        "told": summary,
        "claim": claim,
        "verdict": to_plain(verdict) | {"is_certain": verdict.is_certain},
        "cut": outcome.ran_out_of_time,
        "family": race_family(config, size=target.size),
        "budget": config.budget.name,
        "quality": target.quality,
        "higher_is_better": target.higher_is_better,
        "measured": {
            "size": scale.size,
            "num_params": scale.num_params,
            "steps": round(outcome.rung * scale.steps),
            "epochs": num_epochs(round(outcome.rung * scale.steps), target),
            "equal_seconds": scale.equal_seconds,
        },
        "target": {"size": target.size, "num_params": target.num_params, "steps": target.steps, "data": target.data},
        "entrants": [
            {
                "name": racer.name,
                "state_bytes": racer.entrant.state_bytes,
                "state_share": racer.entrant.state_bytes / target.state_bytes_adamw,
                "uniform": racer.entrant.uniform,
                "control": racer.entrant.control,
                "rate": outcome.rates.get(racer.name),
                "left": outcome.dropped.get(racer.name, ""),
                "stages": {
                    stage_name(stage): _summary(scores[racer.name].values(), sign=sign)
                    for stage, scores in outcome.scores.items()
                    if racer.name in scores
                },
            }
            for racer in target.racers
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


def write_race(content: Mapping[str, Any], *, folder: Path, library: Path) -> None:
    """Writes race.json into the race's folder and into the library, which may fail: the run after the race goes on."""
    files.write_json(folder / RACE_FILE, content)
    family = content["family"]
    model, data = short_name(family["model"]["name"]), short_name(family["dataset"]["name"])
    name = f"{model}_{family['model']['size']}_{data}_{content['budget']}"
    try:
        files.write_json(library / f"{name}_{folder.resolve().parent.name}_{folder.name}.json", content)
    except OutputError as error:
        console.say(f"not kept for recipe=raced ({error}): recipe={folder / RACE_FILE} takes it all the same")


def find_race(config: RunConfig, *, size: str, library: Path) -> dict[str, Any]:
    """The newest race of this family in the library. Raises BadInputError that names the races there are."""
    family = to_plain(race_family(config, size=size))
    newest_last = sorted(library.glob("*.json"), key=_modified_s) if library.is_dir() else []
    races = [race for file in newest_last if (race := _read_race(file)) is not None]
    matching = [race for race in races if race["family"] == family]
    if matching:
        return matching[-1]
    others = list(dict.fromkeys(_family_text(race, wanted=family) for race in races))
    there = f"; there are races of {'; '.join(others[:5])}" if others else "; there is none yet"
    raise BadInputError(
        f"recipe=raced: no race in {library} is of {config.model.name} {size} on {config.dataset.name} at budget "
        f"{config.budget.name} with these settings{there}. Race with mode=race in place of recipe=raced, or name a "
        "recipe"
    )


def _modified_s(file: Path) -> float:
    with suppress(OSError):  # removed meanwhile, which its reader tells
        return file.stat().st_mtime
    return 0.0


def _read_race(file: Path) -> dict[str, Any] | None:
    """The record of a race; None, after a message, if the file is damaged, and without one if it is of another
    version."""
    try:
        if files.read_record(file, {"schema": int})["schema"] != SCHEMA:
            return None
        race = files.read_record(file, _RACE_FIELDS)
        _check_choice(race, file=file)
        return race
    except BadInputError as error:
        console.say(f"passed over when looking for a race: {file} ({error})")
        return None


def read_taken_race(file: Path) -> dict[str, Any] | None:
    """The earlier race whose choice a run has taken, from the file in which it noted that; None if it took none. Raises
    BadInputError if the file is damaged."""
    race = files.read_record(file, {"race": (dict, type(None))})["race"]
    if race is not None:
        files.read_record(file, {f"race.{name}": kind for name, kind in _RACE_FIELDS.items()})
        _check_choice(race, file=file)
    return race


def _check_choice(race: Mapping[str, Any], *, file: Path) -> None:
    if race["recipe"] is not None:
        find_recipe(race["recipe"])
    if not 0 < race["lr"] < math.inf:
        raise BadInputError(f"{file}: its lr is {race['lr']}, which is no learning rate; remove the file")


def _family_text(content: Mapping[str, Any], *, wanted: Mapping[str, Any]) -> str:
    """The model, data set and budget of a race, and settings in which its family differs from the `wanted` one."""
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
    """`config` with the recipe that a race chose, its learning rate unless one was given, and race=off."""
    config, lr = replace(config, race=RaceConfig()), config.optim.lr
    if lr is None:
        config = replace(config, optim=replace(config.optim, lr=float(content["lr"])))
    elif not math.isclose(lr, content["lr"]):
        console.say(f"optim.lr={lr:g} stays as it was given; the race's best was {content['lr']:g}")
    node = content["recipe"]
    if node is None:
        return replace(config, recipe=None, allocator=replace(config.allocator, name="exact"))
    return replace(config, recipe=find_recipe(node), allocator=replace(config.allocator, name="recipe"))


def resolve_raced_recipe(config: RunConfig) -> RunConfig:
    """`config`, with the choice of an earlier race in place of recipe=raced. Raises BadInputError if there is none."""
    recipe = config.recipe
    if recipe is None or recipe.name != RACED or recipe.specs or recipe.blocks:  # a recipe file of that name has those
        return config
    size = choose_size(config.model.name, size=config.model.size, device=choose_device(config.device)).size.name
    content = find_race(config, size=size, library=Path(config.race.library))
    console.say(f"recipe=raced takes {content['told']}\n{content['claim']}")
    return apply_choice(config, content)
