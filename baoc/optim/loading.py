"""Fills a live optimizer from a checkpoint by name: bit for bit where specs agree, converted where they do not."""

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
    entries_of_others,
    per_column_keys,
    row_first_shape,
    slot_with_spec,
    unsharded_slot,
)
from baoc.optim.weights import merge_weights
from baoc.parallel import Ranks, unwrapped_name
from baoc.planning.candidates import shards_cut_rows
from baoc.types import BlockMove, OptimizerSpec, Placement, StateKind

log = logging.getLogger(__name__)
MAX_FP32_STEPS = 2**24  # from here on fp32 does not count by 1


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """The conversions of a load to this plan's specs, and the names that one side lacks."""

    moves: tuple[BlockMove, ...] = ()
    new_names: tuple[str, ...] = ()  # trained here, not in the checkpoint: they start afresh
    whole_names: tuple[str, ...] = ()  # saved with native weights: the checkpoint's model has all of their bits
    waiting_names: tuple[str, ...] = ()  # in the checkpoint, frozen here: their states come back when they are thawed
    unknown_names: tuple[str, ...] = ()  # in the checkpoint, not here: left out, unless a parameter of that name comes


def load(
    saved: ParsedCheckpoint,
    *,
    registry: BlockRegistry,
    param_groups: list[dict[str, Any]],
    among: Ranks,
    checked: Callable[[], object],
) -> LoadReport:
    """Checks everything, then fills the live states, converting where the plans differ. Nothing is aliased. What one
    rank of `among` refuses, all do. `checked` is called between the two and may change the plan."""
    own_names = {name for group in param_groups for name in group["param_names"]}

    def check() -> tuple[ParsedCheckpoint, list[Slot], list[dict[str, Any]]]:
        named = _renamed(saved, own_names=own_names, registry=registry, param_groups=param_groups)
        _check_names(named, param_groups=param_groups)
        return named, _slots_in(named, registry=registry), _saved_settings(named, param_groups=param_groups)

    saved, slots, settings = among.run_or_raise_on_all(check)
    fitted, sources = among.run_or_raise_on_all(lambda: _fit_to_slots(saved, slots=slots), has_collectives=True)
    checked()
    if (new_slots := _slots_in(saved, registry=registry)) != slots:
        slots = new_slots
        fitted, sources = _fit_to_slots(saved, slots=slots)
    if kept := _kept_settings(param_groups, settings):
        log.warning("the checkpoint's settings of the optimizer go on: %s", kept)
    for group, new in zip(param_groups, settings, strict=True):
        group.update(new)
    saved = _apart_from_live(fitted, registry=registry, slots=slots)
    registry.drop_stale_corrections()
    moves = []
    for live in registry.live.values():
        with registry.states_on_device(live):
            move = _load_block(live, sources=sources, saved=saved, registry=registry, groups=param_groups)
        if move is not None:
            moves.append(move)
    unused = [name for name in saved.states if name not in sources]
    registry.pending_states = saved.subset([name for name in unused if name in saved.specs])
    report = LoadReport(
        moves=tuple(moves),
        new_names=tuple(name for name in registry.names.values() if name not in sources),
        whole_names=tuple(name for name in sources if saved.specs[name].weights == "native"),
        waiting_names=tuple(name for name in unused if name in own_names),
        unknown_names=tuple(name for name in unused if name not in own_names),
    )
    _log(report)
    return report


def _renamed(
    saved: ParsedCheckpoint, *, own_names: set[str], registry: BlockRegistry, param_groups: list[dict[str, Any]]
) -> ParsedCheckpoint:
    """The checkpoint by this optimizer's names: of tied parameters, of wrapped modules, and of unnamed parameters."""
    params = [param for live in registry.live.values() for param in live.block.params]
    saved = saved.renamed({alias: param.name for param in params for alias in param.aliases})
    unwrapped = {unwrapped_name(name): name for name in own_names if name not in saved.states}
    unknown = [name for name in saved.states if name not in own_names]
    rewrapped = {name: unwrapped[bare] for name in unknown if (bare := unwrapped_name(name)) in unwrapped}
    saved = saved.renamed(rewrapped)
    return saved.renamed(_by_position(saved, param_groups=param_groups))


