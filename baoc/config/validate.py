"""Builds the dataclasses of settings from plain values by pydantic, and says in one sentence what it refuses.

Types, ranges and choices are annotations of the fields, cross-checks the `__post_init__` of the classes. Values are
validated as JSON, strictly: true is no number, a number is no text, and unknown keys are errors. A message names the
key as the command line writes it, the given value, what is allowed, and similar names.
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
    from pydantic import TypeAdapter, ValidationError

T = TypeVar("T")
_MOST_SHOWN = 60  # characters of a given value
_BITS = 63  # of a whole number, which counters, seeds and tensors hold


@dataclass(frozen=True, slots=True, kw_only=True)
class RemovedKey:
    """A key of earlier versions. What did no more than is done today is read, as older runs hold it: `default`, a group
    that agrees with it, or ANY value."""

    default: object
    instead: str

    def did_nothing(self, value: object) -> bool:
        if isinstance(self.default, Mapping) and isinstance(value, Mapping):
            return all(value.get(key) == held for key, held in self.default.items())
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
            default=ANY,  # the modes that read it are refused themselves
            instead="no decision after the first was shown to help: leave it out, reallocation=once decides once",
        )
        for key in ("interval", "drift_threshold", "min_gain")
    },
    "profile": RemovedKey(
        default=None,
        instead="plans by another run's statistics of gradients were not shown to be better: leave it out",
    ),
    "faults.nonfinite_loss": RemovedKey(
        default="skip", instead="such steps are skipped: set faults.patience=1 to stop at the first one, and resume"
    ),
    "faults.max_rewinds": RemovedKey(default=3, instead="steps of a NaN or infinite loss are skipped: leave it out"),
    "budget.relaxation": RemovedKey(
        default={"from_step": None},
        instead="no run showed what it gives: name steps and budgets in budget.schedule",
    ),
}


@dataclass(frozen=True, slots=True)
class Allowed:
    """What is allowed of a type, in `words` and in pydantic's terms; the latter may be left to the parts of a union."""

    words: str
    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None
    min_length: int | None = None
    pattern: str | None = None

    def hold(self, value: Any) -> bool:
        """Whether a number is in the range."""
        limits = ((operator.ge, self.ge), (operator.gt, self.gt), (operator.le, self.le), (operator.lt, self.lt))
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return is_number and all(limit is None or holds(value, limit) for holds, limit in limits)

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        limits = {item.name: getattr(self, item.name) for item in fields(self) if item.name != "words"}
        return {**handler(source), **{name: limit for name, limit in limits.items() if limit is not None}}


class _BareOff:
    """For choices of which one is `off`: YAML reads a bare off as false."""

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
    """The range of a whole number, `number` or more; `words` name the unit, as in " steps"."""
    return Allowed(f"{number} or more{words}", ge=number)


def require(condition: bool, key: str, value: object, allowed: str) -> None:
    """Raises BadInputError with `key`, its `value` and what is `allowed`, unless `condition` holds."""
    if not condition:
        raise BadInputError(f"{key}={plain_text(value)} is not allowed: it must be {allowed}")


def check_ranges(settings: object, *, path: str) -> None:
    """Raises BadInputError for a number or a choice that its annotation rules out: of settings made in Python, where
    pydantic need not be installed."""
    for name, hint in _hints(type(settings)).items():
        value, bare = getattr(settings, name), _bare(hint)
        limits = next((item for item in getattr(hint, "__metadata__", ()) if isinstance(item, Allowed)), None)
        if typing.get_origin(bare) is Literal:
            if value not in typing.get_args(bare):
                raise _not_a_choice(f"{path}.{name}", value, hint=bare)
        elif limits is not None:
            require(limits.hold(value), f"{path}.{name}", value, limits.words)


