"""ConfigStore nodes that conf/ has no file for: budgets, uniform baselines, recipes, experiments and sweeps.

They are registered before composing, so that `budget=7.5gb` and `experiments=NAME` work like any other option. Hydra
prefers a file of conf/ to a node of the same name.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

import yaml
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, Override, QuotedString
from hydra.errors import HydraException
from omegaconf import OmegaConf

from baoc.config import assets
from baoc.config.options import own_keys
from baoc.config.race import parse_seconds
from baoc.config.validate import plain_text
from baoc.core import own_code
from baoc.core.baselines import UNIFORM_BASELINES
from baoc.core.budgets import AUTO, PRESETS, UNLIMITED, parse_budget
from baoc.core.recipes import RACED, RECIPES, Recipe, find_recipe, names_yaml_file, recipe_node
from baoc.core.yaml_files import read_yaml
from baoc.errors import BadInputError
from baoc.types import Budget

NO_RECIPE = "none"  # the option of the group `recipe` that leaves the choice to an allocator
COLLECTIONS = ("experiments", "sweeps")
TARGET = "_target_"  # which names a class below a group, as Hydra's instantiate does
PRESETS_WITH_FILES = (AUTO, UNLIMITED)  # presets that conf/budget has files for


def register(overrides: Sequence[str] = ()) -> None:
    """Registers what there always is, once, and every size and recipe that `overrides` name. May be called again.

    Raises:
        BadInputError: for a malformed size, or a group that is given what names no option.
    """
    files = [(group, *item) for group in COLLECTIONS for item in assets.option_files(group).items()]
    _register_fixed(tuple((group, name, file, file.stat().st_mtime_ns) for group, name, file in files))
    check_choices(overrides)
    register_budgets(option_values(overrides, group="budget"))
    register_recipes(overrides)
    register_races(option_values(overrides, group="race"))
    for group in own_code.CONFIG_GROUPS:
        register_own_code(group, overrides=overrides)


@lru_cache(maxsize=1)
def _register_fixed(files: tuple[tuple[str, str, Path, int], ...]) -> None:
    """Resolvers, presets, uniform baselines, recipes of the catalogue, experiments and sweeps, with their budgets."""
    OmegaConf.register_new_resolver("baoc.job_folder", job_folder, replace=True)
    OmegaConf.register_new_resolver("baoc.short", lambda name: own_code.short_name(str(name)), replace=True)
    store = ConfigStore.instance()
    register_budgets(PRESETS)
    for baseline in UNIFORM_BASELINES:
        store.store(group="allocator", name=baseline.name, node={"name": baseline.name}, provider="baoc")
    for name, recipe in {NO_RECIPE: None, **RECIPES, RACED: Recipe(name=RACED)}.items():
        store.store(group="recipe", name=name, node=recipe_or_none_node(recipe), provider="baoc")
    for group, name, file, _ in files:
        node = _load(file)
        register_budgets(_budgets_in(node))
        store.store(group=group, name=name, node=node, package="_global_", provider="baoc")


def register_budgets(values: Iterable[str]) -> None:
    """Registers a node for each of `values` that conf/budget has no file for: Hydra would take one for a schema."""
    for value in values:
        if value in PRESETS_WITH_FILES:
            continue
        node = budget_node(parse_budget(value))
        ConfigStore.instance().store(group="budget", name=value, node=node, provider="baoc")


def option_names(group: str) -> list[str]:
    """The names of a group's options: files of conf/, then presets of budgets or uniform baselines."""
    generated = {"budget": PRESETS, "allocator": [row.name for row in UNIFORM_BASELINES]}.get(group, ())
    return list(dict.fromkeys([*assets.option_files(group), *generated]))


def register_recipes(overrides: Sequence[str] = ()) -> None:
    """ConfigStore nodes for the recipes that `overrides` name or change.

    Each has the keys below `recipe` that overrides set, so that unknown ones are told in this project's words. Raises
    BadInputError for a recipe that cannot be read, and for one beside another allocator.
    """
    asked = [value for value in option_values(overrides, group="recipe") if value != NO_RECIPE]
    others = [value for value in option_values(overrides, group="allocator") if value != "recipe"]
    if asked and others:
        raise BadInputError(
            f"recipe={asked[0]} and allocator={others[0]} exclude each other: a recipe says what every block runs, so "
            "that nothing is left to an allocator. Leave one out"
        )
    keys = _keys_below("recipe", overrides)
    if keys and not asked and not any(text.startswith(("experiments=", "sweeps=")) for text in overrides):
        word = f"recipe.{'.'.join(keys[0])}"
        raise BadInputError(f"{word} changes a recipe, and none is named: add recipe=NAME, one of {', '.join(RECIPES)}")
    if keys and RACED in asked:
        word = f"recipe.{'.'.join(keys[0])}"
        raise BadInputError(
            f"{word} changes a recipe, and recipe=raced is what a race chose: leave it out, or name one"
        )
    if ["base"] in keys:
        raise BadInputError("recipe.base is a key of files; here recipe=NAME is what the other keys change")
    for name in [*(RECIPES if keys else ()), *asked]:
        node = recipe_or_none_node(Recipe(name=RACED) if name == RACED else find_recipe(name))
        ConfigStore.instance().store(
            group="recipe", name=recipe_option(name), node=_with_keys(node, keys=keys), provider="baoc"
        )


