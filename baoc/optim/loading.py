"""Filling a live optimizer from a checkpoint: by name, bit for bit where specs agree, converted where they do not."""

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from baoc.core.catalogue import SPECS
from baoc.errors import CheckpointError
from baoc.optim import groups, weights
from baoc.optim import migrate as migration
from baoc.optim.checkpoint import stored_alike
from baoc.optim.migrate import ConversionReport
from baoc.optim.registry import BlockRegistry
from baoc.optim.rules import RULES
from baoc.optim.shards import unsharded
from baoc.optim.state import (
    FIRST_BETAS,
    LiveBlock,
    ParsedCheckpoint,
    Slot,
    State,
    allocate,
    per_column_keys,
    row_first_shape,
    slot_with_spec,
    unsharded_slot,
)
from baoc.optim.weights import merge_weights
from baoc.parallel import unwrapped_name
from baoc.planning.candidates import shards_cut_rows
from baoc.types import BlockMove, OptimizerSpec, Placement, StateKind

log = logging.getLogger(__name__)
MAX_FP32_STEPS = 2**24  # where a count in fp32 ends


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """The conversions of a load to this plan's specs, and the names that one side lacks."""

    moves: tuple[BlockMove, ...] = ()
    new_names: tuple[str, ...] = ()  # trained here, not in the checkpoint: they start afresh
    whole_names: tuple[str, ...] = ()  # whose weights the checkpoint's model has in all of their bits
    waiting_names: tuple[str, ...] = ()  # in the checkpoint, frozen here: their states come back when they are thawed
    unknown_names: tuple[str, ...] = ()  # in the checkpoint, not here: left out, unless a parameter of that name comes


def load(
    saved: ParsedCheckpoint,
    *,
    registry: BlockRegistry,
    param_groups: list[dict[str, Any]],
    checked: Callable[[], object],
) -> LoadReport:
    """Checks everything, then fills the live states, converting where the plans differ. Nothing is aliased.

    `checked` is called between the two and may change the plan.
    """
    aliases = {alias: p.name for live in registry.live.values() for p in live.block.params for alias in p.aliases}
    saved = saved.renamed(aliases)
    here = {name for group in param_groups for name in group["param_names"]}
    bare = {unwrapped_name(name): name for name in here if name not in saved.states}
    rewrapped = {name: bare[own] for name in saved.states if name not in here and (own := unwrapped_name(name)) in bare}
    saved = saved.renamed(rewrapped)  # what only a wrapper of the model calls otherwise
    saved = saved.renamed(_by_position(saved, param_groups=param_groups))
    _check_known(saved, param_groups=param_groups)
    given, slots = saved, _slots_in(saved, registry=registry)
    saved, sources = _fitted(given, slots=slots)
    settings = _match_groups(saved, param_groups=param_groups)
    checked()
    if (now := _slots_in(saved, registry=registry)) != slots:
        slots = now
        saved, sources = _fitted(given, slots=slots)
    for group, new in zip(param_groups, settings, strict=True):
        group.update(new)
    saved = _apart(saved, registry=registry, slots=slots)
    registry.drop_stale_corrections()
    moves = []
    for live in registry.live.values():
        with registry.states_on_device(live):
            move = _load_block(live, sources=sources, saved=saved, registry=registry, groups=param_groups)
        if move is not None:
            moves.append(move)
    left = [name for name in saved.states if name not in sources]
    registry.pending_states = saved.subset([name for name in left if name in saved.specs])
    report = LoadReport(
        moves=tuple(moves),
        new_names=tuple(name for name in registry.names.values() if name not in sources),
        whole_names=tuple(name for name in sources if saved.specs[name].weights == "native"),
        waiting_names=tuple(name for name in left if name in here),
        unknown_names=tuple(name for name in left if name not in here),
    )
    _log(report)
    return report


def _slots_in(saved: ParsedCheckpoint, *, registry: BlockRegistry) -> list[Slot]:
    return [slot for live in registry.live.values() for slot in live.slots if slot.name in saved.states]


