"""Options that the registry entry of a model, task or data set declares.

An option is a key next to `name`, such as `model.dropout`, `task.label_smoothing` or `dataset.val_fraction`, and is
checked against the entry. A new option changes its entry and its file in conf/ only.
"""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from baoc.config.schema import DatasetConfig, ModelConfig, RunConfig, TaskConfig
from baoc.config.validate import plain_text, unknown_key, validate_value
from baoc.core import own_code
from baoc.errors import BadInputError
from baoc.types import to_plain

GROUPS: Mapping[str, Any] = {"task": TaskConfig, "model": ModelConfig, "dataset": DatasetConfig}


def split_options(group: str, node: object, *, complete: bool) -> dict[str, Any]:
    """Splits a flat node into the fields of the group's dataclass and, under `options`, all other keys.

    Absent options take the entry's default; with `complete` they are refused. Raises BadInputError for a node that is
    no mapping, an unknown name or key, and a wrong type.
    """
    if not isinstance(node, Mapping):
        raise BadInputError(f"{group} must be a group of keys, not {plain_text(node)}: choose it with {group}=NAME")
    fixed_keys = group_keys(group)
    name = node.get("name", GROUPS[group]().name)
    if not isinstance(name, str):
        raise BadInputError(f"{group}.name must be one name, not {plain_text(name)}: choose it with {group}=NAME")
    entry = registry_entry(group, name)
    options = dict(entry.options)
    for key, value in node.items():
        if key in fixed_keys:
            continue
        if entry.is_own:  # arguments of the user's code, checked when it is called
            options[key] = value
            continue
        if key not in options:
            raise unknown_key(str(key), allowed=[*fixed_keys, *options], path=group)
        options[key] = validate_value(value, option_type(entry, key), key=f"{group}.{key}")
    if missing := [key for key in options if complete and key not in node]:
        key = f"{group}.{missing[0]}"
        raise BadInputError(f"{key} is missing: it was removed from the configuration, but {name} has it")
    return {**{key: value for key, value in node.items() if key in fixed_keys}, "options": options}


def group_keys(group: str) -> list[str]:
    """The keys that every model, task or data set has."""
    return [item.name for item in fields(GROUPS[group]) if item.name != "options"]


def flatten_options(config: TaskConfig | ModelConfig | DatasetConfig) -> dict[str, Any]:
    """The inverse of `split_options`: one flat node with the group's fields and its options."""
    plain = to_plain(config)
    return {**{key: value for key, value in plain.items() if key != "options"}, **plain["options"]}


def option_type(entry: own_code.Entry, key: str) -> Any:
    """The type of an option: the declared one, else that of its default. A default of null means text or null."""
    if key in entry.option_types:
        return entry.option_types[key]
    default = entry.options[key]
    if default is None:
        return str | None
    return tuple[str, ...] if isinstance(default, tuple | list) else type(default)


def registry_entry(group: str, name: str) -> own_code.Entry:
    """The entry of a registered name or of the user's own code. Raises BadInputError for an unknown name."""
    from baoc.data import dataset_info
    from baoc.models import family_of
    from baoc.tasks import task_info

    return {"task": task_info, "model": family_of, "dataset": dataset_info}[group](name)


def instantiate_targets(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `options` with each group below them that has a `_target_` instantiated by Hydra."""
    from hydra.utils import instantiate

    return {
        key: instantiate(value, _convert_="all") if isinstance(value, Mapping | list | tuple) else value
        for key, value in options.items()
    }


def hash_own_code(config: RunConfig) -> dict[str, str]:
    """`GROUP=NAME` -> SHA-256 of the source file, for each model, task or data set that is the user's own code."""
    hashes = {}
    for group in own_code.CONFIG_GROUPS:
        name = getattr(config, group).name
        if name in registry(group):
            continue
        # Other names stand for objects that a program passed in: they have no file to hash.
        if own_code.is_own_code(name, group=group):
            hashes[f"{group}={name}"] = own_code.source_sha256(name, key=group)
    return hashes


def registry(group: str) -> Mapping[str, Any]:
    from baoc.data import DATASETS
    from baoc.models import MODELS
    from baoc.tasks import TASKS

    return {"task": TASKS, "model": MODELS, "dataset": DATASETS}[group]
