"""Filling a live optimizer from a checkpoint: by name, bit for bit where specs agree, converted where they do not."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from baoc.catalogue import SPECS
from baoc.errors import CheckpointError
from baoc.optim import groups, migration
from baoc.optim.checkpoint import Saved
from baoc.optim.migration import Fates
from baoc.optim.roster import Roster
from baoc.optim.state import LiveBlock, Slot, State, allocate, make_slot, new_match
from baoc.types import BlockMove

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """What loading did beyond copying: blocks converted to this plan's specs, and names on one side only."""

    moves: tuple[BlockMove, ...] = ()
    new_names: tuple[str, ...] = ()  # trained here, not in the checkpoint: they start afresh
    unknown_names: tuple[str, ...] = ()  # in the checkpoint, not trained here: left out


def load(
    saved: Saved, *, roster: Roster, param_groups: list[dict[str, Any]], checked: Callable[[], object]
) -> LoadReport:
    """Checks everything, then fills the live states, converting where the plans differ. Nothing is aliased.

    `checked` is called between the two and may change the plan.
    """
    aliases = {alias: p.name for live in roster.live.values() for p in live.block.params for alias in p.aliases}
    saved_name = {aliases.get(name, name): name for name in saved.states}
    sources: dict[str, Slot] = {}
    for live in roster.live.values():
        for slot in live.slots:
            if slot.name in saved_name:
                sources[slot.name] = _check(slot, saved=saved, name=saved_name[slot.name])
    settings = _match_groups(saved, param_groups=param_groups, aliases=aliases)
    checked()
    for group, new in zip(param_groups, settings, strict=True):
        group.update(new)
    moves = []
    for live in roster.live.values():
        states = {slot.name: saved.states[saved_name[slot.name]] for slot in live.slots if slot.name in sources}
        move = _load_block(live, states=states, sources=sources, saved=saved, roster=roster, groups=param_groups)
        if move is not None:
            moves.append(move)
    report = LoadReport(
        moves=tuple(moves),
        new_names=tuple(name for name in roster.names.values() if name not in sources),
        unknown_names=tuple(name for name in saved_name if name not in sources),
    )
    _log(report)
    return report


def _check(slot: Slot, *, saved: Saved, name: str) -> Slot:
    """The slot as it was when saved. Raises CheckpointError where the saved tensors are not what its spec keeps."""
    spec = saved.specs.get(name)
    if spec is None:
        raise CheckpointError(f"the checkpoint has a state of {name} but no block for it: it is damaged, use another")
    source = make_slot(slot.name, slot.param, info=slot.info, group=slot.group, spec=spec)
    wanted = allocate(make_slot(slot.name, slot.param.to("meta"), info=slot.info, group=slot.group, spec=spec))
    for key, like in wanted.items():
        value = saved.states[name].get(key)
        if not isinstance(value, Tensor) or value.shape != like.shape:
            raise CheckpointError(
                f"state {key} of {name} is {'missing' if value is None else tuple(getattr(value, 'shape', ()))} in the "
                f"checkpoint, {spec.name} keeps {tuple(like.shape)}: it belongs to another model, or is damaged"
            )
        lenient = spec == SPECS["adamw"] and value.is_floating_point()  # torch keeps bf16 states for bf16 weights
        if value.dtype != like.dtype and not lenient:
            raise CheckpointError(
                f"state {key} of {name} is {value.dtype} in the checkpoint, {spec.name} keeps {like.dtype}: it is "
                "damaged, use another"
            )
    return source


