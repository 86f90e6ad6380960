"""The live state of parameters and blocks: allocating, decoding and encoding it, as the rule's tags say.

State of a parameter is a flat dict of tensors: "step" (fp32 on the CPU, as torch keeps it) where the rule counts steps,
and for each declared state its codec's parts, "m" and "m.scale" for example. A matched block has fp32[2] besides.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from baoc.catalogue import STORAGES
from baoc.codecs import CODEC_IMPLS, Codec
from baoc.rules import RULES, RuleContext, UpdateRule
from baoc.types import Block, OptimizerSpec, ParamInfo, StateDecl, StateKind, StateLayout

State = dict[str, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """One declared state of one parameter and how it is kept. `keys` pairs a codec's parts with their state keys."""

    decl: StateDecl
    codec: Codec
    shape: tuple[int, ...]
    keys: tuple[tuple[str, str], ...]

    @property
    def full(self) -> bool:
        return self.decl.layout is StateLayout.FULL

    def parts(self, state: Mapping[str, Tensor]) -> State:
        return {part: state[key] for part, key in self.keys}

    def decode(self, state: Mapping[str, Tensor]) -> Tensor:
        return self.codec.decode(self.parts(state), self.shape)

    def encode_(self, state: Mapping[str, Tensor], values: Tensor, *, phase: int | None = None) -> None:
        """`phase` matters for averages of the square only: they decay too slowly for rounding to nearest."""
        phase = phase if self.decl.kind is StateKind.V else None
        self.codec.encode_(self.parts(state), values, phase=phase)


@dataclass(slots=True, kw_only=True, eq=False)
class Slot:
    """A parameter with everything that `step` would otherwise look up again each time."""

    name: str
    param: Tensor
    info: ParamInfo
    group: int  # index into param_groups
    rule: UpdateRule
    kept: tuple[Kept, ...]
    direct: tuple[str, ...]  # states whose stored tensor is what the rule works on
    coded: tuple[Kept, ...]  # the others
    counts_steps: bool
    matrix: tuple[int, int] | None
    on_cpu: bool

    def context(
        self, *, step: int, betas: tuple[float, float], eps: float, finite: Tensor | None = None
    ) -> RuleContext:
        return RuleContext(
            step=step,
            beta1=betas[0],
            beta2=betas[1],
            eps=eps,
            finite=finite,
            matrix=self.matrix,
            transposed=self.info.transposed,
        )


@dataclass(slots=True, kw_only=True, eq=False)
class LiveBlock:
    """A block as it runs: its spec, its slots, and its matching state.

    `match` is fp32[2] on the block's device: target and own update RMS, own < 0 where it is not measured yet.
    `applied` is the RMS of the last update, of a matched block after its first step.
    """

    block: Block
    spec: OptimizerSpec
    rule: UpdateRule
    slots: list[Slot]
    match: Tensor | None = None
    fresh: bool = True  # own RMS is to be measured before the next step
    applied: float | Tensor | None = None

    @property
    def matched(self) -> bool:
        return self.rule.info.matched and self.block.numel > 0


@dataclass(slots=True, kw_only=True, eq=False)
class Bucket:
    """All blocks of one spec: what a backend steps at once."""

    spec: OptimizerSpec
    rule: UpdateRule
    blocks: list[LiveBlock] = field(default_factory=list)


def make_slot(name: str, param: Tensor, *, info: ParamInfo, group: int, spec: OptimizerSpec) -> Slot:
    rule, storage = RULES[spec.rule], STORAGES[spec.storage]
    empty = param.numel() == 0  # it is never stepped, so it has no state either
    kept = []
    for decl in () if empty else rule.info.states:
        codec = CODEC_IMPLS[storage.codec(decl)]
        parts = codec.allocate((0,), "cpu")
        keys = tuple((part, f"{decl.name}{part}") for part in parts)
        kept.append(Kept(decl=decl, codec=codec, shape=decl.shape(info), keys=keys))
    return Slot(
        name=name,
        param=param,
        info=info,
        group=group,
        rule=rule,
        kept=tuple(kept),
        direct=tuple(k.decl.name for k in kept if k.codec.in_place),
        coded=tuple(k for k in kept if not k.codec.in_place),
        counts_steps=rule.info.counts_steps and not empty,
        matrix=info.matrix_shape,
        on_cpu=param.device.type == "cpu",
    )


def allocate_one(kept: Kept, *, param: Tensor) -> State:
    """Zeros for one declared state, by state key. fp32 of full layout has the parameter's strides, as torch's has."""
    if kept.codec.in_place and kept.full:
        return {kept.decl.name: torch.zeros_like(param, dtype=torch.float32, memory_format=torch.preserve_format)}
    parts = kept.codec.allocate(kept.shape, param.device)
    return {key: parts[part] for part, key in kept.keys}


def allocate(slot: Slot) -> State:
    """A parameter's state before its first step."""
    state: State = {"step": new_step(0)} if slot.counts_steps else {}
    for kept in slot.kept:
        state |= allocate_one(kept, param=slot.param)
    return state


def new_step(step: int) -> Tensor:
    return torch.tensor(float(step), dtype=torch.float32, device="cpu")


def new_match(target: float, *, device: torch.device) -> Tensor:
    """Matching state of a block whose own RMS is not measured yet."""
    return torch.tensor([target, -1.0], dtype=torch.float32, device=device)


def step_of(slot: Slot, state: Mapping[str, Tensor]) -> int:
    return int(state["step"].item()) if slot.counts_steps else 0


def to_buckets(blocks: Iterable[LiveBlock]) -> list[Bucket]:
    """Blocks by spec, in order of first appearance: a backend's launches grow with specs, not with blocks."""
    buckets: dict[OptimizerSpec, Bucket] = {}
    for block in blocks:
        bucket = buckets.setdefault(block.spec, Bucket(spec=block.spec, rule=block.rule))
        bucket.blocks.append(block)
    return list(buckets.values())


def tensor_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the storages behind the tensors; on meta, what they would be."""
    return sum(t.untyped_storage().nbytes() for t in tensors)