def _slots_in(saved: ParsedCheckpoint, *, registry: BlockRegistry) -> list[Slot]:
    return [slot for live in registry.live.values() for slot in live.slots if slot.name in saved.states]


def _fit_to_slots(saved: ParsedCheckpoint, *, slots: Iterable[Slot]) -> tuple[ParsedCheckpoint, dict[str, Slot]]:
    """Cuts or gathers the saved states of `slots` to what this rank needs (its rows, or all if a conversion takes all),
    encodes those again whose codec was another on sharded or unsharded parameters, and checks them.

    Returns:
        The checkpoint with these states, and the slots as they were when saved, by name.
    """
    states = dict(saved.states)
    for slot in slots:
        if (spec := saved.specs.get(slot.name)) is None:
            continue
        source, state = _saved_slot(slot, spec=spec), states[slot.name]
        if source.shard is not slot.shard:
            state = {
                key: unsharded(value).cpu() if isinstance(value, Tensor) else value for key, value in state.items()
            }
        states[slot.name] = _fit_state(source, state, spec=spec)
    saved = replace(saved, states=states)
    return saved, {slot.name: _check_state(slot, saved=saved) for slot in slots}


def _fit_state(slot: Slot, saved: State, *, spec: OptimizerSpec) -> State:
    """One parameter's state for `slot`. Tensors of unexpected shapes or types stay as they are, for the check."""
    own = unsharded_slot(slot, spec=spec, sharded=slot.shard is not None)
    other = unsharded_slot(slot, spec=spec, sharded=slot.shard is None)  # as if the parameter was of the other kind
    own_tensors, other_tensors = ({tensor.key: tensor for tensor in side.tensors} for side in (own, other))
    local_states = {state.decl: state for state in slot.states}
    fitted = dict(saved)
    for own_state, other_state in zip(own.states, other.states, strict=True):
        other_keys = [key for _, key in other_state.keys]
        own_keys_only = {key for _, key in own_state.keys}.difference(other_keys)
        saved_as_other = own_keys_only.isdisjoint(saved) and all(
            isinstance(saved.get(key), Tensor) and saved[key].dtype is other_tensors[key].dtype for key in other_keys
        )
        if own_state.codec.info != other_state.codec.info and saved_as_other:
            values = other_state.decode(
                {key: unsharded(saved[key]).reshape(other_tensors[key].shape) for key in other_keys}
            )
            encoded = own_state.codec.allocate(own_state.shape, values.device)
            own_state.codec.encode_(encoded, values)
            fitted |= {key: encoded[part] for part, key in local_states.get(own_state.decl, own_state).keys}
    same_on_all_ranks, rows = per_column_keys(slot), slot.group_param.shape[:1].numel()
    for tensor in slot.tensors:
        key, value, shape = tensor.key, fitted.get(tensor.key), own_tensors[tensor.key].shape
        if isinstance(value, Tensor) and tuple(value.shape) in (shape, row_first_shape(shape, rows=rows)):
            if slot.shard is None or key in same_on_all_ranks:
                fitted[key] = unsharded(value).reshape(tensor.shape)
            else:
                fitted[key] = slot.shard.local_part(value, shape=tensor.shape)
    return fitted


def _apart_from_live(saved: ParsedCheckpoint, *, registry: BlockRegistry, slots: Iterable[Slot]) -> ParsedCheckpoint:
    """The checkpoint without tensors that are the live ones and mean something else: corrections, which are zeroed if
    weights were loaded since they were made; and all of one that was taken before the first step, as a fresh start."""
    states = dict(saved.states)
    for slot in slots:
        live, loaded = registry.state[slot.param], states[slot.name]
        for key in slot.keys:
            value = loaded.get(key)
            if not isinstance(value, Tensor) or value.data_ptr() != live[key].data_ptr():
                continue
            if key == weights.CORRECTION:
                states[slot.name] = {**states[slot.name], key: value.clone()}
            elif saved.num_steps == 0:
                states[slot.name] = {**states[slot.name], key: torch.zeros_like(value)}
    return replace(saved, states=states)


