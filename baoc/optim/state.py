"""The live state of parameters and blocks: allocating, decoding and encoding it, as the rule's tags say.

The state of a parameter is a flat dict of tensors: "step" (fp32 on the CPU, as torch keeps it) if the rule counts
steps; for each declared state its codec's parts, such as "m" and "m.scale"; and "correction" of split weights. All but
the step are views of one slab of bytes per block and device. A matched block has an fp32[2] besides. The slabs of
host-placed blocks are in the optimizer's arena.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor

from baoc.core.catalogue import STORAGES, WEIGHTS
from baoc.core.recipes import BlockTuning
from baoc.errors import BadInputError
from baoc.optim.codecs import CODEC_IMPLS, StoredState
from baoc.optim.rules import RULES, Rule, RuleContext
from baoc.optim.shards import Shard, largest_shard, unsharded
from baoc.optim.weights import CORRECTION
from baoc.planning.candidates import sums_columns
from baoc.planning.cost import aligned
from baoc.types import Block, OptimizerSpec, ParamInfo, Placement, Scaling, StateLayout
from baoc.types.specs import NUM_ROW_PARTS

State = dict[str, Tensor]


class AbsentStateError(BadInputError, KeyError):
    """A KeyError too, for code that tries whether a state is there."""

    __str__ = Exception.__str__  # KeyError's has quotes around the sentence


def _noting(name: str, *, attribute: str, value: bool) -> Callable[..., Any]:
    """A method of dict that sets an attribute, too."""
    method = getattr(dict, name)

    def noting(self: Any, *args: Any, **entries: Any) -> Any:
        setattr(self, attribute, value)
        return method(self, *args, **entries)

    return noting


class LiveStates(defaultdict[Tensor, State]):
    """`Optimizer.state`. It notes writes, so that a step looks for entries that others took out only after some."""

    touched = True  # of another type of dict, which a user may assign, a step looks at all entries each time
    _touching = partial(_noting, attribute="touched", value=True)
    __setitem__, __delitem__, __ior__ = map(_touching, ("__setitem__", "__delitem__", "__ior__"))
    pop, popitem, clear, update = map(_touching, ("pop", "popitem", "clear", "update"))

    def __reduce__(self) -> tuple[Any, ...]:
        return defaultdict, (dict,), None, None, iter(self.items())  # a deep copy belongs to no optimizer


class LiveState(State):
    """A parameter's state as `Optimizer.state` has it, with a sentence for who looks for AdamW's in it."""

    num_cleared = 0  # by the process: a step looks for cleared ones where this has grown
    is_cleared = False
    _writing = partial(_noting, attribute="is_cleared", value=False)
    __setitem__, __ior__, update = map(_writing, ("__setitem__", "__ior__", "update"))

    def clear(self) -> None:
        """Lets the next step start the state afresh, as an empty one of torch's does, unless it is written to."""
        self.is_cleared = True
        LiveState.num_cleared += 1

    def __reduce__(self) -> tuple[type[State], tuple[State]]:
        return dict, (dict(self),)

    def __missing__(self, key: str) -> Tensor:
        if key not in ("exp_avg", "exp_avg_sq"):
            raise KeyError(key)
        raise AbsentStateError(
            f"optimizer.state has no {key}: the spec of this parameter keeps {', '.join(self) or 'no state'}. "
            "to_adamw_state_dict() gives exp_avg and exp_avg_sq where they are kept; delete a parameter's entry of "
            "optimizer.state to start its state afresh, and build another optimizer where a parameter is replaced"
        )


FIRST_BETAS = "first_betas"  # key of a parameter group: its betas before any schedule, if some blocks have their own


@dataclass(frozen=True, slots=True, kw_only=True)
class StateTensor:
    """A tensor of a parameter's state as it lies in its block's slab."""

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    nbytes: int


