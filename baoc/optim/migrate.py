"""Moving a parameter's or a block's state from one spec to another, tensor by tensor.

Averages carry the bias of their zero start, and one step count per tensor corrects m and v alike. It is therefore read
as the age of the states, the number of gradients that they average, and set so that the correction stays right:
- v is inherited: the count goes on. A new m starts from 0 at that age, so its updates grow to their usual size over
  1 / (1 - beta1) steps.
- v is new, from the profile's moments or else from the next gradient (`optim.seeding`): the age is SEED_AGE. An
  inherited m is kept; a new one starts from 0 as above.
The averages of a rule that counts no steps are taken to have no bias. Weights are moved with their corrections.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isnan, nan
from typing import Any

import torch
from torch import Tensor

from baoc.optim import inherit, weights
from baoc.optim.backends.eager import decoded, update_norm
from baoc.optim.registry import BlockRegistry
from baoc.optim.state import (
    LiveBlock,
    Slot,
    State,
    StoredState,
    allocate,
    per_column_keys,
    step_of,
    unsharded_slot,
    unsharded_state,
)
from baoc.planning.candidates import sums_columns
from baoc.planning.cost import state_bytes, weight_bytes
from baoc.types import BlockMove, Moments, OptimizerSpec, RuleInfo, StateDecl, StateKind, StateLayout

# The largest age at which a coordinate whose v was seeded far too small moves by no more than one learning rate in a
# step: (1 - beta1) sqrt(age) <= 1 at beta1 = .9.
SEED_AGE = 100
_OUTCOMES = ("dropped", "kept", "converted", "new")  # of tensors of a block the latest here is reported


@dataclass(slots=True)
class ConversionReport:
    """The outcome of each state of a block, one of _OUTCOMES; squared error and squared size of converted ones."""

    outcomes: dict[str, str] = field(default_factory=dict)
    error: dict[str, float] = field(default_factory=dict)
    size: dict[str, float] = field(default_factory=dict)

    def note(self, name: str, outcome: str) -> None:
        self.outcomes[name] = max(self.outcomes.get(name, outcome), outcome, key=_OUTCOMES.index)

    def measure(self, name: str, *, wanted: Tensor, stored: Tensor) -> None:
        self.error[name] = self.error.get(name, 0.0) + float((stored - wanted).square().sum(dtype=torch.float64))
        self.size[name] = self.size.get(name, 0.0) + float(wanted.square().sum(dtype=torch.float64))

    def relative_errors(self) -> dict[str, float]:
        """Root of squared error over squared size, of the states whose storage changed."""
        return {n: (e / self.size[n]) ** 0.5 if self.size[n] else 0.0 for n, e in self.error.items()}


def convert(
    source: Slot,
    old: State,
    target: Slot,
    new: State,
    *,
    betas: tuple[float, float],
    report: ConversionReport,
    before_first_step: bool,
    old_v_initialised: bool,
    spec: OptimizerSpec,
    moments: Moments | None = None,
) -> bool:
    """Fills `new`, the zero state of `target` under `spec`, from `old`, the state of `source`; see the module's
    docstring. Writes the outcomes into `report`.

    If `source` is an unsharded tensor of which `target` has some rows, all rows are converted, on the host.

    Args:
        before_first_step: No step was taken yet, so there is nothing to inherit.
        old_v_initialised: False if v of `old` still waits for its first gradient.

    Returns:
        True if v of `new` must be initialised from the next gradient.
    """
    shard, shard_new = None if source.shard is not None else target.shard, new
    if shard is not None:
        target = unsharded_slot(target, spec=spec, device="cpu")
        (new,) = allocate([target])
    step = step_of(source, old)
    if before_first_step or (source.counts_steps and step == 0):
        for state in source.states:
            report.note(state.decl.name, "dropped")
        for state in target.states:
            report.note(state.decl.name, "kept" if source.states else "new")
        return False
    # By the rules' declarations, because a slot without rows on this rank has no states.
    needs_v = target.group_param.numel() > 0 and _has_v(target.rule.info)
    has_v = _has_v(source.rule.info) and old_v_initialised
    if target.matrix is None:
        moments = None
    inherits_age = source.counts_steps and (has_v or not needs_v)
    age = step if inherits_age else SEED_AGE
    if target.counts_steps:
        new["step"].fill_(age)
    for kind in StateKind:
        states = [state for state in source.states if state.decl.kind is kind]
        if kind is StateKind.V and not old_v_initialised:
            states = []
        _convert_kind(kind, states, old, target, new, step=step, age=age, betas=betas, moments=moments, report=report)
    if shard is not None:
        same_on_all_ranks = {"step", *per_column_keys(target)}
        for key in shard_new.keys() - {weights.CORRECTION}:
            value, rows = new[key], shard_new[key]
            rows.copy_(value if key in same_on_all_ranks else shard.local_part(value, shape=rows.shape))
    return needs_v and not has_v and moments is None


def _has_v(rule: RuleInfo) -> bool:
    return any(decl.kind is StateKind.V for decl in rule.states)


def gather_if_needed(slot: Slot, state: State, *, spec: OptimizerSpec, into: RuleInfo) -> tuple[Slot, State]:
    """The source for `convert`, gathered over ranks if v of `into` sums over columns. All ranks call it."""
    if slot.shard is None or not sums_over_all_rows(slot.rule.info, into):
        return slot, state
    return unsharded_slot(slot, spec=spec, device="cpu"), unsharded_state(slot, state, spec=spec)


def _convert_kind(
    kind: StateKind,
    old_states: list[StoredState],
    old: State,
    target: Slot,
    new: State,
    *,
    step: int,
    age: int,
    betas: tuple[float, float],
    moments: Moments | None,
    report: ConversionReport,
) -> None:
    """Fills the target's states of one kind from `old_states`, of age `step`. The new ones have the age `age`."""
    beta = betas[1] if kind is StateKind.V else betas[0]
    new_states = [state for state in target.states if state.decl.kind is kind]
    for state in new_states:
        same = next((each for each in old_states if _tags(each.decl) == _tags(state.decl)), None)
        sources = [same] if same else old_states
        old_bias = inherit.bias(sources[0].decl, beta=beta, num_steps=step) if sources else 1.0
        gain = inherit.bias(state.decl, beta=beta, num_steps=age) / old_bias
        if same is not None and same.codec.info == state.codec.info and gain == 1:
            old_keys = dict(same.keys)
            for part, key in state.keys:
                new[key].copy_(old[old_keys[part]])
            report.note(state.decl.name, "kept")
        elif sources or (kind is StateKind.V and moments is not None):
            if sources:
                value = _inherited(state, sources, old, target=target, old_bias=old_bias, moments=moments)
            else:
                assert moments is not None
                value = _from_moments(state, moments, target=target, new=new, beta1=betas[0], age=age)
            value = value * gain
            state.encode_(new, value)
            report.note(state.decl.name, "converted" if sources else "new")
            report.measure(state.decl.name, wanted=value, stored=state.decode(new))
        else:
            report.note(state.decl.name, "new")
    for state in old_states:
        if all(state.decl.name != each.decl.name for each in new_states):
            report.note(state.decl.name, "converted" if new_states else "dropped")


