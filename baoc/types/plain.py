"""These values as JSON can hold them, and back."""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import StrEnum
from typing import Any, cast

from baoc.types.decision import GradientStats, Profile


def to_plain(value: Any) -> Any:
    """A value of `baoc.types` as dicts, lists, strings and numbers; NaN and infinities become None (no JSON)."""
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


def profile_from_plain(data: Mapping[str, Any]) -> Profile:
    """The inverse of `to_plain` for a Profile; None becomes NaN again."""
    stats = {block: GradientStats(**_numbers(values)) for block, values in data["stats"].items()}
    return Profile(
        stats=stats,
        shadow={
            block: {spec: _numbers(terms) for spec, terms in by_spec.items()}
            for block, by_spec in data["shadow"].items()
        },
        num_samples=data["num_samples"],
        profile_s=data["profile_s"],
        warmup_s=data["warmup_s"],
        profile_bytes=data["profile_bytes"],
    )


def _numbers(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: float("nan")
        if value is None
        else _numbers(cast(Mapping[str, Any], value))
        if isinstance(value, Mapping)
        else value
        for key, value in values.items()
    }