def _fitted(saved: ParsedCheckpoint, *, slots: Iterable[Slot]) -> tuple[ParsedCheckpoint, dict[str, Slot]]:
    """The same with the states of `slots` as their specs keep them here: this rank's rows of what all ranks have, or
    the whole where it takes that to convert it, and in the storage that goes with being sharded or not, where the
    checkpoint is of the other kind. And the slots as they were when saved, by name, checked."""
    states = dict(saved.states)
    for slot in slots:
        if (spec := saved.specs.get(slot.name)) is None:
            continue
        source, state = _source(slot, spec=spec), states[slot.name]
        if source.shard is not slot.shard:
            state = {
                key: unsharded(value).cpu() if isinstance(value, Tensor) else value for key, value in state.items()
            }
        states[slot.name] = _fitted_state(source, state, spec=spec)
    saved = replace(saved, states=states)
    return saved, {slot.name: _check(slot, saved=saved) for slot in slots}


def _fitted_state(slot: Slot, given: State, *, spec: OptimizerSpec) -> State:
    there = unsharded_slot(slot, spec=spec, sharded=slot.shard is None)  # as it is on the other side
    here = unsharded_slot(slot, spec=spec, sharded=slot.shard is not None)
    found = dict(given)
    ours, theirs = ({part.key: part for part in side.tensors} for side in (here, there))
    held = {kept.decl: kept for kept in slot.states}
    for kept, other in zip(here.states, there.states, strict=True):
        keys = [key for _, key in other.keys]
        strays = {key for _, key in kept.keys}.difference(keys)
        given_so = all(isinstance(given.get(key), Tensor) and given[key].dtype is theirs[key].dtype for key in keys)
        if kept.codec.info != other.codec.info and strays.isdisjoint(given) and given_so:
            values = other.decode({key: unsharded(given[key]).reshape(theirs[key].shape) for key in keys})
            parts = kept.codec.allocate(kept.shape, values.device)
            kept.codec.encode_(parts, values)
            found |= {key: parts[part] for part, key in held.get(kept.decl, kept).keys}
    alike, rows = per_column_keys(slot), slot.group_param.shape[:1].numel()
    for part in slot.tensors:
        value, shape = found.get(part.key), ours[part.key].shape
        if isinstance(value, Tensor) and tuple(value.shape) in (shape, row_first_shape(shape, rows=rows)):
            shard = None if part.key in alike else slot.shard
            found[part.key] = (
                shard.local_part(value, shape=part.shape) if shard else unsharded(value).reshape(part.shape)
            )
    return found


def _apart(saved: ParsedCheckpoint, *, registry: BlockRegistry, slots: Iterable[Slot]) -> ParsedCheckpoint:
    """The same with copies of corrections that are the live ones: torch.distributed.checkpoint fills a state dict in
    place, and live corrections go where weights were loaded since they were taken in."""
    states = dict(saved.states)
    for slot in slots:
        live, given = (of.get(weights.CORRECTION) for of in (registry.state[slot.param], states[slot.name]))
        if live is not None and given is not None and live.data_ptr() == given.data_ptr():
            states[slot.name] = {**states[slot.name], weights.CORRECTION: given.clone()}
    return replace(saved, states=states)


def _by_position(saved: ParsedCheckpoint, *, param_groups: list[dict[str, Any]]) -> dict[str, str]:
    """Saved name -> name here, as torch tells parameters, where those of one side are made up: by position in groups
    of the same sizes. Empty where every name has its like, and where positions say nothing."""
    theirs = [name for names, _ in saved.groups for name in names]
    ours = [name for group in param_groups for name in group["param_names"]]
    odd, new = set(theirs) - set(ours), set(ours) - set(theirs)
    if (
        not odd
        or not new
        or not (all(map(groups.is_placeholder_name, odd)) or all(map(groups.is_placeholder_name, new)))
    ):
        return {}
    sizes = [len(names) for names, _ in saved.groups], [len(group["param_names"]) for group in param_groups]
    pairs = [pair for pair in zip(theirs, ours, strict=False) if pair[0] != pair[1]]
    if sizes[0] != sizes[1] or any(a not in odd or b not in new for a, b in pairs):
        raise CheckpointError(
            f"the checkpoint has {groups.shorten(theirs)} in groups of {sizes[0]} parameters, this optimizer has "
            f"{groups.shorten(ours)} in groups of {sizes[1]}: without names they are told by position. Build it on the "
            "same parameters in the same groups, or both on named_parameters()"
        )
    return dict(pairs)