def _by_position(saved: ParsedCheckpoint, *, param_groups: list[dict[str, Any]]) -> dict[str, str]:
    """Saved name -> this optimizer's name by position, as torch does it, if one side has placeholder names only. Raises
    CheckpointError if the groups are of other sizes."""
    saved_names = [name for names, _ in saved.groups for name in names]
    own_names = [name for group in param_groups for name in group["param_names"]]
    saved_only, own_only = set(saved_names) - set(own_names), set(own_names) - set(saved_names)
    if not saved_only or not own_only:
        return {}
    if not any(all(map(groups.is_placeholder_name, names)) for names in (saved_only, own_only)):
        return {}
    sizes = [len(names) for names, _ in saved.groups], [len(group["param_names"]) for group in param_groups]
    pairs = [pair for pair in zip(saved_names, own_names, strict=False) if pair[0] != pair[1]]
    if sizes[0] != sizes[1] or any(a not in saved_only or b not in own_only for a, b in pairs):
        raise CheckpointError(
            f"the checkpoint has {groups.shorten(saved_names)} in groups of {sizes[0]} parameters, this optimizer has "
            f"{groups.shorten(own_names)} in groups of {sizes[1]}: without names they are told by position. Build it "
            "on the same parameters in the same groups, or both on named_parameters()"
        )
    return dict(pairs)


def _check_names(saved: ParsedCheckpoint, *, param_groups: list[dict[str, Any]]) -> None:
    """Raises CheckpointError if a group shares no name with the checkpoint, while a group of that is unused; and if the
    checkpoint has no parameters at all."""
    own_names = {name for group in param_groups for name in group["param_names"]}
    unused = [name for names, _ in saved.groups if own_names.isdisjoint(names) for name in names]
    saved_names = {name for names, _ in saved.groups for name in names}
    if own_names and not saved_names:
        raise CheckpointError(
            f"the checkpoint has {len(saved.groups)} parameter groups with no parameters, this optimizer has "
            f"{len(own_names)} parameters: pass what state_dict() of an optimizer on them returned, or start afresh"
        )
    for position, group in enumerate(param_groups):
        if unused and group["param_names"] and saved_names.isdisjoint(group["param_names"]):
            raise CheckpointError(
                f"parameter group {position} has {groups.shorten(group['param_names'])}, of which the checkpoint has "
                f"nothing; it has {groups.shorten(unused)}: build the optimizer on the names that it was saved with (a "
                "prefix such as net. is part of a name), or start afresh"
            )


def load_late(registry: BlockRegistry, *, param_groups: list[dict[str, Any]]) -> None:
    """Gives parameters that were added after a checkpoint was loaded the states that it had of them."""
    for live in registry.live.values():
        saved = registry.pending_states
        slots = [slot for slot in live.slots if saved is not None and slot.name in saved.states]
        if saved is None or not slots:
            continue
        names = [slot.name for slot in slots]
        registry.pending_states = saved.subset([name for name in saved.states if name not in names])
        try:
            sources = {slot.name: _check_state(slot, saved=saved) for slot in slots}
        except CheckpointError as error:
            log.warning("%s starts afresh: %s", ", ".join(names), error)
            continue
        with registry.states_on_device(live):
            _load_block(live, sources=sources, saved=saved, registry=registry, groups=param_groups)
        log.info("%s goes on from the states in the checkpoint", ", ".join(names))


def _check_state(slot: Slot, *, saved: ParsedCheckpoint) -> Slot:
    """The slot as it was when saved. Raises CheckpointError if the saved tensors are not what its spec keeps."""
    name, spec = slot.name, saved.specs.get(slot.name)
    if spec is None:
        raise CheckpointError(f"the checkpoint has a state of {name} but no block for it: it is damaged, use another")
    source = replace(_saved_slot(slot, spec=spec), tuned=saved.tuned.get(slot.name))
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
        # torch keeps bf16 states for bf16 weights
        lenient = stored_alike(spec, SPECS["adamw"]) and value.is_floating_point()
        if value.dtype != dtype and not lenient:
            raise CheckpointError(
                f"state {key} of {name} is {value.dtype} in the checkpoint, {spec.name} keeps {dtype}: it is "
                "damaged, use another"
            )
    _check_values(source, saved.states[name])
    return source


