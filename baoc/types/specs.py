"""Specs and their parts: the tags of state tensors, rules, codecs, storage schemes, and the specs that join them."""

from dataclasses import dataclass, replace
from enum import StrEnum
from math import prod

from baoc.types.network import ParamInfo

NUM_ROW_PARTS = 32  # of a sharded tensor, by rows: what a rank has is some of them where the number of ranks divides it


class StateKind(StrEnum):
    """Tag of a state tensor: what it averages. Ledger, migration and risk terms derive from it."""

    M = "m"  # average of the gradient
    V = "v"  # average of the squared gradient


class StateLayout(StrEnum):
    """Tag of a state tensor: which numbers of its (rows, columns) matrix it keeps."""

    FULL = "full"  # one per element
    PER_ROW = "per_row"  # shared along fan-in: one per row
    PER_COLUMN = "per_column"  # shared along fan-out: one per column
    FOLDED = "folded"  # mean of 2^level neighbours along fan-in


class Axis(StrEnum):
    FAN_IN = "fan_in"  # along the columns of a (fan_out, fan_in) matrix
    FAN_OUT = "fan_out"  # along its rows


class Scaling(StrEnum):
    """Tag of a rule: what evens out the sizes of its update where no v does."""

    NONE = "none"  # every element for itself (sign), or v
    COLUMN = "column"  # columns of the gradient are made of one length
    SPECTRAL = "spectral"  # singular values are made alike


@dataclass(frozen=True, slots=True, kw_only=True)
class StateDecl:
    """One state tensor of a rule, as its tags. `level` is read for FOLDED only, along fan-in."""

    name: str
    kind: StateKind
    layout: StateLayout = StateLayout.FULL
    level: int = 0
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
        return (rows, -(-cols // 2**self.level))


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleInfo:
    """The tags of an update rule that planning reads.

    `counts_steps`: keeps a 4-byte step count per tensor. `matched`: its update is scaled to AdamW's size, for which it
    keeps 8 bytes per block; a rule that divides averaged gradients by the root of averaged squares has that size by
    itself. `needs_matrix`: applies only to parameters that have a `matrix_shape`.
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
    """How a codec spends bytes: `bits` per element, plus `scale_bytes` for every `group` elements begun (0: none).

    `phased`: it rounds by the phase of the step whatever it keeps; others do so for averages of the square only.
    """

    name: str
    description: str
    bits: int
    group: int = 0
    scale_bytes: int = 0
    phased: bool = False

    def tensor_bytes(self, numel: int) -> tuple[int, ...]:
        """Bytes of each tensor that keeps `numel` numbers: the payload, then the scales where there are any."""
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
        """Name of the codec of a state of `param`; of a large one where that is not said."""
        if decl.layout in (StateLayout.PER_ROW, StateLayout.PER_COLUMN):
            return "fp32"
        if param is not None:
            whole = param if param.whole is None else replace(param, shape=param.whole)
            numel = prod(decl.shape(whole))
            if numel < self.min_numel or (param.whole and not self._in_whole_groups(numel, rows=param.whole[0])):
                return "fp32"
        return self.m if decl.kind is StateKind.M else self.v

    def _in_whole_groups(self, numel: int, *, rows: int) -> bool:
        by_part = rows % NUM_ROW_PARTS == 0 and numel // NUM_ROW_PARTS % self.alignment == 0
        return numel // max(rows, 1) % self.alignment == 0 or by_part


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsInfo:
    """How the weights themselves are kept: bytes per element of the parameter, and of the correction beside it.

    `param_bytes` None: the parameter keeps the type that it has. Corrections are optimizer state.
    """

    name: str
    description: str
    param_bytes: int | None = None
    correction_bytes: int = 0


class Placement(StrEnum):
    """Where a block's states are kept, and where its step is computed."""

    DEVICE = "device"
    HOST_STREAMED = "host_streamed"  # kept on the host, stepped on the device: states go in and out at every step


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSpec:
    """A spec that a block may run: one catalogue row = rule x storage x weights x placement."""

    name: str
    description: str
    rule: str
    storage: str = "fp32"
    weights: str = "native"
    placement: str = Placement.DEVICE