def _check_known(saved: ParsedCheckpoint, *, param_groups: list[dict[str, Any]]) -> None:
    """Raises CheckpointError where a group has nothing of the checkpoint, while one of the checkpoint's goes unused."""
    here = {name for group in param_groups for name in group["param_names"]}
    unused = [name for names, _ in saved.groups if here.isdisjoint(names) for name in names]
    there = {name for names, _ in saved.groups for name in names}
    for position, group in enumerate(param_groups):
        if unused and group["param_names"] and there.isdisjoint(group["param_names"]):
            raise CheckpointError(
                f"parameter group {position} has {groups.shorten(group['param_names'])}, of which the checkpoint has "
                f"nothing; it has {groups.shorten(unused)}: build the optimizer on the names that it was saved with (a "
                "prefix such as net. is part of a name), or start afresh"
            )


def load_late(registry: BlockRegistry, *, param_groups: list[dict[str, Any]]) -> None:
    """Gives parameters that came after a checkpoint was loaded the states that it had of them."""
    for live in registry.live.values():
        saved = registry.pending_states
        slots = [slot for slot in live.slots if saved is not None and slot.name in saved.states]
        if saved is None or not slots:
            continue
        names = [slot.name for slot in slots]
        registry.pending_states = saved.subset([name for name in saved.states if name not in names])
        try:
            sources = {slot.name: _check(slot, saved=saved) for slot in slots}
        except CheckpointError as error:
            log.warning("%s starts afresh: %s", ", ".join(names), error)
            continue
        with registry.states_on_device(live):
            _load_block(live, sources=sources, saved=saved, registry=registry, groups=param_groups)
        log.info("%s goes on from the states in the checkpoint", ", ".join(names))


def _check(slot: Slot, *, saved: ParsedCheckpoint) -> Slot:
    """The slot as it was when saved. Raises CheckpointError where the saved tensors are not what its spec keeps."""
    name, spec = slot.name, saved.specs.get(slot.name)
    if spec is None:
        raise CheckpointError(f"the checkpoint has a state of {name} but no block for it: it is damaged, use another")
    source = replace(_source(slot, spec=spec), tuned=saved.tuned.get(slot.name))
    wanted = [(part.key, part.shape, part.dtype) for part in source.tensors]
    if source.counts_steps:
        wanted.append(("step", (), torch.float32))
    for key, shape, dtype in wanted:
        value = saved.states[name].get(key)
        if not isinstance(value, Tensor) or value.shape != shape:
            raise CheckpointError(
                f"state {key} of {name} is {'missing' if value is None else tuple(getattr(value, 'shape', ()))} in the "
                f"checkpoint, {spec.name} keeps {shape}: it belongs to another model, or is damaged"
            )
        lenient = (
            stored_alike(spec, SPECS["adamw"]) and value.is_floating_point()
        )  # torch keeps bf16 states for bf16 weights
        if value.dtype != dtype and not lenient:
            raise CheckpointError(
                f"state {key} of {name} is {value.dtype} in the checkpoint, {spec.name} keeps {dtype}: it is "
                "damaged, use another"
            )
    _check_values(source, saved.states[name])
    return source