def _not_a_choice(key: str, value: object, *, hint: Any) -> BadInputError:
    shown = plain_text(value)
    if (told := removal_message(shown)).startswith(f"{key.partition('.')[0]}="):
        return BadInputError(told)
    near = did_you_mean(shown, [str(item) for item in typing.get_args(_optional(hint))])
    return BadInputError(f"{key}={shown} is not allowed: choose {key}={type_in_words(hint)}{near}")


def plain_text(value: object) -> str:
    """A value as the command line writes it, shortened."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    text = str(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


def build_settings(cls: type[T], given: object, *, path: str = "", complete: bool = False) -> T:
    """An instance of the dataclass `cls` from a mapping.

    Args:
        path: key of the mapping, as in `optim`.
        complete: absent fields are errors instead of taking their default.
    """
    made = validate_value(given, cls, key=path)
    if complete and (absent := _first_absent(cls, given, path=path)):
        raise BadInputError(f"{absent} is missing: it was removed from the configuration, but every run needs it")
    return made


def validate_value(value: object, hint: Any, *, key: str) -> Any:
    """`value` as the type `hint`; raises BadInputError. An int converts to float, a list to a tuple, nothing else."""
    from pydantic import ValidationError

    refuse_unwritable(value, key=key)
    try:
        return _adapter(hint).validate_json(_json(value))
    except ValidationError as error:
        raise _refusal(error, value, hint=hint, path=key) from None


def refuse_unwritable(value: object, *, key: str) -> None:
    """Raises BadInputError for numbers and text inside `value` that neither a file nor a tensor could hold."""
    if isinstance(value, Mapping):
        for name, item in value.items():
            refuse_unwritable(str(name), key=key)
            refuse_unwritable(item, key=_joined(key, str(name).encode(errors="replace").decode()))
    elif isinstance(value, list | tuple):
        for at, item in enumerate(value):
            refuse_unwritable(item, key=f"{key}[{at}]")
    elif isinstance(value, int) and value.bit_length() > _BITS:
        digits = int(value.bit_length() * log10(2)) + 1
        raise BadInputError(f"{key} is a number of about {digits} digits: it must be below 9.2e18")
    elif isinstance(value, str) and not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            shown = value.encode(errors="backslashreplace").decode()
            raise BadInputError(f"{key}={plain_text(shown)} is no text of UTF-8: write it without such bytes") from None


def unknown_key(key: str, *, allowed: Iterable[str], path: str = "") -> BadInputError:
    """The error for a key that `path` does not have."""
    allowed, prefix = list(allowed), f"{path}." if path else ""
    if f"{prefix}{key}" in REMOVED_KEYS:
        return BadInputError(f"{prefix}{key} was removed: {REMOVED_KEYS[f'{prefix}{key}'].instead}")
    hint = did_you_mean(key, allowed, prefix=prefix)
    return BadInputError(f"unknown key {prefix}{key}{hint}\n{path or 'a run'} has: {', '.join(allowed)}")


def type_in_words(hint: Any) -> str:
    """A type in words, for messages."""
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
    cast(Any, hint).__pydantic_config__ = config  # nested dataclasses without one of their own take it over
    return TypeAdapter(cast(Any, hint))


def _json(value: object) -> bytes:
    from pydantic_core import to_json

    return to_json(value, inf_nan_mode="constants", fallback=str)


def _refusal(error: "ValidationError", given: object, *, hint: Any, path: str) -> BadInputError:
    """The first fault that pydantic found, or an unknown key, which may be why another one is missing."""
    found = [_Fault.of(item, given, hint=hint, path=path) for item in error.errors(include_url=False)]
    first = next((fault for fault in found if fault.kind == "unexpected_keyword_argument"), found[0])
    # Of the types of a union, the one whose range is missed says more than those that the value is none of.
    first = next((fault for fault in found if fault.key == first.key and fault.is_range), first)
    return first.told()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fault:
    """One of pydantic's errors: the key as the command line writes it, its type, and the dataclass that holds it."""

    key: str
    kind: str
    value: object
    hint: Any
    holder: Any
    own: object  # the error that a check of this project raised

    @classmethod
    def of(cls, fault: Any, given: Any, *, hint: Any, path: str) -> "_Fault":
        """What follows a union in pydantic's `loc` is the name of one of its types, and no part of a key."""
        key, holder = path, None
        for part in fault["loc"]:
            bare = _optional(hint)
            origin, items = typing.get_origin(bare), typing.get_args(bare)
            if is_dataclass(bare):
                key, holder, hint = _joined(key, part), bare, _hints(cast(type, bare)).get(part)
                given = given.get(part) if isinstance(given, Mapping) else None
            elif origin is tuple and items[-1] is Ellipsis:
                key, holder, hint, given = f"{key}[{part}]", None, items[0], given[part]
            elif isinstance(origin, type) and issubclass(origin, Mapping):
                given = next(item for name, item in given.items() if str(name) == part)
                key, holder, hint = _joined(key, part), None, items[1]
            else:
                holder = None
                break
        own = fault.get("ctx", {}).get("error")
        return cls(key=key, kind=fault["type"], value=given, hint=hint, holder=holder, own=own)

    @property
    def is_range(self) -> bool:
        """Whether the value has the right type and misses its range."""
        return not self.kind.endswith(("_type", "_error", "_from_float", "missing", "too_long"))

    def told(self) -> BadInputError:
        key, shown = self.key, plain_text(self.value)
        if self.own is not None:
            return self.own if isinstance(self.own, BadInputError) else BadInputError(f"{key} {self.own}")
        if self.kind == "unexpected_keyword_argument":
            path, _, name = key.rpartition(".")
            return unknown_key(name, allowed=[item.name for item in fields(self.holder)], path=path)
        if self.kind == "missing" and self.holder is not None:
            return BadInputError(f"{key} is missing: it was removed from the configuration, but every run needs it")
        if self.kind == "dataclass_type":
            return BadInputError(f"{key or 'the configuration'} must be a group of keys, not {shown}")
        if self.kind == "literal_error" and typing.get_origin(_optional(self.hint)) is Literal:
            return _not_a_choice(key, self.value, hint=self.hint)
        allowed = (_words(self.hint) if self.is_range else None) or type_in_words(self.hint)
        allowed = "a finite number" if self.kind == "finite_number" else allowed
        return BadInputError(f"{key}={shown} is not allowed: it must be {allowed}")


