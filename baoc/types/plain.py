"""Converts values of `baoc.types` to plain ones, which JSON can hold, and back."""

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
    """A value of `baoc.types` as dicts, lists, strings and numbers. NaN and infinity become None (JSON has none)."""
    if type(value) in _PLAIN:  # most of a table, so it comes first
        return value
    if isinstance(value, StrEnum):
        return value.value
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in cast(Mapping[Any, Any], value).items()}
    if isinstance(value, list | tuple | set | frozenset):
        items = [to_plain(item) for item in cast(list[Any], value)]
        return items if isinstance(value, list | tuple) else sorted(items, key=str)  # each process has its own order
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return None
    return value


def read_plain(kind: type[_T], data: object, *, partial: bool = False) -> _T:
    """The inverse of `to_plain`, for a dataclass of plain values, tuples, mappings and such dataclasses.

    None is read as NaN where the type is float. Unknown keys are ignored. `partial`: keys with a default may be absent,
    as in files of earlier versions.

    Raises:
        ValueError: a value has another type or a key is absent; the message names it.
    """
    return _read(kind, data, path="it", partial=partial)


@cache
def _hints(kind: type[Any]) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _read(kind: Any, data: Any, *, path: str, partial: bool) -> Any:
    """`data` as a value of type `kind`; `path` names it in messages."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if is_dataclass(kind) and isinstance(data, Mapping):
        return _read_fields(cast(type[Any], kind), cast(Mapping[str, Any], data), path=path, partial=partial)
    if origin in (types.UnionType, typing.Union):
        (some,) = (arg for arg in args if arg is not type(None))
        absent = data is None or (is_dataclass(some) and data == {})
        return None if absent else _read(some, data, path=path, partial=partial)
    if origin is collections.abc.Mapping and isinstance(data, Mapping):
        mapping = cast(Mapping[Any, Any], data)
        if all(isinstance(key, str) for key in mapping):
            return {key: _read(args[1], value, path=f"{path}.{key}", partial=partial) for key, value in mapping.items()}
    if origin is tuple and isinstance(data, list | tuple):
        values = cast(list[Any], data)
        kinds = [args[0]] * len(values) if args[-1] is ... else args
        if len(kinds) == len(values):
            pairs = enumerate(zip(kinds, values, strict=True))
            return tuple(_read(kind, value, path=f"{path}.{i}", partial=partial) for i, (kind, value) in pairs)
    value = cast(Any, data)
    if kind is float and (value is None or type(value) in (int, float)):
        return float("nan") if value is None else float(value)
    if kind is Any or type(value) is kind:
        return value
    expected = kind.__name__ if isinstance(kind, type) and not args else str(kind)
    raise ValueError(f"{path.removeprefix('it.')} is {value!r:.40}, not {expected}")


def _read_fields(kind: type[Any], data: Mapping[str, Any], *, path: str, partial: bool) -> Any:
    hints, values, missing = _hints(kind), dict[str, Any](), list[str]()
    for f in fields(kind):
        if f.name in data:
            values[f.name] = _read(hints[f.name], data[f.name], path=f"{path}.{f.name}", partial=partial)
        elif not partial or (f.default is MISSING and f.default_factory is MISSING):
            missing.append(f.name)
    if missing:
        raise ValueError(f"{path.removeprefix('it.')} lacks {', '.join(missing)}")
    return kind(**values)
