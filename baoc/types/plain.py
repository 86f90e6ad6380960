"""These values as JSON can hold them, and back."""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import StrEnum
from typing import Any

from baoc.types.decision import GradientStats, Profile


def to_plain(value: Any) -> Any:
    """A value of this module as dicts, lists, strings and numbers; NaN and infinities become None, as JSON has none."""
    if isinstance(value, StrEnum):
        return value.value
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [to_plain(item) for item in value]
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return None
    return value


def profile_from_plain(data: Mapping[str, Any]) -> Profile:
    """The inverse of `to_plain` for a Profile; None becomes NaN again."""
    stats = {
        block: GradientStats(**{k: float("nan") if v is None else v for k, v in values.items()})
        for block, values in data["stats"].items()
    }
    return Profile(**{**data, "stats": stats})