@dataclass(slots=True, kw_only=True, eq=False)
class Slot:
    """A parameter with everything that `step` would otherwise look up again each time.

    `param` and `info` of a sharded parameter are this rank's shard, see `baoc.optim.shards`.
    """

    name: str
    param: Tensor
    info: ParamInfo
    group: int  # index into param_groups
    options_index: int  # into a step's options: `group`, or if it is tuned an index behind those of all groups
    rule: Rule
    weights: str
    states: tuple[StoredState, ...]
    tensors: tuple[StateTensor, ...]
    in_place_states: tuple[str, ...]  # names of states whose stored tensor the rule updates in place
    encoded_states: tuple[StoredState, ...]  # the others
    counts_steps: bool
    matrix: tuple[int, int] | None
    placement: str = Placement.DEVICE
    tuned: BlockTuning | None = None  # how its settings differ from those of its group
    weight_checksum: int | None = None  # of split weights when their correction was made, until the next step
    shard: Shard | None = None
    gathers_rows: bool = False  # its rule needs all rows of a matrix, of which this rank has some
    sums_over_ranks: bool = False  # its rule needs sums over the rows of all ranks
    offset: int = 0  # index of its first element in the unsharded parameter

    @property
    def group_param(self) -> Tensor:
        """The parameter as the parameter groups have it."""
        return self.param if self.shard is None else self.shard.param

    @property
    def slab_bytes(self) -> int:
        return sum(aligned(tensor.nbytes) for tensor in self.tensors)

    @property
    def keys(self) -> list[str]:
        """The keys of its state, beside which a wrapper may keep others."""
        return [*(["step"] if self.counts_steps else []), *(tensor.key for tensor in self.tensors)]

    @property
    def state_device(self) -> torch.device:
        """Where its state is kept between steps: on the parameter's device, or on the host."""
        on_cpu = self.on_host and self.param.device.type != "meta"
        return torch.device("cpu") if on_cpu else self.param.device

    @property
    def on_host(self) -> bool:
        return self.placement != Placement.DEVICE

    def betas(self, param_groups: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
        """The betas that its rule runs with now."""
        group = param_groups[self.group]
        return group["betas"] if self.tuned is None else betas_of(self.tuned, group)

    @property
    def shape_context(self) -> RuleContext:
        """A context for functions that need the tensor's shape only."""
        return self.context(step=0, betas=(0.0, 0.0), eps=0.0)

    def context(self, *, step: int, betas: tuple[float, float], eps: float) -> RuleContext:
        return RuleContext(
            step=step,
            beta1=betas[0],
            beta2=betas[1],
            eps=eps,
            matrix=self.matrix,
            transposed=self.info.transposed,
            shard=self.shard if self.gathers_rows or self.sums_over_ranks else None,
        )


def betas_of(tuned: BlockTuning, group: Mapping[str, Any]) -> tuple[float, float]:
    """The betas of a tuned block: its own, except one that a schedule has moved from the group's first value."""
    now = group["betas"]
    if tuned.betas is None:
        return now
    first = group.get(FIRST_BETAS, now)
    return (tuned.betas[0] if now[0] == first[0] else now[0], tuned.betas[1] if now[1] == first[1] else now[1])


@dataclass(slots=True, kw_only=True, eq=False)
class LiveBlock:
    """A block as it runs: its spec, its slots, and its matching state.

    Attributes:
        match: fp32[2] on the block's device: target and own update RMS. The own is negative until it is measured.
        rms_unmeasured: True if the own RMS is to be measured before the next step.
        unseeded: Names of the parameters whose v is initialised from their next gradient, see `optim.seeding`.
        previous_rms: The update RMS before the migration that left parameters unseeded.
    """

    block: Block
    spec: OptimizerSpec
    rule: Rule
    slots: list[Slot]
    match: Tensor | None = None
    rms_unmeasured: bool = True
    unseeded: set[str] = field(default_factory=set)
    previous_rms: float | None = None

    @property
    def matched(self) -> bool:
        return self.rule.info.matched and self.block.numel > 0

    @property
    def on_host(self) -> bool:
        return self.spec.placement != Placement.DEVICE

    @property
    def slab_bytes(self) -> int:
        return sum(slot.slab_bytes for slot in self.slots)

    @property
    def largest_slab_bytes(self) -> int:
        """`slab_bytes` on the rank with the most rows: the same number on all ranks."""
        return sum(slot.slab_bytes if slot.shard is None else _largest_slab(slot, self.spec) for slot in self.slots)


def make_slot(
    name: str,
    param: Tensor,
    *,
    info: ParamInfo,
    group: int,
    spec: OptimizerSpec,
    tuned: BlockTuning | None = None,
    shard: Shard | None = None,
) -> Slot:
    """A slot for `param` under `spec`. If the parameter is sharded, `info` and `param` are this rank's shard."""
    rule, storage = RULES[spec.rule], STORAGES[spec.storage]
    sums = shard is not None and sums_columns(rule.info)
    empty = param.numel() == 0  # never stepped, so it has only the states that are the same on all ranks
    states: list[StoredState] = []
    tensors: list[StateTensor] = []
    for decl in rule.info.states:
        if empty and not (sums and decl.layout is StateLayout.PER_COLUMN):
            continue
        shape = decl.shape(info)
        codec = CODEC_IMPLS[storage.codec(decl, param=info)]
        stored = codec.allocate(shape, "meta")
        if codec.in_place and decl.layout is StateLayout.FULL:  # with the parameter's strides, as in torch's optimizers
            stored = {"": torch.empty_like(param, dtype=torch.float32, device="meta")}
        keys = tuple((part, f"{decl.name}{part}") for part in stored)
        states.append(StoredState(decl=decl, codec=codec, shape=shape, keys=keys))
        tensors += [_state_tensor(key, stored[part]) for part, key in keys]
    if WEIGHTS[spec.weights].correction_bytes and not empty:
        tensors.append(_state_tensor(CORRECTION, torch.empty(param.shape, dtype=torch.int8, device="meta")))
    return Slot(
        name=name,
        param=param,
        info=info,
        group=group,
        options_index=group,
        rule=rule,
        tuned=tuned,
        weights=spec.weights,
        states=tuple(states),
        tensors=tuple(tensors),
        in_place_states=tuple(state.decl.name for state in states if state.codec.in_place),
        encoded_states=tuple(state for state in states if not state.codec.in_place),
        counts_steps=rule.info.counts_steps and not (empty and (shard is None or not shard.param.numel())),
        matrix=info.matrix_shape,
        placement=spec.placement,
        shard=shard,
        gathers_rows=rule.info.scaling is Scaling.SPECTRAL and shard is not None and shard.group.size > 1,
        sums_over_ranks=sums,
        offset=0 if shard is None else shard.offset,
    )


def _largest_slab(slot: Slot, spec: OptimizerSpec) -> int:
    assert slot.shard is not None
    info = largest_shard(slot.info, param=slot.group_param)
    param = torch.empty(info.shape, dtype=slot.param.dtype, device="meta")
    return make_slot(slot.name, param, info=info, group=slot.group, spec=spec, shard=slot.shard).slab_bytes


def slot_with_spec(slot: Slot, *, spec: OptimizerSpec) -> Slot:
    return make_slot(slot.name, slot.param, info=slot.info, group=slot.group, spec=spec, shard=slot.shard)


def unsharded_slot(slot: Slot, *, spec: OptimizerSpec, sharded: bool = True, device: str = "meta") -> Slot:
    """A slot under `spec` for all rows of the parameter.

    Args:
        sharded: Whether states have the codecs that they have on a parameter that is sharded.
        device: Where the placeholder of a sharded parameter is.
    """
    info, param = slot.info, slot.param
    if slot.shard is not None:
        assert info.whole is not None
        info = replace(info, shape=info.whole, whole=info.whole if sharded else None)
        param = torch.empty(info.shape, dtype=param.dtype, device=device)
    elif sharded and len(info.shape):
        info = replace(info, whole=info.shape)
    return make_slot(slot.name, param, info=info, group=slot.group, spec=spec, tuned=slot.tuned)


def per_column_keys(slot: Slot) -> set[str]:
    """Keys of the states with one number per column, which are the same on all ranks."""
    return {key for state in slot.states if state.decl.layout is StateLayout.PER_COLUMN for _, key in state.keys}


def row_first_shape(shape: tuple[int, ...], *, rows: int) -> tuple[int, ...]:
    """The shape of a state with the parameter's rows first, or NUM_ROW_PARTS of them where codecs' groups cut rows."""
    numel = prod(shape)
    if not shape or shape[0] == rows or not rows:
        return shape
    return (rows, numel // rows) if numel % rows == 0 else (NUM_ROW_PARTS, numel // NUM_ROW_PARTS)


def checkpoint_state(slot: Slot, state: State, *, spec: OptimizerSpec) -> State:
    """A parameter's state as a checkpoint has it: with the same keys on all ranks, those of a sharded parameter as
    DTensors with its rows. A state per column is a plain tensor, the same on all ranks."""
    if slot.shard is None:
        return {key: with_own_storage(state[key]) for key in slot.keys}
    rows, unsharded_like = slot.shard.param.shape[0], unsharded_slot(slot, spec=spec)
    same_on_all_ranks = per_column_keys(unsharded_like)
    saved = {"step": with_own_storage(state["step"])} if "step" in state else State()
    for tensor in unsharded_like.tensors:
        if tensor.key in same_on_all_ranks:
            saved[tensor.key] = with_own_storage(state[tensor.key])
            continue
        shape = row_first_shape(tensor.shape, rows=rows)
        if tensor.key in state:
            value = with_own_storage(state[tensor.key])
        else:
            value = torch.empty(0, *shape[1:], dtype=tensor.dtype, device=slot.param.device)
        saved[tensor.key] = slot.shard.as_dtensor(value, shape=shape)
    return saved


def unsharded_state(slot: Slot, state: State, *, spec: OptimizerSpec) -> State:
    """The state of a sharded parameter with the rows of all ranks, on the CPU. Collective."""
    shapes = {tensor.key: tensor.shape for tensor in unsharded_slot(slot, spec=spec).tensors}
    gathered = {key: unsharded(value).cpu() for key, value in checkpoint_state(slot, state, spec=spec).items()}
    return {key: value.reshape(shapes.get(key, value.shape)) for key, value in gathered.items()}


def _state_tensor(key: str, tensor: Tensor) -> StateTensor:
    shape, stride = tuple(tensor.shape), tensor.stride()
    return StateTensor(key=key, dtype=tensor.dtype, shape=shape, stride=stride, nbytes=tensor.nbytes)


@torch.inference_mode(False)  # inference tensors could never be stepped
def allocate(slots: Sequence[Slot], *, at_home: bool = True) -> list[State]:
    """The states of a block's parameters before its first step: zeros in one slab per device, which are those where
    they are kept between steps (`at_home`) or those of the parameters."""
    devices = [slot.state_device if at_home else slot.param.device for slot in slots]
    sizes: dict[torch.device, int] = {}
    for slot, device in zip(slots, devices, strict=True):
        sizes[device] = sizes.get(device, 0) + slot.slab_bytes
    slabs = {device: torch.zeros(size, dtype=torch.uint8, device=device) for device, size in sizes.items() if size}
    offsets = dict.fromkeys(slabs, 0)
    states = initial_states(slots)
    for slot, device, state in zip(slots, devices, states, strict=True):
        if slot.tensors:
            state |= slab_views(slot, slabs[device], begin=offsets[device])
            offsets[device] += slot.slab_bytes
    return states


def initial_states(slots: Sequence[Slot]) -> list[State]:
    """The states of parameters before their first step, without the tensors that lie in slabs."""
    return [LiveState({"step": new_step(0)} if slot.counts_steps else {}) for slot in slots]


def slab_views(slot: Slot, slab: Tensor, *, begin: int) -> State:
    """The parameter's state tensors, except step, as views of a slab (uint8) from byte `begin` on."""
    state: State = {}
    for tensor in slot.tensors:
        memory = slab[begin : begin + tensor.nbytes].view(tensor.dtype)
        state[tensor.key] = memory.as_strided(tensor.shape, tensor.stride)
        begin += aligned(tensor.nbytes)
    return state


def pack_states(slots: Sequence[Slot], states: Sequence[State]) -> list[State]:
    """The states in slabs on the devices where they are kept: the given ones if they lie so already, else copies."""
    tensors = [(slot, state[each.key]) for slot, state in zip(slots, states, strict=True) for each in slot.tensors]
    storages = {tensor.untyped_storage()._cdata for _, tensor in tensors}
    sizes: dict[torch.device, int] = {}
    for slot in slots:
        if slot.tensors:
            sizes[slot.state_device] = sizes.get(slot.state_device, 0) + slot.slab_bytes
    # One tensor alone is not padded, so its memory may be too small for a slab.
    if len(storages) <= len(sizes) and all(
        tensor.device == slot.state_device and tensor.untyped_storage().nbytes() >= sizes[slot.state_device]
        for slot, tensor in tensors
    ):
        return list(states)
    copies = allocate(slots)
    for new, state in zip(copies, states, strict=True):
        for key, value in new.items():
            value.copy_(state[key])
    return copies


def with_own_storage(tensor: Tensor) -> Tensor:
    """The same memory as a tensor whose storage is no larger than itself, so that no slab is saved or copied with it; a
    copy if the device allows no such tensor."""
    if tensor.untyped_storage().nbytes() == tensor.nbytes:
        return tensor
    if tensor.device.type == "cpu" and tensor.is_pinned():  # from_dlpack takes pinned memory for a GPU's
        size = (tensor.nbytes // tensor.element_size(),)
        flat = tensor.as_strided(size, (1,)).view(torch.uint8).numpy()
        return torch.from_numpy(flat).view(tensor.dtype).as_strided(tensor.shape, tensor.stride())
    if tensor.device.type not in ("cpu", "cuda"):
        return tensor.clone()
    same = torch.from_dlpack(tensor)
    same.untyped_storage().is_alias = True  # pyright: ignore[reportAttributeAccessIssue]  # for MemoryTracker
    return same


@torch.inference_mode(False)
def new_step(step: int) -> Tensor:
    return torch.tensor(float(step), dtype=torch.float32, device="cpu")


@torch.inference_mode(False)
def new_match(target: float, *, device: torch.device) -> Tensor:
    """Matching state of a block whose own RMS is not measured yet."""
    return torch.tensor([target, -1.0], dtype=torch.float32, device=device)


def step_of(slot: Slot, state: Mapping[str, Tensor]) -> int:
    return int(state["step"].item()) if slot.counts_steps else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedCheckpoint:
    """BAOC's or torch.optim.AdamW's checkpoint, parsed. The names in it and the tensors' shapes are not checked yet."""

    states: Mapping[str, State]
    specs: Mapping[str, OptimizerSpec]  # by parameter name
    groups: Sequence[tuple[tuple[str, ...], Mapping[str, Any]]]  # names and settings
    matches: Mapping[str, tuple[tuple[str, ...], Tensor]] = field(default_factory=dict)  # by block: names and match
    unseeded: frozenset[str] = frozenset()  # parameters whose v waits for a gradient
    tuned: Mapping[str, BlockTuning] = field(default_factory=dict)  # by parameter name, if it has settings of its own
    num_steps: int = 0

    def renamed(self, new_names: Mapping[str, str]) -> "ParsedCheckpoint":
        """A copy with parameters renamed; `new_names` maps old names to new ones."""

        def new(name: str) -> str:
            return new_names.get(name, name)

        return replace(
            self,
            states={new(name): state for name, state in self.states.items()},
            specs={new(name): spec for name, spec in self.specs.items()},
            groups=[(tuple(map(new, names)), settings) for names, settings in self.groups],
            matches={new(block): (tuple(map(new, names)), match) for block, (names, match) in self.matches.items()},
            unseeded=frozenset(map(new, self.unseeded)),
            tuned={new(name): tuned for name, tuned in self.tuned.items()},
        )

    def subset(self, names: Collection[str]) -> "ParsedCheckpoint":
        """The saved states of some parameters, copied to the CPU."""
        states = {
            name: {
                key: value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value
                for key, value in self.states[name].items()
            }
            for name in names
        }
        matches = {
            block: (own_names, match.detach().to("cpu", copy=True))
            for block, (own_names, match) in self.matches.items()
            if not set(own_names).isdisjoint(names)
        }
        return replace(self, states=states, specs={n: self.specs[n] for n in names}, groups=(), matches=matches)


def entries_of_others(state: Mapping[str, Any], *, keys: Collection[str]) -> dict[str, Any]:
    """The entries of a parameter's state that no spec keeps; `keys` are those of its own spec."""
    if all(key in keys for key in state):
        return {}
    own = {"step", CORRECTION, *(decl.name for rule in RULES.values() for decl in rule.info.states)}
    return {key: value for key, value in state.items() if str(key).partition(".")[0] not in own}


def tensor_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the storages behind the tensors, each counted once; on meta, what they would be."""
    storages = {storage._cdata: storage for storage in (tensor.untyped_storage() for tensor in tensors)}
    return sum(storage.nbytes() for storage in storages.values())
