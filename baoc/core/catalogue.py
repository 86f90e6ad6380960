"""The catalogue: codecs, storage schemes, weights formats and optimizer specs, each with a one-line description.

A spec only names what the rule and codec files implement; tests build and step every one of them.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import lru_cache

from baoc.core.rule_tags import OWN_RULES
from baoc.errors import BadInputError
from baoc.types import CodecInfo, OptimizerSpec, Placement, StorageScheme, WeightsInfo

MAX_LR = 1e30  # an update beyond fp32's range cannot be computed
MIN_EPS = 2.0**-126  # of fp32's numbers with all of their bits; what is divided by a smaller one overflows
GROUP = 32  # elements that share one scale; its two bytes cost 1/16 byte per element
PACKED_GROUP = 64  # of the 4-bit codecs
LEAST_PACKED = 4096  # smaller states stay fp32 under int4: they are of biases and norms, and cost next to nothing
_SCALE_BYTES = 2  # a scale is bf16, which has fp32's range: fp16 scales lose states below 1e-6


def _codec(name: str, description: str, *, bits: int, group: int = 0) -> CodecInfo:
    scale_bytes, phased = _SCALE_BYTES if group else 0, bits < 8
    return CodecInfo(name=name, description=description, bits=bits, group=group, scale_bytes=scale_bytes, phased=phased)


CODECS: dict[str, CodecInfo] = {
    codec.name: codec
    for codec in (
        _codec("fp32", "the numbers themselves", bits=32),
        _codec("bf16", "rounded to bfloat16", bits=16),
        _codec("softsign8", "int8 of a softsign-companded value, groups of 32 (for m)", bits=8, group=GROUP),
        _codec("sqrt8", "uint8 of the square root, groups of 32 (for v)", bits=8, group=GROUP),
        _codec("root8m", "int8 with a sign and a fourth root, groups of 32 (for m of any spread)", bits=8, group=GROUP),
        _codec("root8v", "uint8 of the eighth root, groups of 32 (for v of any spread)", bits=8, group=GROUP),
        _codec("root4", "4 bits, sign and root, groups of 64 (for m)", bits=4, group=PACKED_GROUP),
        _codec(
            "lattice4", "4 bits on a logarithmic lattice without zero, groups of 64 (for v)", bits=4, group=PACKED_GROUP
        ),
    )
}

STORAGES: dict[str, StorageScheme] = {
    storage.name: storage
    for storage in (
        StorageScheme(name="fp32", description="4 bytes per number", m="fp32", v="fp32"),
        StorageScheme(name="bf16", description="2 bytes per number", m="bf16", v="bf16", alignment=GROUP),
        StorageScheme(
            name="int8", description="1.06 bytes per number, companded", m="softsign8", v="sqrt8", alignment=GROUP
        ),
        StorageScheme(
            name="int8_root", description="1.06 bytes per number, roots", m="root8m", v="root8v", alignment=GROUP
        ),
        StorageScheme(
            name="int4",
            description=f"0.53 bytes per number; states of fewer than {LEAST_PACKED} numbers stay fp32",
            m="root4",
            v="lattice4",
            min_numel=LEAST_PACKED,
            alignment=PACKED_GROUP,
        ),
    )
}

_ALL = ("fp32", "bf16", "int8", "int8_root", "int4")
_FOLDS = {1: "(1)", 2: "(1/2)", 3: "(1/4)"}  # level -> numbers kept per element
# rule, its description, storages it is offered in; a description begins with the states (numbers kept per element)
_RULES: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("adamw", "m and v (2 per element): AdamW", _ALL),
    ("rmsprop", "v (1): AdamW without momentum", _ALL),
    ("adamw_shared_in", "m, and v per row (1): AdamW with v shared along fan-in", _ALL),
    ("adamw_shared_out", "m, and v per column (1): AdamW with v shared along fan-out", _ALL),
    ("adafactor", "v per row and per column (~0): Adafactor without momentum", ("fp32",)),
    ("adafactor_momentum", "m, and v per row and per column (1): Adafactor", _ALL),
    ("lion", "m (1): sign of the interpolated momentum", _ALL),
    ("signum", "m (1): sign of the momentum", _ALL),
    ("muon", "m (1): orthogonalized momentum, hidden matrices only: Muon", _ALL),
    *(
        (f"foam_l{level}", f"m and v folded by {2**level} along fan-in {numbers}: FOAM", ("fp32", "int8"))
        for level, numbers in _FOLDS.items()
    ),
    ("sign", "nothing (0): sign of the gradient", ("fp32",)),
    ("column_norm", "nothing (0): gradient with columns of one norm", ("fp32",)),
    ("column_norm_momentum", "m (1): momentum with columns of one norm, of SCALE's head", _ALL),
    *((name, rule.info.description, rule.storages) for name, rule in OWN_RULES.items()),
)


WEIGHTS: dict[str, WeightsInfo] = {
    weights.name: weights
    for weights in (
        WeightsInfo(name="native", description="as the parameter is"),
        WeightsInfo(name="split8", description="bf16 with an 8-bit correction", param_bytes=2, correction_bytes=1),
        WeightsInfo(name="bf16_sr", description="bf16, rounded at random", param_bytes=2),
        WeightsInfo(name="bf16", description="bf16, rounded to nearest: small steps are lost", param_bytes=2),
    )
}
WEIGHT_DTYPES = ("float32", "bfloat16")  # of parameters that may have weights other than native
NEAREST = "bf16"  # these weights lose small steps, so a glob never selects them


STREAMED, STREAMED_TEXT = "@streamed", "states on the host, stepped on the device"  # end a spec's name, description
_STATELESS = frozenset({"sign", "column_norm"})  # without corrections they have nothing to keep on the host


def removal_message(name: str) -> str:
    """The message for a spec, allocator, risk or option that was removed; empty for any other name."""
    if name == "shadow":
        return (
            "risk=shadow was removed: it measured likeness to fp32 AdamW, which is no measure of quality: choose "
            "risk=measured, the default, or risk=statistics, which reads the same gradients"
        )
    if name == "greedy":
        return (
            "allocator=greedy was removed: it reported no gap and never chose better than allocator=lagrangian: choose "
            "that, or exact, the default"
        )
    if name in ("interval", "drift"):
        return (
            f"reallocation={name} was removed: no decision after the first was shown to help: choose "
            "reallocation=once, or off, the default"
        )
    if name in ("host_adamw", "host_adamw_flush", "host_every_kth"):
        return (
            f"allocator={name} was removed with all steps on the CPU, to which streamed ones are superior in time and "
            "memory: leave it out and take catalogue=host, or catalogue.specs=[adamw@streamed] for fp32 AdamW alone"
        )
    uniform = re.fullmatch(r"uniform_(foam_l8|adamw8bit_log)(_matched)?", name)
    if uniform is not None:
        instead = {"foam_l8": "foam_l3", "adamw8bit_log": "adamw8bit_root"}[uniform[1]]
        return f"allocator={name} was removed with its spec: choose allocator=uniform_{instead}{uniform[2] or ''}"
    instead = name.replace("+split16", "+split8").replace("@updated", "@streamed")
    if "+split16" in name:
        return (
            f"{name} was removed, bf16 weights with a 16-bit correction, which no measured recipe used: choose "
            f"{instead}, or fp32 weights. A checkpoint that holds 16-bit corrections is "
            "resumed by an earlier version"
        )
    if name.endswith("@updated"):
        return (
            f"{name} was removed, a step on the CPU, to which a streamed one is superior in time and memory: choose "
            f"{instead}, which keeps the same states"
        )
    folds = re.match(r"(foam_l[1238])(_out|_sq)?(?=_|\+|@|$)", name)
    if "_int8_log" in name:
        what, instead = "logarithmic codes", name.replace("_int8_log", "_int8_root")
    elif folds is not None and (folds[1] == "foam_l8" or folds[2]):
        level = "foam_l3" if folds[1] == "foam_l8" else folds[1]
        kinds = {"_out": "folds along fan-out", "_sq": "averages of folded squares", None: "folds of 256 neighbours"}
        what, instead = f"FOAM with {kinds[folds[2]]}", name.replace(folds[0], level, 1)
    else:
        return ""
    return (
        f"{name} was removed, {what}, which no measured recipe used: choose {instead}. Its states cannot be "
        "converted, so a checkpoint that holds them is resumed by an earlier version, or only its weights are used"
    )


def unknown_spec_error(name: str, *, what: str = "called", also: str = "") -> BadInputError:
    """The error for an unknown spec: the replacement of a removed one, else the nearest names."""
    if message := removal_message(name):
        return BadInputError(message)
    close = ", ".join(get_close_matches(name, SPECS, n=3)) or "none is close"
    return BadInputError(
        f"no optimizer spec is {what} {name!r} (close: {close}): `python run.py --list specs` shows every row{also}"
    )


def device_spec_name(name: str) -> str:
    """The name of the spec that keeps the same states on the device: `name` without its placement."""
    return name.partition("@")[0]


def base_name(name: str) -> str:
    """A spec's name without weights and placement: its rule and storage."""
    return device_spec_name(name).partition("+")[0]


