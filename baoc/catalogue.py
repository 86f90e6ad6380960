"""The frozen rows that a run may choose from: codecs, storage schemes and optimizer specs, each with one line of text.

A row only names what the rule and codec files implement; tests build and step every one of them.
"""

from collections.abc import Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase

from baoc.errors import BadInputError
from baoc.types import CodecInfo, OptimizerSpec, StorageScheme

GROUP = 32  # elements that share one scale; its two bytes cost 1/16 byte per element
_SCALE_BYTES = 2  # bf16, which has the range of fp32: fp16 scales lose the state below 1e-6


def _codec(name: str, description: str, *, bits: int, scaled: bool = False) -> CodecInfo:
    group, scale_bytes = (GROUP, _SCALE_BYTES) if scaled else (0, 0)
    return CodecInfo(name=name, description=description, bits=bits, group=group, scale_bytes=scale_bytes)


CODECS: dict[str, CodecInfo] = {
    codec.name: codec
    for codec in (
        _codec("fp32", "the numbers themselves", bits=32),
        _codec("bf16", "rounded to bfloat16", bits=16),
        _codec("softsign8", "int8 of a softsign-companded value, groups of 32 (for m)", bits=8, scaled=True),
        _codec("sqrt8", "uint8 of the square root, groups of 32 (for v)", bits=8, scaled=True),
        _codec("log8m", "int8 with a sign and a logarithm, groups of 32 (for m of wide spread)", bits=8, scaled=True),
        _codec("log8v", "uint8 of the logarithm, groups of 32 (for v of wide spread)", bits=8, scaled=True),
    )
}

STORAGES: dict[str, StorageScheme] = {
    storage.name: storage
    for storage in (
        StorageScheme(name="fp32", description="4 bytes per number", m="fp32", v="fp32"),
        StorageScheme(name="bf16", description="2 bytes per number", m="bf16", v="bf16"),
        StorageScheme(name="int8", description="1.06 bytes per number, companded", m="softsign8", v="sqrt8"),
        StorageScheme(name="int8_log", description="1.06 bytes per number, logarithmic", m="log8m", v="log8v"),
    )
}

# rule, its text, the storages it is offered in; (numbers kept per element) opens each text
_NARROW = ("fp32", "bf16", "int8")
_RULES: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("adamw", "m and v (2 per element): AdamW", (*_NARROW, "int8_log")),
    ("rmsprop", "v (1): AdamW without momentum", (*_NARROW, "int8_log")),
    ("adamw_shared_in", "m, and v per row (1): AdamW with v shared along fan-in", _NARROW),
    ("adamw_shared_out", "m, and v per column (1): AdamW with v shared along fan-out", _NARROW),
    ("adafactor", "v per row and per column (~0): Adafactor without momentum", ("fp32",)),
    ("adafactor_momentum", "m, and v per row and per column (1): Adafactor", ("fp32", "int8")),
    ("lion", "m (1): sign of the interpolated momentum", _NARROW),
    ("signum", "m (1): sign of the momentum", ("fp32", "int8")),
    ("foam_l1", "m and v folded by 2 along fan-in (1): FOAM", ("fp32", "int8")),
    ("foam_l2", "m and v folded by 4 along fan-in (1/2): FOAM", ("fp32", "int8")),
    ("foam_l3", "m and v folded by 8 along fan-in (1/4): FOAM", ("fp32", "int8")),
    ("foam_l8", "m and v folded by 256 along fan-in (1/128): FOAM", ("fp32", "int8")),
    ("foam_l1_out", "m and v folded by 2 along fan-out (1): FOAM", ("fp32", "int8")),
    ("foam_l2_out", "m and v folded by 4 along fan-out (1/2): FOAM", ("fp32", "int8")),
    ("foam_l3_out", "m and v folded by 8 along fan-out (1/4): FOAM", ("fp32", "int8")),
    ("foam_l8_out", "m and v folded by 256 along fan-out (1/128): FOAM", ("fp32", "int8")),
    ("sign", "nothing (0): sign of the gradient", ("fp32",)),
)


def _specs() -> dict[str, OptimizerSpec]:
    rows: dict[str, OptimizerSpec] = {}
    for rule, text, storages in _RULES:
        for storage in storages:
            name = rule if storage == "fp32" else f"{rule}_{storage}"
            rows[name] = OptimizerSpec(name=name, description=f"{text}, {storage}", rule=rule, storage=storage)
    return rows


SPECS: dict[str, OptimizerSpec] = _specs()


def select(patterns: Sequence[str]) -> dict[str, OptimizerSpec]:
    """Rows whose name is in `patterns` or matches one of them as a glob (`foam_*`), in catalogue order.

    Raises BadInputError for a pattern that matches no row.
    """
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in SPECS):
            close = ", ".join(get_close_matches(pattern, SPECS, n=3)) or "none is close"
            raise BadInputError(
                f"no optimizer spec is called or matches {pattern!r} (close: {close}): "
                "`python run.py --list specs` shows every row; globs such as foam_* are allowed"
            )
    return {name: spec for name, spec in SPECS.items() if any(fnmatchcase(name, p) for p in patterns)}
