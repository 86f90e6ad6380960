"""Options that a model, task or data set declares in its registry row: flat keys beside `name`, checked against the
row.

`model.dropout`, `task.label_smoothing` and `dataset.val_fraction` are therefore keys like any other, and a new option
changes its row and its file in conf/ only.
"""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Protocol

from baoc.config.schema import DatasetConfig, ModelConfig, TaskConfig
from baoc.config.validate import convert, plain_text, unknown_key
from baoc.errors import BadInputError, unknown_name
from baoc.types import to_plain


class Row(Protocol):
    """A row of MODELS, TASKS or DATASETS: defaults of its options, and types that the defaults do not show."""

    @property
    def options(self) -> Mapping[str, Any]: ...

    @property
    def option_types(self) -> Mapping[str, Any]: ...


GROUPS: Mapping[str, Any] = {"task": TaskConfig, "model": ModelConfig, "dataset": DatasetConfig}


def gather(group: str, given: object, *, complete: bool) -> dict[str, Any]:
    """Moves keys of a flat node that are not fields of the group's dataclass into `options`. Absent options take the
    row's default unless `complete`. Raises BadInputError for an unknown name or key, or a wrong type."""
    if not isinstance(given, Mapping):
        raise BadInputError(f"{group} must be a group of keys, not {plain_text(given)}: choose it with {group}=NAME")
    registry, own = registry_of(group), own_keys(group)
    name = given.get("name", GROUPS[group]().name)
    if not isinstance(name, str):
        raise BadInputError(f"{group}.name must be one name, not {plain_text(name)}: choose it with {group}=NAME")
    if name not in registry:
        raise unknown_name(name, what=group, allowed=registry)
    row = registry[name]
    options = dict(row.options)
    for key, value in given.items():
        if key in own:
            continue
        if key not in options:
            raise unknown_key(str(key), allowed=[*own, *options], path=group)
        options[key] = convert(value, type_of(row, key), key=f"{group}.{key}")
    if missing := [key for key in options if complete and key not in given]:
        key = f"{group}.{missing[0]}"
        raise BadInputError(f"{key} is missing: it was removed from the configuration, but {name} has it")
    return {**{key: value for key, value in given.items() if key in own}, "options": options}


def own_keys(group: str) -> list[str]:
    """The keys that every model, task or data set has."""
    return [item.name for item in fields(GROUPS[group]) if item.name != "options"]


def spread(config: TaskConfig | ModelConfig | DatasetConfig) -> dict[str, Any]:
    """The inverse of `gather`: options as flat keys beside the group's own fields."""
    plain = to_plain(config)
    return {**{key: value for key, value in plain.items() if key != "options"}, **plain["options"]}


def type_of(row: Row, key: str) -> Any:
    """The type of an option: the declared one, or that of its default; text or null for a default of null."""
    if key in row.option_types:
        return row.option_types[key]
    default = row.options[key]
    if default is None:
        return str | None
    return tuple[str, ...] if isinstance(default, tuple | list) else type(default)


def registry_of(group: str) -> Mapping[str, Any]:
    from baoc.data import DATASETS
    from baoc.models import MODELS
    from baoc.tasks import TASKS

    return {"task": TASKS, "model": MODELS, "dataset": DATASETS}[group]
