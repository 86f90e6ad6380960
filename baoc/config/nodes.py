"""Options that conf/ has no file for: budgets, uniform baselines, recipes, races, own code, experiments and sweeps.

They are registered as nodes of Hydra's ConfigStore before composing, so that `budget=7.5gb` and `experiments=NAME` work
like any other option. Hydra prefers a file of conf/ to a node of the same name.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, cast

import yaml
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, Override, QuotedString
from hydra.core.singleton import Singleton
from hydra.errors import HydraException
from omegaconf import OmegaConf

from baoc.config import assets
from baoc.config.options import group_keys
from baoc.config.race import parse_seconds
from baoc.config.validate import plain_text
from baoc.core import own_code
from baoc.core.baselines import UNIFORM_BASELINES
from baoc.core.budgets import AUTO, PRESETS, UNLIMITED, parse_budget
from baoc.core.recipes import NO_RECIPE, RACED, RECIPES, Recipe, find_recipe, names_recipe_file, recipe_node
from baoc.core.yaml_files import read_yaml
from baoc.errors import BadInputError
from baoc.frontier.runs import quote, unquote
from baoc.types import Budget
from baoc.units import parse_size

COLLECTIONS = ("experiments", "sweeps")  # folders with files that compose a whole run or study
TARGET = "_target_"  # model._target_=... names own code as Hydra's instantiate does
_QUOTED_ITEM = re.compile(r"""(?:'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*"|[^,])+""")
# Keys whose value may be a path, relative to the folder in which the command was started.
PATH_KEYS = (
    ("dataset", "path"),
    ("dataset", "tokenizer"),
    ("model", "pretrained"),
    ("model", "name_or_path"),
    ("resume",),
)
_PATHS = (*(".".join(key) for key in PATH_KEYS), "hydra.run.dir", "hydra.sweep.dir")
UNREADABLE = re.compile(r"[^A-Za-z0-9_/\\+.$%*@?|:, -]")  # no part of a value in Hydra's grammar
_READ_OTHERWISE = re.compile(r"[\[{]|.*\$\{|(choice|shuffle|sort|glob|str)\(")  # lists, functions
PRESETS_WITH_FILES = (AUTO, UNLIMITED)  # in conf/budget


class _SharedNodes(dict[str, Any]):
    """The nodes of one group. Each composition copies all that Hydra's store has, for our groups a quarter of its time;
    these are not copied then, as a node is copied again when it is read."""

    def __deepcopy__(self, memo: object) -> "_SharedNodes":
        return self


def register(overrides: Sequence[str] = ()) -> None:
    """Registers the fixed nodes, and those for budgets, recipes, races and own code that `overrides` name.

    May be called again. Raises BadInputError for a malformed size, and for a value of a group that names no option.
    """
    files = [(group, *item) for group in COLLECTIONS for item in assets.option_files(group).items()]
    _register_fixed_nodes(tuple((group, name, file, file.stat().st_mtime_ns) for group, name, file in files))
    check_choices(overrides)
    register_budgets(option_values(overrides, group="budget"))
    register_recipes(overrides)
    register_races(option_values(overrides, group="race"))
    for group in own_code.CONFIG_GROUPS:
        register_own_code(group, overrides=overrides)


@lru_cache(maxsize=1)
def _register_fixed_nodes(files: tuple[tuple[str, str, Path, int], ...]) -> None:
    """Registers resolvers, presets, uniform baselines, recipes, experiments and sweeps, and the budgets in the latter.

    `files`: (group, name, file, time of the last change) of experiments and sweeps; the cache is keyed by them.
    """
    OmegaConf.register_new_resolver("baoc.job_folder", job_folder, replace=True)
    OmegaConf.register_new_resolver("baoc.short", lambda name: own_code.short_name(str(name)), replace=True)
    register_budgets(PRESETS)
    for baseline in UNIFORM_BASELINES:
        _store("allocator", baseline.name, {"name": baseline.name})
    for name, recipe in {NO_RECIPE: None, **RECIPES, RACED: Recipe(name=RACED)}.items():
        _store("recipe", name, recipe_or_none_node(recipe))
    for group, name, file, _ in files:
        node = _read_node(file)
        register_budgets(_budgets_in(node))
        _store(group, name, node, package="_global_")


class _TypedOptions(dict[tuple[str, str], str], metaclass=Singleton):
    """(group, option) -> what the user typed for it. Launched jobs get it, as Hydra hands them its singletons."""


def _store(group: str, name: str, node: dict[str, Any], *, package: str | None = None) -> None:
    store = ConfigStore.instance()
    store.repo.setdefault(group, _SharedNodes())
    store.store(group=group, name=name, node=node, package=package, provider="baoc")


def _store_typed(group: str, typed: str, node: dict[str, Any]) -> None:
    """Stores the node of what the user typed on the command line, for `as_typed`."""
    option = _option_name(group, typed)
    _TypedOptions()[group, option] = typed
    _store(group, option, node)


def _option_name(group: str, typed: str) -> str:
    """The option's name for what the user typed: with a number where another option has that name already, as two
    paths may differ in what no name can hold, and a file may be called as a recipe is."""
    # Hydra would look for a path among the folders of conf/.
    if group == "recipe" and names_recipe_file(typed):
        option = re.sub(r"(?a)[^\w.-]+", "-", typed).strip("-.").removesuffix(".yaml")
    elif group != "recipe" and own_code.names_own_code(typed):
        option = re.sub(r"(?a)[^\w-]+", "-", typed).strip("-")
    else:
        return typed
    nodes, known = ConfigStore.instance().repo.get(group, {}), _TypedOptions()
    names = (option, *(f"{option}-{number}" for number in range(2, len(nodes) + 3)))
    return next(name for name in names if known.get((group, name), "" if f"{name}.yaml" in nodes else typed) == typed)


def register_budgets(values: Iterable[str]) -> None:
    """Registers a node for each budget without a file in conf/budget. With a file, Hydra would use it as a schema."""
    for value in values:
        if value not in PRESETS_WITH_FILES:
            _store("budget", value, budget_node(parse_budget(value)))


def option_names(group: str) -> list[str]:
    """The names of a group's options: files of conf/, then presets of budgets or uniform baselines."""
    without_files = {"budget": PRESETS, "allocator": [baseline.name for baseline in UNIFORM_BASELINES]}.get(group, ())
    return list(dict.fromkeys([*assets.option_files(group), *without_files]))


def register_recipes(overrides: Sequence[str] = ()) -> None:
    """Registers nodes for the recipes that `overrides` name or change.

    Each node gets the keys below `recipe` that overrides set, so that Hydra accepts them and `from_plain` can refuse
    unknown ones with a better message. Raises BadInputError for a recipe that cannot be read, and for a recipe together
    with another allocator.
    """
    recipes = [value for value in option_values(overrides, group="recipe") if value != NO_RECIPE]
    allocators = [value for value in option_values(overrides, group="allocator") if value != "recipe"]
    if recipes and allocators:
        raise BadInputError(
            f"recipe={recipes[0]} and allocator={allocators[0]} exclude each other: a recipe says what every block "
            "runs, so that nothing is left to an allocator. Leave one out"
        )
    keys = _keys_below("recipe", overrides)
    first_key = f"recipe.{'.'.join(keys[0])}" if keys else None
    if keys and not recipes and not any(text.startswith(("experiments=", "sweeps=")) for text in overrides):
        raise BadInputError(
            f"{first_key} changes a recipe, and none is named: add recipe=NAME, one of {', '.join(RECIPES)}"
        )
    if keys and RACED in recipes:
        raise BadInputError(
            f"{first_key} changes a recipe, and recipe=raced is what a race chose: leave it out, or name one"
        )
    if ["base"] in keys:
        raise BadInputError("recipe.base is a key of files; here recipe=NAME is what the other keys change")
    for name in [*(RECIPES if keys else ()), *recipes]:
        node = recipe_or_none_node(Recipe(name=RACED) if name == RACED else find_recipe(name))
        _store_typed("recipe", name, _with_keys(node, keys=keys))


def register_races(options: Iterable[str]) -> None:
    """Registers a node for each option of `race` that is a duration. Raises BadInputError for unknown options."""
    for option in options:
        seconds = parse_seconds(option)
        if seconds is not None:
            defaults = _read_node(assets.option_files("race")["off"])
            _store("race", race_option(option), {**defaults, "first": "capped", "cap_s": seconds})


def register_own_code(group: str, *, overrides: Sequence[str]) -> None:
    """Registers nodes for own code that `overrides` name and for entry points of installed packages.

    Each node gets the keys below the group that overrides set: arguments of the code, checked when it is called.
    """
    names = [value for value in option_values(overrides, group=group) if own_code.names_own_code(value)]
    names += option_values(overrides, group=f"{group}.{TARGET}")
    fixed_keys = group_keys(group)
    keys = [key for key in _keys_below(group, overrides) if key[0] not in fixed_keys and key != [TARGET]]
    for name in [*own_code.entry_points_of(f"baoc.{group}s"), *names]:
        node: dict[str, Any] = {"name": name, **({"path": None} if group == "dataset" else {})}
        _store_typed(group, name, _with_keys(node, keys=keys))


def _keys_below(group: str, overrides: Sequence[str]) -> list[list[str]]:
    """The keys below a group that overrides set, as lists of parts: [a, b] for `group.a.b=1` and `group.a={b: 1}`."""
    keys: list[list[str]] = []
    for text in overrides:
        name, equals, value = text.partition("=")
        first, *key = name.lstrip("+").split(".")
        if first == group and key and equals:
            override = _parsed(text) if value.startswith("{") else None
            keys += [[*key, *inner] for inner in _key_paths(None if override is None else override.value())]
    return keys


def _key_paths(value: object) -> list[list[str]]:
    """The keys of a nested dict as lists of parts; one empty list for any other value."""
    if not isinstance(value, dict) or not value:
        return [[]]
    items = cast("dict[Any, Any]", value).items()
    return [[str(key), *path] for key, item in items for path in _key_paths(item)]


def _with_keys(node: dict[str, Any], *, keys: Iterable[Sequence[str]]) -> dict[str, Any]:
    """Adds each of `keys` that `node` lacks, with the value None, which counts as absent. Returns `node`.

    Keys below a value that is no dict are not added.
    """
    for *path, last in keys:
        group: Any = node
        for part in path:
            group = group.setdefault(part, {}) if isinstance(group, dict) else None
        if isinstance(group, dict):
            cast("dict[str, Any]", group).setdefault(last, None)
    return node


def race_option(duration: str) -> str:
    """The option's name for a duration: Hydra would read bare digits as a number."""
    return f"{duration}s" if duration.replace(".", "", 1).isdigit() else duration


def _budget_option(typed: str) -> str:
    """A number in quotes, as `option_values` writes it; other text as it is."""
    for number in (int, float):
        with suppress(ValueError):
            return repr(str(number(typed)))
    return typed


def recipe_or_none_node(recipe: Recipe | None) -> dict[str, Any]:
    return {"name": NO_RECIPE} if recipe is None else recipe_node(recipe)


def with_option_names(argv: Sequence[str]) -> list[str]:
    """Replaces values of a command line by the names of the options that `register` has made for them.

    These are own code, files of recipes, durations of races, and budgets that Hydra would read as a number.
    Paths that Hydra's grammar cannot read, as with ~, accents and brackets, are quoted.
    """
    to_option = {
        **{
            key: partial(_option_name, group)
            for group in own_code.CONFIG_GROUPS
            for key in (group, f"{group}.{TARGET}")
        },
        "recipe": partial(_option_name, "recipe"),
        "race": race_option,
        "budget": _budget_option,
    }
    replaced = []
    for word in argv:
        key, _, value = word.partition("=")
        if (convert := to_option.get(key.lstrip("+"))) is not None:
            if key.endswith(f".{TARGET}"):
                key = key.lstrip("+").removesuffix(f".{TARGET}")
            word = f"{key}={','.join(convert(unquote(text)) for text in _items(value))}"
        elif key.lstrip("+") in _PATHS and _is_unreadable(word, value=value):
            quoted = (text if text.lstrip()[:1] in ("'", '"') else quote(text) for text in _items(value))
            word = f"{key}={','.join(quoted)}"
        replaced.append(word)
    return replaced


def _is_unreadable(word: str, *, value: str) -> bool:
    """Whether Hydra cannot read a word that is meant as text. Parsing, which takes long, is left to the last."""
    return bool(UNREADABLE.search(value)) and not _READ_OTHERWISE.match(value) and _parsed(word) is None


def _items(value: str) -> list[str]:
    """The values of a sweep; a comma in quotes parts none."""
    return _QUOTED_ITEM.findall(value) if "'" in value or '"' in value else value.split(",")


def as_typed(overrides: Sequence[str]) -> list[str]:
    """Turns option names that `register` has made of own code and recipe files back into the paths that the user typed,
    which any process can resolve."""
    words = []
    for word in overrides:
        key, _, option = word.partition("=")
        typed = _TypedOptions().get((key.lstrip("+"), option), "")
        is_other = own_code.names_own_code(typed) or names_recipe_file(typed)
        words.append(f"{key}={quote(typed)}" if is_other else word)
    return words


def budget_node(budget: Budget) -> dict[str, Any]:
    """A Budget in the form of a file of conf/budget. Its memory is its name if that is the size, as in `8gb`."""
    memory = None if budget.memory_bytes is None else f"{budget.memory_bytes}b"
    with suppress(BadInputError):  # raised for a name that is no size
        memory = budget.name if parse_size(budget.name) == budget.memory_bytes else memory
    return {
        "name": budget.name,
        "memory": memory,
        "state_fraction": budget.state_fraction,
        "step_time": budget.step_time,
        **({} if budget.host_memory_bytes is None else {"host_memory": f"{budget.host_memory_bytes}b"}),
    }


def check_choices(overrides: Sequence[str]) -> None:
    """Raises BadInputError for a group whose value is neither a name nor a list of names: Hydra's message is unclear.

    Such values are lists of lists, numbers in a list, and interpolations. `budget` and `race` check theirs themselves.
    """
    for text in overrides:
        group, equals, value_text = text.lstrip("+~").partition("=")
        if group in ("hydra.sweeper", "hydra.launcher") and equals and not value_text.startswith("{"):
            raise BadInputError(f"{group} is a group of keys: set one of them, as in {group}.KEY=VALUE")
        group = group.partition("@")[0]
        if group == "budget" and value_text.startswith("{"):
            raise BadInputError(
                f"budget cannot be {plain_text(value_text)}: set its limits one by one, as in budget=20mb "
                "budget.step_time=1.2"
            )
        if not equals or group in ("budget", "race") or not group.replace("_", "").isalpha():
            continue
        options = assets.option_files(group)
        override = _parsed(text) if options else None
        if override is None:
            continue
        value = override.value()
        items = value if isinstance(value, list) else [] if override.is_sweep_override() else [value]
        all_names = all(isinstance(item, str | QuotedString | None) and "${" not in str(item) for item in items)
        if not all_names or (isinstance(value, list) and None in value) or (text.startswith("~") and value is None):
            example = f"{group}={next(iter(options))}"
            raise BadInputError(
                f"{group} cannot be {plain_text(value_text)}: choose one of its options, such as {example}"
            )


def _parsed(text: str) -> Override | None:
    """Parses an override; None if it is malformed: composing will refuse it and say where the fault is."""
    try:
        (override,) = OverridesParser.create().parse_overrides([text])
    except HydraException:
        return None
    return override


def option_values(overrides: Sequence[str], *, group: str) -> list[str]:
    """The options of a group that `overrides` select, each of a sweep."""
    values: list[str] = []
    for text in overrides:
        key, _, typed = text.partition("=")
        if key.lstrip("+") != group:
            continue
        if (override := _parsed(text)) is None:
            values += _items(typed) if _is_unreadable(text, value=typed) else []
            continue
        value = override.value()
        if not override.is_sweep_override():
            values += [] if value is None else [str(value)]
        elif override.is_discrete_sweep() and not isinstance(value, Glob):  # a glob matches files only
            values += override.sweep_string_iterator()
    return [unquote(value) for value in values]


def job_folder(num: int, summary: str) -> str:
    """The folder name of a multirun's job, such as `0_budget=4gb`, safe in any file system."""
    safe = "".join(char if char.isalnum() or char in "_.=,+-" else "-" for char in summary)
    return f"{num}_{safe[:80]}".rstrip("_.")


def _read_node(file: Path) -> dict[str, Any]:
    try:
        node = read_yaml(file.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise BadInputError(f"{file.parent.name}/{file.name} is no valid YAML: {error}") from error
    if not isinstance(node, dict):
        raise BadInputError(f"{file.parent.name}/{file.name} must hold keys and values, as conf/config.yaml does")
    return node


def _budgets_in(node: Any) -> Iterator[str]:
    """Yields every budget that an experiment or sweep names, in its defaults list or a sweeper's parameters."""
    items = node.items() if isinstance(node, dict) else [(None, item) for item in node]
    for key, value in items:
        if isinstance(value, dict | list):
            yield from _budgets_in(value)
        elif isinstance(value, str) and str(key).split("/")[-1].removeprefix("override ") == "budget":
            yield from option_values([f"budget={value}"], group="budget")
