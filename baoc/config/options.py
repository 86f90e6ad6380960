"""Options that the registry row of a model, task or data set declares.

An option is written as a flat key beside `name`, such as `model.dropout`, `task.label_smoothing` or
`dataset.val_fraction`, and is checked against the row. A new option changes its row and its file in conf/ only.
"""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Protocol

from baoc.config.schema import DatasetConfig, ModelConfig, RunConfig, TaskConfig
from baoc.config.validate import plain_text, unknown_key, validate_value
from baoc.core import own_code
from baoc.errors import BadInputError
from baoc.types import to_plain


class Row(Protocol):
    """A row of MODELS, TASKS or DATASETS: the options' defaults, and the types that these do not show."""

    @property
    def options(self) -> Mapping[str, Any]: ...

    @property
    def option_types(self) -> Mapping[str, Any]: ...

    @property
    def is_own(self) -> bool: ...


GROUPS: Mapping[str, Any] = {"task": TaskConfig, "model": ModelConfig, "dataset": DatasetConfig}


def split_options(group: str, given: object, *, complete: bool) -> dict[str, Any]:
    """Splits the flat node `given` into fields of the group's dataclass and, under `options`, all other keys. Absent
    options take the row's default; with `complete` they are refused. Raises BadInputError for a node that is no
    mapping, an unknown name or key, a wrong type, or a refused absence."""
    if not isinstance(given, Mapping):
        raise BadInputError(f"{group} must be a group of keys, not {plain_text(given)}: choose it with {group}=NAME")
    own = own_keys(group)
    name = given.get("name", GROUPS[group]().name)
    if not isinstance(name, str):
        raise BadInputError(f"{group}.name must be one name, not {plain_text(name)}: choose it with {group}=NAME")
    row = registry_entry(group, name)
    options = dict(row.options)
    for key, value in given.items():
        if key in own:
            continue
        if row.is_own:  # arguments of a function, which its call checks
            options[key] = value
            continue
        if key not in options:
            raise unknown_key(str(key), allowed=[*own, *options], path=group)
        options[key] = validate_value(value, option_type(row, key), key=f"{group}.{key}")
    if missing := [key for key in options if complete and key not in given]:
        key = f"{group}.{missing[0]}"
        raise BadInputError(f"{key} is missing: it was removed from the configuration, but {name} has it")
    return {**{key: value for key, value in given.items() if key in own}, "options": options}


def own_keys(group: str) -> list[str]:
    """The keys that every model, task or data set has, whatever its row."""
    return [item.name for item in fields(GROUPS[group]) if item.name != "options"]


def flatten_options(config: TaskConfig | ModelConfig | DatasetConfig) -> dict[str, Any]:
    """The inverse of `gather`: options as flat keys beside the group's own fields."""
    plain = to_plain(config)
    return {**{key: value for key, value in plain.items() if key != "options"}, **plain["options"]}


def option_type(row: Row, key: str) -> Any:
    """The type of an option: the declared one, else that of its default. A default of null means text or null."""
    if key in row.option_types:
        return row.option_types[key]
    default = row.options[key]
    if default is None:
        return str | None
    return tuple[str, ...] if isinstance(default, tuple | list) else type(default)


def registry_entry(group: str, name: str) -> Row:
    """The row of a registered name or of the user's own code. Raises BadInputError for an unknown name."""
    from baoc.data import dataset_info
    from baoc.models import family_of
    from baoc.tasks import task_info

    return {"task": task_info, "model": family_of, "dataset": dataset_info}[group](name)


def instantiate_targets(options: Mapping[str, Any]) -> dict[str, Any]:
    """`options` with each inner group that has a `_target_` replaced by what Hydra's `instantiate` makes of it."""
    from hydra.utils import instantiate

    return {
        key: instantiate(value, _convert_="all") if isinstance(value, Mapping | list | tuple) else value
        for key, value in options.items()
    }


def hash_own_code(config: RunConfig) -> dict[str, str]:
    """Setting, such as `model=NAME` -> SHA-256 of the file with the user's own code."""
    named = {group: getattr(config, group).name for group in own_code.CONFIG_GROUPS}
    others = {group: name for group, name in named.items() if name not in registry(group)}
    # Other names stand for objects that a program passed in: they have no file to hash.
    own = {
        g: name
        for g, name in others.items()
        if own_code.names_own_code(name) or name in own_code.entry_points_of(f"baoc.{g}s")
    }
    return {f"{group}={name}": own_code.source_sha256(name, key=group) for group, name in own.items()}


def registry(group: str) -> Mapping[str, Any]:
    from baoc.data import DATASETS
    from baoc.models import MODELS
    from baoc.tasks import TASKS

    return {"task": TASKS, "model": MODELS, "dataset": DATASETS}[group]