def register_races(options: Iterable[str]) -> None:
    """Registers an option of `race` for each duration. Raises BadInputError for what is neither that nor an option."""
    for option in options:
        seconds = parse_seconds(option)
        if seconds is not None:
            capped = {**_load(assets.option_files("race")["off"]), "first": "capped", "cap_s": seconds}
            ConfigStore.instance().store(group="race", name=race_option(option), node=capped, provider="baoc")


def register_own_code(group: str, *, overrides: Sequence[str]) -> None:
    """ConfigStore nodes for the user's own code that `overrides` name, and for what installed packages declare.

    Each has the keys that overrides set below the group: they are arguments, which the call checks.
    """
    asked = [value for value in option_values(overrides, group=group) if own_code.names_own_code(value)]
    asked += option_values(overrides, group=f"{group}.{TARGET}")
    own = own_keys(group)  # which conf/ has already
    keys = [key for key in _keys_below(group, overrides) if key[0] not in own and key != [TARGET]]
    for name in [*own_code.entry_points_of(f"baoc.{group}s"), *asked]:
        node: dict[str, Any] = {"name": name, **({"path": None} if group == "dataset" else {})}
        ConfigStore.instance().store(
            group=group, name=own_code_option(name), node=_with_keys(node, keys=keys), provider="baoc"
        )


def _keys_below(group: str, overrides: Sequence[str]) -> list[list[str]]:
    """The keys below a group that overrides set, each as its parts: `group.a.b=1` and `group.a={b: 1}` alike."""
    keys: list[list[str]] = []
    for text in overrides:
        name, equals, value = text.partition("=")
        first, *key = name.lstrip("+").split(".")
        if first == group and key and equals:
            override = _parsed(text) if value.startswith("{") else None
            keys += [[*key, *inner] for inner in _paths(None if override is None else override.value())]
    return keys


def _paths(held: object) -> list[list[str]]:
    """Each key of nested values as its parts; a value that is no group has none."""
    if not isinstance(held, dict) or not held:
        return [[]]
    return [[str(key), *inner] for key, value in cast("dict[Any, Any]", held).items() for inner in _paths(value)]


def _with_keys(node: dict[str, Any], *, keys: Iterable[Sequence[str]]) -> dict[str, Any]:
    """`node` with a null, which counts as not there, at each of `keys` that it lacks, but below what is no group."""
    for *path, last in keys:
        held: Any = node
        for part in path:
            held = held.setdefault(part, {}) if isinstance(held, dict) else None
        if isinstance(held, dict):
            cast("dict[str, Any]", held).setdefault(last, None)
    return node


def own_code_option(name: str) -> str:
    """What Hydra is to call the user's own code: a path would be looked for among the folders of groups."""
    return re.sub(r"[^\w-]+", "-", name).strip("-") if own_code.names_own_code(name) else name


def race_option(duration: str) -> str:
    """A duration as an option's name, which Hydra wants to be text."""
    return f"{duration}s" if duration.replace(".", "", 1).isdigit() else duration


def recipe_or_none_node(recipe: Recipe | None) -> dict[str, Any]:
    return {"name": NO_RECIPE} if recipe is None else recipe_node(recipe)


def recipe_option(recipe: str) -> str:
    """What Hydra is to call a recipe: a file's path would be looked for among the options of groups."""
    return re.sub(r"[^\w.-]+", "-", recipe).strip("-.").removesuffix(".yaml") if names_yaml_file(recipe) else recipe


