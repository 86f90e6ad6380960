"""Builds dataclasses from plain mappings; unknown keys and wrong types are errors.

Each message names the key as the command line writes it, the given value, the allowed ones, and similar names.
"""

import sys
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from difflib import get_close_matches
from math import isfinite
from typing import Any, Literal, TypeVar, Union, cast

from baoc.errors import BadInputError

T = TypeVar("T")


def require(condition: bool, key: str, value: object, allowed: str) -> None:
    """Raises BadInputError with `key`, its `value` and what is `allowed`, unless `condition` holds."""
    if not condition:
        raise BadInputError(f"{key}={plain_text(value)} is not allowed: it must be {allowed}")


def plain_text(value: object) -> str:
    """A value as the command line writes it."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)


def build(cls: type[T], given: object, *, path: str = "", complete: bool = False) -> T:
    """An instance of the dataclass `cls` from a mapping.

    Args:
        path: key of the mapping, as in `optim`.
        complete: absent fields are errors instead of taking their default.
    """
    where = path or "the configuration"
    if not isinstance(given, Mapping):
        raise BadInputError(f"{where} must be a group of keys, not {plain_text(given)}")
    named = {item.name: item for item in fields(cast(Any, cls))}
    for key in given:
        if key not in named:
            raise unknown_key(str(key), allowed=named, path=path)
    hints = typing.get_type_hints(cls)
    values: dict[str, Any] = {}
    for name, item in named.items():
        full = f"{path}.{name}" if path else name
        if name in given:
            values[name] = convert(given[name], hints[name], key=full, complete=complete)
        elif complete or (item.default is MISSING and item.default_factory is MISSING):
            raise BadInputError(f"{full} is missing: it was removed from the configuration, but every run needs it")
    return cls(**values)


def unknown_key(key: str, *, allowed: Iterable[str], path: str = "") -> BadInputError:
    """The error for a key that `path` does not have."""
    prefix = f"{path}." if path else ""
    hint = did_you_mean(key, allowed, prefix=prefix)
    return BadInputError(f"unknown key {prefix}{key}{hint}\n{path or 'a run'} has: {', '.join(allowed)}")


def did_you_mean(given: str, allowed: Iterable[str], *, prefix: str = "") -> str:
    """`; did you mean a or b?`, or empty if no name is similar."""
    close = get_close_matches(given, list(allowed), n=3, cutoff=0.6)
    return f"; did you mean {' or '.join(prefix + name for name in close)}?" if close else ""


def convert(value: Any, hint: Any, *, key: str, complete: bool = False) -> Any:
    """`value` as the type `hint`; raises BadInputError. An int converts to float, a list to a tuple, nothing else."""
    origin = typing.get_origin(hint)
    if is_dataclass(hint):
        return build(cast(type, hint), value, path=key, complete=complete)
    if origin is Literal:
        return _convert_literal(value, typing.get_args(hint), key=key)
    if origin in (Union, types.UnionType):
        return _convert_union(value, hint, key=key)
    if origin is tuple:
        return _convert_tuple(value, hint, key=key)
    if origin is not None and issubclass(origin, Mapping):
        if not isinstance(value, Mapping):
            raise _wrong_type(value, hint, key=key)
        item = typing.get_args(hint)[1]
        return {str(name): convert(entry, item, key=f"{key}.{name}") for name, entry in value.items()}
    if hint is Any:
        return value
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        if abs(value) > sys.float_info.max:
            raise BadInputError(f"{key} is a number of {len(str(abs(value)))} digits: it must be below 1.8e308")
        return float(value)
    if hint is float and isinstance(value, float) and not isfinite(value):
        raise BadInputError(f"{key}={value} is not allowed: it must be a finite number")
    if not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
        raise _wrong_type(value, hint, key=key)
    return value


def _convert_literal(value: Any, allowed: tuple[Any, ...], *, key: str) -> Any:
    if isinstance(value, bool) and not any(value is choice for choice in allowed):
        value = {False: "off", True: "on"}[value]  # YAML reads a bare off as false
    if value not in allowed:
        shown = "|".join(plain_text(choice) for choice in allowed)
        hint = did_you_mean(plain_text(value), [str(choice) for choice in allowed])
        raise BadInputError(f"{key}={plain_text(value)} is not allowed: choose {key}={shown}{hint}")
    return value


def _convert_union(value: Any, hint: Any, *, key: str) -> Any:
    choices = typing.get_args(hint)
    if value is None and type(None) in choices:
        return None
    rest = [choice for choice in choices if choice is not type(None)]
    exact = [choice for choice in rest if type(value) is choice]  # an int stays an int where int | float is allowed
    for choice in exact or rest:
        try:
            return convert(value, choice, key=key)
        except BadInputError:
            if len(rest) == 1:
                raise
    raise _wrong_type(value, hint, key=key)


def _convert_tuple(value: Any, hint: Any, *, key: str) -> tuple[Any, ...]:
    items = typing.get_args(hint)
    if not isinstance(value, list | tuple):
        raise _wrong_type(value, hint, key=key)
    if len(items) == 2 and items[1] is Ellipsis:
        return tuple(convert(entry, items[0], key=f"{key}[{at}]") for at, entry in enumerate(value))
    if len(value) != len(items):
        raise _wrong_type(value, hint, key=key)
    return tuple(convert(entry, item, key=key) for entry, item in zip(value, items, strict=True))


def _wrong_type(value: object, hint: Any, *, key: str) -> BadInputError:
    return BadInputError(f"{key}={plain_text(value)} is not allowed: it must be {describe(hint)}")


def describe(hint: Any) -> str:
    """A type in words, for messages."""
    names = {int: "a whole number", float: "a number", str: "text", bool: "true or false", type(None): "null"}
    if hint in names:
        return names[hint]
    origin, items = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return "|".join(plain_text(item) for item in items)
    if origin in (Union, types.UnionType):
        return " or ".join(describe(item) for item in items)
    if origin is tuple:
        if items[-1] is Ellipsis:
            return f"a list, each entry {describe(items[0])}"
        return f"a list of {len(items)}: {', '.join(describe(item) for item in items)}"
    return "a group of keys"
