"""The registry: for each parameter of an optimizer its block, spec, states and backend.

What it holds, from the outside in:

1. A `Block` is a set of parameters that an allocation gave one spec. `LiveBlock` is a block as it runs: spec, rule,
   update matching, and one `Slot` per parameter (group, codecs, weights format). `live` maps names to them.
2. `build` checks blocks and specs against the parameter groups, allocates every state, and converts weights to the
   format of their spec (`add_block`). `add_late_params` does the same for late parameters: those of a new group, and
   those that were frozen and have a gradient now. They run the spec that was given for all, else fp32 AdamW.
3. States are views of one slab of bytes per block; `state` maps parameters to them. Slabs of host-placed blocks lie in
   the `arena`, in CPU memory. Whoever reads or converts them brings a block's by `states_on_device`.
4. A step calls a `StepUnit`: the backends of all blocks, and what the finite check looks at. `ready` builds it and
   keeps it in `unit`. Backends hold addresses, so whoever replaces a state, a match or a parameter's data drops it
   (`refresh`, `drop_backends`). Replacements by others are detected by `sample_state`, whose identity is
   compared, and by each backend's `moved`.
5. Blocks that are stepped in backward have a unit of their own (`alone`), on the same backend.
6. A rank steps its rows of a sharded parameter as a plain tensor, the local parameter (`baoc.optim.shards`). `state`
   has these for keys, and `set_local_gradients` gives them the gradients of a step.
"""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import prod
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from baoc.core.catalogue import STORAGES
from baoc.core.recipes import BlockTuning, Tuning
from baoc.errors import BadInputError
from baoc.kernels.host_memory import check_host_memory
from baoc.optim import groups, matching, weights
from baoc.optim.backends import Backend, BackendChoice, StepUnit, build_backends, build_backward_backend
from baoc.optim.nonfinite import new_nonfinite
from baoc.optim.offload import HostArena, Pipelines, drop_stale_correction, fill_param, replace_params, transfer_order
from baoc.optim.rules import RULES
from baoc.optim.shards import Shard, ShardGroup, check_codec_groups, common_group, is_sharded, local_shard, shard_of
from baoc.optim.state import (
    LiveBlock,
    ParsedCheckpoint,
    Slot,
    State,
    allocate,
    make_slot,
    new_match,
    pack_states,
    tensor_bytes,
    unsharded_slot,
)
from baoc.optim.wrappers import refuse_averages, refuse_casts, refuse_shard
from baoc.parallel import refusal
from baoc.planning.cost import aligned
from baoc.types import Block, OptimizerSpec, ParamInfo
from baoc.units import format_bytes

log = logging.getLogger(__name__)
_LOCAL, _GRAD = attrgetter("_local_tensor"), attrgetter("grad")
_DATA_PTR = Tensor.data_ptr  # of the class: a third faster than looked up in each tensor
LATE_SPEC = "adamw"  # spec of a late parameter, unless one spec was given for all


