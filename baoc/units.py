"""Parses and formats byte sizes.

Every unit is a power of two: `8gb` means 8 GiB, as on a card's label.
"""

import re

from baoc.errors import BadInputError

KIB = 2**10
MIB = 2**20
GIB = 2**30

_UNITS = {"b": 1, "kb": KIB, "kib": KIB, "mb": MIB, "mib": MIB, "gb": GIB, "gib": GIB, "tb": 2**40, "tib": 2**40}
MAX_NUMBER = 2.0**80  # of any unit, which no device has; longer digit strings become an infinite float
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?|\.\d+)\s*([a-z]+)\s*", re.IGNORECASE)


def is_size(text: str) -> bool:
    """True if `text` is a number with a unit, such as `7.5gb`. `parse_size` may still refuse its value, as of 0gb."""
    match = _SIZE.fullmatch(text)
    return match is not None and match.group(2).lower() in _UNITS


def parse_size(text: str) -> int:
    """`"7.5gb"` -> bytes, rounded down. Raises BadInputError on anything else, zero included."""
    if not is_size(text):
        raise BadInputError(
            f"cannot read {text!r} as a memory size: write a positive number and a unit out of "
            f"{', '.join(sorted(_UNITS))}, for example 8gb, 7.5gb or 300mb"
        )
    number, unit = _SIZE.fullmatch(text).groups()  # pyright: ignore[reportOptionalMemberAccess]
    if float(number) > MAX_NUMBER:
        raise BadInputError(f"a memory size of {len(text)} characters is more than any device has: write one like 8gb")
    size = int(float(number) * _UNITS[unit.lower()])
    if size <= 0:
        raise BadInputError(f"a memory size of {text!r} holds nothing: give a positive one, for example 8gb or 300mb")
    return size


def format_bytes(num_bytes: float) -> str:
    """Bytes as a short text in the unit that leaves one to four digits: `7.50 GiB`, `812 KiB`."""
    for size, unit in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if abs(num_bytes) >= size:
            value = num_bytes / size
            return f"{value:.2f} {unit}" if value < 100 else f"{value:.0f} {unit}"
    return f"{num_bytes:.0f} B"


def gib(num_bytes: float) -> float:
    """Bytes -> GiB, for metric keys that end in `_gib`."""
    return num_bytes / GIB
