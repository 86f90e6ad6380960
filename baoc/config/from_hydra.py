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
from baoc.config.nodes import NO_RECIPE, budget_node, recipe_or_none_node
from baoc.config.options import GROUPS, flatten_options, registry_entry, split_options
from baoc.config.race import RaceConfig
from baoc.config.schema import RunConfig
from baoc.config.trainer_arguments import SET_BY_BAOC
from baoc.config.validate import REMOVED_KEYS, build_settings, refuse_unwritable, require, unknown_key, validate_value
from baoc.core import own_code
from baoc.core.budgets import parse_budget
from baoc.core.recipes import Recipe, recipe_from_node
from baoc.errors import BadInputError, unknown_name
from baoc.models import choose_size
from baoc.types import Budget, Role, to_plain

# Keys whose value may be a path; where it is relative, it is one of the folder in which the command was given.
PATH_KEYS = (
    *(("dataset", "path"), ("dataset", "tokenizer"), ("model", "pretrained"), ("model", "name_or_path")),
    ("resume",),
)


def from_hydra(config: DictConfig, *, folder: Path | None = None) -> RunConfig:
    """The RunConfig of a composed configuration. Raises BadInputError, which names the key, for what the schema
    refuses.

    `folder`: in which the command was given, where a job runs in another one (hydra.job.chdir).
    """
    try:
        plain = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise BadInputError(f"a value refers to what is not there: {str(error).splitlines()[0]}") from error
    if folder is not None and folder != Path.cwd():
        _anchor(cast(dict[str, Any], plain), folder=folder)
    run = from_plain(cast(Mapping[str, Any], plain), complete=True)
    check_names(run)
    return run


def _anchor(plain: dict[str, Any], *, folder: Path) -> None:
    """Makes relative paths absolute in place, of what is there: a name of the hub is no path."""
    for *groups, key in PATH_KEYS:
        node: Any = plain
        for group in groups:
            node = node.get(group)
        given = node.get(key) if isinstance(node, dict) else None
        if isinstance(given, str) and not Path(given).expanduser().is_absolute() and (folder / given).exists():
            node[key] = str(folder / given)
    for group in GROUPS:
        node = plain.get(group)
        name = node.get("name") if isinstance(node, dict) else None
        file = own_code.file_of(name) if isinstance(name, str) else None
        if file is not None and not file.expanduser().is_absolute() and (folder / file).is_file():
            node["name"] = f"{folder}/{name}"


def from_plain(plain: Mapping[str, Any], *, complete: bool = False) -> RunConfig:
    """The RunConfig of plain mappings in the shape of conf/; absent keys take their default unless `complete`."""
    refuse_unwritable(plain, key="")
    given = {key: value for key, value in plain.items() if key not in ("experiments", "sweeps", "debug")}
    for key in given["trainer"] if isinstance(given.get("trainer"), Mapping) else ():
        if key in SET_BY_BAOC:
            raise BadInputError(f"trainer.{key} is decided by BAOC: {SET_BY_BAOC[key]}")
    for name, removed_key in REMOVED_KEYS.items():
        group, _, leaf = name.rpartition(".")
        node = given.get(group) if group else given
        if isinstance(node, Mapping) and leaf in node:
            if not removed_key.did_nothing(node[leaf]):
                raise BadInputError(f"{name} was removed: {removed_key.instead}")
            kept = {key: value for key, value in node.items() if key != leaf}
            given = {**given, group: kept} if group else kept
    if isinstance(allocator := given.get("allocator"), Mapping):  # `every` was of host_every_kth, which is no more
        given["allocator"] = {key: value for key, value in allocator.items() if key != "every"}
    for group in GROUPS:
        if group in given:
            given[group] = split_options(group, given[group], complete=complete)
    if "budget" in given:
        budget, dynamics = split_dynamics(given["budget"])
        if not isinstance(budget, str | int | float | Mapping):
            raise BadInputError("a run needs a budget: budget=unlimited is the one without limits")
        parsed = parse_budget(budget)
        given["budget"] = {item.name: getattr(parsed, item.name) for item in fields(Budget)}
        build_settings(
            DynamicsConfig, dynamics, path="budget"
        )  # checked here for messages that name keys under `budget`
        given.update({"dynamics": dynamics} if dynamics or complete else {})
    recipe = _recipe(given.get("recipe"))
    given["recipe"] = None if recipe is None else {item.name: getattr(recipe, item.name) for item in fields(Recipe)}
    run = build_settings(RunConfig, given, complete=complete)
    if recipe is not None and run.allocator.name == "exact":  # which was not chosen: `register` refuses where it was
        run = replace(run, allocator=replace(run.allocator, name="recipe"))
    return run


def to_conf(config: RunConfig) -> dict[str, Any]:
    """Plain values of a RunConfig in the shape of conf/; the inverse of `from_plain`."""
    plain = to_plain(config)
    plain.update({group: flatten_options(getattr(config, group)) for group in GROUPS})
    plain["recipe"] = recipe_or_none_node(config.recipe)
    plain["budget"] = budget_node(config.budget) | plain.pop("dynamics")
    return plain


def write_config(config: RunConfig, *, path: Path) -> None:
    """Writes `config.yaml`: every value, with interpolations resolved; `race` only where one was asked for."""
    plain = to_conf(config)
    if config.race == RaceConfig() and config.mode != "race":
        del plain["race"]
    text = yaml.safe_dump(plain, sort_keys=False, default_flow_style=False, allow_unicode=True)
    path.write_text(text, encoding="utf-8")


def check_names(config: RunConfig) -> None:
    """Raises BadInputError for an unknown model, dataset, task, allocator, risk, term, spec, role or path."""
    from baoc.core.catalogue import removal_message, select
    from baoc.planning.allocators import ALLOCATORS
    from baoc.planning.risk import RISKS

    for group in GROUPS:
        registry_entry(group, name := getattr(config, group).name)
        file = own_code.file_of(name)
        there = file is None or file.expanduser().is_file()
        require(there, group, name, f"a file that is there: {file} is not, seen from {Path.cwd()}")
    for key, given, allowed in (
        ("allocator", config.allocator.name, ALLOCATORS),
        ("risk", config.risk.name, RISKS),
        *(("role in catalogue.keep_fp32_roles", role, list(Role)) for role in config.catalogue.keep_fp32_roles),
    ):
        if given not in allowed:
            raise (
                BadInputError(removal_message(given))
                if removal_message(given)
                else unknown_name(given, what=key, allowed=allowed)
            )
    terms = yaml.safe_load(assets.option_files("risk")[config.risk.name].read_text(encoding="utf-8"))["weights"]
    for term in config.risk.weights:
        if term not in terms:
            raise unknown_key(term, allowed=terms, path="risk.weights")
    _check_task(config)
    choose_size(config.model.name, size=config.model.size)
    select(config.catalogue.specs)
    if config.resume not in (None, "auto"):
        there = Path(config.resume).expanduser().exists()
        require(there, "resume", config.resume, "auto, or a run folder or checkpoint that exists")


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


def _recipe(given: object) -> Recipe | None:
    """The recipe of a node; none where it is called so, or where there is no node, as in older runs."""
    if given is None or (isinstance(given, Mapping) and given.get("name") == NO_RECIPE):
        return None
    if not isinstance(given, Mapping):
        raise BadInputError(f"recipe must be a group of keys, not {given}: choose one with recipe=NAME")
    for key in ("name", "base", "description", "source", "weights"):
        validate_value(given.get(key), str | None, key=f"recipe.{key}")
    return recipe_from_node(given)