def _source(slot: Slot, *, spec: OptimizerSpec) -> Slot:
    """The slot under `spec`, of the whole tensor where one that is cut is converted as a whole: the spec kept what no
    rank has a part of, or its v becomes another by sums over all rows."""
    rule = RULES[spec.rule].info
    as_whole = shards_cut_rows(rule, param=slot.info) or migration.sums_over_all_rows(rule, slot.rule.info)
    if slot.shard is None or not as_whole:
        return slot_with_spec(slot, spec=spec)
    return unsharded_slot(slot, spec=spec, sharded=False, device="cpu")


def _check_values(slot: Slot, state: Mapping[str, Tensor]) -> None:
    """Raises CheckpointError for numbers that no step leaves: NaN and infinities, steps that are no count, and scales
    and squares below zero."""
    squares = {key for kept in slot.states if kept.decl.kind is StateKind.V for _, key in kept.keys}
    for key in (*(part.key for part in slot.tensors), *(["step"] if slot.counts_steps else [])):
        value = state[key].detach()
        if not value.is_floating_point() or not value.numel() or value.is_meta:
            continue
        low, high = (float(end) for end in value.aminmax())  # either is NaN if any element is
        never_below = key in squares or key.endswith(".scale") or key == "step"
        if (
            not isfinite(high - low)
            or (never_below and low < 0)
            or (key == "step" and (low != int(low) or low > MAX_FP32_STEPS))
        ):
            raise CheckpointError(
                f"state {key} of {slot.name} reaches from {low:g} to {high:g} in the checkpoint, which no step of "
                f"{slot.rule.info.name} leaves: it is damaged, use another one"
            )