def _inherited(
    new: StoredState, sources: list[StoredState], old: State, *, target: Slot, old_bias: float, moments: Moments | None
) -> Tensor:
    """The numbers of a new state computed from old ones, with the bias of the old ones' age."""
    values = {source.decl: source.decode(old) for source in sources}
    first = sources[0].decl
    if _tags(first) == _tags(new.decl):
        return values[first]
    ctx = target.shape_context
    full = inherit.expand(values, ctx=ctx, shape=tuple(target.param.shape))
    if first.kind is StateKind.V and first.layout is StateLayout.FOLDED and moments is not None:
        # A folded v says where v is large; the profile says how large.
        mean = moments.row.to(target.param.device).mean()
        full = full * (mean * old_bias / full.mean().clamp(min=1e-30))
    return inherit.reduce(full, new.decl, ctx=ctx)


def _from_moments(state: StoredState, moments: Moments, *, target: Slot, new: State, beta1: float, age: int) -> Tensor:
    """The numbers of a new v from the profile's moments, at least the square of m in `new`."""
    ctx = target.shape_context
    least = inherit.squared_m(target, new, beta=beta1, age=age, ctx=ctx)
    full = torch.maximum(inherit.from_moments(moments, ctx=ctx, param=target.param), least)
    return inherit.reduce(full, state.decl, ctx=ctx)


def convert_weights(source: Slot, target: Slot, old: State, new: State, *, report: ConversionReport) -> None:
    """Changes the parameter's weights to the target's format, in place. The same format keeps its correction."""
    if source.weights == target.weights:
        if weights.CORRECTION in new:
            new[weights.CORRECTION].copy_(old[weights.CORRECTION])
        target.weight_checksum = source.weight_checksum
        return
    param = target.param
    values = weights.master(param, old).detach()
    dtype = weights.dtype_of(target.weights, info=target.info)
    weights.replace_data_(param, dtype=dtype, device=param.device)
    weights.store_in_pieces_(param, new, values, weights=target.weights, name=target.name)
    report.note("weights", "converted")
    report.measure("weights", wanted=values, stored=weights.master(param, new).detach())


