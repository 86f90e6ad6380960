"""The values that cross a stage line: frozen, keyword-only, free of torch, and writable as JSON by `to_plain`.

One run is a chain of these (README, "One run as data"); a stage reads the values before it and returns one more.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from enum import StrEnum
from math import prod
from typing import Any


class Role(StrEnum):
    """What a parameter does in its network; priors of risk are given by role."""

    EMBEDDING = "embedding"
    NORM = "norm"  # norm layers, and everything with fewer than two dimensions
    HEAD = "head"
    ATTENTION = "attention"
    MLP = "mlp"
    CONV = "conv"
    MODULATION = "modulation"
    OTHER = "other"


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamInfo:
    """One trainable parameter, tied ones once: the first name owns, the others are `aliases`."""

    name: str
    shape: tuple[int, ...]
    dtype: str  # "float32", "bfloat16", ...
    role: Role
    depth: int | None = None  # index of the layer it is in; None outside any layer list
    group: int = 0  # index of the user's parameter group
    aliases: tuple[str, ...] = ()
    transposed: bool = False  # stored (in, out), as GPT-2's Conv1D

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def matrix_shape(self) -> tuple[int, int] | None:
        """(fan_out, fan_in) as rules by row and column see it; None where there is no matrix. See `matrix_shape`."""
        shape = matrix_shape(self.shape)
        return (shape[1], shape[0]) if shape is not None and self.transposed else shape


def matrix_shape(shape: Sequence[int]) -> tuple[int, int] | None:
    """The (rows, columns) of a tensor seen as a matrix: dimensions of size 1 dropped, then the first against the rest.

    None for what is a vector, a scalar or empty after that, so (1, 1, d) is a vector and (d, 3, 16, 16) is (d, 768).
    """
    kept = [size for size in shape if size != 1]
    if len(kept) < 2 or 0 in kept:
        return None
    return kept[0], prod(kept[1:])


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A named set of parameters sharing one optimizer spec."""

    name: str
    params: tuple[ParamInfo, ...]
    role: Role
    depth: int | None = None

    @property
    def numel(self) -> int:
        return sum(param.numel for param in self.params)


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageDataSpec:
    """What a model must know of a set of labelled images: `image_size` is height and width in pixels."""

    dataset: str
    image_size: int
    channels: int
    num_classes: int
    num_train: int
    num_val: int


class StateKind(StrEnum):
    """Tag of a state tensor: what it averages. Ledger, migration and risk terms derive from it."""

    M = "m"  # average of the gradient
    V = "v"  # average of the squared gradient


class StateLayout(StrEnum):
    """Tag of a state tensor: which numbers of its (rows, columns) matrix it keeps."""

    FULL = "full"  # one per element
    PER_ROW = "per_row"  # shared along fan-in: one per row
    PER_COLUMN = "per_column"  # shared along fan-out: one per column
    FOLDED = "folded"  # mean of 2^level neighbours along an axis


class Axis(StrEnum):
    FAN_IN = "fan_in"  # along the columns of a (fan_out, fan_in) matrix
    FAN_OUT = "fan_out"  # along its rows


