"""Converts these values to what JSON can hold, and back."""

import collections.abc
import types
import typing
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from enum import StrEnum
from functools import cache
from typing import Any, TypeVar, cast

_PLAIN = (str, int, bool, type(None))
_T = TypeVar("_T")


def to_plain(value: Any) -> Any:
    """A value of `baoc.types` as dicts, lists, strings and numbers; NaN and infinities become None (no JSON)."""
    if type(value) in _PLAIN:  # most of a table, so it comes first
        return value
    if isinstance(value, StrEnum):
        return value.value
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in cast(Mapping[Any, Any], value).items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [to_plain(item) for item in cast(list[Any], value)]
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return None
    return value


def read_plain(kind: type[_T], data: object) -> _T:
    """The inverse of `to_plain` for a dataclass of plain values, tuples, mappings and such dataclasses.

    None is NaN where a float is due; unknown keys are left out, and absent ones have their defaults. Raises ValueError,
    which says what is of another type, for anything else: a file may hold whatever JSON can.
    """
    return _read(kind, data, path="it")


@cache
def _hints(kind: type[Any]) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _read(kind: Any, data: Any, *, path: str) -> Any:
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if is_dataclass(kind) and isinstance(data, Mapping):
        return _read_fields(cast(type[Any], kind), cast(Mapping[str, Any], data), path=path)
    if origin in (types.UnionType, typing.Union):
        (some,) = (part for part in parts if part is not type(None))
        absent = data is None or (is_dataclass(some) and data == {})
        return None if absent else _read(some, data, path=path)
    if origin is collections.abc.Mapping and isinstance(data, Mapping):
        given = cast(Mapping[Any, Any], data)
        if all(isinstance(key, str) for key in given):
            return {key: _read(parts[1], value, path=f"{path}.{key}") for key, value in given.items()}
    if origin is tuple and isinstance(data, list | tuple):
        given = cast(list[Any], data)
        each = [parts[0]] * len(given) if parts[-1] is ... else parts
        if len(each) == len(given):
            return tuple(
                _read(part, value, path=f"{path}.{i}") for i, (part, value) in enumerate(zip(each, given, strict=True))
            )
    one = cast(Any, data)
    if kind is float and (one is None or type(one) in (int, float)):
        return float("nan") if one is None else float(one)
    if kind is Any or type(one) is kind:
        return one
    words = kind.__name__ if isinstance(kind, type) and not parts else str(kind)
    raise ValueError(f"{path.removeprefix('it.')} is {one!r:.40}, not {words}")


def _read_fields(kind: type[Any], data: Mapping[str, Any], *, path: str) -> Any:
    known = fields(kind)
    lacking = [f.name for f in known if f.name not in data and f.default is MISSING and f.default_factory is MISSING]
    if lacking:
        raise ValueError(f"{path.removeprefix('it.')} lacks {', '.join(lacking)}")
    hints = _hints(kind)
    return kind(
        **{f.name: _read(hints[f.name], data[f.name], path=f"{path}.{f.name}") for f in known if f.name in data}
    )
