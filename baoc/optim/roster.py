"""Which parameters run what: the live blocks of an optimizer, their slots and buckets, and late parameters."""

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from baoc.optim import groups, matching
from baoc.optim.backends import Backend, backend_for
from baoc.optim.state import Bucket, LiveBlock, State, allocate, make_slot, new_match, tensor_bytes, to_buckets
from baoc.rules import RULES
from baoc.types import Block, OptimizerSpec, ParamInfo

log = logging.getLogger(__name__)
FALLBACK = "adamw"  # what a parameter that comes late runs, unless one spec was given for all


class Roster:
    """Live blocks over `state` (the optimizer's own dict: parameter -> its tensors).

    `names` maps every parameter that has state to its name, `frozen` holds the others, and `steppers` is what a step
    goes through.
    """

    def __init__(self, state: dict[Tensor, State], *, backend: str, target_rms: Mapping[str, float]):
        self.state = state
        self.backend = backend
        self.target_rms = dict(target_rms)
        self.live: dict[str, LiveBlock] = {}
        self.names: dict[Tensor, str] = {}
        self.frozen: list[Tensor] = []
        self.steppers: list[tuple[Bucket, Backend]] = []
        self.late_spec: str | OptimizerSpec = FALLBACK
        self.placed = False

    def build(self, param_groups: list[dict[str, Any]], *, specs: Any, blocks: Sequence[Block] | None) -> None:
        """Checks blocks and specs against the groups, then allocates every state."""
        if isinstance(specs, str | OptimizerSpec):
            self.late_spec = specs
        where = named_params(param_groups)
        infos = [groups.param_info(n, p, group=g) for n, (p, g) in where.items() if p.requires_grad]
        blocks = [groups.single_block(info) for info in infos] if blocks is None else list(blocks)
        owners = groups.match_blocks(blocks, params={info.name: where[info.name][0] for info in infos})
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
        for slot in live.slots:
            self.state[slot.param] = allocate(slot)
        self.add_match(live, target=self.target(block.name))
        self.live[block.name] = live

    def target(self, block: str) -> float:
        """The update RMS that AdamW is taken to have on a block where none was measured."""
        return self.target_rms.get(block, matching.DEFAULT_TARGET)

    def add_match(self, live: LiveBlock, *, target: float) -> None:
        """Gives a matched block its matching state, own RMS still to be measured."""
        if live.matched and live.slots:
            live.match = new_match(target, device=live.slots[0].param.device)

    def refresh(self, param_groups: list[dict[str, Any]]) -> None:
        """What a step goes through, made anew after anything changed."""
        buckets = to_buckets(self.live.values())
        self.steppers = [(bucket, backend_for(bucket, name=self.backend)) for bucket in buckets]
        self.frozen = [p for group in param_groups for p in group["params"] if p not in self.names]

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
            for slot in live.slots:
                device = slot.param.device
                slot.on_cpu = device.type == "cpu"
                state = self.state[slot.param]
                for key, value in state.items():
                    state[key] = value.cpu() if key == "step" else value.to(device)
            if live.match is not None:
                live.match = live.match.to(live.slots[0].param.device)
        self.placed = True

    def block_bytes(self, live: LiveBlock) -> int:
        """Live bytes of a block's state, its matching state included."""
        tensors = [value for slot in live.slots for value in self.state[slot.param].values()]
        return tensor_bytes([*tensors, *([live.match] if live.match is not None else [])])


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