def _spec(base: OptimizerSpec, *, weights: str, placement: str) -> OptimizerSpec:
    """The spec `base`, with native weights on the device, as one with other weights and placement."""
    name, description = base.name, base.description
    if weights != "native":
        name, description = f"{name}+{weights}", f"{description}; weights {WEIGHTS[weights].description}"
    if placement == Placement.HOST_STREAMED:
        name, description = f"{name}{STREAMED}", f"{description}; {STREAMED_TEXT}"
    return replace(base, name=name, description=description, weights=weights, placement=placement)


def _base(spec: OptimizerSpec) -> OptimizerSpec:
    description = spec.description.partition("; states ")[0].partition("; weights ")[0]
    return replace(spec, name=base_name(spec.name), description=description)


def with_weights(spec: OptimizerSpec, weights: str) -> OptimizerSpec:
    """The spec with another weights format, under its name in the catalogue."""
    return _spec(_base(spec), weights=weights, placement=spec.placement)


def with_placement(spec: OptimizerSpec, placement: str) -> OptimizerSpec:
    """The spec with another placement, under its name in the catalogue."""
    return _spec(_base(spec), weights=spec.weights, placement=placement)


def device_specs(specs: Iterable[OptimizerSpec]) -> list[OptimizerSpec]:
    """These specs placed on the device, each once: kernels step states of either placement alike."""
    placed = [with_placement(spec, Placement.DEVICE) for spec in specs]
    return list({spec.name: spec for spec in placed}.values())


