"""Which parameters run what: the live blocks of an optimizer, their slots and buckets, and late parameters."""

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from baoc.optim import groups, matching, weights
from baoc.optim.backends import Backend, Choice, build_alone, build_backends
from baoc.optim.state import LiveBlock, State, allocate, make_slot, new_match, packed, tensor_bytes
from baoc.rules import RULES
from baoc.types import Block, OptimizerSpec, ParamInfo

if TYPE_CHECKING:
    from baoc.optim.checkpoint import Saved

log = logging.getLogger(__name__)
FALLBACK = "adamw"  # what a parameter that comes late runs, unless one spec was given for all


@dataclass(frozen=True, slots=True, kw_only=True)
class Alone:
    """A block that is stepped by itself, as gradient release does it; to the guard what the whole roster is else."""

    live: LiveBlock
    backend: Backend
    guarded: Mapping[Tensor, str]

    @property
    def marking(self) -> list[Backend]:
        return [self.backend] if self.backend.excludes_nonfinite else []

    def forget_marks(self) -> None:
        self.backend.forget_marks()

    def new_bad(self, *, wait: bool) -> dict[str, int]:
        return self.backend.new_bad(wait=wait)


class Roster:
    """Live blocks over `state` (the optimizer's own dict: parameter -> its tensors).

    `names` maps every parameter that has state to its name, `frozen` holds the others, and `backends` is what a step
    goes through: built when first asked for, and anew after `refresh`. Whoever replaces a tensor of the state, a match,
    or a parameter's data calls that, because backends may hold addresses; copies come without backends.
    """

    def __init__(
        self,
        state: dict[Tensor, State],
        *,
        backend: str,
        target_rms: Mapping[str, float],
        matched_by: matching.Matching = "rms",
    ):
        self.state = state
        self.matched_by = matched_by
        self.backend = backend
        self.target_rms = dict(target_rms)
        self.live: dict[str, LiveBlock] = {}
        self.names: dict[Tensor, str] = {}
        self.frozen: list[Tensor] = []
        self._backends: list[Backend] | None = None
        self._alone: dict[str, Alone] = {}
        self._choices: dict[str, Choice] = {}
        self._guarded: dict[Tensor, str] = {}
        self._unread: dict[str, int] = {}  # what backends that are gone found in gradients
        self.late_spec: str | OptimizerSpec = FALLBACK
        self.placed = False
        self.waiting: Saved | None = None  # states that were loaded of parameters that do not train yet

    def build(self, param_groups: list[dict[str, Any]], *, specs: Any, blocks: Sequence[Block] | None) -> None:
        """Checks blocks and specs against the groups, then allocates every state."""
        if isinstance(specs, str | OptimizerSpec):
            self.late_spec = specs
        where = named_params(param_groups)
        infos = [groups.param_info(n, p, group=g) for n, (p, g) in where.items() if p.requires_grad]
        blocks = [groups.single_block(info) for info in infos] if blocks is None else list(blocks)
        owners = groups.match_blocks(blocks, params={info.name: where[info.name][0] for info in infos})
        blocks = [_as_it_is(block, {name: where[owner][0] for name, owner in owners.items()}) for block in blocks]
        chosen = groups.specs_by_block(specs, blocks=blocks)
        self.names = {where[name][0]: owner for owner, name in owners.items()}
        for group in param_groups:  # tied parameters are called what their block calls them
            pairs = zip(group["params"], group["param_names"], strict=True)
            group["param_names"] = [self.names.get(param, name) for param, name in pairs]
        for block in blocks:
            self.enlist(block, spec=chosen[block.name], param_groups=param_groups)
        self.refresh(param_groups)

    def enlist(self, block: Block, *, spec: OptimizerSpec, param_groups: list[dict[str, Any]]) -> None:
        """A block before its first step, with its state."""
        live = make_live(block, spec=spec, param_groups=param_groups)
        for slot, state in zip(live.slots, allocate(live.slots), strict=True):
            self.state[slot.param] = state
            if slot.weights != "native":
                values, dtype = weights.master(slot.param, {}), weights.dtype_of(slot.weights, info=slot.info)
                weights.adopt_(slot.param, state, values, weights=slot.weights, name=slot.name, dtype=dtype)
                slot.adopted = slot.param._version
        self.add_match(live, target=self.target(block.name))
        self.live[block.name] = live

    def target(self, block: str) -> float:
        """The update RMS that AdamW is taken to have on a block where none was measured."""
        return self.target_rms.get(block, matching.DEFAULT_TARGET)

    def add_match(self, live: LiveBlock, *, target: float) -> None:
        """Gives a matched block its matching state, own RMS still to be measured; `target` is AdamW's RMS."""
        if live.matched and live.slots:
            live.match = new_match(self.own_target(live, target=target), device=live.slots[0].param.device)

    def own_target(self, live: LiveBlock, *, target: float) -> float:
        """The RMS that a block's update is scaled to, where AdamW's on it is `target`."""
        return matching.UNAVERAGED_TARGET if self.has_own_target(live) else target

    def has_own_target(self, live: LiveBlock) -> bool:
        """Whether the block's RMS tells nothing of AdamW's: matched by displacement, its rule averages nothing."""
        return self.matched_by == "displacement" and live.matched and not matching.averages(live.rule.info)

    def __getstate__(self) -> dict[str, Any]:
        """Without the states: whoever owns them puts them back into the copy, and packs them again."""
        self._drop_backends()
        return {**self.__dict__, "state": {}}

    def refresh(self, param_groups: list[dict[str, Any]]) -> None:
        """To be called after anything changed: what a step goes through is made anew."""
        self._drop_backends()
        self.frozen = [p for group in param_groups for p in group["params"] if p not in self.names]

    def _drop_backends(self) -> None:
        self._unread = self.new_bad(wait=True)
        self._backends, self._alone = None, {}

    def ready(self) -> list[Backend]:
        """The backends, for parameters as they are now."""
        if not self.placed:
            self.place()
        elif any(backend.moved for backend in self._backends or ()):
            self._drop_backends()
        return self.backends

    @property
    def backends(self) -> list[Backend]:
        if self._backends is None:
            self._backends, self._choices = build_backends(self.live.values(), state=self.state, name=self.backend)
            looking = {live for b in self._backends if not b.excludes_nonfinite for k in b.buckets for live in k.blocks}
            self._guarded = {slot.param: self.names[slot.param] for live in looking for slot in live.slots}
        return self._backends

    def alone(self, name: str) -> Alone:
        """What steps one block by itself, on the backend that steps it among all others too."""
        unit = self._alone.get(name)
        if unit is not None and not unit.backend.moved:
            return unit
        if unit is not None:
            self._unread = self.new_bad(wait=True)
        live = self.live[name]
        backend = build_alone(live, state=self.state, backend=self.choices[name].backend)
        guarded = {} if backend.excludes_nonfinite else {slot.param: self.names[slot.param] for slot in live.slots}
        self._alone[name] = unit = Alone(live=live, backend=backend, guarded=guarded)
        return unit

    @property
    def choices(self) -> dict[str, Choice]:
        """Block -> the backend that steps it, and why not another."""
        assert self.backends is not None
        return self._choices

    # -- non-finite gradients -------------------------------------------------------------------------------------

    @property
    def guarded(self) -> dict[Tensor, str]:
        """Parameter -> name, of those whose non-finite gradients somebody has to find before the step."""
        assert self.backends is not None
        return self._guarded

    @property
    def marking(self) -> list[Backend]:
        """Backends that exclude non-finite elements themselves."""
        return [backend for backend in self.backends if backend.excludes_nonfinite]

    def forget_marks(self) -> None:
        for backend in self._built():
            backend.forget_marks()

    @property
    def holds_addresses(self) -> bool:
        """True while there are backends, which may keep tensors alive that others have put away."""
        return bool(self._built())

    def _built(self) -> list[Backend]:
        return [*(self._backends or ()), *(unit.backend for unit in self._alone.values())]

    def new_bad(self, *, wait: bool) -> dict[str, int]:
        """Parameter -> non-finite elements that backends found since this was last asked."""
        found, self._unread = self._unread, {}
        for backend in self._built():
            for name, count in backend.new_bad(wait=wait).items():
                found[name] = found.get(name, 0) + count
        return found

    def admit(self, infos: Iterable[ParamInfo], *, param_groups: list[dict[str, Any]]) -> None:
        """Parameters that no plan knows: each becomes a block with the spec given for all, else fp32 AdamW."""
        where = named_params(param_groups)
        spec = groups.to_spec(self.late_spec)
        late = [(info, self._late_block(info)) for info in infos]
        for info, block in late:  # all are looked at before any gets state
            groups.check_param(where[info.name][0], name=info.name)
            groups.check_applies(spec, block=block)
        for info, block in late:
            self.names[where[info.name][0]] = info.name
            self.enlist(block, spec=spec, param_groups=param_groups)
            log.info("%s came after the plan was made: it runs %s", info.name, spec.name)
        self.refresh(param_groups)

    def _late_block(self, info: ParamInfo) -> Block:
        """A block of its own, under a name that no block has."""
        block = groups.single_block(info)
        while block.name in self.live:
            block = replace(block, name=f"{block.name}_late")
        return block

    def admit_thawed(self, param_groups: list[dict[str, Any]]) -> None:
        """Admits parameters that were frozen when the optimizer was built and have a gradient now."""
        late = {param for param in self.frozen if param.grad is not None}
        if late:
            where = named_params(param_groups).items()
            self.admit(
                [groups.param_info(name, param, group=group) for name, (param, group) in where if param in late],
                param_groups=param_groups,
            )

    def place(self) -> None:
        """Moves states to their parameters' device, for a model that was moved after the optimizer was built."""
        for live in self.live.values():
            self.pack(live)
            if live.match is not None:
                live.match = live.match.to(live.slots[0].param.device)
        self._drop_backends()
        self.placed = True

    def pack(self, live: LiveBlock) -> None:
        """Puts the block's states into slabs on their parameters' devices, where they do not lie so already."""
        states = packed(live.slots, [self.state[slot.param] for slot in live.slots])
        for slot, state in zip(live.slots, states, strict=True):
            slot.on_cpu = slot.param.device.type == "cpu"
            if "step" in state:
                state["step"] = state["step"].cpu()
            self.state[slot.param] = state

    def block_bytes(self, live: LiveBlock) -> int:
        """Live bytes of a block's state, its matching state included."""
        states = [self.state[slot.param].items() for slot in live.slots]
        tensors = [value for state in states for key, value in state if key != "step"]
        # Steps may be views of all of a backend's.
        steps = sum(value.nbytes for state in states for key, value in state if key == "step")
        return steps + tensor_bytes([*tensors, *([live.match] if live.match is not None else [])])


def _as_it_is(block: Block, params: Mapping[str, Tensor]) -> Block:
    """The block with the types that its parameters have now: they may have been cast since they were described."""
    dtypes = {info.name: str(params[info.name].dtype).removeprefix("torch.") for info in block.params}
    if all(info.dtype == dtypes[info.name] for info in block.params):
        return block
    return replace(block, params=tuple(replace(info, dtype=dtypes[info.name]) for info in block.params))


def named_params(param_groups: list[dict[str, Any]]) -> dict[str, tuple[Tensor, int]]:
    """Name -> parameter and index of its group, frozen ones included."""
    return {
        name: (param, index)
        for index, group in enumerate(param_groups)
        for name, param in zip(group["param_names"], group["params"], strict=True)
    }


def make_live(block: Block, *, spec: OptimizerSpec, param_groups: list[dict[str, Any]]) -> LiveBlock:
    """A block with its slots, and no state yet."""
    where = named_params(param_groups)
    slots = [
        make_slot(info.name, where[info.name][0], info=info, group=where[info.name][1], spec=spec)
        for info in block.params
    ]
    return LiveBlock(block=block, spec=spec, rule=RULES[spec.rule], slots=slots)
