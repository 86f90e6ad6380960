"""The registry: for each parameter of an optimizer its block, spec, states and backend.

How it works, in the order in which things happen:

1. Building. `build` matches the plan's blocks to the parameters of the groups. It makes a `LiveBlock` of each
   (`make_block`): the spec, the rule, and one `Slot` per parameter (group, codecs, weights format). Then it adds them
   (`add_block`): it allocates their states and converts their weights to the format of the spec. `live` maps block
   names to live blocks. `add_late_params` does the same for parameters that come later.
2. States. Those of a block are views of one slab of bytes; `state` maps parameters to them. Slabs of host-placed blocks
   lie in the `arena`, in CPU memory; inside `states_on_device` a block's states are on the device.
3. A step calls a `StepUnit`: the backends of all blocks, and the parameters whose gradients the finite check looks at.
   `step_unit` builds it once and keeps it in `unit`.
4. Invalidation. Backends hold addresses. Whoever replaces a state, a match or a parameter's data here calls `refresh`
   or `drop_backends`, and the next step builds another unit. Replacements by others are noticed by the identity of
   `sample_state`, and by each backend's `moved`.
5. In backward, blocks are stepped by units of their own (`backward_unit`), on the same backend.
6. Sharded parameters. A rank steps its rows as a plain tensor, the local parameter (`baoc.optim.shards`). `state` has
   the local parameter as key, and `set_local_gradients` gives it the gradient of a step.
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

from baoc.core.catalogue import STORAGES, WEIGHTS
from baoc.core.recipes import BlockTuning, Tuning
from baoc.errors import BadInputError
from baoc.kernels.host_memory import check_host_memory
from baoc.optim import groups, matching, weights
from baoc.optim.backends import Backend, BackendChoice, StepUnit, build_backends, build_backward_backend
from baoc.optim.backends.fused import FusedBackend
from baoc.optim.nonfinite import new_nonfinite
from baoc.optim.offload import HostArena, StagingPipeline, build_pipelines, transfer_order
from baoc.optim.rules import RULES
from baoc.optim.shards import Shard, ShardGroup, check_codec_groups, is_sharded, local_shard, shard_of
from baoc.optim.state import (
    LiveBlock,
    LiveState,
    LiveStates,
    ParsedCheckpoint,
    Slot,
    State,
    allocate,
    entries_of_others,
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
_LOCAL_TENSOR, _GRAD = attrgetter("_local_tensor"), attrgetter("grad")
_DATA_PTR = Tensor.data_ptr  # of the class: a third faster than looked up in each tensor
LATE_SPEC = "adamw"  # spec of a late parameter, unless one spec was given for all


class BlockRegistry:
    """Live blocks of one optimizer and their states. The module's docstring says how they work together.

    Args:
        torch_state: `Optimizer.state`, parameter -> states. States of host-placed blocks are left out of it, because
            Lightning moves all that is there to the device at the start of a fit.
        backend: "auto", or the name of the backend that steps every block.
        matched_by: How updates are matched, see `baoc.optim.matching`.
        tuning: Multiples of the learning rate and betas by rule and role.

    Attributes:
        names: Parameter -> name, of those that have state.
        local_params: Sharded parameter -> (this rank's rows of it as a plain tensor, how it is sharded).
        shard_group: The ranks over which parameters are sharded; None if none is.
        slots_without_rows: Slots of which this rank has no rows, so that it only counts their steps.
        frozen: The parameters that have no state.
        params_by_group: All parameters, by group, as of the last `refresh`.
        tuned_options: (group, tuning) of each `Options` that follows those of the groups in a step.
        step_groups: Block -> the blocks that are stepped together with it in backward.
        placed: True once states have been moved to their parameters' devices.
        may_be_overwritten: True if weights may have been overwritten since their corrections were made.
        pending_states: Loaded states of parameters that are not trained yet.
    """

    graphs = True  # whether the backends of whole steps may capture what they launch

    def __init__(
        self,
        torch_state: dict[Tensor, State],
        *,
        backend: str,
        matched_by: matching.Matching = "rms",
        tuning: Tuning | None = None,
    ):
        self.state: dict[Tensor, State] = {}
        self.torch_state = torch_state
        self.arena = HostArena()
        self.matched_by = matched_by
        self.backend = backend
        self.tuning = tuning
        self.tuned_options: list[tuple[int, BlockTuning]] = []
        self.live: dict[str, LiveBlock] = {}
        self.names: dict[Tensor, str] = {}
        self.local_params: dict[Tensor, tuple[Tensor, Shard]] = {}
        self.shard_group: ShardGroup | None = None
        self.slots_without_rows: list[Slot] = []
        self.frozen: list[Tensor] = []
        self.params_by_group: list[list[Tensor]] = []
        self.unit: StepUnit | None = None  # None until a step asks for it
        self.num_cleared = 0  # LiveState's, when states were last looked at
        self.sample_state: tuple[State, str, Tensor] | None = None  # a state, a key, its tensor as `unit` was built
        self._pipelines: list[StagingPipeline] | None = None
        self._gradient_order: dict[Tensor, int] = {}  # parameter -> its place in the order of final gradients
        self._backward_units: dict[tuple[str, ...], StepUnit] = {}
        self.step_groups: dict[str, tuple[str, ...]] = {}
        self._choices: dict[str, BackendChoice] = {}
        self._unreported_nonfinite: dict[str, int] = {}  # non-finite elements that dropped backends had found
        self.late_spec: str | OptimizerSpec | None = None  # the spec given for all blocks
        self.placed = False
        self.may_be_overwritten = False
        self.pending_states: ParsedCheckpoint | None = None

    # -- building --------------------------------------------------------------------------------------------------

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
        params = groups.named_params(param_groups)
        infos = [groups.param_info(name, p, group=group) for name, (p, group) in params.items() if p.requires_grad]
        blocks = [groups.single_block(info) for info in infos] if blocks is None else list(blocks)
        group_names = groups.match_blocks(blocks, params={info.name: params[info.name][0] for info in infos})
        by_block_name = {name: params[group_name][0] for name, group_name in group_names.items()}
        blocks = [groups.with_current_dtypes(block, by_block_name) for block in blocks]
        spec_of = groups.specs_by_block(specs, blocks=blocks)
        self.names = {param: name for name, param in by_block_name.items()}
        for group in param_groups:  # tied parameters are called what their block calls them
            pairs = zip(group["params"], group["param_names"], strict=True)
            group["param_names"] = [self.names.get(param, name) for param, name in pairs]
        params = groups.named_params(param_groups)
        lives = [self.make_block(block, spec=spec_of[block.name], params=params) for block in blocks]
        check_new_blocks(lives, device=device)
        host_states = self.arena.reserve(transfer_order(lives), device=device)
        for live in lives:
            self.add_block(live, device=device, states=host_states.get(live))
        self.refresh(param_groups)

    def make_block(self, block: Block, *, spec: OptimizerSpec, params: Mapping[str, tuple[Tensor, int]]) -> LiveBlock:
        """A live block with its slots, tuned by rule and role, without states. `params`: `groups.named_params`."""
        tuned = None if self.tuning is None else self.tuning.of(block, rule=spec.rule)
        slots = []
        for info in block.params:
            param, group = params[info.name]
            local, shard = self._local_param(param, name=info.name)
            local_info = info if shard is None else replace(info, shape=tuple(local.shape))
            slot = make_slot(info.name, local, info=local_info, group=group, spec=spec, tuned=tuned, shard=shard)
            if shard is not None:
                group_size = STORAGES[spec.storage].alignment
                encoded = [each for each in unsharded_slot(slot, spec=spec).states if not each.codec.in_place]
                states = {each.decl.name: (prod(each.shape), group_size) for each in encoded}
                check_codec_groups(info, states=states, shard=shard, spec=spec.name)
            slots.append(slot)
        return LiveBlock(block=block, spec=spec, rule=RULES[spec.rule], slots=slots)

    def _local_param(self, param: Tensor, *, name: str) -> tuple[Tensor, Shard | None]:
        """The tensor that is stepped for a parameter, the same in every call, and how the parameter is sharded."""
        if param not in self.local_params:
            shard = shard_of(param)
            if shard is None:
                return param, None
            self.shard_group = self.shard_group or shard.group
            if shard.group.process_group is not self.shard_group.process_group:
                raise refusal("meshes", name=name, other=self.names.get(next(iter(self.local_params)), "another"))
            self.local_params[param] = local_shard(param).detach(), shard
        return self.local_params[param]

    def add_block(
        self, live: LiveBlock, *, device: torch.device | None = None, states: list[State] | None = None
    ) -> None:
        """Adds a block before its first step: allocates its states and converts its weights to the format of its spec.

        Args:
            device: Parameters elsewhere move there; None leaves them where they are.
            states: States that are allocated already, in the order of the block's slots.
        """
        values: dict[Tensor, Tensor] = {}  # of parameters that move, which get unfilled data on the device
        for slot in live.slots:
            if device is not None and slot.param.device != device:
                dtype = weights.dtype_of(slot.weights, info=slot.info)
                values[slot.param] = weights.replace_data_(slot.param, dtype=dtype, device=device)
        for slot, state in zip(live.slots, states or allocate(live.slots), strict=True):
            self.set_state(slot, state)
            _fill_param(slot, state, values=values.pop(slot.param, None))  # so that those converted are freed
        self.may_be_overwritten = True
        self.init_match(live)
        self.live[live.block.name] = live

    def set_state(self, slot: Slot, state: State) -> None:
        others = self.entries_of_others(slot)
        self.state[slot.param] = state = state if isinstance(state, LiveState) else LiveState(state)
        # One dict for both, so that who writes to a state of `Optimizer.state` writes to what is stepped; but none for
        # one on the host, whose tensors Lightning would move to the device.
        self.torch_state[slot.group_param] = shown = LiveState() if slot.on_host else state
        shown.update(others)

    def entries_of_others(self, slot: Slot) -> dict[str, Any]:
        """What a wrapper, such as Lookahead, keeps in `Optimizer.state` beside a parameter's own states."""
        return entries_of_others(self.torch_state.get(slot.group_param) or {}, keys=slot.keys)

    def set_entries_of_others(self, slot: Slot, entries: Mapping[str, Any]) -> None:
        """Replaces them. Tensors are copied to the parameter's device."""
        shown = self.torch_state[slot.group_param]
        for key in self.entries_of_others(slot):
            del shown[key]
        for key, value in entries.items():
            shown[key] = value.detach().to(slot.param.device, copy=True) if isinstance(value, Tensor) else value

    def restart_absent(self, torch_state: dict[Tensor, State]) -> None:
        """Starts states afresh that were taken out of `Optimizer.state`, cleared, or replaced by {} or another dict."""

        def is_absent(slot: Slot) -> bool:
            state = torch_state.get(slot.group_param)
            return state.is_cleared if isinstance(state, LiveState) else not state

        by_block = [(live, [slot for slot in live.slots if is_absent(slot)]) for live in self.live.values()]
        restarted = [slot.name for _, absent in by_block for slot in absent]
        if restarted or self.torch_state is not torch_state:
            self.synchronize()
            self.torch_state = torch_state
            for live, absent in by_block:
                for slot in absent:
                    state = self.state[slot.param]
                    for key in slot.keys:
                        if key != weights.CORRECTION:  # which belongs to the weight
                            state[key].zero_()
                    self.set_state(slot, LiveState({key: state[key] for key in slot.keys}))
                    live.unseeded.discard(slot.name)
                if absent and len(absent) == len(live.slots):
                    live.rms_unmeasured, live.previous_rms = True, None
                    self.init_match(live)
            self.drop_backends()
            log.info("taken out of optimizer.state, so its state starts afresh: %s", groups.shorten(restarted))
        self.num_cleared = LiveState.num_cleared
        if isinstance(torch_state, LiveStates):  # a dict of another's may be emptied without a word
            torch_state.touched = not all(isinstance(state, LiveState) for state in torch_state.values())

    def init_match(self, live: LiveBlock, *, rms: float | None = None) -> None:
        """Gives a matched block its matching state, whose own RMS is not measured yet.

        Args:
            rms: AdamW's update RMS on the block, if it is known.
        """
        if live.matched and live.slots:
            target = matching.UNAVERAGED_TARGET if self.has_own_target(live) else rms or matching.DEFAULT_TARGET
            live.match = new_match(target, device=live.slots[0].param.device)

    def has_own_target(self, live: LiveBlock) -> bool:
        """True if the block is matched to 1, not to AdamW's RMS: displacement does so for rules without momentum."""
        return self.matched_by == "displacement" and live.matched and not matching.has_momentum(live.rule.info)

    def thawed_params(self, param_groups: list[dict[str, Any]]) -> list[ParamInfo]:
        """Parameters that were frozen when the optimizer was built and have a gradient now."""
        thawed = {param for param in self.frozen if param.grad is not None}
        params = groups.named_params(param_groups).items()
        return [groups.param_info(name, param, group=group) for name, (param, group) in params if param in thawed]

    def add_late_params(
        self, infos: Iterable[ParamInfo], *, param_groups: list[dict[str, Any]], specs: Mapping[str, str] | None = None
    ) -> None:
        """Makes each parameter that the plan does not have a block of its own. It runs the spec that `specs` (by
        parameter name) has for it, else the one given for all blocks, else LATE_SPEC. Raises BadInputError, with
        nothing changed, if one cannot be optimized or cannot run its spec."""
        params = groups.named_params(param_groups)
        late: list[tuple[ParamInfo, Block, OptimizerSpec]] = []
        for info in infos:
            block = groups.single_block(info)
            while block.name in self.live:
                block = replace(block, name=f"{block.name}_late")
            late.append((info, block, groups.resolve_spec((specs or {}).get(info.name) or self.late_spec or LATE_SPEC)))
        for info, block, spec in late:  # all are checked before any gets state
            groups.check_param(params[info.name][0], name=info.name)
            groups.check_applies(spec, block=block)
        lives = [self.make_block(block, spec=spec, params=params) for _, block, spec in late]
        check_new_blocks(lives)
        for (info, _, _), live in zip(late, lives, strict=True):
            self.names[params[info.name][0]] = info.name
            self.add_block(live)
        self.refresh(param_groups)
        if not late:
            return
        log.log(
            logging.WARNING if self.late_spec is None and not specs else logging.INFO,
            "%s came after the plan was made: run by %s, with %s of state that the plan has not",
            groups.shorten(info.name for info, _, _ in late),
            ", ".join(dict.fromkeys(spec.name for _, _, spec in late)),
            format_bytes(sum(self.block_bytes(live) for live in lives)),
        )

    # -- the unit of a step, and what invalidates it ----------------------------------------------------------------

    def step_unit(self) -> StepUnit:
        """The StepUnit of all blocks, rebuilt if parameters or states have moved. A step begins with it."""
        sample = self.sample_state
        if not self.placed or (sample is not None and sample[0].get(sample[1]) is not sample[2]):
            self.move_states()
        elif self.unit is not None and any([backend.moved for backend in self.unit.backends]):
            self.drop_backends()
        unit = self._build_unit()
        self.drop_stale_corrections(step_begins=True)
        return unit

    def _build_unit(self) -> StepUnit:
        """The present unit; builds one if there is none."""
        if self.unit is None:
            backends, self._choices = build_backends(
                self.live.values(), state=self.state, name=self.backend, pipelines=self.pipelines
            )
            for backend in backends:
                backend.graphs &= self.graphs
            checked = {live for backend in backends if not backend.excludes_nonfinite for live in backend.blocks}
            self.unit = StepUnit(
                backends=backends,
                checked_params={slot.param: slot.name for live in checked for slot in live.slots},
                prepares=[backend.prepare for backend in backends if isinstance(backend, FusedBackend)],
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
    def choices(self) -> dict[str, BackendChoice]:
        """Block -> the backend that steps it, and why not another."""
        self._build_unit()
        return self._choices

    def refresh(self, param_groups: list[dict[str, Any]]) -> None:
        """To be called after blocks, states or groups changed: the next step builds new backends."""
        self.drop_backends()
        self._gather_host_slabs()
        self._assign_tuned_options(num_groups=len(param_groups))
        self.params_by_group = [list(group["params"]) for group in param_groups]
        self.frozen = [p for group in self.params_by_group for p in group if p not in self.names]
        slots = [slot for live in self.live.values() for slot in live.slots] if self.local_params else []
        self.slots_without_rows = [slot for slot in slots if slot.counts_steps and not slot.param.numel()]

    def drop_backends(self) -> None:
        """Drops all units and staging buffers. Waits until no copy of states is on its way."""
        self.synchronize()
        self._save_nonfinite_counts()  # backends that go take what they have counted with them
        self.unit = self.sample_state = self._pipelines = None
        self._backward_units, self.step_groups = {}, {}

    def _save_nonfinite_counts(self) -> None:
        """Keeps the counts of non-finite elements of backends that are about to be dropped."""
        self._unreported_nonfinite |= new_nonfinite(self.all_backends, wait=True)

    def _gather_host_slabs(self) -> None:
        """Gathers states of host-placed blocks in the arena, in the order in which they are stepped."""
        on_cpu = [live for live in transfer_order(self.live.values()) if live.slots[0].state_device.type == "cpu"]
        if self.arena.gather(on_cpu, state=self.state):
            self.drop_backends()

    def _assign_tuned_options(self, *, num_groups: int) -> None:
        """Gives tuned slots the index of their `Options` in a step, one for all slots of a group with one tuning."""
        slots = [slot for live in self.live.values() for slot in live.slots if slot.tuned is not None]
        tunings = {(slot.group, slot.tuned): slot.tuned for slot in slots}
        self.tuned_options = [(group, tuned) for (group, _), tuned in tunings.items() if tuned is not None]
        indices = {key: num_groups + index for index, key in enumerate(tunings)}
        for slot in slots:
            slot.options_index = indices[slot.group, slot.tuned]

    def retune(self, tuning: Tuning | None, *, param_groups: list[dict[str, Any]]) -> None:
        """Gives every block the learning rates and betas of `tuning`; None gives those of the groups."""
        self.tuning = tuning
        for live in self.live.values():
            tuned = None if tuning is None else tuning.of(live.block, rule=live.spec.rule)
            for slot in live.slots:
                slot.tuned, slot.options_index = tuned, slot.group
        self.refresh(param_groups)

    def move_states(self) -> None:
        """Moves states to their parameters' device, after either was moved. Raises BadInputError if parameters were
        sharded after the optimizer was built."""
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
        """Moves the block's states into slabs on the device where they are kept, unless they lie so already."""
        states = pack_states(live.slots, [self.state[slot.param] for slot in live.slots])
        for slot, state in zip(live.slots, states, strict=True):
            if "step" in state:
                state["step"] = state["step"].cpu()
            self.set_state(slot, state)

    # -- units that are stepped in backward -------------------------------------------------------------------------

    def backward_unit(self, names: tuple[str, ...]) -> StepUnit:
        """The StepUnit of some blocks, on the backend that steps them in `unit` too, which must be one for all."""
        unit = self._backward_units.get(names)
        if unit is not None and not unit.backends[0].moved:
            return unit
        if unit is not None:
            self._save_nonfinite_counts()
        lives = [self.live[name] for name in names]
        backend = build_backward_backend(
            lives, state=self.state, backend=self.choices[names[0]].backend, pipeline=self.pipeline_of(lives[0])
        )
        slots = () if backend.excludes_nonfinite else [slot for live in lives for slot in live.slots]
        unit = StepUnit(backends=[backend], checked_params={slot.param: slot.name for slot in slots})
        self._backward_units[names] = unit
        return unit

    def regroup(self, groups: Sequence[tuple[str, ...]]) -> None:
        """From now on backward steps the blocks of each group together. Other units, whose counts states show, go."""
        self._save_nonfinite_counts()
        self._backward_units = {}
        self.step_groups = {name: group for group in groups for name in group}

    def can_step_together(self, lives: Sequence[LiveBlock]) -> bool:
        """True if one unit can step these blocks: all have one backend, and none is host-placed."""
        one_backend = len({self.choices[live.block.name].backend for live in lives}) == 1
        return one_backend and all(self.pipeline_of(live) is None for live in lives)

    @property
    def all_backends(self) -> StepUnit:
        """All present backends, those of backward units too, to be asked for the non-finite elements they found."""
        units = [*filter(None, [self.unit]), *self._backward_units.values()]
        backends = [backend for unit in units for backend in unit.backends]
        return StepUnit(backends=backends, checked_params={}, unreported_nonfinite=self._unreported_nonfinite)

    # -- gradients of sharded parameters ----------------------------------------------------------------------------

    def set_local_gradients(self) -> None:
        """Gives local parameters the gradients of their sharded ones, and the data of those that were moved. Each pass
        goes over all tensors with one C function, because the device waits meanwhile."""
        local_params = [local for local, _ in self.local_params.values()]
        shards = list(map(_LOCAL_TENSOR, self.local_params))
        if list(map(_DATA_PTR, shards)) != list(map(_DATA_PTR, local_params)):
            for local, shard in zip(local_params, shards, strict=True):
                local.grad = None
                local.data = shard.detach()
            self.drop_backends()
        for local, grad in zip(local_params, map(_GRAD, self.local_params), strict=True):
            local.grad = getattr(grad, "_local_tensor", grad)

    def drop_local_gradients(self) -> None:
        """Drops the local parameters' gradients, so that whoever drops a parameter's gradient frees it."""
        for local, _ in self.local_params.values():
            local.grad = None

    # -- corrections of split weights -------------------------------------------------------------------------------

    def drop_stale_corrections(self, *, step_begins: bool = False) -> None:
        """Zeroes the corrections of split weights whose checksum is another (versions do not tell: writing to `.data`
        changes none). `step_begins`: a step changes the weights, so checksums are forgotten too."""
        if not self.may_be_overwritten:
            return
        for slot in (slot for live in self.live.values() for slot in live.slots):
            if slot.weight_checksum is None or slot.param.dtype is not torch.bfloat16 or slot.param.is_meta:
                continue  # `build_backends` refuses a parameter that was cast
            if weights.checksum(slot.param) != slot.weight_checksum:
                with torch.no_grad():
                    self.state[slot.param][weights.CORRECTION].zero_()
            if step_begins:
                slot.weight_checksum = None
        self.may_be_overwritten = not step_begins

    def checksum_weights(self) -> None:
        """Takes checksums of split weights before others may write to them, for the next step to tell. Before the first
        step, after a migration and after loading there are those taken with corrections."""
        if self.may_be_overwritten:
            return
        for slot in (slot for live in self.live.values() for slot in live.slots):
            if weights.CORRECTION in self.state[slot.param] and slot.param.dtype is torch.bfloat16:
                slot.weight_checksum = weights.checksum(slot.param)
        self.may_be_overwritten = True

    # -- states on the host ---------------------------------------------------------------------------------------

    @property
    def pipelines(self) -> list[StagingPipeline]:
        """The buffers through which host-placed blocks pass to be stepped, built when first asked for."""
        if self._pipelines is None:
            self._pipelines = build_pipelines(self.host_blocks(), home=self.state)
        return self._pipelines

    def pipeline_of(self, live: LiveBlock) -> StagingPipeline | None:
        """None if the block is not placed on the host, or has no elements."""
        return next((pipeline for pipeline in self.pipelines if live in pipeline.blocks), None)

    def host_blocks(self) -> list[LiveBlock]:
        """Host-placed blocks in the order in which they are stepped."""
        last, order = len(self._gradient_order), self._gradient_order
        blocks = transfer_order(self.live.values())
        return sorted(blocks, key=lambda live: max(order.get(slot.param, last) for slot in live.slots))

    def reorder_host_blocks(self, params: Sequence[Tensor]) -> None:
        """Orders host-placed blocks by when their gradients are final, the order of `params`: in another one a buffer
        would wait for a late block, and blocks that overtake it would be fetched again."""
        before = self.host_blocks()
        self._gradient_order = {param: index for index, param in enumerate(params)}
        if self.host_blocks() != before:
            self.drop_backends()

    def join(self) -> None:
        """Ends a step: work launched afterwards sees the new weights."""
        for pipeline in self._pipelines or ():
            pipeline.join()

    def synchronize(self) -> None:
        """Waits until all states are where they are kept. To be called before anybody reads them."""
        for pipeline in self._pipelines or ():
            pipeline.synchronize()

    def synchronized_states(self) -> Mapping[Tensor, State]:
        """Parameter -> its state where it is kept. Waits for corrections that are being copied to the host."""
        if any(live.on_host and WEIGHTS[live.spec.weights].correction_bytes for live in self.live.values()):
            self.synchronize()
        return self.state

    @contextmanager
    def states_on_device(self, live: LiveBlock, *, write_back: bool = True) -> Iterator[None]:
        """Inside, a host-placed block's states are on the device; `write_back` copies them back unless replaced."""
        if not live.on_host:
            yield
            return
        self.synchronize()
        host_states = [self.state[slot.param] for slot in live.slots]
        device_states = allocate(live.slots, at_home=False)
        for slot, on_host, on_device in zip(live.slots, host_states, device_states, strict=True):
            for key, value in on_host.items():
                if key == "step":
                    on_device[key] = value
                else:
                    on_device[key].copy_(value)
            self.state[slot.param] = on_device
        try:
            yield
        finally:
            for slot, on_host, on_device in zip(live.slots, host_states, device_states, strict=True):
                if self.state[slot.param] is on_device:
                    self.state[slot.param] = on_host
                    for key, value in on_host.items() if write_back else ():
                        value.copy_(on_device[key])
            for pipeline in self._pipelines or () if write_back else ():
                pipeline.invalidate()

    # -- bytes -----------------------------------------------------------------------------------------------------

    def block_bytes(self, live: LiveBlock) -> int:
        """Live bytes of a block's state, its matching state included, on its parameters' device."""
        match = [live.match] if live.match is not None else []
        if live.on_host:
            return tensor_bytes(match)
        return self._step_bytes(live) + tensor_bytes([*self._slab_tensors(live), *match])

    def block_host_bytes(self, live: LiveBlock) -> int:
        """Live bytes of a host-placed block's state on the host; 0 for other blocks."""
        if not live.on_host:
            return 0
        return self._step_bytes(live) + sum(aligned(value.nbytes) for value in self._slab_tensors(live))

    def _slab_tensors(self, live: LiveBlock) -> list[Tensor]:
        return [self.state[slot.param][tensor.key] for slot in live.slots for tensor in slot.tensors]

    def _step_bytes(self, live: LiveBlock) -> int:
        """Bytes of the step counts themselves, which may be views of a tensor with the counts of all blocks."""
        states = [self.state[slot.param] for slot in live.slots]
        return sum(state["step"].nbytes for state in states if "step" in state)

    # -- copies ----------------------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        """Leaves the states out, which `adopt` puts into the copy. Raises BadInputError if parameters are sharded."""
        if self.local_params:
            raise refusal("sharded_copy")
        self.drop_backends()
        return {**self.__dict__, "state": {}, "torch_state": {}, "arena": HostArena()}

    def adopt(self, torch_state: dict[Tensor, State]) -> None:
        """Takes the states of a copied optimizer, and packs them into slabs and the arena."""
        self.torch_state, self.state = torch_state, dict(torch_state)
        for live in self.live.values():
            self.pack(live)
        self._gather_host_slabs()


def _fill_param(slot: Slot, state: State, *, values: Tensor | None) -> None:
    """Fills a parameter in its spec's weights format from `values`, or from its own if these are None."""
    if slot.weights != "native":
        if values is None:
            dtype = weights.dtype_of(slot.weights, info=slot.info)
            values = weights.replace_data_(slot.param, dtype=dtype, device=slot.param.device)
        weights.store_in_pieces_(slot.param, state, values, weights=slot.weights, name=slot.name)
        if weights.CORRECTION in state and not slot.param.is_meta:
            slot.weight_checksum = weights.checksum(slot.param)
    elif values is not None:
        slot.param.detach().copy_(values)


def check_new_blocks(lives: Sequence[LiveBlock], *, device: torch.device | None = None) -> None:
    """Raises BadInputError if blocks cannot keep their weights or be host-placed as their specs say, or host memory is
    short. `device`: where parameters will be."""
    refuse_casts(lives)
    refuse_averages(lives)
    host_blocks = transfer_order(lives)
    for live in host_blocks:
        devices = sorted({str(device or slot.param.device) for slot in live.slots})
        if len(devices) > 1:
            raise BadInputError(
                f"block {live.block.name} cannot run {live.spec.name}: its parameters are on {', '.join(devices)}, "
                "and the states of a host-placed block pass to one device. Make them two blocks"
            )
    if host_blocks and host_blocks[0].slots[0].param.device.type != "meta":
        check_host_memory(sum(live.slab_bytes for live in host_blocks), what="the states of host-placed blocks")
