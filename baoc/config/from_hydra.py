"""Converts a composed configuration to a RunConfig, and back to plain values for `config.yaml`."""

from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, cast

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from baoc.config import assets
from baoc.config.dynamics import DynamicsConfig, split_dynamics
from baoc.config.nodes import COLLECTIONS, PATH_KEYS, budget_node, recipe_or_none_node
from baoc.config.options import GROUPS, flatten_options, registry_entry, split_options
from baoc.config.race import RaceConfig
from baoc.config.schema import RunConfig
from baoc.config.trainer_arguments import SET_BY_BAOC
from baoc.config.validate import REMOVED_KEYS, build_settings, refuse_unwritable, require, unknown_key, validate_value
from baoc.core import own_code
from baoc.core.budgets import parse_budget
from baoc.core.recipes import NO_RECIPE, Recipe, recipe_from_node
from baoc.errors import BadInputError, unknown_name
from baoc.models import choose_size
from baoc.tracking.files import write_text
from baoc.types import Budget, Role, to_plain


def from_hydra(config: DictConfig, *, folder: Path | None = None) -> RunConfig:
    """Converts a composed configuration to a RunConfig. Raises BadInputError, which names the key.

    `folder`: where the command was started, if the job runs in another folder (hydra.job.chdir).
    """
    try:
        plain = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise BadInputError(f"a value refers to what is not there: {str(error).splitlines()[0]}") from error
    if folder is not None and folder != Path.cwd():
        _make_paths_absolute(cast(dict[str, Any], plain), folder=folder)
    run = from_plain(cast(Mapping[str, Any], plain), complete=True)
    check_names(run)
    return run


def _make_paths_absolute(plain: dict[str, Any], *, folder: Path) -> None:
    """Makes relative paths of existing files absolute, in place; a name of the hub is no existing file."""
    for *groups, key in PATH_KEYS:
        node: Any = plain
        for group in groups:
            node = node.get(group)
        value = node.get(key) if isinstance(node, dict) else None
        if isinstance(value, str) and not Path(value).expanduser().is_absolute() and (folder / value).exists():
            node[key] = str(folder / value)
    for group in GROUPS:
        node = plain.get(group)
        name = node.get("name") if isinstance(node, dict) else None
        file = own_code.file_of(name) if isinstance(name, str) else None
        if file is not None and not file.expanduser().is_absolute() and (folder / file).is_file():
            node["name"] = f"{folder}/{name}"


def from_plain(plain: Mapping[str, Any], *, complete: bool = False) -> RunConfig:
    """Converts plain mappings in the shape of conf/ to a RunConfig. Raises BadInputError.

    Absent keys take their default; with `complete` they are refused.
    """
    refuse_unwritable(plain, key="")
    values = {key: value for key, value in plain.items() if key not in (*COLLECTIONS, "debug")}
    for key in values["trainer"] if isinstance(values.get("trainer"), Mapping) else ():
        if key in SET_BY_BAOC:
            raise BadInputError(f"trainer.{key} is decided by BAOC: {SET_BY_BAOC[key]}")
    values = _without_removed_keys(values)
    for group in GROUPS:
        if group in values:
            values[group] = split_options(group, values[group], complete=complete)
    if "budget" in values:
        budget, dynamics = split_dynamics(values["budget"])
        if not isinstance(budget, str | int | float | Mapping):
            raise BadInputError("a run needs a budget: budget=unlimited is the one without limits")
        values["budget"] = _field_values(parse_budget(budget))
        build_settings(DynamicsConfig, dynamics, path="budget")  # so that messages name keys under `budget`
        values.update({"dynamics": dynamics} if dynamics or complete else {})
    recipe = _recipe(values.get("recipe"))
    values["recipe"] = None if recipe is None else _field_values(recipe)
    run = build_settings(RunConfig, values, complete=complete)
    if recipe is not None and run.allocator.name == "exact":  # the default: register_recipes refuses a chosen allocator
        run = replace(run, allocator=replace(run.allocator, name="recipe"))
    return run