class BlockRegistry:
    """Live blocks of one optimizer and their states. The module's docstring says how they work together.

    Args:
        shown: The optimizer's own dict of parameter -> states. States of host-placed blocks are not in it, because
            Lightning moves all that is there to the device at the start of a fit.
        backend: "auto", or the name of the backend that steps every block.
        matched_by: How updates are matched, see `baoc.optim.matching`.
        tuning: Multiples of the learning rate and betas by rule and role.

    Attributes:
        names: Parameter -> name, of those that have state.
        twins: Sharded parameter -> this rank's rows of it as a plain tensor, and how it is cut.
        shards: The ranks over which parameters are cut; None where none is.
        idle: Slots without rows on this rank, which only counts their steps.
        frozen: The parameters that have no state.
        listed: All parameters, by group, as of the last `refresh`.
        rows: Group and tuning of each set of options that follows those of the groups in a step.
    """

    graphs = True  # whether the backends of whole steps may capture what they launch

    def __init__(
        self,
        shown: dict[Tensor, State],
        *,
        backend: str,
        matched_by: matching.Matching = "rms",
        tuning: Tuning | None = None,
    ):
        self.state: dict[Tensor, State] = {}
        self._torch_state = shown
        self.arena = HostArena()
        self.matched_by = matched_by
        self.backend = backend
        self.tuning = tuning
        self.rows: list[tuple[int, BlockTuning]] = []
        self.live: dict[str, LiveBlock] = {}
        self.names: dict[Tensor, str] = {}
        self.local_params: dict[Tensor, tuple[Tensor, Shard]] = {}
        self.shard_group: ShardGroup | None = None
        self.slots_without_rows: list[Slot] = []
        self.frozen: list[Tensor] = []
        self.params_by_group: list[list[Tensor]] = []
        self.unit: StepUnit | None = None  # None until a step asks for it
        self.sample_state: tuple[State, str, Tensor] | None = None  # a state, a key, its tensor as `unit` was built
        self._pipelines: Pipelines | None = None
        self._gradient_order: dict[Tensor, int] = {}  # parameter -> its place in the order of final gradients
        self._backward_units: dict[tuple[str, ...], StepUnit] = {}
        self.step_groups: dict[str, tuple[str, ...]] = {}  # block -> those that are stepped with it in backward
        self._choices: dict[str, BackendChoice] = {}
        self._unreported_nonfinite: dict[str, int] = {}  # non-finite elements that dropped backends had found
        self.late_spec: str | OptimizerSpec | None = None  # the spec given for all blocks
        self.placed = self.may_be_overwritten = False  # weights may have changed since the last step
        self.pending_states: ParsedCheckpoint | None = None  # loaded states of parameters that are not trained yet

    def build(
        self,
        param_groups: list[dict[str, Any]],
        *,
        specs: Any,
        blocks: Sequence[Block] | None,
        device: torch.device | None = None,
    ) -> None:
        """Checks blocks and specs against the groups, then allocates every state.

        `device`: parameters elsewhere move there block by block, in the format of their specs. None moves none.
        """
        if isinstance(specs, str | OptimizerSpec):
            self.late_spec = specs
        where = groups.named_params(param_groups)
        infos = [groups.param_info(n, p, group=g) for n, (p, g) in where.items() if p.requires_grad]
        blocks = [groups.single_block(info) for info in infos] if blocks is None else list(blocks)
        owners = groups.match_blocks(blocks, params={info.name: where[info.name][0] for info in infos})
        params = {name: where[owner][0] for name, owner in owners.items()}
        blocks = [groups.with_current_dtypes(block, params) for block in blocks]
        chosen = groups.specs_by_block(specs, blocks=blocks)
        self.names = {where[name][0]: owner for owner, name in owners.items()}
        for group in param_groups:  # tied parameters are called what their block calls them
            pairs = zip(group["params"], group["param_names"], strict=True)
            group["param_names"] = [self.names.get(param, name) for param, name in pairs]
        where = groups.named_params(param_groups)
        lives = [self.make_block(block, spec=chosen[block.name], where=where) for block in blocks]
        check_new_blocks(lives, device=device)
        reserved = self.arena.reserve(transfer_order(lives), device=device)
        for live in lives:
            self.add_block(live, device=device, states=reserved.get(live))
        self.refresh(param_groups)

    def make_block(self, block: Block, *, spec: OptimizerSpec, where: Mapping[str, tuple[Tensor, int]]) -> LiveBlock:
        """A block with its slots, tuned by rule and role, without states. `where`: `groups.named_params`."""
        tuned = None if self.tuning is None else self.tuning.of(block, rule=spec.rule)
        slots = []
        for info in block.params:
            param, group = where[info.name]
            twin, shard = self._local_param(param, name=info.name)
            part = info if shard is None else replace(info, shape=tuple(twin.shape))  # the rows that this rank steps
            slot = make_slot(info.name, twin, info=part, group=group, spec=spec, tuned=tuned, shard=shard)
            if shard is not None:
                aligned = STORAGES[spec.storage].alignment
                kept = [kept for kept in unsharded_slot(slot, spec=spec).states if not kept.codec.in_place]
                states = {each.decl.name: (prod(each.shape), aligned) for each in kept}
                check_codec_groups(info, states=states, shard=shard, spec=spec.name)
            slots.append(slot)
        return LiveBlock(block=block, spec=spec, rule=RULES[spec.rule], slots=slots)

    def _local_param(self, param: Tensor, *, name: str) -> tuple[Tensor, Shard | None]:
        """The tensor that is stepped for a parameter, always the same, and how the parameter is cut."""
        if param not in self.local_params:
            shard = shard_of(param)
            if shard is None:
                return param, None
            cut = {self.names.get(owner, "another"): other for owner, (_, other) in self.local_params.items()}
            self.shard_group = common_group({**cut, name: shard})
            self.local_params[param] = local_shard(param).detach(), shard
        return self.local_params[param]

    def set_local_gradients(self) -> None:
        """Gives twins their parameters' gradients, and the data of parameters that were moved.

        All of one kind at once: in every step it is done for each tensor, and the device waits for the host meanwhile.
        """
        twins = [twin for twin, _ in self.local_params.values()]
        parts = list(map(_LOCAL, self.local_params))
        if list(map(_DATA_PTR, parts)) != list(map(_DATA_PTR, twins)):
            for twin, part in zip(twins, parts, strict=True):
                twin.grad = None
                twin.data = part.detach()
            self.drop_backends()
        for twin, grad in zip(twins, map(_GRAD, self.local_params), strict=True):
            twin.grad = getattr(grad, "_local_tensor", grad)

    def drop_local_gradients(self) -> None:
        """Drops the twins' gradients, so that whoever drops a parameter's gradient frees it."""
        for twin, _ in self.local_params.values():
            twin.grad = None

    def retune(self, tuning: Tuning | None, *, param_groups: list[dict[str, Any]]) -> None:
        """Gives every block the learning rates and betas of `tuning`; None gives those of the groups."""
        self.tuning = tuning
        for live in self.live.values():
            tuned = None if tuning is None else tuning.of(live.block, rule=live.spec.rule)
            for slot in live.slots:
                slot.tuned, slot.options_index = tuned, slot.group
        self.refresh(param_groups)

    def add_block(
        self, live: LiveBlock, *, device: torch.device | None = None, states: list[State] | None = None
    ) -> None:
        """Adds a block before its first step: allocates its states and converts its weights to the format of its spec.

        Args:
            device: Parameters elsewhere move there; None leaves them where they are.
            states: States that are allocated already, in the order of the block's slots.
        """
        waiting = replace_params(live, device=device)
        for slot, state in zip(live.slots, states or allocate(live.slots), strict=True):
            self.set_state(slot, state)
            fill_param(slot, state, whole=waiting.pop(slot.param, None))
        self.may_be_overwritten = True
        self.init_match(live)
        self.live[live.block.name] = live

    def set_state(self, slot: Slot, state: State) -> None:
        """Makes `state` that of the slot's parameter."""
        self.state[slot.param] = state
        self._torch_state[slot.group_param] = {} if slot.on_host else state

    def init_match(self, live: LiveBlock, *, rms: float | None = None) -> None:
        """Gives a matched block its matching state, without an own RMS yet.

        Args:
            rms: AdamW's update RMS on the block, where it is known.
        """
        if live.matched and live.slots:
            target = matching.UNAVERAGED_TARGET if self.has_own_target(live) else rms or matching.DEFAULT_TARGET
            live.match = new_match(target, device=live.slots[0].param.device)

    def has_own_target(self, live: LiveBlock) -> bool:
        """Whether AdamW's RMS does not matter: displacement matches a rule without momentum to 1."""
        return self.matched_by == "displacement" and live.matched and not matching.averages(live.rule.info)

    def __getstate__(self) -> dict[str, Any]:
        """Without the states: the optimizer puts them back into the copy by `adopt`. Raises BadInputError where
        parameters are sharded."""
        if self.local_params:
            raise refusal("sharded_copy")
        self.drop_backends()
        return {**self.__dict__, "state": {}, "_torch_state": {}, "arena": HostArena()}

    def adopt(self, shown: dict[Tensor, State]) -> None:
        """Takes a copy's states from `shown` and packs them into slabs, those of host-placed blocks into the arena."""
        self._torch_state, self.state = shown, dict(shown)
        for live in self.live.values():
            self.pack(live)
        self._gather_host_slabs()

    def refresh(self, param_groups: list[dict[str, Any]]) -> None:
        """To be called after blocks, states or groups changed: the next step builds new backends."""
        self.drop_backends()
        self._gather_host_slabs()
        self._assign_tuned_options(num_groups=len(param_groups))
        self.params_by_group = [list(group["params"]) for group in param_groups]
        self.frozen = [p for group in self.params_by_group for p in group if p not in self.names]
        cut = [slot for live in self.live.values() for slot in live.slots] if self.local_params else []
        self.slots_without_rows = [slot for slot in cut if slot.counts_steps and not slot.param.numel()]

    def _assign_tuned_options(self, *, num_groups: int) -> None:
        """Gives tuned slots their row in a step's options, one for all slots of a group with one tuning."""
        slots = [slot for live in self.live.values() for slot in live.slots if slot.tuned is not None]
        found = {(slot.group, slot.tuned): slot.tuned for slot in slots}
        self.tuned_options = [(group, tuned) for (group, _), tuned in found.items() if tuned is not None]
        places = {key: num_groups + index for index, key in enumerate(found)}
        for slot in slots:
            slot.options_index = places[slot.group, slot.tuned]

    def drop_backends(self) -> None:
        self.synchronize()
        self._save_nonfinite_counts()
        self.unit, self.sample_state, self._backward_units, self.step_groups, self._pipelines = None, None, {}, {}, None

    def _save_nonfinite_counts(self) -> None:
        """Keeps the counts of non-finite elements of backends that are about to be dropped."""
        self._unreported_nonfinite |= new_nonfinite(self.all_backends, wait=True)

    def _gather_host_slabs(self) -> None:
        """Gathers states of host-placed blocks in the arena, in the order in which they are stepped."""
        on_cpu = [live for live in transfer_order(self.live.values()) if live.slots[0].state_device.type == "cpu"]
        if self.arena.gather(on_cpu, state=self.state):
            self.drop_backends()

    def step_unit(self) -> StepUnit:
        """The StepUnit of all blocks, rebuilt where parameters or states have moved."""
        if not self.placed or ((seen := self.sample_state) is not None and seen[0].get(seen[1]) is not seen[2]):
            self.move_states()
        elif self.unit is not None and any([backend.moved for backend in self.unit.backends]):
            self.drop_backends()
        unit = self._build_unit()
        self.drop_stale_corrections(begins=True)
        return unit

    def _build_unit(self) -> StepUnit:
        if self.unit is None:
            backends, self._choices = build_backends(
                self.live.values(), state=self.state, name=self.backend, pipelines=self.pipelines
            )
            for backend in backends:
                backend.graphs &= self.graphs
            looking = {live for backend in backends if not backend.excludes_nonfinite for live in backend.blocks}
            self.unit = StepUnit(
                backends=backends,
                checked_params={slot.param: slot.name for live in looking for slot in live.slots},
                waits=[pipeline.join for pipeline in self.pipelines],
                unreported_nonfinite=self._unreported_nonfinite,
            )
            slots = [slot for live in self.live.values() for slot in live.slots if slot.tensors]
            if slots:
                state, key = self.state[slots[0].param], slots[0].tensors[0].key
                self.sample_state = state, key, state[key]
        return self.unit

    @property
    def backends(self) -> list[Backend]:
        return self._build_unit().backends

    @property
    def all_backends(self) -> StepUnit:
        """All present backends, those of `alone` included, to ask for the non-finite elements they found."""
        units = [*filter(None, [self.unit]), *self._backward_units.values()]
        backends = [backend for unit in units for backend in unit.backends]
        return StepUnit(backends=backends, checked_params={}, unreported_nonfinite=self._unreported_nonfinite)

    def backward_unit(self, names: tuple[str, ...]) -> StepUnit:
        """The StepUnit of some blocks, on the backend that steps them in `unit` too, which must be one for all."""
        unit = self._backward_units.get(names)
        if unit is not None and not unit.backends[0].moved:
            return unit
        if unit is not None:
            self._save_nonfinite_counts()
        lives = [self.live[name] for name in names]
        backend = build_backward_backend(
            lives, state=self.state, backend=self.choices[names[0]].backend, pipelines=self.pipelines
        )
        slots = () if backend.excludes_nonfinite else [slot for live in lives for slot in live.slots]
        guarded = {slot.param: slot.name for slot in slots}
        self._backward_units[names] = unit = StepUnit(backends=[backend], checked_params=guarded)
        return unit

    def regroup(self, groups: Sequence[tuple[str, ...]]) -> None:
        """From now on backward steps the blocks of each group together. Their present units go, because step counts are
        views of the newest unit's."""
        self._save_nonfinite_counts()
        self._backward_units = {}
        self.step_groups = {name: group for group in groups for name in group}

    def can_step_together(self, lives: Sequence[LiveBlock]) -> bool:
        """Whether one unit can step these blocks: all have one backend, and none is host-placed."""
        one_backend = len({self.choices[live.block.name].backend for live in lives}) == 1
        return one_backend and all(self.pipelines.of(live) is None for live in lives)

    def drop_stale_corrections(self, *, begins: bool = False) -> None:
        """Drops corrections of split weights that were overwritten. `begins`: a step begins, so later ones cannot be
        told."""
        for slot in (slot for live in self.live.values() for slot in live.slots) if self.may_be_overwritten else ():
            drop_stale_correction(slot, self.state[slot.param], for_good=begins)
        self.may_be_overwritten &= not begins

    def checksum_weights(self) -> None:
        """Notes split weights before others may write to them, so that the next step knows which were overwritten.

        Before the first step, after a move and after loading it does nothing: the bits were noted when the corrections
        were made, and those that a checkpoint gave may have come before their weights.
        """
        if self.may_be_overwritten:
            return
        for slot in (slot for live in self.live.values() for slot in live.slots):
            if weights.CORRECTION in self.state[slot.param] and slot.param.dtype is torch.bfloat16:
                slot.weight_checksum = weights.checksum(slot.param)
        self.may_be_overwritten = True

    # -- states on the host ---------------------------------------------------------------------------------------

    @property
    def pipelines(self) -> Pipelines:
        """The buffers through which host-placed blocks pass to be stepped, built when first asked for."""
        if self._pipelines is None:
            self._pipelines = Pipelines(self.host_blocks(), home=self.state)
        return self._pipelines

    def host_blocks(self) -> list[LiveBlock]:
        """Host-placed blocks in the order in which they are stepped."""
        last = len(self._gradient_order)
        placed = transfer_order(self.live.values())
        return sorted(placed, key=lambda live: max(self._gradient_order.get(slot.param, last) for slot in live.slots))

    def reorder_host_blocks(self, finals: Sequence[Tensor]) -> None:
        """Orders host-placed blocks by when their gradients are final; `finals` are parameters in that order.

        In another order a buffer would wait for a late block, and blocks that overtake it would be fetched again.
        """
        before = self.host_blocks()
        self._gradient_order = {param: index for index, param in enumerate(finals)}
        if self.host_blocks() != before:
            self.drop_backends()

    def join(self) -> None:
        """Ends a step: work launched afterwards sees the new weights."""
        if self._pipelines is not None:
            self._pipelines.join()

    def synchronize(self) -> None:
        """Waits until all states are where they are kept. To be called before anybody reads them."""
        if self._pipelines is not None:
            self._pipelines.synchronize()

    @contextmanager
    def states_on_device(self, live: LiveBlock, *, keep: bool = True) -> Iterator[None]:
        """Inside, a host-placed block's states are on its parameters' device; `keep` copies changes back."""
        if not live.on_host:
            yield
            return
        self.synchronize()
        home = {slot.param: self.state[slot.param] for slot in live.slots}
        away = allocate(live.slots, at_home=False)
        for slot, there in zip(live.slots, away, strict=True):
            for key, value in home[slot.param].items():
                if key == "step":
                    there[key] = value
                else:
                    there[key].copy_(value)
            self.state[slot.param] = there
        try:
            yield
        finally:
            for slot, there in zip(live.slots, away, strict=True):
                if self.state[slot.param] is there:  # not replaced inside
                    self.state[slot.param] = home[slot.param]
                    for key, value in home[slot.param].items() if keep else ():
                        value.copy_(there[key])
            if keep and self._pipelines is not None:
                self._pipelines.invalidate()

    @property
    def choices(self) -> dict[str, BackendChoice]:
        """Block -> the backend that steps it, and why not another."""
        self._build_unit()
        return self._choices

    # -- parameters that come late -------------------------------------------------------------------------------------

    def add_late_params(
        self,
        infos: Iterable[ParamInfo],
        *,
        param_groups: list[dict[str, Any]],
        specs: Mapping[str, str] | None = None,
    ) -> None:
        """Gives states to parameters that the plan does not have: each becomes a block. `specs` maps parameter names to
        specs that were planned for them.

        Raises BadInputError, with nothing changed, where one cannot be optimized or cannot run its spec.
        """
        where = groups.named_params(param_groups)
        late = [(info, groups.single_block(info)) for info in infos]
        for at, (info, block) in enumerate(late):
            while block.name in self.live:
                block = replace(block, name=f"{block.name}_late")
            late[at] = info, block
        chosen = {
            info.name: groups.resolve_spec((specs or {}).get(info.name) or self.late_spec or LATE_SPEC)
            for info, _ in late
        }
        for info, block in late:  # all are checked before any gets state
            groups.check_param(where[info.name][0], name=info.name)
            groups.check_applies(chosen[info.name], block=block)
        lives = [self.make_block(block, spec=chosen[info.name], where=where) for info, block in late]
        check_new_blocks(lives)
        for (info, _), live in zip(late, lives, strict=True):
            self.names[where[info.name][0]] = info.name
            self.add_block(live)
        self.refresh(param_groups)
        if not late:
            return
        held = sum(self.block_bytes(self.live[block.name]) for _, block in late)
        log.log(
            logging.WARNING if self.late_spec is None and not specs else logging.INFO,
            "%s came after the plan was made: run by %s, with %s of state that the plan has not",
            groups.shorten(info.name for info, _ in late),
            ", ".join(dict.fromkeys(spec.name for spec in chosen.values())),
            format_bytes(held),
        )

    def thawed_params(self, param_groups: list[dict[str, Any]]) -> list[ParamInfo]:
        """Parameters that were frozen when the optimizer was built and have a gradient now."""
        late = {param for param in self.frozen if param.grad is not None}
        where = groups.named_params(param_groups).items()
        return [groups.param_info(name, param, group=group) for name, (param, group) in where if param in late]

    def move_states(self) -> None:
        """Moves states to their parameters' device, where the model or the states were moved. Raises BadInputError
        where parameters were sharded after the optimizer was built."""
        for param, name in self.names.items():
            refuse_shard(param, name=name)
            if is_sharded(param) and param not in self.local_params:
                raise refusal("sharded_late", name=name)
        for live in self.live.values():
            self.pack(live)
            if live.match is not None:
                live.match = live.match.to(live.slots[0].param.device)
        self.drop_backends()
        self._gather_host_slabs()
        self.placed = True

    def pack(self, live: LiveBlock) -> None:
        """Moves the block's states into slabs where they are kept, unless they lie so already."""
        states = pack_states(live.slots, [self.state[slot.param] for slot in live.slots])
        for slot, state in zip(live.slots, states, strict=True):
            if "step" in state:
                state["step"] = state["step"].cpu()
            self.set_state(slot, state)

    def block_bytes(self, live: LiveBlock) -> int:
        """Live bytes of a block's state, its matching state included, on its parameters' device."""
        match = [live.match] if live.match is not None else []
        if live.on_host:
            return tensor_bytes(match)
        return self._steps(live) + tensor_bytes([*self._tensors(live), *match])

    def block_host_bytes(self, live: LiveBlock) -> int:
        """Live bytes of a host-placed block's state on the host."""
        if not live.on_host:
            return 0
        return self._steps(live) + sum(aligned(value.nbytes) for value in self._tensors(live))

    def _tensors(self, live: LiveBlock) -> list[Tensor]:
        states = [self.state[slot.param].items() for slot in live.slots]
        return [value for state in states for key, value in state if key != "step"]

    def _steps(self, live: LiveBlock) -> int:
        """Steps may be views of all of a backend's."""
        states = [self.state[slot.param] for slot in live.slots]
        return sum(state["step"].nbytes for state in states if "step" in state)


def check_new_blocks(lives: Sequence[LiveBlock], *, device: torch.device | None = None) -> None:
    """Raises BadInputError where blocks cannot keep their weights or be host-placed as their specs say, or host memory
    is short. `device`: where parameters will be, if they are not there yet."""
    refuse_casts(lives)
    refuse_averages(lives)
    placed = transfer_order(lives)
    for live in placed:
        devices = sorted({str(device or slot.param.device) for slot in live.slots})
        if len(devices) > 1:
            raise BadInputError(
                f"block {live.block.name} cannot run {live.spec.name}: its parameters are on {', '.join(devices)}, "
                "and the states of a host-placed block pass to one device. Make them two blocks"
            )
    if placed and placed[0].slots[0].param.device.type != "meta":
        check_host_memory(sum(live.slab_bytes for live in placed), what="the states of host-placed blocks")