def _saved_slot(slot: Slot, *, spec: OptimizerSpec) -> Slot:
    """The slot as it was when saved under `spec`. Unsharded if all rows are converted together: the spec keeps a state
    of which no rank has a part, or its v becomes another by sums over all rows."""
    rule = RULES[spec.rule].info
    takes_all_rows = shards_cut_rows(rule, param=slot.info) or migration.sums_over_all_rows(rule, slot.rule.info)
    if slot.shard is None or not takes_all_rows:
        return slot_with_spec(slot, spec=spec)
    return unsharded_slot(slot, spec=spec, sharded=False, device="cpu")


def _check_values(slot: Slot, state: Mapping[str, Tensor]) -> None:
    """Raises CheckpointError for numbers that no step leaves: not finite, no count, negative scales or squares."""
    squares = {key for each in slot.states if each.decl.kind is StateKind.V for _, key in each.keys}
    for key in (*(tensor.key for tensor in slot.tensors), *(["step"] if slot.counts_steps else [])):
        value = state[key].detach()
        if not value.is_floating_point() or not value.numel() or value.is_meta:
            continue
        low, high = (float(end) for end in value.aminmax())  # either is NaN if any element is
        never_negative = key in squares or key.endswith(".scale") or key == "step"
        if (
            not isfinite(high - low)
            or (never_negative and low < 0)
            or (key == "step" and (low != int(low) or low > MAX_FP32_STEPS))
        ):
            raise CheckpointError(
                f"state {key} of {slot.name} reaches from {low:g} to {high:g} in the checkpoint, which no step of "
                f"{slot.rule.info.name} leaves: it is damaged, use another one"
            )