def _match_groups(saved: ParsedCheckpoint, *, param_groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Saved settings for each group, by the names in it; none for a group that the checkpoint does not know."""
    origin = {name: index for index, (names, _) in enumerate(saved.groups) for name in names}
    found = []
    for position, group in enumerate(param_groups):
        indices = sorted({origin[name] for name in group["param_names"] if name in origin})
        settings = [dict(saved.groups[index][1]) for index in indices]
        if any(other != settings[0] for other in settings[1:]):
            raise CheckpointError(
                f"parameter group {position} holds parameters that the checkpoint has in groups {indices}, with "
                "different settings: build the optimizer with the groups it was saved with"
            )
        new = {key: groups.to_plain(value) for key, value in settings[0].items()} if settings else {}
        groups.check_settings({**group, **new})
        if "betas" in new:
            new["betas"] = tuple(float(beta) for beta in new["betas"])
            if FIRST_BETAS in group:  # those of a checkpoint without it were as no schedule had moved them
                new[FIRST_BETAS] = tuple(new.get(FIRST_BETAS, new["betas"]))
        found.append(new)
    return found


def _load_block(
    live: LiveBlock,
    *,
    sources: Mapping[str, Slot],
    saved: ParsedCheckpoint,
    registry: BlockRegistry,
    groups: list[dict[str, Any]],
) -> BlockMove | None:
    """Fills one block; returns what was converted, if anything."""
    report, rms, origins, held = ConversionReport(), [], set(), 0
    live.unseeded.clear()
    for slot in live.slots:
        state = registry.state[slot.param]
        own = {key: value for key, value in state.items() if key != weights.CORRECTION}
        if slot.name not in sources:
            _zero(own)
            continue
        source, spec, given = sources[slot.name], saved.specs[slot.name], saved.states[slot.name]
        unseeded = slot.name in saved.unseeded
        if spec.placement == Placement.DEVICE:
            held += source.slab_bytes + sum(given[key].nbytes for key in ("step",) if key in given)
        if not stored_alike(spec, live.spec):
            origins.add(spec.name)
        if (spec.rule, spec.storage) == (live.spec.rule, live.spec.storage):
            for key, value in own.items():  # which may be the given one itself
                value.copy_(given[key])
        else:
            (old,) = allocate([source])  # its own dtype, device and strides
            for key, value in old.items():  # first: what is given may be the live one, filled in place
                value.copy_(given[key])
            _zero(own)
            if live.matched:
                before = LiveBlock(block=live.block, spec=spec, rule=source.rule, slots=[source])
                rms.append(migration.last_update_rms(before, state={source.param: old}, param_groups=groups))
            unseeded = migration.convert(
                source,
                old,
                slot,
                state,
                spec=live.spec,
                betas=slot.betas(groups),
                report=report,
                before_first_step=saved.num_steps == 0,
                old_v_initialised=not unseeded,
            )
        if unseeded:
            live.unseeded.add(slot.name)
        correction = given.get(weights.CORRECTION)
        if correction is not None and slot.shard is not None and source.shard is None:
            correction = slot.shard.local_part(correction, shape=slot.param.shape)
        _load_weights(slot, state, kept=spec.weights, correction=correction, report=report)
    _load_match(live, saved=saved, registry=registry, converted=bool(origins), rms=[r for r in rms if r])
    if not origins:
        return None
    return BlockMove(
        block=live.block.name,
        source=", ".join(sorted(origins)),
        target=live.spec.name,
        kept=report.outcomes,
        conversion_error=report.relative_errors(),
        bytes_before=held,
        bytes_after=registry.block_bytes(live),
        why="the checkpoint was saved under another plan",
    )


def _zero(state: State) -> None:
    for tensor in state.values():
        tensor.zero_()


def _load_weights(slot: Slot, state: State, *, kept: str, correction: Tensor | None, report: ConversionReport) -> None:
    """Adds the checkpoint's correction to weights that the model has loaded, if they were `kept` so.

    Weights that are no bf16 numbers did not come with that correction, and are whole already. A correction that this
    plan has and the checkpoint does not stays where it is compared with the weights by their bits; in mid-run none
    can tell whether they were overwritten, and it goes.
    """
    param, own = slot.param, state.get(weights.CORRECTION)
    if correction is not None and kept == slot.weights:
        assert own is not None
        own.copy_(correction)
        slot.weight_checksum = None  # its weights may come after it
    elif correction is not None:
        near = param.detach().to(torch.bfloat16)
        if torch.equal(near.to(param.dtype), param.detach()):
            whole = merge_weights(near, correction.to(near.device))
            if own is not None:
                own.zero_()
            weights.store_(param, state, whole, weights=slot.weights, name=slot.name)
            report.note("weights", "converted")
            report.measure("weights", wanted=whole, stored=weights.master(param, state).detach())
    elif own is not None and slot.weight_checksum is None:
        own.zero_()


def _load_match(
    live: LiveBlock, *, saved: ParsedCheckpoint, registry: BlockRegistry, converted: bool, rms: list[float]
) -> None:
    """The block's matching state; where it is another block than when saved, its target and a new measurement."""
    live.rms_unmeasured = True
    if not live.matched or not live.slots:
        return
    names, match = saved.matches.get(live.block.name, ((), None))
    if match is not None and not converted and names == tuple(slot.name for slot in live.slots):
        live.match = match.to(device=live.slots[0].param.device, dtype=torch.float32, copy=True)
        live.rms_unmeasured = bool(match[1] < 0)
        return
    targets = [m[0].item() for ns, m in saved.matches.values() if not {s.name for s in live.slots}.isdisjoint(ns)]
    known = (targets or rms) if registry.matched_by == "rms" else []  # else they may be of rules that average nothing
    registry.init_match(live, rms=(sum(r * r for r in known) / len(known)) ** 0.5 if known else None)


def _log(report: LoadReport) -> None:
    for move in report.moves:
        errors = ", ".join(f"{name} {error:.1e}" for name, error in move.conversion_error.items()) or "none"
        log.info("block %s: %s -> %s, relative error %s", move.block, move.source, move.target, errors)
    if report.new_names:
        log.warning("not in the checkpoint, so they start afresh: %s", ", ".join(report.new_names))
    if report.waiting_names:
        log.info("frozen here, so their states wait: %s", ", ".join(report.waiting_names))
    if report.unknown_names:
        log.warning("in the checkpoint but not trained here, so left out: %s", ", ".join(report.unknown_names))
