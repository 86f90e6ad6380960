"""Parses `budget=`, of the command line and of Python alike, and defines the presets.

A budget is a preset's name, a size (`7.5gb`), a state fraction (`state_25`, any percentage), a number (whole bytes, or
a fraction of fp32 AdamW's state), a mapping of limits, or a Budget.
"""

import logging
import math
import re
from collections.abc import Mapping
from dataclasses import replace
from difflib import get_close_matches
from numbers import Integral, Real
from typing import Any, cast

from baoc.errors import BadInputError
from baoc.types import Budget
from baoc.units import GIB, KIB, MIB, is_size, parse_size

log = logging.getLogger(__name__)
AUTO = "auto"  # the device's free memory; no limit until `resolve_auto` gets it
UNLIMITED = "unlimited"

_CARDS_GB = (2, 4, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 80)  # as on cards' labels, in GiB
_STATE_PERCENT = (50, 25, 10)

PRESETS: Mapping[str, Budget] = {
    **{f"{size}gb": Budget(name=f"{size}gb", memory_bytes=size * GIB) for size in _CARDS_GB},
    **{f"state_{part}": Budget(name=f"state_{part}", state_fraction=part / 100) for part in _STATE_PERCENT},
    AUTO: Budget(name=AUTO),
    UNLIMITED: Budget(name=UNLIMITED),
}

MAX_BYTES = 2**63
MAX_GIB_AS_TEXT = 1024  # a larger number without a unit is no number of GiB
MIN_TEXT_BYTES = MIB  # a smaller whole number given as text, such as a shell variable, probably lacks its unit
_SHARE = re.compile(r"0?\.\d+|1\.0*")
_STATE = re.compile(r"state_(\d+(?:\.\d+)?)")
_MEMORY_KEYS = ("memory", "memory_bytes")
_NAMED_LIMITS = (*_MEMORY_KEYS, "state_fraction")  # those that a name can spell
_KEYS = ("name", *_NAMED_LIMITS, "step_time", "host_memory")


def parse_budget(spelling: str | int | float | Budget | Mapping[str, Any]) -> Budget:
    """Any spelling of a budget as a Budget.

    An int is bytes of device memory, a float the fraction of fp32 AdamW's state bytes in (0, 1]; both may be text. A
    mapping may have `name`, `memory` (a size or bytes; `memory_bytes` is the same), `state_fraction`, `step_time` and
    `host_memory` (a size or bytes of pinned host memory for states).

    Raises:
        BadInputError: For anything else; the message lists the spellings.
    """
    if isinstance(spelling, Budget):
        return _limited(_checked(spelling))
    if isinstance(spelling, str):
        return _warned(_parse_text(spelling), spelling=spelling)
    if isinstance(spelling, bool):
        raise _refusal(spelling)
    if isinstance(spelling, Integral):  # numpy's too
        return replace(_checked(Budget(name="", memory_bytes=int(spelling))), name=_memory_name(int(spelling)))
    if isinstance(spelling, Real):
        return _checked(Budget(name=_state_name(float(spelling)), state_fraction=float(spelling)))
    return _parse_mapping(spelling)


def resolve_auto(budget: Budget, *, free_bytes: int) -> Budget:
    """`auto` as a memory budget of `free_bytes`; any other budget unchanged."""
    is_open = budget.name == AUTO and budget.kind == "none"
    return replace(budget, memory_bytes=free_bytes) if is_open else budget


def spellings() -> str:
    """The spellings of `budget=` in one line, for messages and help."""
    sizes = "a size such as 7.5gb or 300mb, whole bytes"
    return f"a preset ({', '.join(PRESETS)}), {sizes}, or state_N for N % of AdamW's state"


def _warned(budget: Budget, *, spelling: str) -> Budget:
    """Warns of a percentage below 1, which may be meant as a share."""
    match = _STATE.fullmatch(spelling.strip().lower())
    if match and float(match.group(1)) < 1:
        share = float(match.group(1))
        log.warning(
            "budget=%s allows %g %% of AdamW's state: a share of %g is %s", spelling, share, share, _state_name(share)
        )
    return budget


