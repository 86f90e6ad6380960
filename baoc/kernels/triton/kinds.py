"""Kinds of fused steps: rule x codecs x weights format, in families of rules that share kernels. Needs no Triton.

`register` adds a family: its rules, the bytes of its states, how many programs a tensor gets, and the module with its
kernels. Tables, uploads, matching and graphs are the same for all families, see `table` and `engine`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

# A tensor has a row of addresses (int64) and a row of settings (fp32) in the engine's buffers, both of WIDTH columns.
WIDTH = 8
ADDRESS_COLUMNS = PARAM, M, M_SCALE, V, V_SCALE, CORRECTION, MATCH = range(7)
SETTING_COLUMNS = DECAY, SIZE, W1, B2, W2, INV_BC2, EPS, PER_LR = range(WIDTH)

GROUP, PACKED_GROUP = 32, 64  # elements that share a scale, of 8 and of 4 bits
WEIGHTS = ("native", "split8", "bf16_sr")
PHASED = ("sqrt8", "root8v", "root4", "lattice4")  # codecs that round by thresholds; bf16 does too where it keeps v
PACKED = ("root4", "lattice4")
M_CODECS = ("fp32", "bf16", "softsign8", "root8m", "root4")
V_CODECS = ("fp32", "bf16", "sqrt8", "root8v", "lattice4")
NUM_THRESHOLDS = 4 * GROUP  # columns of `kernel_thresholds`
_FINE = 1.5 * 2**15  # as baoc.kernels.triton.device
_LION_DECAY = 0.99  # as baoc.optim.rules.sign
Row = tuple[float, float, float, float, float, float, float, float]


def kernel_thresholds(thresholds: Tensor) -> Tensor:
    """Rounding thresholds as kernels read them: fp32 [steps, 32] -> fp32 [steps, 128], on the CPU.

    A threshold t in (0, 1) is where a fraction starts to round up. Its 32 positions in a group are followed by
    2 t / 255^2 and t / 255^2, for sqrt8, and by _FINE + (1 - t), for 8-bit corrections: there fp32 has steps of 1/256.
    """
    return torch.cat([thresholds, thresholds * (2 / 65025), thresholds / 65025, _FINE + (1 - thresholds)], dim=1)


@dataclass(slots=True, kw_only=True)  # not frozen: made in each step, and a frozen one takes a microsecond more
class Options:
    """A parameter group's settings in one step. Nobody changes them."""

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float


def adam_row(options: Options, step: int) -> Row:
    """Settings of a tensor as its kernel reads them, in the order of SETTING_COLUMNS.

    decay, size: the weight becomes weight * decay - size * factor * update, with the factor of matched updates, else 1.
    w1: the weight of g in m. b2, w2: the weights of v and of g^2 in v. inv_bc2: 1 / sqrt(bias correction of v).
    per_lr: size / lr. `step` counts from 1.

    Each rule has its own function, because a step calls it for each rule and parameter group.
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
    """A rule as the kernels see it. `row(options, step)` computes its settings; `step` is 1 if it counts no steps."""

    has_m: bool
    has_v: bool
    counts_steps: bool
    row: Callable[[Options, int], Row]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Size of a tensor; for a matrix also rows (fan_out), cols (fan_in) and whether it is stored transposed."""

    numel: int
    rows: int = 0
    cols: int = 0
    transposed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """What decides which kernel steps a tensor. `m` and `v` name codecs, and count only where the rule has that state.

    `weights`: "native" (fp32 or bf16 as the parameter is), "split8" (bf16 parameter and int8 correction) or "bf16_sr"
    (bf16 parameter, rounded stochastically by the tensor's seed and the step's phase).
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
        """Bytes of each state of a tensor, by state key."""
        sizes = self.family.sizes(self, shape)
        if self.weights == "split8":
            sizes["correction"] = shape.numel
        return sizes


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchConfig:
    """How a launch divides its work.

    chunk: elements that a program steps at once. warps: of a program. registers: limit for a thread, 0 for none.
    repeat: chunks that a program steps one after the other, which saves loading the tensor's addresses and settings
    again; only for rules that see a matrix.
    vector: elements that a thread loads at once. 4 keeps accesses of fp32, bf16 and int8 in one layout, so that nothing
    passes through shared memory; 8 suits launches without any fp32 tensor.
    """

    chunk: int = 1024
    warps: int = 4
    vector: int = 4
    registers: int = 0
    repeat: int = 1

    def __post_init__(self) -> None:
        assert self.chunk % (GROUP * self.vector) == 0 and not self.chunk & (self.chunk - 1), "whole groups"


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """Options of a launch, all of them compile-time constants of the kernel.

    mode: "step" steps. "measure" only sums up and changes no weight and no state. "repair" changes only weights, where
        `table.repair[tensor]` is not 0: it subtracts `size * repair * update`, with the update recomputed from the
        gradient and the states after the step (approximately, where storage rounds them), without decay.
    matched: multiply the update by `elementwise.matched_factor`.
    track: store the sum of squares of each program's update, before factor and size, in `table.partial`, and add the
        elements that are not stepped to `table.num_skipped`.
    marked: skip elements whose gradient is -0.0, as non-finite ones are (see `marks`).
    count: add the non-finite elements to `table.num_nonfinite`.
    """

    mode: Literal["step", "measure", "repair"] = "step"
    matched: bool = False
    track: bool = False
    marked: bool = False
    count: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Rules that share kernels.

    module: name of the module with `launch(table, call)`, imported at the first launch because it imports Triton. Its
        launches read only buffers that never move, so that a graph can capture them.
    columns: column of `table.ptrs` for each state key.
    sizes: bytes of each state of a tensor, by key.
    programs: number of programs of a tensor, which is its number of places in `table.partial`.
    launch_config: the default config of a kind; the second argument says whether parameters are fp32.
    takes_workspace: launches need temporary memory (`muon_plan`). The engine allocates it, because memory allocated
        during a capture stays with the graph.
    """

    module: str
    rules: Mapping[str, RuleKind]
    m: tuple[str, ...] = M_CODECS
    v: tuple[str, ...] = ()
    columns: Mapping[str, int]
    sizes: Callable[[Kind, Shape], dict[str, int]]
    programs: Callable[[Shape, LaunchConfig], int]
    launch_config: Callable[[Kind, bool], LaunchConfig]
    takes_workspace: bool = False


FAMILIES: dict[str, Family] = {}  # by rule


def register(family: Family) -> Family:
    """Adds the family under the names of its rules."""
    FAMILIES.update(dict.fromkeys(family.rules, family))
    return family


def codec_bytes(codec: str, numel: int, *, name: str) -> dict[str, int]:
    """Bytes of a state of `numel` numbers and of its scales in an elementwise codec, by state key."""
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
    """The fastest config on an H100 for 1.3 billion elements, by experiments/benchmarks/optimizer_step.py.

    Few elements per thread leave registers for more threads, which hide more memory latency. Where all tensors have 16
    or 8 bits, a thread needs 8 elements for wide accesses; the limit on registers keeps occupancy at a half.
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
        columns={"m": M, "m.scale": M_SCALE, "v": V, "v.scale": V_SCALE},
        sizes=_sizes,
        programs=_chunks,
        launch_config=_launch_config,
    )
)
