"""Kinds of fused steps: rule x storage x weights, in families of rules that share kernels. Needs no Triton.

A family is registered with `register`: its rules, how many programs a tensor gets, and the module with its launches.
Tables, uploads, matching and graphs are the same for all; see `table` and `engine`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

GROUP, PACKED_GROUP = 32, 64  # elements that share a scale, of 8 and of 4 bits
WEIGHTS = ("native", "split8", "bf16_sr")
PHASED = ("sqrt8", "root8v", "root4", "lattice4")  # codecs that round by thresholds, beside bf16 as that of v
PACKED = ("root4", "lattice4")
M_CODECS = ("fp32", "bf16", "softsign8", "root8m", "root4")
V_CODECS = ("fp32", "bf16", "sqrt8", "root8v", "lattice4")
NUM_THRESHOLDS = 4 * GROUP  # numbers that `kernel_thresholds` makes
_FINE = 1.5 * 2**15  # as baoc.kernels.triton.device
_LION_DECAY = 0.99  # as baoc.optim.rules.sign
Row = tuple[float, float, float, float, float, float, float, float]


def kernel_thresholds(thresholds: Tensor) -> Tensor:
    """The codecs' lanes, fp32 [n, 32], as kernels take them: fp32 [n, 128] on the CPU.

    After the thresholds th come 2 th / 255^2 and th / 255^2, for sqrt8; and 1 - th in steps of 1/256 above the number
    at which these are the least that fp32 has, for corrections of 8 bits.
    """
    return torch.cat([thresholds, thresholds * (2 / 65025), thresholds / 65025, _FINE + (1 - thresholds)], dim=1)


class Options(Protocol):
    """A parameter group's settings in one step."""

    @property
    def lr(self) -> float: ...
    @property
    def betas(self) -> tuple[float, float]: ...
    @property
    def eps(self) -> float: ...
    @property
    def weight_decay(self) -> float: ...


def adam_row(options: Options, step: int) -> Row:
    """Settings as the kernels read them: decay, size, w1, b2, w2, 1 / sqrt(bias correction of v), eps, size / lr.

    The weight becomes `weight * decay - size * factor * update`; `w1` is the weight of g in m, `b2` and `w2` those of
    v and g^2 in v. `step` counts from 1. Written out for each rule, because a step makes a row for each rule and group.
    """
    (beta1, beta2), lr = options.betas, options.lr
    divisor, inv_bc2 = 1 - beta1**step, (1 - beta2**step) ** -0.5
    decay = 1 - lr * options.weight_decay
    return (decay, lr / divisor, 1 - beta1, beta2, 1 - beta2, inv_bc2, options.eps, 1 / divisor)


def _rmsprop_row(options: Options, step: int) -> Row:
    (beta1, beta2), lr = options.betas, options.lr
    decay = 1 - lr * options.weight_decay
    return (decay, lr, 1 - beta1, beta2, 1 - beta2, (1 - beta2**step) ** -0.5, options.eps, 1.0)


def sign_row(options: Options, step: int) -> Row:
    (beta1, beta2), lr = options.betas, options.lr
    return (1 - lr * options.weight_decay, lr, 1 - beta1, beta2, 1 - beta2, 1.0, options.eps, 1.0)