def _parse_text(text: str) -> Budget:
    name = text.strip().lower()
    if name in PRESETS:
        return PRESETS[name]
    if (num_bytes := _whole_bytes(name)) is not None:
        return parse_budget(num_bytes)
    if _SHARE.fullmatch(name):
        return parse_budget(float(name))
    if is_size(name):
        compact = "".join(name.split())
        return Budget(name=compact, memory_bytes=parse_size(compact))
    if match := _STATE.fullmatch(name):
        return _checked(Budget(name=name, state_fraction=float(match.group(1)) / 100))
    raise _refusal(text)


def _parse_mapping(mapping: object) -> Budget:
    if not isinstance(mapping, Mapping):
        raise _refusal(mapping)
    node = cast(Mapping[str, Any], mapping)
    if unknown := [str(key) for key in node if key not in _KEYS]:
        close = get_close_matches(unknown[0], _KEYS, n=1)
        hint = f"; did you mean {close[0]}?" if close else "."
        raise BadInputError(f"budget has no key {unknown[0]!r}{hint} It takes {', '.join(_KEYS)}")
    sizes = [node[key] for key in _MEMORY_KEYS if node.get(key) is not None]
    if len(sizes) > 1:
        raise BadInputError("budget.memory and budget.memory_bytes are the same limit: give one of them")
    memory_bytes = _size(sizes[0], key="memory") if sizes else None
    host, name = node.get("host_memory"), node.get("name")
    if name is not None and not isinstance(name, str):
        raise BadInputError(f"budget.name={name!r} is not allowed: it must be text, or null")
    budget = Budget(
        name=name or "",
        memory_bytes=memory_bytes,
        state_fraction=_number(node, "state_fraction"),
        step_time=_number(node, "step_time"),
        host_memory_bytes=None if host is None else _size(host, key="host_memory"),
    )
    takes_away = any(key in node for key in _NAMED_LIMITS) and _is_allowed(budget.name)  # as budget.memory=null does
    return replace(_checked(budget) if takes_away else _limited(_checked(budget)), name=_name(budget))


def _size(value: object, *, key: str) -> int:
    if isinstance(value, str):
        num_bytes = _whole_bytes(value)
        return parse_size(value) if num_bytes is None else num_bytes
    if not isinstance(value, bool) and isinstance(value, Integral):
        return int(value)
    raise BadInputError(f"budget.{key}={value!r} is no size: write 8gb, 7.5gb or 300mb, or whole bytes")


def _whole_bytes(text: str) -> int | None:
    """The number of bytes that `text` writes; None if it is no whole number or too small to be meant as bytes. Only its
    first 40 digits are read, more than any limit has, as Python refuses to parse thousands of digits."""
    num_bytes = int(text[:40]) if text.isdecimal() else 0
    return num_bytes if num_bytes >= MIN_TEXT_BYTES else None


def _number(node: Mapping[str, Any], key: str) -> float | None:
    value = node.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, Real):
        raise BadInputError(f"budget.{key}={value!r} is no number")
    try:
        return float(value)
    except OverflowError:
        raise BadInputError(
            f"budget.{key} is a number above 1.8e308: give a smaller one, or null for no limit"
        ) from None


def _limited(budget: Budget) -> Budget:
    """Returns `budget`. Raises BadInputError if its name alone spells a limit, and for no limit at all, unless its name
    says so."""
    named = _parse_text(budget.name) if _is_allowed(budget.name) else None
    if named is not None and named.kind != "none" == budget.kind:
        raise BadInputError(
            f"budget.name={budget.name} is a name and limits nothing: give budget={budget.name}, or memory or "
            "state_fraction beside it"
        )
    if named is None and budget == Budget(name=budget.name):
        by_name = f"budget.name={budget.name} is a name, and" if budget.name else "the budget"
        raise BadInputError(f'{by_name} sets none of {", ".join(_KEYS[1:])}: set one of them, or give "unlimited"')
    return budget


