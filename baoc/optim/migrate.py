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
_OUTCOMES = ("dropped", "kept", "converted", "new")


@dataclass(slots=True)
class ConversionReport:
    """The fate of each state of a block; squared error and squared size of converted ones."""

    outcomes: dict[str, str] = field(default_factory=dict)
    error: dict[str, float] = field(default_factory=dict)
    size: dict[str, float] = field(default_factory=dict)

    def note(self, name: str, how: str) -> None:
        """Notes a tensor's outcome. If tensors of a block differ, the latest in _ORDER is reported."""
        self.outcomes[name] = max(self.outcomes.get(name, how), how, key=_OUTCOMES.index)

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
    fresh: bool,
    seeded: bool,
    spec: OptimizerSpec,
    moments: Moments | None = None,
) -> bool:
    """Fills `new`, the zero state of `target` under `spec`, from `old`, the state of `source`. The module's docstring
    says how. Where `source` is a whole tensor of which `target` has some rows, the whole is converted, on the host.

    `fresh`: no step was taken yet. `seeded`: v of `old` has had its first gradient. Outcomes go to `report`. Returns
    True if v of `new` must be initialised from the next gradient.
    """
    if target.shard is not None and source.shard is None:
        here = unsharded_slot(target, spec=spec, device="cpu")
        (made,) = allocate([here])
        how: dict[str, Any] = {"betas": betas, "report": report, "fresh": fresh, "seeded": seeded, "moments": moments}
        unseeded = convert(source, old, here, made, spec=spec, **how)
        alike = {"step", *per_column_keys(target)}
        for key in new.keys() - {weights.CORRECTION}:
            new[key].copy_(made[key] if key in alike else target.shard.local_part(made[key], shape=new[key].shape))
        return unseeded
    kinds = {decl.kind for decl in source.rule.info.states}  # also where this rank has no part of the tensor
    needs_v = target.group_param.numel() > 0 and any(decl.kind is StateKind.V for decl in target.rule.info.states)
    step = step_of(source, old)
    has_v = StateKind.V in kinds and seeded
    if target.matrix is None:
        moments = None
    if fresh or (source.counts_steps and step == 0):
        for kept in source.states:
            report.note(kept.decl.name, "dropped")
        for kept in target.states:
            report.note(kept.decl.name, "kept" if source.states else "new")
        return False
    age = step if source.counts_steps and (has_v or not needs_v) else SEED_AGE
    if target.counts_steps:
        new["step"].fill_(age)
    for kind in StateKind:
        held = [kept for kept in source.states if kept.decl.kind is kind and (kind is StateKind.M or seeded)]
        mover = _Mover(target=target, kind=kind, held=held, step=step, age=age, betas=betas)
        mover.move(old, new, moments=moments, report=report)
    return needs_v and not has_v and moments is None


def gather_if_needed(slot: Slot, state: State, *, spec: OptimizerSpec, into: RuleInfo) -> tuple[Slot, State]:
    """The source for `convert`, gathered over ranks if v of `into` sums over columns. All ranks call it."""
    if slot.shard is None or not sums_over_all_rows(slot.rule.info, into):
        return slot, state
    return unsharded_slot(slot, spec=spec, device="cpu"), unsharded_state(slot, state, spec=spec)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Mover:
    """Moves the states of one kind of one tensor from `held`, of age `step`, to new ones of age `age`."""

    target: Slot
    kind: StateKind
    held: list[StoredState]
    step: int
    age: int
    betas: tuple[float, float]

    def move(self, old: State, new: State, *, moments: Moments | None, report: ConversionReport) -> None:
        wanted = [kept for kept in self.target.states if kept.decl.kind is self.kind]
        for kept in wanted:
            twin = next((h for h in self.held if _tags(h.decl) == _tags(kept.decl)), None)
            if twin is not None and twin.codec.info == kept.codec.info and self._gain(twin.decl, kept.decl) == 1:
                for (_, before), (_, after) in zip(twin.keys, kept.keys, strict=True):
                    new[after].copy_(old[before])
                report.note(kept.decl.name, "kept")
            elif self.held or (self.kind is StateKind.V and moments is not None):
                held = [twin] if twin else self.held
                value = self._value(kept, old, new, held=held, moments=moments)
                value = value * self._gain(held[0].decl if held else None, kept.decl)
                kept.encode_(new, value)
                report.note(kept.decl.name, "converted" if held else "new")
                report.measure(kept.decl.name, wanted=value, stored=kept.decode(new))
            else:
                report.note(kept.decl.name, "new")
        for kept in self.held:
            if all(kept.decl.name != w.decl.name for w in wanted):
                report.note(kept.decl.name, "converted" if wanted else "dropped")

    def _value(
        self, kept: StoredState, old: State, new: State, *, held: list[StoredState], moments: Moments | None
    ) -> Tensor:
        """The numbers of the new state, with the bias of the old state's age."""
        param = self.target.param
        ctx = self.target.shape_context
        if not held:
            assert moments is not None
            m_square = inherit.squared_m(self.target, new, beta=self.betas[0], age=self.age, ctx=ctx)
            full = torch.maximum(inherit.from_moments(moments, ctx=ctx, param=param), m_square)
            return inherit.reduce(full, kept.decl, ctx=ctx)
        values = {h.decl: h.decode(old) for h in held}
        if _tags(held[0].decl) == _tags(kept.decl):
            return values[held[0].decl]
        full = inherit.expand(values, ctx=ctx, shape=tuple(param.shape))
        if self.kind is StateKind.V and held[0].decl.layout is StateLayout.FOLDED and moments is not None:
            # A folded v says where v is large; the profile says how large.
            mean = moments.row.to(param.device).mean()
            full = full * (mean * self._bias(held[0].decl, at=self.step) / full.mean().clamp(min=1e-30))
        return inherit.reduce(full, kept.decl, ctx=ctx)

    def _gain(self, held: StateDecl | None, wanted: StateDecl) -> float:
        before = self._bias(held, at=self.step) if held is not None else 1.0
        return self._bias(wanted, at=self.age) / before

    def _bias(self, decl: StateDecl, *, at: int) -> float:
        return inherit.bias(decl, beta=self.betas[self.kind is StateKind.V], at=at)