def _match_groups(
    saved: Saved, *, param_groups: list[dict[str, Any]], aliases: Mapping[str, str]
) -> list[dict[str, Any]]:
    """Saved settings for each group, by the names in it; none for a group that the checkpoint does not know."""
    origin = {aliases.get(n, n): index for index, (names, _) in enumerate(saved.groups) for n in names}
    found = []
    for position, group in enumerate(param_groups):
        indices = sorted({origin[name] for name in group["param_names"] if name in origin})
        settings = [dict(saved.groups[index][1]) for index in indices]
        if any(other != settings[0] for other in settings[1:]):
            raise CheckpointError(
                f"parameter group {position} holds parameters that the checkpoint has in groups {indices}, with "
                "different settings: build the optimizer with the groups it was saved with"
            )
        new = {key: groups.plain(value) for key, value in settings[0].items()} if settings else {}
        groups.check_settings({**group, **new})
        if "betas" in new:
            new["betas"] = tuple(float(beta) for beta in new["betas"])
        found.append(new)
    return found


def _load_block(
    live: LiveBlock,
    *,
    states: Mapping[str, Mapping[str, Tensor]],
    sources: Mapping[str, Slot],
    saved: Saved,
    roster: Roster,
    groups: list[dict[str, Any]],
) -> BlockMove | None:
    """Fills one block; returns what was converted, if anything."""
    fates, rms, origins = Fates(), [], set()
    for slot in live.slots:
        if slot.name not in states:
            roster.state[slot.param] = allocate(slot)
            continue
        source = sources[slot.name]
        old = _copy(states[slot.name], slot=source)
        spec = saved.specs.get(slot.name, SPECS["adamw"])
        if spec == live.spec:
            roster.state[slot.param] = old
            continue
        origins.add(spec.name)
        if live.matched:
            before = LiveBlock(block=live.block, spec=spec, rule=source.rule, slots=[source])
            rms.append(migration.last_rms(before, state={slot.param: old}, param_groups=groups))
        roster.state[slot.param] = migration.convert(
            source, slot, old, betas=groups[slot.group]["betas"], moments=None, fates=fates
        )
    _load_match(live, saved=saved, roster=roster, converted=bool(origins), rms=[r for r in rms if r])
    if not origins:
        return None
    return BlockMove(
        block=live.block.name,
        source=", ".join(sorted(origins)),
        target=live.spec.name,
        kept=fates.how,
        conversion_error=fates.relative_errors(),
        bytes_after=roster.block_bytes(live),
        why="the checkpoint was saved under another plan",
    )


def _copy(state: Mapping[str, Tensor], *, slot: Slot) -> State:
    """Saved tensors as the slot keeps them: own memory, dtype, device and strides."""
    copy = allocate(slot)
    for key, value in copy.items():
        value.copy_(state[key])
    return copy


def _load_match(live: LiveBlock, *, saved: Saved, roster: Roster, converted: bool, rms: list[float]) -> None:
    """The block's matching state; where it is another block than when saved, its target and a new measurement."""
    live.applied, live.fresh = None, True
    if not live.matched or not live.slots:
        return
    device = live.slots[0].param.device
    names, match = saved.matches.get(live.block.name, ((), None))
    if match is not None and not converted and names == tuple(slot.name for slot in live.slots):
        live.match = match.to(device=device, dtype=torch.float32, copy=True)
        live.fresh = bool(match[1] < 0)
        return
    targets = [m[0].item() for ns, m in saved.matches.values() if not {s.name for s in live.slots}.isdisjoint(ns)]
    known = targets or rms
    mean = (sum(r * r for r in known) / len(known)) ** 0.5 if known else roster.target(live.block.name)
    live.match = new_match(mean, device=device)


def _log(report: LoadReport) -> None:
    for move in report.moves:
        errors = ", ".join(f"{name} {error:.1e}" for name, error in move.conversion_error.items()) or "none"
        log.info("block %s: %s -> %s, relative error %s", move.block, move.source, move.target, errors)
    if report.new_names:
        log.warning("not in the checkpoint, so they start afresh: %s", ", ".join(report.new_names))
    if report.unknown_names:
        log.warning("in the checkpoint but not trained here, so left out: %s", ", ".join(report.unknown_names))
