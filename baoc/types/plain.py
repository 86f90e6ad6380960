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


def read_plain(kind: type[_T], data: object, *, partial: bool = False) -> _T:
    """The inverse of `to_plain` for a dataclass of plain values, tuples, mappings and such dataclasses.

    None is NaN where a float is due, and unknown keys are left out. `partial`: keys that have a default may be absent,
    as in what earlier versions wrote. Raises ValueError, which says what is of another type, for anything else: a file
    may hold whatever JSON can.
    """
    return _read(kind, data, path="it", partial=partial)


@cache
def _hints(kind: type[Any]) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _read(kind: Any, data: Any, *, path: str, partial: bool) -> Any:
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if is_dataclass(kind) and isinstance(data, Mapping):
        return _read_fields(cast(type[Any], kind), cast(Mapping[str, Any], data), path=path, partial=partial)
    if origin in (types.UnionType, typing.Union):
        (some,) = (part for part in parts if part is not type(None))
        absent = data is None or (is_dataclass(some) and data == {})
        return None if absent else _read(some, data, path=path, partial=partial)
    if origin is collections.abc.Mapping and isinstance(data, Mapping):
        given = cast(Mapping[Any, Any], data)
        if all(isinstance(key, str) for key in given):
            return {key: _read(parts[1], value, path=f"{path}.{key}", partial=partial) for key, value in given.items()}
    if origin is tuple and isinstance(data, list | tuple):
        given = cast(list[Any], data)
        each = [parts[0]] * len(given) if parts[-1] is ... else parts
        if len(each) == len(given):
            places = (f"{path}.{i}" for i in range(len(given)))
            found = zip(each, given, places, strict=True)
            return tuple(_read(part, value, path=place, partial=partial) for part, value, place in found)
    one = cast(Any, data)
    if kind is float and (one is None or type(one) in (int, float)):
        return float("nan") if one is None else float(one)
    if kind is Any or type(one) is kind:
        return one
    words = kind.__name__ if isinstance(kind, type) and not parts else str(kind)
    raise ValueError(f"{path.removeprefix('it.')} is {one!r:.40}, not {words}")


def _read_fields(kind: type[Any], data: Mapping[str, Any], *, path: str, partial: bool) -> Any:
    hints, found, lacking = _hints(kind), dict[str, Any](), list[str]()
    for f in fields(kind):
        if f.name in data:
            found[f.name] = _read(hints[f.name], data[f.name], path=f"{path}.{f.name}", partial=partial)
        elif not partial or (f.default is MISSING and f.default_factory is MISSING):
            lacking.append(f.name)
    if lacking:
        raise ValueError(f"{path.removeprefix('it.')} lacks {', '.join(lacking)}")
    return kind(**found)