@cache
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls, include_extras=True)


def _bare(hint: Any) -> Any:
    """A type without its ranges and descriptions."""
    while hasattr(hint, "__metadata__"):
        hint = hint.__origin__
    return hint


def _optional(hint: Any) -> Any:
    """`X` of `X | None`."""
    hint = _bare(hint)
    if typing.get_origin(hint) in (Union, types.UnionType):
        others = [item for item in typing.get_args(hint) if item is not type(None)]
        return _bare(others[0]) if len(others) == 1 else hint
    return hint


def _words(hint: Any) -> str | None:
    """What is allowed of a field, or of one of its types."""
    for item in getattr(hint, "__metadata__", ()):
        if isinstance(item, Allowed):
            return item.words
    inner = typing.get_args(_bare(hint)) if typing.get_origin(_bare(hint)) in (Union, types.UnionType) else ()
    return next((text for item in inner if (text := _words(item))), None)


def _first_absent(cls: type, given: object, *, path: str) -> str | None:
    """The first field that `given` leaves to its default, at any depth."""
    hints = _hints(cls)
    for item in fields(cast(Any, cls)):
        key = _joined(path, item.name)
        assert isinstance(given, Mapping)
        if item.name not in given:
            return key
        inner = _optional(hints[item.name])
        nested = is_dataclass(inner) and given[item.name] is not None
        if nested and (absent := _first_absent(cast(type, inner), given[item.name], path=key)):
            return absent
    return None


def _joined(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key
