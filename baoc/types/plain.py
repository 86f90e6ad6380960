"""Converts these values to what JSON can hold, and back."""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import StrEnum
from typing import Any, cast

from baoc.types.decision import Footprint, GradientStats, LatencyTable, LinkRates, PeakInterval, Profile
from baoc.types.option import Option

_PLAIN = (str, int, bool, type(None))


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


def profile_from_plain(data: Mapping[str, Any]) -> Profile:
    """The inverse of `to_plain` for a Profile; None becomes NaN again."""
    stats = {block: GradientStats(**_numbers(values)) for block, values in data["stats"].items()}
    return Profile(
        stats=stats,
        num_samples=data["num_samples"],
        profile_s=data["profile_s"],
        warmup_s=data["warmup_s"],
        profile_bytes=data["profile_bytes"],
    )


def latency_from_plain(data: Mapping[str, Any]) -> LatencyTable:
    """The inverse of `to_plain` for a LatencyTable. Raises KeyError, TypeError or ValueError for anything else."""
    fixed, slope = ({str(spec): float(s) for spec, s in data[key].items()} for key in ("fixed_s", "per_element_s"))
    return LatencyTable(
        device=str(data["device"]),
        fixed_s=fixed,
        per_element_s=slope,
        step_s=float(data["step_s"]),
        base_step_s=float(data["base_step_s"]),
        reference_step_s=float(data["reference_step_s"]),
        assumed=tuple(data["assumed"]),
        hidden_s=float(data["hidden_s"]),
        link=None if data["link"] is None else _link(data["link"]),
    )


def option_from_plain(data: Mapping[str, Any]) -> Option:
    """The inverse of `to_plain` for an Option. Raises KeyError or TypeError for anything else."""
    measured = ("samples_per_s", "step_s", "fastest_s", "reference_s")
    known: dict[str, Any] = {key: float("nan") if data[key] is None else data[key] for key in measured}
    return Option(**{**data, **known})


def footprint_from_plain(data: Mapping[str, Any]) -> Footprint:
    """The inverse of `to_plain` for a Footprint. Raises KeyError or TypeError for anything else."""
    order: dict[str, Any] = {"gradient_order": tuple(data["gradient_order"])}
    intervals: dict[str, Any] = {"intervals": tuple(PeakInterval(**interval) for interval in data["intervals"])}
    return Footprint(**{**data, **order, **intervals})


def _link(data: Mapping[str, Any]) -> LinkRates:
    return LinkRates(
        sizes=tuple(data["sizes"]),
        in_rates=tuple(data["in_rates"]),
        out_rates=tuple(data["out_rates"]),
        both_rates=tuple(data["both_rates"]),
        source=str(data["source"]),
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
