"""Optimizer specs and their parts: rules with the tags of their states, codecs, storage schemes, weights formats."""

from dataclasses import dataclass, replace
from enum import StrEnum
from math import prod

from baoc.types.network import ParamInfo

NUM_ROW_PARTS = 32  # equal row ranges of a sharded tensor: a shard is some of them if the number of ranks divides this


class StateKind(StrEnum):
    """Tag of a state tensor: what it averages. Bytes, migration and risk terms are derived from it."""

    M = "m"  # average of the gradient
    V = "v"  # average of the squared gradient


class StateLayout(StrEnum):
    """Tag of a state tensor: the numbers that it keeps of a (rows, columns) matrix."""

    FULL = "full"  # one per element
    PER_ROW = "per_row"  # shared along fan-in: one per row
    PER_COLUMN = "per_column"  # shared along fan-out: one per column
    FOLDED = "folded"  # mean of 2^level neighbours along fan-in


class Scaling(StrEnum):
    """Tag of a rule: how it equalises its update, in place of v."""

    NONE = "none"  # element by element (sign), or by v
    COLUMN = "column"  # columns of the gradient get one norm
    SPECTRAL = "spectral"  # singular values become equal


@dataclass(frozen=True, slots=True, kw_only=True)
class StateDecl:
    """One state tensor of a rule, as its tags. FOLDED states average 2^`level` neighbours along fan-in."""

    name: str
    kind: StateKind
    layout: StateLayout = StateLayout.FULL
    level: int = 0
    bias_corrected: bool = True  # the average starts at 0, so it is read divided by 1 - beta^step

    def shape(self, param: ParamInfo) -> tuple[int, ...]:
        """Shape of the decoded state for `param`. Layouts other than FULL need a matrix."""
        if self.layout is StateLayout.FULL:
            return param.shape
        matrix = param.matrix_shape
        assert matrix is not None, f"{self.name} ({self.layout}) needs a matrix, {param.name} has shape {param.shape}"
        rows, cols = matrix
        if self.layout is StateLayout.PER_ROW:
            return (rows,)
        if self.layout is StateLayout.PER_COLUMN:
            return (cols,)
        return (rows, -(-cols // 2**self.level))


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleInfo:
    """The tags of an update rule that planning reads.

    `counts_steps`: keeps a 4-byte step count per tensor. `matched`: its update is scaled to the RMS of AdamW's, which
    takes 8 bytes per block; a rule that divides m by the root of v needs no scaling. `needs_matrix`: applies only to
    parameters that have a `matrix_shape`.
    """

    name: str
    description: str
    states: tuple[StateDecl, ...]
    counts_steps: bool = True
    matched: bool = True
    needs_matrix: bool = False
    hidden_only: bool = False  # refuses embeddings and heads (Muon)
    scaling: Scaling = Scaling.NONE


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecInfo:
    """The bytes of a codec: `bits` per element, plus `scale_bytes` for every `group` elements begun (0: no scales).
    `phased`: it rounds every state by the phase of the step; other codecs do so for V states only."""

    name: str
    description: str
    bits: int
    group: int = 0
    scale_bytes: int = 0
    phased: bool = False

    def tensor_bytes(self, numel: int) -> tuple[int, ...]:
        """Bytes of each tensor that stores `numel` numbers: the payload, then the scales if there are any."""
        payload = -(-numel * self.bits // 8)
        return (payload, -(-numel // self.group) * self.scale_bytes) if self.group else (payload,)

    def nbytes(self, numel: int) -> int:
        return sum(self.tensor_bytes(numel))


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageScheme:
    """Which codec keeps which kind of state.

    PER_ROW and PER_COLUMN states are always fp32, as they are small. So is a state of fewer than `min_numel` numbers.
    So is a state of a sharded parameter where a group of `alignment` numbers could lie on two ranks, as its codes would
    then depend on the number of ranks: neither its rows nor its NUM_ROW_PARTS equal parts are whole groups.
    """

    name: str
    description: str
    m: str
    v: str
    min_numel: int = 0
    alignment: int = 1

    def codec(self, decl: StateDecl, *, param: ParamInfo | None = None) -> str:
        """Name of the codec of a state of `param`, or of any large parameter if it is None."""
        if decl.layout in (StateLayout.PER_ROW, StateLayout.PER_COLUMN):
            return "fp32"
        if param is not None:
            unsharded = param if param.whole is None else replace(param, shape=param.whole)
            numel = prod(decl.shape(unsharded))
            if numel < self.min_numel or (param.whole and not self._in_whole_groups(numel, rows=param.whole[0])):
                return "fp32"
        return self.m if decl.kind is StateKind.M else self.v

    def _in_whole_groups(self, numel: int, *, rows: int) -> bool:
        by_part = rows % NUM_ROW_PARTS == 0 and numel // NUM_ROW_PARTS % self.alignment == 0
        return numel // max(rows, 1) % self.alignment == 0 or by_part


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsInfo:
    """A weights format: bytes per element of the parameter, and of the correction, which is optimizer state.
    `param_bytes` None: the parameter keeps its own type."""

    name: str
    description: str
    param_bytes: int | None = None
    correction_bytes: int = 0


class Placement(StrEnum):
    """Where a block's states are kept. Its step is always computed on the device."""

    DEVICE = "device"
    HOST_STREAMED = "host_streamed"  # on the host: states go to the device and back at every step


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSpec:
    """A spec that a block may run: rule x storage x weights format x placement."""

    name: str
    description: str
    rule: str
    storage: str = "fp32"
    weights: str = "native"
    placement: str = Placement.DEVICE