@dataclass(frozen=True, slots=True, kw_only=True)
class StateDecl:
    """One state tensor of a rule, as its tags. `level` and `axis` are read for FOLDED only."""

    name: str
    kind: StateKind
    layout: StateLayout = StateLayout.FULL
    level: int = 0
    axis: Axis = Axis.FAN_IN
    bias_corrected: bool = True  # averages from 0, so its reader divides by 1 - beta^step

    def shape(self, param: ParamInfo) -> tuple[int, ...]:
        """Shape of the decoded state for `param`; a vector knows FULL only."""
        if self.layout is StateLayout.FULL:
            return param.shape
        matrix = param.matrix_shape
        assert matrix is not None, f"{self.name} ({self.layout}) needs a matrix, {param.name} has shape {param.shape}"
        rows, cols = matrix
        if self.layout is StateLayout.PER_ROW:
            return (rows,)
        if self.layout is StateLayout.PER_COLUMN:
            return (cols,)
        fold = 2**self.level
        return (rows, -(-cols // fold)) if self.axis is Axis.FAN_IN else (-(-rows // fold), cols)


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleInfo:
    """What the decision core may know of an update rule; declared in the rule's own file.

    `counts_steps`: keeps a 4-byte step count per tensor. `matched`: its update RMS is matched to AdamW's, for which it
    keeps 8 bytes per block. `needs_matrix`: applies only to parameters that have a `matrix_shape`.
    """

    name: str
    description: str
    states: tuple[StateDecl, ...]
    counts_steps: bool = True
    matched: bool = True
    needs_matrix: bool = False
    hidden_only: bool = False  # refuses embeddings and heads (Muon)


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecInfo:
    """How a codec spends bytes: `bits` per element, plus `scale_bytes` for every `group` elements begun (0: none)."""

    name: str
    description: str
    bits: int
    group: int = 0
    scale_bytes: int = 0

    def nbytes(self, numel: int) -> int:
        payload = -(-numel * self.bits // 8)
        return payload + (-(-numel // self.group) * self.scale_bytes if self.group else 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageScheme:
    """Which codec keeps which kind of state. PER_ROW and PER_COLUMN states are always fp32: they are small."""

    name: str
    description: str
    m: str
    v: str

    def codec(self, decl: StateDecl) -> str:
        if decl.layout in (StateLayout.PER_ROW, StateLayout.PER_COLUMN):
            return "fp32"
        return self.m if decl.kind is StateKind.M else self.v


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSpec:
    """What a block may run: one catalogue row = rule x storage x weights x placement."""

    name: str
    description: str
    rule: str
    storage: str = "fp32"
    weights: str = "native"  # the parameter's own dtype, no correction bytes
    placement: str = "device"


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientStats:
    """Streaming statistics of one block's gradients, sampled during warm-up (METHODS 1; formulas in the README).

    Each is a ratio without unit unless said. `snr_fan_in` is SNR along fan-in (sharing v per row), and so on;
    `fold_residual` maps "fan_in:2" (axis:level) to ||R||^2 / ||G||^2. NaN where the block cannot have the value.
    """

    num_samples: int
    grad_rms: float  # root mean square of the gradient's elements
    coherence: float  # kappa = ||EMA g||^2 / EMA ||g||^2
    noise: float  # N = tr Cov(g) / ||E g||^2
    anisotropy: float  # std over elements of log v
    snr_fan_in: float
    snr_fan_out: float
    factor_residual: float  # ||v - rank1(v)|| / ||v||
    spread: float  # mean over quantisation groups of std(log sqrt v)
    update_rms: float  # RMS of AdamW's update on the block's slice
    descent_share: float  # share of the step's predicted loss decrease, lr <g, u_ref>
    fold_residual: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """What warm-up measured. `shadow[block][spec]` holds the terms of METHODS 1 where shadow ran."""

    stats: Mapping[str, GradientStats]
    shadow: Mapping[str, Mapping[str, Mapping[str, float]]] = field(default_factory=dict)
    num_samples: int = 0
    profile_s: float = 0.0  # time spent on sampling
    warmup_s: float = 0.0  # time of the steps in which it was sampled
    profile_bytes: int = 0  # what the profiler held


@dataclass(frozen=True, slots=True, kw_only=True)
class Moments:
    """Means of one matrix parameter's squared gradients, from which a stateless block can become Adam.

    `row`: float32 tensor (fan_out,), mean over fan-in; `col`: (fan_in,), mean over fan-out. Typed Any: no torch here.
    """

    row: Any
    col: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    state_bytes: int
    transfer_bytes: int = 0  # over the host link, both ways, per step
    step_s: float = 0.0  # 0 where no latency table was asked for


@dataclass(frozen=True, slots=True, kw_only=True)
class Risk:
    """Predicted loss of quality against fp32 AdamW: a hypothesis, not a measurement. `terms` are weighted and sum up."""

    total: float
    terms: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    block: str
    spec: str
    cost: Cost
    risk: Risk
    role: Role = Role.OTHER  # the block's: published baselines leave some roles on AdamW


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """What a run may spend; every limit may be absent. See `baoc.budget` words in the README.

    `memory_bytes`: peak device memory of the process. `state_fraction`: state bytes / state bytes of fp32 AdamW.
    `step_time`: step / step with torch's fused AdamW.
    """

    name: str
    memory_bytes: int | None = None
    state_fraction: float | None = None
    step_time: float | None = None

    @property
    def kind(self) -> str:
        if self.memory_bytes is not None:
            return "memory"
        return "state_fraction" if self.state_fraction is not None else "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """A budget turned into what an allocator understands: totals over the blocks. None does not bind."""

    state_bytes: int | None = None
    step_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """One spec per block. `gap`: (risk - lower bound) / max(|risk|, tiny); 0 is proven optimal, None is not known."""

    choices: Mapping[str, str]  # block name -> spec name, in block order
    state_bytes: int
    risk: float
    allocator: str
    step_s: float = 0.0
    transfer_bytes: int = 0
    gap: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """Device bytes of a training step apart from optimizer state, and the peak they predict together.

    `forward_backward_bytes` is the largest live total during forward and backward (weights, gradients, activations,
    data), `validation_bytes` the same for a validation batch, both without optimizer state; `resident_bytes` are the
    weights, gradients and data that live through the optimizer step. `step_temporary_bytes` maps a spec to what its
    step needs for the largest tensor beyond its state.
    """

    device: str
    micro_batch: int
    weights_bytes: int
    gradients_bytes: int
    forward_backward_bytes: int
    validation_bytes: int
    resident_bytes: int
    ema_bytes: int = 0
    profile_bytes: int = 0
    context_bytes: int = 0
    reserve_bytes: int = 0  # for modules that load late
    step_temporary_bytes: Mapping[str, int] = field(default_factory=dict)
    source: str = "probe"  # probe | prior

    def peak_bytes(self, *, state_bytes: int, specs: Sequence[str] = ()) -> int:
        """Predicted peak with `state_bytes` of optimizer state, `specs` being those in use."""
        temporary = max((self.step_temporary_bytes.get(spec, 0) for spec in specs), default=0)
        moment = max(self.forward_backward_bytes, self.validation_bytes, self.resident_bytes + temporary)
        fixed = self.ema_bytes + self.profile_bytes + self.context_bytes + self.reserve_bytes
        return moment + fixed + state_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyTable:
    """Seconds of an optimizer step per spec: `fixed_s + per_element_s * numel`, measured on `device`."""

    device: str
    fixed_s: Mapping[str, float]
    per_element_s: Mapping[str, float]
    base_step_s: float = 0.0  # forward and backward, without the optimizer
    reference_step_s: float = 0.0  # whole step with torch's fused AdamW


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """Why a block runs what it runs: the next cheaper and dearer candidate, and the terms that decided."""

    block: str
    spec: str
    cheaper: str | None
    dearer: str | None
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What stages 3 to 9 decided. `candidates` holds those that were not dominated, by block."""

    blocks: tuple[Block, ...]
    candidates: Mapping[str, tuple[Candidate, ...]]
    allocation: Allocation
    budget: Budget
    limits: Limits
    risk_model: str
    binding: bool
    peak_bytes: int  # predicted
    state_bytes_adamw: int
    least_feasible_bytes: int  # in the budget's measure: peak for memory, state for a state fraction
    most_useful_bytes: int  # the same measure, from which on the budget does not bind
    reasons: tuple[Reason, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockMove:
    """One block's migration. `kept`: state name -> "kept" | "converted" | "dropped" | "new"; error is relative RMS."""

    block: str
    source: str
    target: str
    kept: Mapping[str, str]
    conversion_error: Mapping[str, float] = field(default_factory=dict)
    bytes_before: int = 0
    bytes_after: int = 0
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reallocation:
    step: int
    trigger: str
    accepted: bool
    why: str
    moves: tuple[BlockMove, ...]
    state_bytes_before: int
    state_bytes_after: int
    risk_before: float
    risk_after: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Quality:
    name: str  # a metric key, such as val/loss
    value: float
    higher_is_better: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """`result.json`. Bytes are measured unless the name ends in `_predicted`."""

    schema: int
    task: str
    model: str
    name: str
    allocator: str
    risk: str
    num_params: int
    budget: Mapping[str, Any]  # {kind, name, limit}
    budget_bytes: int | None
    budget_met: bool | None  # None: nothing was limited
    binding: bool
    least_feasible_bytes: int
    peak_bytes: int
    peak_bytes_predicted: int
    state_bytes: int
    state_bytes_predicted: int
    state_bytes_adamw: int
    step_ms: float
    samples_per_s: float
    quality: Quality
    metrics: Mapping[str, float]
    risk_total: float
    allocation_gap: float | None
    num_reallocations: int
    num_steps: int
    seed: int
    commit: str
    versions: Mapping[str, str]
    command: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontierPoint:
    """One run (or the mean of several seeds) as a frontier sees it."""

    run: str
    task: str
    model: str
    label: str
    quality: float
    peak_bytes: int
    state_bytes: int
    samples_per_s: float
    num_seeds: int = 1
    quality_spread: float | None = None  # sample standard deviation over seeds
    dominated: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedRun:
    """A job of a multirun that left no result or ended badly: a row of the frontier table with its reason.

    `exit_code` is None for a job that has not ended, or was killed.
    """

    run: str
    label: str
    exit_code: int | None
    message: str


def to_plain(value: Any) -> Any:
    """A value of this module as dicts, lists, strings and numbers; NaN and infinities become None, as JSON has none."""
    if isinstance(value, StrEnum):
        return value.value
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [to_plain(item) for item in value]
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return None
    return value


def profile_from_plain(data: Mapping[str, Any]) -> Profile:
    """The inverse of `to_plain` for a Profile; None becomes NaN again."""
    stats = {
        block: GradientStats(**{k: float("nan") if v is None else v for k, v in values.items()})
        for block, values in data["stats"].items()
    }
    return Profile(**{**data, "stats": stats})