def sums_over_all_rows(source: RuleInfo, target: RuleInfo) -> bool:
    """True if v of `target` is computed from v of `source` by sums over columns, which take the rows of all ranks.

    A v per column alone is the same on all ranks, and v of equal tags is copied.
    """
    before, after = ([_tags(decl) for decl in of.states if decl.kind is StateKind.V] for of in (source, target))
    needs_own_rows_only = before == after or before == [(StateKind.V, StateLayout.PER_COLUMN, 0)]
    return bool(before and after) and not needs_own_rows_only and (sums_columns(source) or sums_columns(target))


def _tags(decl: StateDecl) -> tuple[Any, ...]:
    return decl.kind, decl.layout, decl.level


def last_update_rms(
    live: LiveBlock, *, state: Mapping[Tensor, State], param_groups: list[dict[str, Any]]
) -> float | None:
    """RMS of an unmatched block's last update, recomputed from its states; None if they do not determine it.
    Synchronises with the device, and is a collective if parameters are sharded."""
    if live.unseeded:
        return live.previous_rms
    total, count = 0.0, 0
    for slot in live.slots:
        step = step_of(slot, state[slot.param])
        if slot.counts_steps and step == 0:
            continue
        norm, numel = 0.0, 0
        if slot.param.numel() or slot.sums_over_ranks:
            group = param_groups[slot.group]
            ctx = slot.context(step=step, betas=slot.betas(param_groups), eps=group["eps"])
            states = decoded(slot, state[slot.param])
            norm = nan  # if the states do not determine it: ranks without rows cannot know that, and all sum
            if (last := slot.rule.last(states=states, ctx=ctx)) is not None:
                norm, numel = update_norm(last.update(), divisor=last.divisor, finite=None)
        norm, numel = norm_over_ranks(slot, norm=float(norm), count=numel)
        total += norm**2
        count += numel
    return (total / count) ** 0.5 if count and not isnan(total) else None


def norm_over_ranks(slot: Slot, *, norm: float, count: int) -> tuple[float, int]:
    """Norm and number of elements of an unsharded tensor, from those of this rank's shard. Collective."""
    if slot.shard is None or slot.shard.group.size == 1:
        return norm, count
    sums = torch.tensor([norm**2, count], dtype=torch.float64, device=slot.param.device)
    slot.shard.group.all_reduce_(sums)
    return float(sums[0]) ** 0.5, int(sums[1])


def device_growth(target: LiveBlock, *, source: LiveBlock) -> int:
    """Bytes of states and weights that a migration adds on the device; negative if it frees some."""
    after, before = (
        (0 if live.on_host else state_bytes(live.block, spec=live.spec, rule=live.rule.info))
        + weight_bytes(live.block, spec=live.spec)
        for live in (target, source)
    )
    return after - before


def migrate_block(
    target: LiveBlock,
    *,
    registry: BlockRegistry,
    param_groups: list[dict[str, Any]],
    moments: Mapping[str, Moments],
    before_first_step: bool,
    why: str,
) -> BlockMove:
    """Replaces the live block of that name by `target`, which inherits its states and update RMS. Old and new states,
    those of host-placed blocks too, are on the parameters' device together until this returns."""
    source = registry.live[target.block.name]
    bytes_before = registry.block_bytes(source)
    has_own_target = registry.has_own_target(source)  # its RMS says nothing of AdamW's
    rms = source.match[0].item() if source.match is not None and not has_own_target else None
    report = ConversionReport()
    with registry.states_on_device(source):
        if rms is None and target.matched and not has_own_target:
            rms = last_update_rms(source, state=registry.state, param_groups=param_groups)
        new_states = allocate(target.slots, at_home=False)
        for old_slot, slot, new in zip(source.slots, target.slots, new_states, strict=True):
            old = registry.state[slot.param]
            v_waits = convert(
                *gather_if_needed(old_slot, old, spec=source.spec, into=slot.rule.info),
                slot,
                new,
                spec=target.spec,
                betas=slot.betas(param_groups),
                moments=moments.get(slot.name),
                report=report,
                before_first_step=before_first_step,
                old_v_initialised=old_slot.name not in source.unseeded,
            )
            if v_waits:
                target.unseeded.add(slot.name)
            convert_weights(old_slot, slot, old, new, report=report)
            if old_slot.weights != slot.weights and weights.CORRECTION in new:
                slot.weight_checksum = weights.checksum(slot.param)
            registry.set_state(slot, new)
    registry.pack(target)
    target.previous_rms = rms
    registry.init_match(target, rms=rms)
    registry.live[target.block.name] = target
    return BlockMove(
        block=target.block.name,
        source=source.spec.name,
        target=target.spec.name,
        kept=report.outcomes,
        conversion_error=report.relative_errors(),
        bytes_before=bytes_before,
        bytes_after=registry.block_bytes(target),
        why=why,
    )