NATIVE: dict[str, OptimizerSpec] = {  # specs with native weights, on the device
    (name := rule if storage == "fp32" else f"{rule}_{storage}"): OptimizerSpec(
        name=name, description=f"{text}, {storage}", rule=rule, storage=storage
    )
    for rule, text, storages in _RULES
    for storage in storages
}
ON_DEVICE: dict[str, OptimizerSpec] = {
    (spec := _spec(native, weights=weights, placement=Placement.DEVICE)).name: spec
    for weights in WEIGHTS
    for native in NATIVE.values()
}
ON_HOST: dict[str, OptimizerSpec] = {
    (spec := _spec(native, weights=weights.name, placement=Placement.HOST_STREAMED)).name: spec
    for weights in WEIGHTS.values()
    for native in NATIVE.values()
    if native.rule not in _STATELESS or weights.correction_bytes
}
SPECS: dict[str, OptimizerSpec] = {**ON_DEVICE, **ON_HOST}


def _selects(pattern: str, name: str) -> bool:
    """True if the pattern is the spec's name or matches its parts: rule and storage, "+" weights, "@" placement."""
    if pattern == name:
        return True
    pattern, pattern_at, placement_pattern = pattern.partition("@")
    name, name_at, placement = name.partition("@")
    if pattern_at != name_at or not fnmatchcase(placement, placement_pattern):
        return False
    base_pattern, pattern_plus, weights_pattern = pattern.partition("+")
    base, name_plus, weights = name.partition("+")
    if pattern_plus != name_plus or (weights == NEAREST and weights_pattern != NEAREST):
        return False
    return fnmatchcase(base, base_pattern) and fnmatchcase(weights, weights_pattern)


def select(patterns: Sequence[str]) -> dict[str, OptimizerSpec]:
    """Specs whose name is in `patterns` or matches one of them as a glob (`foam_*`), in catalogue order.

    A pattern without "+" selects native weights only, one without "@" specs on the device only: `*_int8+split8`,
    `*+*`, `*@streamed` and `*+*@*` select others. Plain bf16 weights have to be named (`adamw*+bf16`). Raises
    BadInputError for a pattern that matches no spec.
    """
    return dict(_selected(tuple(patterns)))


@lru_cache(maxsize=64)
def _selected(patterns: tuple[str, ...]) -> Mapping[str, OptimizerSpec]:
    names: set[str] = set()
    for pattern in patterns:
        matched = {name for name in (ON_HOST if "@" in pattern else ON_DEVICE) if _selects(pattern, name)}
        if not matched:
            raise unknown_spec_error(pattern, what="called or matches", also="; globs such as foam_* are allowed")
        names |= matched
    return {name: spec for name, spec in SPECS.items() if name in names}