def convert_weights(source: Slot, target: Slot, old: State, new: State, *, report: ConversionReport) -> None:
    """Converts the weights where the target's format is another; else takes the correction over."""
    if source.weights == target.weights:
        if weights.CORRECTION in new:
            new[weights.CORRECTION].copy_(old[weights.CORRECTION])
        target.weight_checksum = source.weight_checksum
        return
    param = target.param
    wanted = weights.master(param, old).detach()
    dtype = weights.dtype_of(target.weights, info=target.info)
    weights.replace_data_(param, dtype=dtype, device=param.device)
    weights.store_in_pieces_(param, new, wanted, weights=target.weights, name=target.name)
    report.note("weights", "converted")
    report.measure("weights", wanted=wanted, stored=weights.master(param, new).detach())


def sums_over_all_rows(source: RuleInfo, target: RuleInfo) -> bool:
    """Whether v of `target` comes of v of `source` by sums over columns, to which all ranks' rows belong.

    A v by column alone is the same on all ranks, and v of equal tags is copied.
    """
    before, after = ([_tags(decl) for decl in of.states if decl.kind is StateKind.V] for of in (source, target))
    alike = before == after or before == [(StateKind.V, StateLayout.PER_COLUMN, 0)]
    return bool(before and after) and not alike and (sums_columns(source) or sums_columns(target))


def _tags(decl: StateDecl) -> tuple[Any, ...]:
    return decl.kind, decl.layout, decl.level


def last_update_rms(
    live: LiveBlock, *, state: Mapping[Tensor, State], param_groups: list[dict[str, Any]]
) -> float | None:
    """RMS of an unmatched block's last update, recomputed from its states; None where they do not determine it."""
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
            norm = nan  # where the states do not tell, which ranks with rows alone know: all take part in the sum
            if (last := slot.rule.last(states=states, ctx=ctx)) is not None:
                norm, numel = update_norm(last.update(), divisor=last.divisor, finite=None)
        norm, numel = norm_over_ranks(slot, norm=float(norm), count=numel)
        total += norm**2
        count += numel
    return (total / count) ** 0.5 if count and not isnan(total) else None


def norm_over_ranks(slot: Slot, *, norm: float, count: int) -> tuple[float, int]:
    """Norm and number of elements of a whole tensor, from those of each rank's part of it."""
    if slot.shard is None or slot.shard.group.size == 1:
        return norm, count
    sums = torch.tensor([norm**2, count], dtype=torch.float64, device=slot.param.device)
    slot.shard.group.all_reduce_(sums)
    return float(sums[0]) ** 0.5, int(sums[1])


def device_growth(target: LiveBlock, *, held: LiveBlock) -> int:
    """Bytes of states and weights that a move adds on the device; negative where it frees some."""
    after, before = (
        (0 if live.on_host else state_bytes(live.block, spec=live.spec, rule=live.rule.info))
        + weight_bytes(live.block, spec=live.spec)
        for live in (target, held)
    )
    return after - before


def migrate_block(
    target: LiveBlock,
    *,
    registry: BlockRegistry,
    param_groups: list[dict[str, Any]],
    moments: Mapping[str, Moments],
    fresh: bool,
    why: str,
) -> BlockMove:
    """Replaces the live block of that name by `target`, which inherits its states and update RMS.

    `fresh`: no step was taken yet. Old and new states are on the parameters' device together until this returns, those
    of host-placed blocks too.
    """
    held = registry.live[target.block.name]
    bytes_before = registry.block_bytes(held)
    unlike = registry.has_own_target(held)  # its RMS says nothing of AdamW's
    rms = held.match[0].item() if held.match is not None and not unlike else None
    report = ConversionReport()
    with registry.states_on_device(held, write_back=False):
        if rms is None and target.matched and not unlike:
            rms = last_update_rms(held, state=registry.state, param_groups=param_groups)
        news = allocate(target.slots, at_home=False)
        for source, slot, new in zip(held.slots, target.slots, news, strict=True):
            old = registry.state[slot.param]
            unseeded = convert(
                *gather_if_needed(source, old, spec=held.spec, into=slot.rule.info),
                slot,
                new,
                spec=target.spec,
                betas=slot.betas(param_groups),
                moments=moments.get(slot.name),
                report=report,
                fresh=fresh,
                seeded=source.name not in held.unseeded,
            )
            if unseeded:
                target.unseeded.add(slot.name)
            convert_weights(source, slot, old, new, report=report)
            if source.weights != slot.weights and weights.CORRECTION in new:
                slot.weight_checksum = weights.checksum(slot.param)
            registry.set_state(slot, new)
    registry.pack(target)
    target.previous_rms = rms
    registry.init_match(target, rms=rms)
    registry.live[target.block.name] = target
    return BlockMove(
        block=target.block.name,
        source=held.spec.name,
        target=target.spec.name,
        kept=report.outcomes,
        conversion_error=report.relative_errors(),
        bytes_before=bytes_before,
        bytes_after=registry.block_bytes(target),
        why=why,
    )