def _saved_settings(saved: ParsedCheckpoint, *, param_groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Saved settings for each group, found by its names; empty if the checkpoint has none of them."""
    group_of = {name: index for index, (names, _) in enumerate(saved.groups) for name in names}
    settings_by_group = []
    for position, group in enumerate(param_groups):
        indices = sorted({group_of[name] for name in group["param_names"] if name in group_of})
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
            if FIRST_BETAS in group:  # a checkpoint without them has betas that no schedule had moved
                new[FIRST_BETAS] = tuple(new.get(FIRST_BETAS, new["betas"]))
        settings_by_group.append(new)
    return settings_by_group


def _kept_settings(param_groups: list[dict[str, Any]], settings: list[dict[str, Any]]) -> str:
    """Where saved settings differ from what was asked for. A schedule moves `lr`, and some move `betas`."""
    kept = {}
    for group, new in zip(param_groups, settings, strict=True):
        for key in ("initial_lr", "eps", "weight_decay", *(() if "max_momentum" in group else ("betas",))):
            asked = groups.to_plain(group.get(key))
            asked = tuple(asked) if key == "betas" else asked
            if asked is not None and new.get(key, asked) != asked:
                kept[f"{key.removeprefix('initial_')}={new[key]}, not {asked}"] = None
    return "; ".join(kept)


def _load_block(
    live: LiveBlock,
    *,
    sources: Mapping[str, Slot],
    saved: ParsedCheckpoint,
    registry: BlockRegistry,
    groups: list[dict[str, Any]],
) -> BlockMove | None:
    """Fills one block. Returns its conversion; None if the block was saved under the same spec."""
    report, rms, old_specs, bytes_before = ConversionReport(), [], set(), 0
    live.unseeded.clear()
    for slot in live.slots:
        state = registry.state[slot.param]
        own = {key: state[key] for key in slot.keys if key != weights.CORRECTION}
        if slot.name not in sources:
            _zero(own)
            registry.set_entries_of_others(slot, {})
            continue
        source, spec, loaded = sources[slot.name], saved.specs[slot.name], saved.states[slot.name]
        v_waits = slot.name in saved.unseeded
        if spec.placement == Placement.DEVICE:
            bytes_before += source.slab_bytes + sum(loaded[key].nbytes for key in ("step",) if key in loaded)
        if not stored_alike(spec, live.spec):
            old_specs.add(spec.name)
        if (spec.rule, spec.storage) == (live.spec.rule, live.spec.storage):
            for key, value in own.items():  # which may be the loaded tensor itself
                value.copy_(loaded[key])
        else:
            (old,) = allocate([source])  # its own dtype, device and strides
            for key, value in old.items():  # before `own` is zeroed: the loaded tensors may be the live ones
                value.copy_(loaded[key])
            _zero(own)
            if live.matched:
                before = LiveBlock(block=live.block, spec=spec, rule=source.rule, slots=[source])
                rms.append(migration.last_update_rms(before, state={source.param: old}, param_groups=groups))
            v_waits = migration.convert(
                source,
                old,
                slot,
                state,
                spec=live.spec,
                betas=slot.betas(groups),
                report=report,
                before_first_step=saved.num_steps == 0,
                old_v_initialised=not v_waits,
            )
        if v_waits:
            live.unseeded.add(slot.name)
        registry.set_entries_of_others(slot, entries_of_others(loaded, keys=source.keys))
        correction = loaded.get(weights.CORRECTION)
        if correction is not None and slot.shard is not None and source.shard is None:
            correction = slot.shard.local_part(correction, shape=slot.param.shape)
        _load_weights(slot, state, saved_format=spec.weights, correction=correction, report=report)
    _load_match(live, saved=saved, registry=registry, converted=bool(old_specs), rms=[r for r in rms if r])
    if not old_specs:
        return None
    return BlockMove(
        block=live.block.name,
        source=", ".join(sorted(old_specs)),
        target=live.spec.name,
        kept=report.outcomes,
        conversion_error=report.relative_errors(),
        bytes_before=bytes_before,
        bytes_after=registry.block_bytes(live),
        why="the checkpoint was saved under another plan",
    )


def _zero(state: State) -> None:
    for tensor in state.values():
        tensor.zero_()


def _load_weights(
    slot: Slot, state: State, *, saved_format: str, correction: Tensor | None, report: ConversionReport
) -> None:
    """Adds the checkpoint's correction to weights that the model has loaded, unless these are no bf16 numbers: then
    they came without it, and have all of their bits. Where the checkpoint has no correction and this plan has, the live
    one stays while a checksum can tell whether it belongs to the weights, and is zeroed in mid-run."""
    param, own = slot.param, state.get(weights.CORRECTION)
    if correction is not None and saved_format == slot.weights:
        assert own is not None
        own.copy_(correction)
        slot.weight_checksum = None  # its weights may be loaded later
    elif correction is not None:
        rounded = param.detach().to(torch.bfloat16)
        if torch.equal(rounded.to(param.dtype), param.detach()):
            values = merge_weights(rounded, correction.to(rounded.device))
            if own is not None:
                own.zero_()
            weights.store_(param, state, values, weights=slot.weights, name=slot.name)
            report.note("weights", "converted")
            report.measure("weights", wanted=values, stored=weights.master(param, state).detach())
    elif own is not None and slot.weight_checksum is None:
        own.zero_()


def _load_match(
    live: LiveBlock, *, saved: ParsedCheckpoint, registry: BlockRegistry, converted: bool, rms: list[float]
) -> None:
    """Loads the block's matching state; or its target alone, the own RMS to be measured, if it was saved otherwise."""
    live.rms_unmeasured = True
    if not live.matched or not live.slots:
        return
    names, match = saved.matches.get(live.block.name, ((), None))
    if match is live.match and saved.num_steps == 0:  # as in `_apart_from_live`
        match = None
    if match is not None and not converted and names == tuple(slot.name for slot in live.slots):
        live.match = match.to(device=live.slots[0].param.device, dtype=torch.float32, copy=True)
        live.rms_unmeasured = bool(match[1] < 0)
        return
    own_names = {slot.name for slot in live.slots}
    targets = [match[0].item() for names, match in saved.matches.values() if not own_names.isdisjoint(names)]
    # By displacement a target may be that of a rule without momentum, which is not AdamW's RMS.
    adamw_rms = (targets or rms) if registry.matched_by == "rms" else []
    registry.init_match(live, rms=(sum(r * r for r in adamw_rms) / len(adamw_rms)) ** 0.5 if adamw_rms else None)


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
