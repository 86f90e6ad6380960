"""Builds dataclasses of settings from plain values by pydantic, with one sentence for each refusal.

Annotations of the fields declare types, ranges and choices; `__post_init__` of the classes checks fields against each
other. Values are validated as strict JSON: true is no number, a number is no text, and unknown keys are errors. A
message names the key as the command line writes it, its value, what is allowed, and similar names.
"""

import operator
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from math import log10
from typing import TYPE_CHECKING, Any, Literal, TypeVar, Union, cast

from baoc.core.catalogue import removal_message
from baoc.errors import BadInputError, did_you_mean

if TYPE_CHECKING:  # read when the first settings are validated, as `--help` validates none
    from pydantic import TypeAdapter

T = TypeVar("T")
_MAX_SHOWN = 60  # characters of a value in a message
_INT_BITS = 63  # counters, seeds and tensors hold int64


@dataclass(frozen=True, slots=True, kw_only=True)
class RemovedKey:
    """A key of earlier versions, which config.yaml of older runs may hold.

    It is ignored if its value changed nothing: if it equals `default`, if it is a group with all items of `default`, or
    always if `default` is ANY. `instead`: what to do about another value.
    """

    default: object
    instead: str

    def did_nothing(self, value: object) -> bool:
        if isinstance(self.default, Mapping) and isinstance(value, Mapping):
            return all(value.get(key) == default for key, default in self.default.items())
        return self.default is ANY or value == self.default


ANY = object()

REMOVED_KEYS: Mapping[str, RemovedKey] = {
    "blocks.merge": RemovedKey(
        default=None,
        instead="no measured run tied blocks by their statistics: choose coarser blocks with blocks=layer or "
        "blocks=role, or name them in blocks.patterns",
    ),
    "reallocation.update_rms": RemovedKey(
        default="usual",
        instead="targets of early gradients multiplied the learning rate for good: leave it out, targets stay at .2",
    ),
    **{
        f"reallocation.{key}": RemovedKey(
            default=ANY,  # the modes that read it are refused
            instead="no decision after the first was shown to help: leave it out, reallocation=once decides once",
        )
        for key in ("interval", "drift_threshold", "min_gain")
    },
    "profile": RemovedKey(
        default=None, instead="plans by another run's statistics of gradients were not shown to be better: leave it out"
    ),
    "faults.nonfinite_loss": RemovedKey(
        default="skip", instead="such steps are skipped: set faults.patience=1 to stop at the first one, and resume"
    ),
    "faults.max_rewinds": RemovedKey(default=3, instead="steps of a NaN or infinite loss are skipped: leave it out"),
    "budget.relaxation": RemovedKey(
        default={"from_step": None}, instead="no run showed what it gives: name steps and budgets in budget.schedule"
    ),
}


@dataclass(frozen=True, slots=True)
class Allowed:
    """A range or format for `Annotated`: `words` for messages, pydantic's constraints for the check.

    The constraints of a union stand at its types, the words at the union.
    """

    words: str = ""
    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None
    min_length: int | None = None
    pattern: str | None = None

    def contains(self, value: Any) -> bool:
        limits = ((operator.ge, self.ge), (operator.gt, self.gt), (operator.le, self.le), (operator.lt, self.lt))
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return is_number and all(limit is None or compare(value, limit) for compare, limit in limits)

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        limits = {item.name: getattr(self, item.name) for item in fields(self) if item.name != "words"}
        return {**handler(source), **{name: limit for name, limit in limits.items() if limit is not None}}


class _BareOff:
    """Reads booleans as `off` and `on`, for choices with `off`: YAML reads a bare off as false."""

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        from pydantic_core import core_schema

        return core_schema.no_info_before_validator_function(
            lambda value: ("off", "on")[value] if type(value) is bool else value, handler(source)
        )


OFF = _BareOff()
ABOVE_0 = Allowed("above 0", gt=0)
FROM_0 = Allowed("zero or more", ge=0)
SHARE = Allowed("from 0 to 1", ge=0, le=1)


def at_least(number: int, words: str = "") -> Allowed:
    """The range `number` or more. `words` are appended to it in messages, such as " steps"."""
    return Allowed(f"{number} or more{words}", ge=number)


def require(condition: bool, key: str, value: object, allowed: str) -> None:
    """Raises BadInputError with `key`, its `value` and what is `allowed` if `condition` is False."""
    if not condition:
        raise BadInputError(f"{key}={plain_text(value)} is not allowed: it must be {allowed}")


