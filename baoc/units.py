"""Sizes and times as people write them, and the only place where they become numbers.

`8gb` means 8 GiB, as on a card's label; every unit here is a power of two.
"""

import re

from baoc.errors import BadInputError

KIB = 2**10
MIB = 2**20
GIB = 2**30

_UNITS = {"b": 1, "kb": KIB, "kib": KIB, "mb": MIB, "mib": MIB, "gb": GIB, "gib": GIB, "tb": 2**40, "tib": 2**40}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?|\.\d+)\s*([a-z]+)\s*", re.IGNORECASE)


def is_size(text: str) -> bool:
    """True if `text` reads as a size with a unit, such as `7.5gb`; its value may still be refused (0gb)."""
    match = _SIZE.fullmatch(text)
    return match is not None and match.group(2).lower() in _UNITS


MOST = 2.0**80  # of any unit


def parse_size(text: str) -> int:
    """`"7.5gb"` -> bytes, rounded down. Raises BadInputError on anything else, zero included."""
    if not is_size(text):
        raise BadInputError(
            f"cannot read {text!r} as a memory size: write a positive number and a unit out of "
            f"{', '.join(sorted(_UNITS))}, for example 8gb, 7.5gb or 300mb"
        )
    number, unit = _SIZE.fullmatch(text).groups()  # pyright: ignore[reportOptionalMemberAccess]
    if float(number) > MOST:
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