def _name(budget: Budget) -> str:
    """The budget's name, replaced by its limit's own if it spells another limit."""
    if not _is_allowed(budget.name):
        return budget.name or _derived_name(budget)  # a name of the user's own
    named = _parse_text(budget.name)
    same = (named.memory_bytes, named.state_fraction) == (budget.memory_bytes, budget.state_fraction)
    return named.name if same else _derived_name(budget)


def _derived_name(budget: Budget) -> str:
    if budget.memory_bytes is not None:
        return _memory_name(budget.memory_bytes)
    return _state_name(budget.state_fraction) if budget.state_fraction is not None else UNLIMITED


def _memory_name(num_bytes: int) -> str:
    for size, unit in ((GIB, "gb"), (MIB, "mb"), (KIB, "kb")):
        text = f"{num_bytes / size:g}"
        if num_bytes >= size and float(text) * size == num_bytes:
            return f"{text}{unit}"
    return f"{num_bytes}b"


def _state_name(fraction: float) -> str:
    return f"state_{fraction * 100:g}"


def _checked(budget: Budget) -> Budget:
    memory, fraction, step_time = budget.memory_bytes, budget.state_fraction, budget.step_time
    if memory is not None and memory <= 0:
        raise BadInputError(f"a memory budget of {memory} bytes holds nothing: give a positive size, such as 8gb")
    host = budget.host_memory_bytes
    if max(memory or 0, host or 0) >= MAX_BYTES:
        raise BadInputError(
            "a memory limit of 2^63 bytes or more is more than any machine has: give a size, such as 8gb"
        )
    if host is not None and host <= 0:
        raise BadInputError(
            f"budget.host_memory={host} holds nothing: give a positive size, such as 16gb, or null for no limit"
        )
    if fraction is not None and not 0 < fraction <= 1:
        raise BadInputError(
            f"a state fraction of {fraction:.9g} is not allowed: it is a share of fp32 AdamW's state in (0, 1], as in "
            "state_25; device memory is written with a unit (8gb) or as whole bytes"
        )
    if step_time is not None and not (step_time > 0 and math.isfinite(step_time)):
        raise BadInputError(
            f"budget.step_time={step_time:g} is not allowed: it is a ratio to a step with torch's fused AdamW, above "
            "0, such as 1.2; null does not limit time"
        )
    if memory is not None and fraction is not None:
        by_name = f" (budget={budget.name}, given or by default, is the former)" if budget.name else ""
        raise BadInputError(
            f"a budget limits device memory or the state fraction, not both{by_name}: choose "
            f"budget={_memory_name(memory)} or budget={_state_name(fraction)}"
        )
    return budget


def _refusal(spelling: object) -> BadInputError:
    text = f"cannot read budget={cast(Any, spelling)}: it takes {spellings()}"
    if isinstance(spelling, str) and (suggestion := _suggestion(spelling.strip().lower())):
        text += f"; did you mean {suggestion}?"
    return BadInputError(text)


def _suggestion(text: str) -> str:
    """The allowed spelling that is nearest to `text`, with the same number; "" if none is near."""
    number = re.search(r"\d+(?:\.\d+)?", text)
    names = [f"{number[0]}gb", f"{number[0]}mb", f"state_{number[0]}"] if number else [AUTO, UNLIMITED]
    allowed = [name for name in names if _is_allowed(name)]
    if number and number[0] == text:
        if float(text) > MAX_GIB_AS_TEXT:
            return f"{int(float(text))}b"
        return " or ".join(name for name in allowed if not name.endswith("mb"))
    return next(iter(get_close_matches(text, allowed, n=1)), "")


def _is_allowed(text: str) -> bool:
    try:
        _parse_text(text)
    except BadInputError:
        return False
    return True