def check_ranges(settings: object, *, path: str) -> None:
    """Checks settings that were made in Python, without pydantic, which need not be installed.

    Raises BadInputError for a number out of its range and for an unknown choice. Hints that are unions are not checked.
    """
    for name, hint in _hints(type(settings)).items():
        value, bare = getattr(settings, name), _bare(hint)
        limits = next((item for item in getattr(hint, "__metadata__", ()) if isinstance(item, Allowed)), None)
        if typing.get_origin(bare) is Literal:
            if value not in typing.get_args(bare):
                raise _not_a_choice(f"{path}.{name}", value, hint=bare)
        elif limits is not None:
            require(limits.contains(value), f"{path}.{name}", value, limits.words)


def _not_a_choice(key: str, value: object, *, hint: Any) -> BadInputError:
    shown = plain_text(value)
    if (removal := removal_message(shown)).startswith(f"{key.partition('.')[0]}="):
        return BadInputError(removal)
    near = did_you_mean(shown, [str(item) for item in typing.get_args(_optional(hint))])
    return BadInputError(f"{key}={shown} is not allowed: choose {key}={type_in_words(hint)}{near}")


def plain_text(value: object) -> str:
    """A value as the command line writes it, shortened."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    text = str(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


def build_settings(cls: type[T], values: object, *, path: str = "", complete: bool = False) -> T:
    """Builds the dataclass `cls` from a mapping. Raises BadInputError.

    Args:
        path: key of the mapping, as in `optim`.
        complete: absent fields are errors instead of taking their default.
    """
    settings = validate_value(values, cls, key=path)
    if complete and (absent := _first_absent(cls, values, path=path)):
        raise _missing(absent)
    return settings


def validate_value(value: object, hint: Any, *, key: str) -> Any:
    """Returns `value` as the type `hint`. Converts int to float and list to tuple only. Raises BadInputError."""
    from pydantic import ValidationError
    from pydantic_core import to_json

    refuse_unwritable(value, key=key)
    try:
        return _adapter(hint).validate_json(to_json(value, inf_nan_mode="constants", fallback=str))
    except ValidationError as error:
        # An unknown key comes first, as it may be a missing one misspelt.
        faults = [_Fault.from_pydantic(item, value, hint=hint, path=key) for item in error.errors(include_url=False)]
        first = next((fault for fault in faults if fault.kind == "unexpected_keyword_argument"), faults[0])
        # Pydantic has one fault per type of a union. A missed range says more than a wrong type.
        first = next((fault for fault in faults if fault.key == first.key and fault.is_range), first)
        raise first.to_bad_input() from None


def refuse_unwritable(value: object, *, key: str) -> None:
    """Raises BadInputError for integers inside `value` that int64 cannot hold, and text that UTF-8 cannot encode."""
    if isinstance(value, Mapping):
        for name, item in value.items():
            refuse_unwritable(str(name), key=key)
            refuse_unwritable(item, key=_joined(key, str(name).encode(errors="replace").decode()))
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            refuse_unwritable(item, key=f"{key}[{index}]")
    elif isinstance(value, int) and value.bit_length() > _INT_BITS:
        digits = int(value.bit_length() * log10(2)) + 1
        raise BadInputError(f"{key} is a number of about {digits} digits: it must be below 9.2e18")
    elif isinstance(value, str) and not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            shown = value.encode(errors="backslashreplace").decode()
            raise BadInputError(f"{key}={plain_text(shown)} is no text of UTF-8: write it without such bytes") from None


def unknown_key(key: str, *, allowed: Iterable[str], path: str = "") -> BadInputError:
    """Returns the error for a key that the group `path` does not have."""
    allowed, prefix = list(allowed), f"{path}." if path else ""
    if f"{prefix}{key}" in REMOVED_KEYS:
        return BadInputError(f"{prefix}{key} was removed: {REMOVED_KEYS[f'{prefix}{key}'].instead}")
    hint = did_you_mean(key, allowed, prefix=prefix)
    return BadInputError(f"unknown key {prefix}{key}{hint}\n{path or 'a run'} has: {', '.join(allowed)}")


def _missing(key: str) -> BadInputError:
    return BadInputError(f"{key} is missing: it was removed from the configuration, but every run needs it")


def type_in_words(hint: Any) -> str:
    names = {
        int: "a whole number",
        float: "a number",
        str: "text",
        bool: "true or false",
        type(None): "null",
        Any: "a value",
    }
    hint = _bare(hint)
    if hint in names:
        return names[hint]
    origin, items = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return "|".join(plain_text(item) for item in items)
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(type_in_words(item) for item in items))
    if origin is tuple:
        if items[-1] is Ellipsis:
            return f"a list, each entry {type_in_words(items[0])}"
        return f"a list of {len(items)}: {', '.join(type_in_words(item) for item in items)}"
    return "a group of keys"


# -- pydantic's errors as sentences -----------------------------------------------------------------------------------


@cache
def _adapter(hint: Any) -> "TypeAdapter[Any]":
    from pydantic import ConfigDict, TypeAdapter

    config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
    if not is_dataclass(hint):
        return TypeAdapter(hint, config=config)
    cast(Any, hint).__pydantic_config__ = config  # also used for nested dataclasses
    return TypeAdapter(cast(Any, hint))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fault:
    """One of pydantic's errors."""

    key: str  # as the command line writes it
    kind: str  # pydantic's type of error
    value: object
    hint: Any  # of the key
    parent: Any  # dataclass that has the key as a field; None if none does
    raised: object  # the error that a check in `__post_init__` raised, or None

    @classmethod
    def from_pydantic(cls, fault: Any, value: Any, *, hint: Any, path: str) -> "_Fault":
        """Follows pydantic's `loc` through hints and values to the key of the fault."""
        key, parent = path, None
        for part in fault["loc"]:
            bare = _optional(hint)
            origin, items = typing.get_origin(bare), typing.get_args(bare)
            if is_dataclass(bare):
                key, parent, hint = _joined(key, part), bare, _hints(cast(type, bare)).get(part)
                value = value.get(part) if isinstance(value, Mapping) else None
                continue
            parent = None
            if origin is tuple and items[-1] is Ellipsis:
                key, hint, value = f"{key}[{part}]", items[0], value[part]
            elif isinstance(origin, type) and issubclass(origin, Mapping):
                value = next(item for name, item in value.items() if str(name) == part)
                key, hint = _joined(key, part), items[1]
            else:  # a union: the rest of `loc` names one of its types, which is no part of the key
                break
        raised = fault.get("ctx", {}).get("error")
        return cls(key=key, kind=fault["type"], value=value, hint=hint, parent=parent, raised=raised)

    @property
    def is_range(self) -> bool:
        """Whether the value has the right type and misses its range."""
        return not self.kind.endswith(("_type", "_error", "_from_float", "missing", "too_long"))

    def to_bad_input(self) -> BadInputError:
        key, shown = self.key, plain_text(self.value)
        if self.raised is not None:
            return self.raised if isinstance(self.raised, BadInputError) else BadInputError(f"{key} {self.raised}")
        if self.kind == "unexpected_keyword_argument":
            path, _, name = key.rpartition(".")
            return unknown_key(name, allowed=[item.name for item in fields(self.parent)], path=path)
        if self.kind == "missing" and self.parent is not None:
            return _missing(key)
        if self.kind == "dataclass_type":
            return BadInputError(f"{key or 'the configuration'} must be a group of keys, not {shown}")
        if self.kind == "literal_error" and typing.get_origin(_optional(self.hint)) is Literal:
            return _not_a_choice(key, self.value, hint=self.hint)
        if self.kind == "finite_number":
            allowed = "a finite number"
        else:
            allowed = (_allowed_words(self.hint) if self.is_range else None) or type_in_words(self.hint)
        return BadInputError(f"{key}={shown} is not allowed: it must be {allowed}")