def _without_removed_keys(values: dict[str, Any]) -> dict[str, Any]:
    """Drops keys of earlier versions that changed nothing. Raises BadInputError for others."""
    for name, removed_key in REMOVED_KEYS.items():
        group, _, key = name.rpartition(".")
        node = values.get(group) if group else values
        if isinstance(node, Mapping) and key in node:
            if not removed_key.did_nothing(node[key]):
                raise BadInputError(f"{name} was removed: {removed_key.instead}")
            node = {other: value for other, value in node.items() if other != key}
            values = {**values, group: node} if group else node
    if isinstance(allocator := values.get("allocator"), Mapping):  # `every` was a key of the allocator host_every_kth
        values["allocator"] = {key: value for key, value in allocator.items() if key != "every"}
    return values


def _field_values(settings: Budget | Recipe) -> dict[str, Any]:
    return {item.name: getattr(settings, item.name) for item in fields(settings)}


def to_conf(config: RunConfig) -> dict[str, Any]:
    """Converts a RunConfig to plain values in the shape of conf/; the inverse of `from_plain`."""
    plain = to_plain(config)
    plain.update({group: flatten_options(getattr(config, group)) for group in GROUPS})
    plain["recipe"] = recipe_or_none_node(config.recipe)
    plain["budget"] = budget_node(config.budget) | plain.pop("dynamics")
    return plain


def write_config(config: RunConfig, *, path: Path) -> None:
    """Writes `config.yaml`: every value, with interpolations resolved. `race` is left out unless the run races."""
    plain = to_conf(config)
    if config.race == RaceConfig() and config.mode != "race":
        del plain["race"]
    text = yaml.safe_dump(plain, sort_keys=False, default_flow_style=False, allow_unicode=True)
    write_text(path, text)


def check_names(config: RunConfig) -> None:
    """Raises BadInputError for an unknown model, data set, task, allocator, risk, risk term, spec, role or path."""
    from baoc.core.catalogue import removal_message, select
    from baoc.planning.allocators import ALLOCATORS
    from baoc.planning.risk import RISKS

    for group in GROUPS:
        registry_entry(group, name := getattr(config, group).name)
        file = own_code.file_of(name)
        exists = file is None or file.expanduser().is_file()
        require(exists, group, name, f"a file that is there: {file} is not, seen from {Path.cwd()}")
    for key, value, allowed in (
        ("allocator", config.allocator.name, ALLOCATORS),
        ("risk", config.risk.name, RISKS),
        *(("role in catalogue.keep_fp32_roles", role, list(Role)) for role in config.catalogue.keep_fp32_roles),
    ):
        if value not in allowed:
            removal = removal_message(value)
            raise BadInputError(removal) if removal else unknown_name(value, what=key, allowed=allowed)
    terms = yaml.safe_load(assets.option_files("risk")[config.risk.name].read_text(encoding="utf-8"))["weights"]
    for term in config.risk.weights:
        if term not in terms:
            raise unknown_key(term, allowed=terms, path="risk.weights")
    _check_task(config)
    choose_size(config.model.name, size=config.model.size)
    select(config.catalogue.specs)
    if config.resume not in (None, "auto"):
        exists = Path(config.resume).expanduser().exists()
        require(exists, "resume", config.resume, "auto, or a run folder or checkpoint that exists")


def _check_task(config: RunConfig) -> None:
    """Raises BadInputError unless the model's output and the data's batches fit the task's loss."""
    from baoc.data import require_task
    from baoc.models import MODELS, family_of
    from baoc.tasks import task_info

    name, task = config.model.name, config.task.name
    family = family_of(name)
    serves = " and ".join([str(family.task), *family.other_tasks])
    if not family.supports(task) and not task_info(task).is_own:
        fitting = ", ".join(row.name for row in MODELS.values() if row.supports(task)) or "none yet"
        raise BadInputError(
            f"model {name} is trained for {serves}, not {task}: leave task away, as the model brings it, or "
            f"choose a model for {task}: {fitting}"
        )
    require_task(config.dataset.name, task=task)


def _recipe(node: object) -> Recipe | None:
    """The recipe of a node. None if the node is the name NO_RECIPE alone, or absent as in older runs."""
    if node is None or node == {"name": NO_RECIPE}:
        return None
    if not isinstance(node, Mapping):
        raise BadInputError(f"recipe must be a group of keys, not {node}: choose one with recipe=NAME")
    for key in ("name", "base", "description", "source", "weights"):
        validate_value(node.get(key), str | None, key=f"recipe.{key}")
    return recipe_from_node(node)