def with_option_names(words: Sequence[str]) -> list[str]:
    """A command line with the options that `register` has made in place of files of recipes, seconds of races and whole
    bytes, which Hydra would take for a number."""
    makers = {
        **{key: own_code_option for group in own_code.CONFIG_GROUPS for key in (group, f"{group}.{TARGET}")},
        "recipe": recipe_option,
        "race": race_option,
        "budget": lambda text: repr(text) if text.isdecimal() else text,
    }
    found = []
    for word in words:
        key, _, value = word.partition("=")
        make = makers.get(key.lstrip("+"))
        key = key.lstrip("+") if key.endswith(f".{TARGET}") else key
        texts = [] if make is None else [make(_unquoted(text)) for text in value.split(",")]
        found.append(word if make is None else f"{key.removesuffix(f'.{TARGET}')}={','.join(texts)}")
    return found


def budget_node(budget: Budget) -> dict[str, Any]:
    """A Budget as a file of conf/budget writes it."""
    memory = f"{budget.memory_bytes}b" if budget.memory_bytes is not None else None
    with suppress(BadInputError):  # of a name that is no size
        memory = budget.name if memory and parse_budget(budget.name).memory_bytes == budget.memory_bytes else memory
    return {
        "name": budget.name,
        "memory": memory,
        "state_fraction": budget.state_fraction,
        "step_time": budget.step_time,
        **({} if budget.host_memory_bytes is None else {"host_memory": f"{budget.host_memory_bytes}b"}),
    }


def check_choices(overrides: Sequence[str]) -> None:
    """BadInputError where a group is given a list of lists, a number in a list, an interpolation: Hydra has no words
    for what is neither a name nor a list of names."""
    for text in overrides:
        group, equals, given = text.lstrip("+~").partition("=")
        if group in ("hydra.sweeper", "hydra.launcher") and equals and not given.startswith("{"):
            raise BadInputError(f"{group} is a group of keys: set one of them, as in {group}.KEY=VALUE")
        group = group.partition("@")[0]
        known = assets.option_files(group) if equals and group.replace("_", "").isalpha() else {}
        known = {} if group in ("budget", "race") else known  # which take sizes and durations, and refuse the rest
        override = _parsed(text) if known else None
        if override is None:
            continue
        value = override.value()
        items = value if isinstance(value, list) else [] if override.is_sweep_override() else [value]
        names = all(isinstance(item, str | QuotedString | None) and "${" not in str(item) for item in items)
        if not names or (isinstance(value, list) and None in value) or (text.startswith("~") and value is None):
            raise BadInputError(
                f"{group} cannot be {plain_text(given)}: choose one of its options, such as {group}={next(iter(known))}"
            )


def _parsed(text: str) -> Override | None:
    """None for what composing will refuse, with Hydra's own position of the fault."""
    try:
        (override,) = OverridesParser.create().parse_overrides([text])
    except HydraException:
        return None
    return override


def option_values(overrides: Sequence[str], *, group: str) -> list[str]:
    """The options of a group that `overrides` select, those of a sweep one by one."""
    values: list[str] = []
    for text in overrides:
        override = _parsed(text) if text.lstrip("+").startswith(f"{group}=") else None
        if override is None:
            continue
        value = override.value()
        if not override.is_sweep_override():
            values += [] if value is None else [str(value)]
        elif override.is_discrete_sweep() and not isinstance(value, Glob):  # a glob matches files only
            values += override.sweep_string_iterator()
    return [_unquoted(value) for value in values]


def job_folder(num: int, summary: str) -> str:
    """`0_budget=4gb`: the folder name of a multirun's job, from its number and overrides, safe in any file system."""
    safe = "".join(char if char.isalnum() or char in "_.=,+-" else "-" for char in summary)
    return f"{num}_{safe[:80]}".rstrip("_.")


def _unquoted(text: str) -> str:
    return text[1:-1] if len(text) >= 2 and text[0] == text[-1] and text[0] in "'\"" else text


def _load(file: Path) -> dict[str, Any]:
    try:
        node = read_yaml(file.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise BadInputError(f"{file.parent.name}/{file.name} is no valid YAML: {error}") from error
    if not isinstance(node, dict):
        raise BadInputError(f"{file.parent.name}/{file.name} must hold keys and values, as conf/config.yaml does")
    return node


def _budgets_in(node: Any) -> Iterator[str]:
    """Every budget that a composed file names, in its defaults list or among a sweeper's parameters."""
    entries = node.items() if isinstance(node, dict) else [(None, entry) for entry in node]
    for key, value in entries:
        if isinstance(value, dict | list):
            yield from _budgets_in(value)
        elif isinstance(value, str) and str(key).split("/")[-1].removeprefix("override ") == "budget":
            yield from option_values([f"budget={value}"], group="budget")