@cache
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls, include_extras=True)


def _bare(hint: Any) -> Any:
    """The type without the annotations of `Annotated`."""
    while hasattr(hint, "__metadata__"):
        hint = hint.__origin__
    return hint


def _optional(hint: Any) -> Any:
    """`X` for `X | None`; other types without the annotations of `Annotated`."""
    hint = _bare(hint)
    if typing.get_origin(hint) in (Union, types.UnionType):
        others = [item for item in typing.get_args(hint) if item is not type(None)]
        return _bare(others[0]) if len(others) == 1 else hint
    return hint


def _allowed_words(hint: Any) -> str | None:
    """The words of a hint's `Allowed`, else those of the first type of its union that has one."""
    for item in getattr(hint, "__metadata__", ()):
        if isinstance(item, Allowed):
            return item.words
    inner = typing.get_args(_bare(hint)) if typing.get_origin(_bare(hint)) in (Union, types.UnionType) else ()
    return next((text for item in inner if (text := _allowed_words(item))), None)


def _first_absent(cls: type, values: object, *, path: str) -> str | None:
    """The key of the first field of `cls`, at any depth, that `values` leaves to its default; None if there is none."""
    assert isinstance(values, Mapping)
    for name, hint in _hints(cls).items():
        key = _joined(path, name)
        if name not in values:
            return key
        inner = _optional(hint)
        is_group = is_dataclass(inner) and values[name] is not None
        if is_group and (absent := _first_absent(cast(type, inner), values[name], path=key)):
            return absent
    return None


def _joined(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key