def _lion_row(options: Options, step: int) -> Row:
    (beta1, beta2), lr = options.betas, options.lr
    return (1 - lr * options.weight_decay, lr, 1 - beta1, beta2, 1 - min(beta2, _LION_DECAY), 1.0, options.eps, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleKind:
    """A rule as the kernels see it. `row` makes its settings for a step, counted from 1 (1 if it counts none)."""

    has_m: bool
    has_v: bool
    counts_steps: bool
    row: Callable[[Options, int], Row]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A tensor: its elements and, where it is a matrix, (fan_out, fan_in) and whether it is stored transposed."""

    numel: int
    rows: int = 0
    cols: int = 0
    transposed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """The kind of a table's tensors. `m` and `v` name codecs and are read only where the rule has that state.

    `weights`: "native" (fp32 or bf16 as the parameter is), "split8" (bf16 parameter with an int8
    correction) or "bf16_sr" (bf16 parameter rounded at random by the tensor's seed and the step's phase).
    """

    rule: str
    m: str = "fp32"
    v: str = "fp32"
    weights: str = "native"

    def __post_init__(self) -> None:
        if self.rule not in FAMILIES:
            raise ValueError(f"no kernel for rule {self.rule!r}: fused rules are {', '.join(FAMILIES)}")
        family = self.family
        if (self.traits.has_m and self.m not in family.m) or (self.traits.has_v and self.v not in family.v):
            raise ValueError(f"m is kept as {self.m!r}, v as {self.v!r}: m may be {family.m}, v {family.v}")
        if self.weights not in WEIGHTS:
            raise ValueError(f"weights is {self.weights!r}: it may be {' or '.join(WEIGHTS)}")

    @property
    def family(self) -> "Family":
        return FAMILIES[self.rule]

    @property
    def traits(self) -> RuleKind:
        return self.family.rules[self.rule]

    def sizes(self, shape: Shape) -> dict[str, int]:
        """State key -> bytes of a tensor's state."""
        sizes = self.family.sizes(self, shape)
        if self.weights == "split8":
            sizes["correction"] = shape.numel
        return sizes


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchConfig:
    """How a launch is cut: elements that a program steps at once, its warps, elements that a thread loads at once, how
    many registers it may have (0: as many as it likes), and how often a program goes on with the next elements, which
    spares it the tensor's addresses and settings (rules that see a matrix alone).

    `vector` 4 keeps fp32, bf16 and int8 accesses in one layout, so that nothing passes through shared memory; 8 suits
    launches without any fp32 tensor.
    """

    chunk: int = 1024
    warps: int = 4
    vector: int = 4
    registers: int = 0
    repeat: int = 1

    def __post_init__(self) -> None:
        if self.chunk % (GROUP * self.vector) or self.chunk & (self.chunk - 1):
            raise ValueError(
                f"a chunk of {self.chunk} elements: it must be a power of two of at least {GROUP * self.vector}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """Options of a launch. All of them are compile-time constants.

    `mode`: "step" steps. "measure" changes no weight and no state, only sums. "repair" takes another
    `size * table.repair[tensor] * update` off the weights where that is not 0, with the update computed again from the
    gradient and the states that the step left (approximately, where storage rounds them), and no decay.
    `matched`: the update is multiplied by what `elementwise.matched_factor` reads from the tensor's match.
    `track`: each program stores in `table.partial` the sum of squares of the tensor's own update, before factor and
    size, over the elements that are stepped, and adds the number of elements left out to `table.num_skipped`.
    `marked`: elements of the gradient that are -0.0 are left out as non-finite ones are (see `kernels.matching`).
    `count`: adds the number of non-finite elements to `table.num_nonfinite`.
    """

    mode: Literal["step", "measure", "repair"] = "step"
    matched: bool = False
    track: bool = False
    marked: bool = False
    count: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Rules that share kernels.

    `module` is imported at the first launch, for it needs Triton: its `launch(table, call)` does what `Call` says, with
    kernels alone and from buffers of the table that never move, so that it can be captured. `programs` says how many
    programs (places in `table.partial`) a tensor gets. `sizes`: bytes of each state of a tensor, by key. `columns`:
    state key -> column of its address in `table.ptrs` (0 is the parameter, 5 the correction, or
    the seed of weights rounded at random, 6 the match). `takes_workspace`: launches need temporary memory, of
    `workspace_bytes(table)` bytes by the module's function. The engine allocates it, because memory allocated during a
    capture stays with the graph. If that fails, the module's `halve_workspace(table)` lowers the need.
    """

    module: str
    rules: Mapping[str, RuleKind]
    m: tuple[str, ...] = M_CODECS
    v: tuple[str, ...] = ()
    columns: Mapping[str, int]
    sizes: Callable[[Kind, Shape], dict[str, int]]
    programs: Callable[[Shape, LaunchConfig], int]
    launch_config: Callable[[Kind, bool], LaunchConfig]  # the kind, and whether parameters are fp32
    takes_workspace: bool = False


FAMILIES: dict[str, Family] = {}  # by rule


def register(family: Family) -> Family:
    """Makes the family's rules known."""
    FAMILIES.update(dict.fromkeys(family.rules, family))
    return family


def codec_bytes(codec: str, numel: int, *, name: str) -> dict[str, int]:
    """State key -> bytes of one state of `numel` numbers called `name` in an elementwise codec."""
    if codec in ("fp32", "bf16"):
        return {name: numel * (4 if codec == "fp32" else 2)}
    if codec in PACKED:
        return {name: -(-numel // 2), f"{name}.scale": -(-numel // PACKED_GROUP) * 2}
    return {name: numel, f"{name}.scale": -(-numel // GROUP) * 2}


def _sizes(kind: Kind, shape: Shape) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for name, present, codec in (("m", kind.traits.has_m, kind.m), ("v", kind.traits.has_v, kind.v)):
        if present:
            sizes |= codec_bytes(codec, shape.numel, name=name)
    return sizes


def _chunks(shape: Shape, config: LaunchConfig) -> int:
    return -(-shape.numel // config.chunk)


def _launch_config(kind: Kind, fp32_params: bool) -> LaunchConfig:
    """The cut that did best on an H100 for 1.3 billion elements; see experiments/benchmarks/optimizer_step.py.

    Few elements per thread leave registers for more threads, which hide more of the memory's latency; with only 16-bit
    and 8-bit tensors a thread needs 8 for wide accesses, and is kept from taking more registers than half as many
    threads could have.
    """
    states = [kind.m] * kind.traits.has_m + [kind.v] * kind.traits.has_v
    if any(state in PACKED for state in states):  # on an H200
        if fp32_params or "fp32" in states:
            return LaunchConfig(chunk=256, warps=1, vector=4, registers=64)
        return LaunchConfig(chunk=256, warps=1, vector=8, registers=64)
    if fp32_params or "fp32" in states:
        return LaunchConfig(chunk=512, warps=2) if len(states) == 1 else LaunchConfig(chunk=256, warps=2)
    return LaunchConfig(chunk=256, warps=1, vector=8, registers=64)


ELEMENTWISE = register(
    Family(
        module="baoc.kernels.triton.elementwise",
        rules={
            "adamw": RuleKind(has_m=True, has_v=True, counts_steps=True, row=adam_row),
            "rmsprop": RuleKind(has_m=False, has_v=True, counts_steps=True, row=_rmsprop_row),
            "lion": RuleKind(has_m=True, has_v=False, counts_steps=False, row=_lion_row),
            "signum": RuleKind(has_m=True, has_v=False, counts_steps=False, row=sign_row),
            "sign": RuleKind(has_m=False, has_v=False, counts_steps=False, row=sign_row),
        },
        v=V_CODECS,
        columns={"m": 1, "m.scale": 2, "v": 3, "v.scale": 4},
        sizes=_sizes,
        programs=_chunks,
        launch_config=_launch_config,
    )
)
