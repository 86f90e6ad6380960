"""The live state of parameters and blocks: allocating, decoding and encoding it, as the rule's tags say.

State of a parameter is a flat dict of tensors: "step" (fp32 on the CPU, as torch keeps it) where the rule counts steps,
for each declared state its codec's parts, "m" and "m.scale" for example, and "correction" of split weights. All but the
step are views of one slab of bytes per block and device. A matched block has fp32[2] besides.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

import torch
from torch import Tensor

from baoc.catalogue import STORAGES
from baoc.codecs import CODEC_IMPLS, Codec
from baoc.cost import aligned
from baoc.optim.weights import CORRECTION, CORRECTIONS
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

    def encode_(
        self, state: Mapping[str, Tensor], values: Tensor, *, phase: int | None = None, new: Tensor | None = None
    ) -> None:
        """`phase` matters for averages of the square, too slow for rounding to nearest, and for codecs of few bits.

        `new`: where the values are other than those that are stored; see `Codec.encode_`.
        """
        phase = phase if self.decl.kind is StateKind.V or self.codec.info.phased else None
        self.codec.encode_(self.parts(state), values, phase=phase, new=new if self.full else None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A tensor of a parameter's state as it lies in its block's slab."""

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    nbytes: int


@dataclass(slots=True, kw_only=True, eq=False)
class Slot:
    """A parameter with everything that `step` would otherwise look up again each time."""

    name: str
    param: Tensor
    info: ParamInfo
    group: int  # index into param_groups
    rule: UpdateRule
    weights: str
    kept: tuple[Kept, ...]
    parts: tuple[Part, ...]
    direct: tuple[str, ...]  # states whose stored tensor is what the rule works on
    coded: tuple[Kept, ...]  # the others
    counts_steps: bool
    matrix: tuple[int, int] | None
    on_cpu: bool
    adopted: int = -1  # version of the parameter when its data became what `weights` says

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
    `applied` is the RMS of the last update, of a matched block after its first step. `unseeded` names the parameters
    whose v is to be started by their next gradient, see `optim.seeding`; `carried` is the update RMS before that.
    """

    block: Block
    spec: OptimizerSpec
    rule: UpdateRule
    slots: list[Slot]
    match: Tensor | None = None
    fresh: bool = True  # own RMS is to be measured before the next step
    applied: float | Tensor | None = None
    unseeded: set[str] = field(default_factory=set)
    carried: float | None = None

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
    kept, parts = [], []
    for decl in () if empty else rule.info.states:
        shape = decl.shape(info)
        codec = CODEC_IMPLS[storage.codec(decl, numel=prod(shape))]
        tensors = codec.allocate(shape, "meta")
        if codec.in_place and decl.layout is StateLayout.FULL:  # it has the parameter's strides, as torch's has
            tensors = {"": torch.empty_like(param, dtype=torch.float32, device="meta")}
        keys = tuple((part, f"{decl.name}{part}") for part in tensors)
        kept.append(Kept(decl=decl, codec=codec, shape=shape, keys=keys))
        parts += [_part(key, tensors[part]) for part, key in keys]
    if spec.weights in CORRECTIONS and not empty:
        parts.append(_part(CORRECTION, torch.empty(param.shape, dtype=CORRECTIONS[spec.weights], device="meta")))
    return Slot(
        name=name,
        param=param,
        info=info,
        group=group,
        rule=rule,
        weights=spec.weights,
        kept=tuple(kept),
        parts=tuple(parts),
        direct=tuple(k.decl.name for k in kept if k.codec.in_place),
        coded=tuple(k for k in kept if not k.codec.in_place),
        counts_steps=rule.info.counts_steps and not empty,
        matrix=info.matrix_shape,
        on_cpu=param.device.type == "cpu",
    )


def _part(key: str, tensor: Tensor) -> Part:
    shape, stride = tuple(tensor.shape), tensor.stride()
    return Part(key=key, dtype=tensor.dtype, shape=shape, stride=stride, nbytes=tensor.nbytes)


def allocate(slots: Sequence[Slot]) -> list[State]:
    """The states of a block's parameters before its first step: zeros in one slab, or one per device."""
    sizes: dict[torch.device, int] = {}
    for slot in slots:
        size = sum(aligned(part.nbytes) for part in slot.parts)
        sizes[slot.param.device] = sizes.get(slot.param.device, 0) + size
    slabs = {device: torch.zeros(size, dtype=torch.uint8, device=device) for device, size in sizes.items() if size}
    offsets = dict.fromkeys(slabs, 0)
    states: list[State] = []
    for slot in slots:
        state: State = {"step": new_step(0)} if slot.counts_steps else {}
        for part in slot.parts:
            device = slot.param.device
            begin = offsets[device]
            flat = slabs[device][begin : begin + part.nbytes].view(part.dtype)
            state[part.key] = flat.as_strided(part.shape, part.stride)
            offsets[device] = begin + aligned(part.nbytes)
        states.append(state)
    return states


def packed(slots: Sequence[Slot], states: Sequence[State]) -> list[State]:
    """The states in slabs on their parameters' devices: as they are where they lie so, else copies."""
    held = [(slot, state[part.key]) for slot, state in zip(slots, states, strict=True) for part in slot.parts]
    storages = {tensor.untyped_storage()._cdata for _, tensor in held}
    devices = {slot.param.device for slot, _ in held}
    if len(storages) <= len(devices) and all(tensor.device == slot.param.device for slot, tensor in held):
        return list(states)
    moved = allocate(slots)
    for new, state in zip(moved, states, strict=True):
        for key, value in new.items():
            value.copy_(state[key])
    return moved


def alone(tensor: Tensor) -> Tensor:
    """The same memory as a tensor whose storage is no larger than itself, so that no slab is saved or copied with it.

    A copy only where that cannot be.
    """
    if tensor.untyped_storage().nbytes() == tensor.nbytes:
        return tensor
    return torch.from_dlpack(tensor) if tensor.device.type in ("cpu", "cuda") else tensor.clone()


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
    """Bytes of the storages behind the tensors, each counted once; on meta, what they would be."""
    storages = {storage._cdata: storage for storage in (tensor.untyped_storage() for tensor in tensors)}
    return sum(storage.nbytes() for storage in storages.values())
