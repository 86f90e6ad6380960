"""Moving a parameter's or a block's state from one spec to another, tensor by tensor.

Averages carry the bias of their zero start, and one step count per tensor corrects m and v alike. It is therefore read
as the age of the states, the number of gradients they stand for, and inherited so that it stays right:
- v is inherited: the count goes on. An m that is new starts from 0 at that age, so its updates grow to their usual size
  over 1 / (1 - beta1) steps.
- v comes from the profile's moments: the age is SEED_AGE. An inherited m is kept; a new one starts from 0 as above.
- v is needed and nothing tells it: all starts from 0, m too, for m over the root of a v of one step has no bound.
A rule that counts no steps is taken to have full-grown averages.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from baoc.cost import state_bytes
from baoc.optim import inherit, matching
from baoc.optim.roster import Roster
from baoc.optim.state import Kept, LiveBlock, Slot, State, allocate, allocate_one, new_step, step_of
from baoc.types import BlockMove, Moments, StateDecl, StateKind, StateLayout

# The largest age at which a coordinate whose v was seeded far too small moves by no more than one learning rate in a
# step: (1 - beta1) sqrt(age) <= 1 at beta1 = .9.
SEED_AGE = 100
_ORDER = ("dropped", "kept", "converted", "new")


@dataclass(slots=True)
class Fates:
    """What became of each state over the tensors of a block, and the squared error and size of what was converted."""

    how: dict[str, str] = field(default_factory=dict)
    error: dict[str, float] = field(default_factory=dict)
    size: dict[str, float] = field(default_factory=dict)

    def note(self, name: str, how: str) -> None:
        """Of several tensors the one that lost most speaks for the block."""
        self.how[name] = max(self.how.get(name, how), how, key=_ORDER.index)

    def measure(self, name: str, *, wanted: Tensor, stored: Tensor) -> None:
        self.error[name] = self.error.get(name, 0.0) + float((stored - wanted).square().sum(dtype=torch.float64))
        self.size[name] = self.size.get(name, 0.0) + float(wanted.square().sum(dtype=torch.float64))

    def relative_errors(self) -> dict[str, float]:
        """Root of squared error over squared size, of the states whose storage changed."""
        return {n: (e / self.size[n]) ** 0.5 if self.size[n] else 0.0 for n, e in self.error.items()}


def convert(
    source: Slot, target: Slot, old: State, *, betas: tuple[float, float], moments: Moments | None, fates: Fates
) -> State:
    """The state of `target` from `old`, the state of `source`, which is emptied on the way. See the module's text."""
    kinds = {kept.decl.kind for kept in source.kept}
    needs_v = any(kept.decl.kind is StateKind.V for kept in target.kept)
    step = step_of(source, old)
    has_v = StateKind.V in kinds
    if target.matrix is None:
        moments = None
    if (source.counts_steps and step == 0) or (needs_v and not has_v and moments is None):
        fresh = not (source.counts_steps and step == 0)
        return _restart(source, target, old, fates=fates, lost=fresh)
    age = step if source.counts_steps and (has_v or not needs_v) else SEED_AGE
    new: State = {"step": new_step(age)} if target.counts_steps else {}
    for kind in StateKind:
        mover = _Mover(source=source, target=target, kind=kind, step=step, age=age, beta=betas[kind is StateKind.V])
        new |= mover.move(old, moments=moments, fates=fates)
    old.clear()
    return new


def _restart(source: Slot, target: Slot, old: State, *, fates: Fates, lost: bool) -> State:
    for kept in source.kept:
        fates.note(kept.decl.name, "dropped")
    for kept in target.kept:
        fates.note(kept.decl.name, "new" if lost or not source.kept else "kept")
    old.clear()
    return allocate(target)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Mover:
    """The states of one kind of one tensor. `step` is the age they have, `age` the one they will be read at."""

    source: Slot
    target: Slot
    kind: StateKind
    step: int
    age: int
    beta: float

    def move(self, old: State, *, moments: Moments | None, fates: Fates) -> State:
        held = [kept for kept in self.source.kept if kept.decl.kind is self.kind]
        wanted = [kept for kept in self.target.kept if kept.decl.kind is self.kind]
        new: State = {}
        for kept in wanted:
            twin = next((h for h in held if _tags(h.decl) == _tags(kept.decl)), None)
            if twin is not None and twin.codec.info == kept.codec.info and self._gain(twin.decl, kept.decl) == 1:
                moved = {part: old[key] for part, key in twin.keys}
                new |= {key: moved[part] for part, key in kept.keys}
                fates.note(kept.decl.name, "kept")
            elif held or (self.kind is StateKind.V and moments is not None):
                new |= self._compute(kept, old, held=[twin] if twin else held, moments=moments, fates=fates)
            else:
                new |= allocate_one(kept, param=self.target.param)
                fates.note(kept.decl.name, "new")
        for kept in held:
            if all(kept.decl.name != w.decl.name for w in wanted):
                fates.note(kept.decl.name, "converted" if wanted else "dropped")
            for _, key in kept.keys:
                del old[key]
        return new

    def _compute(self, kept: Kept, old: State, *, held: list[Kept], moments: Moments | None, fates: Fates) -> State:
        value = self._value(kept, old, held=held, moments=moments)
        value = value * self._gain(held[0].decl if held else None, kept.decl)
        new = allocate_one(kept, param=self.target.param)
        kept.encode_(new, value)
        fates.note(kept.decl.name, "converted" if held else "new")
        fates.measure(kept.decl.name, wanted=value, stored=kept.decode(new))
        return new

    def _value(self, kept: Kept, old: State, *, held: list[Kept], moments: Moments | None) -> Tensor:
        """The numbers of the new state, still with the bias of the old one."""
        param = self.target.param
        ctx = self.target.context(step=0, betas=(0.0, 0.0), eps=0.0)
        if not held:
            assert moments is not None
            return inherit.reduce(inherit.from_moments(moments, ctx=ctx, param=param), kept.decl, ctx=ctx)
        values = {h.decl: h.decode(old) for h in held}
        if _tags(held[0].decl) == _tags(kept.decl):
            return values[held[0].decl]
        full = inherit.expand(values, ctx=ctx, shape=tuple(param.shape))
        if self.kind is StateKind.V and held[0].decl.layout is StateLayout.FOLDED and moments is not None:
            # What was folded says where v is large; how large, the profile knows better than any assumption.
            mean = moments.row.to(device=param.device, dtype=torch.float32).mean()
            full = full * (mean * self._bias(held[0].decl, at=self.step) / full.mean().clamp(min=1e-30))
        return inherit.reduce(full, kept.decl, ctx=ctx)

    def _gain(self, held: StateDecl | None, wanted: StateDecl) -> float:
        before = self._bias(held, at=self.step) if held is not None else 1.0
        after = self._bias(wanted, at=self.age)
        return 1.0 if before == after else after / before

    def _bias(self, decl: StateDecl, *, at: int) -> float:
        """What an average of zero start holds of the true mean after `at` steps; 1 where no bias is corrected."""
        return 1 - self.beta**at if decl.bias_corrected and at else 1.0


def _tags(decl: StateDecl) -> tuple[Any, ...]:
    folded = decl.layout is StateLayout.FOLDED
    return (decl.kind, decl.layout, *((decl.level, decl.axis) if folded else ()))


def last_rms(live: LiveBlock, *, state: Mapping[Tensor, State], param_groups: list[dict[str, Any]]) -> float | None:
    """RMS of an unmatched block's last update, from the states it left; None where they do not tell."""
    total, count = 0.0, 0
    for slot in live.slots:
        step = step_of(slot, state[slot.param])
        if (slot.counts_steps and step == 0) or not slot.param.numel():
            continue
        group = param_groups[slot.group]
        ctx = slot.context(step=step, betas=group["betas"], eps=group["eps"])
        states = {kept.decl.name: kept.decode(state[slot.param]) for kept in slot.kept}
        direction = slot.rule.last(states=states, ctx=ctx)
        if direction is None:
            return None
        norm, numel = matching.update_norm(
            direction.update(), divisor=direction.divisor, finite=None, on_cpu=slot.on_cpu
        )
        total += float(norm) ** 2
        count += numel
    return (total / count) ** 0.5 if count else None


def planned_growth(target: LiveBlock, *, held: LiveBlock) -> int:
    """Bytes that a move adds, negative where it frees some."""
    after, before = (state_bytes(live.block, spec=live.spec, rule=live.rule.info) for live in (target, held))
    return after - before


def move(
    target: LiveBlock,
    *,
    roster: Roster,
    param_groups: list[dict[str, Any]],
    moments: Mapping[str, Moments],
    why: str,
) -> BlockMove:
    """Makes `target` the live block of its name, its states inherited; its update RMS goes on where it was."""
    held = roster.live[target.block.name]
    bytes_before = roster.block_bytes(held)
    rms = held.match[0].item() if held.match is not None else None
    if rms is None and target.matched:
        rms = last_rms(held, state=roster.state, param_groups=param_groups)
    fates = Fates()
    for source, slot in zip(held.slots, target.slots, strict=True):
        roster.state[slot.param] = convert(
            source,
            slot,
            roster.state[slot.param],
            betas=param_groups[slot.group]["betas"],
            moments=moments.get(slot.name),
            fates=fates,
        )
    roster.add_match(target, target=rms if rms else roster.target(target.block.name))
    roster.live[target.block.name] = target
    return BlockMove(
        block=target.block.name,
        source=held.spec.name,
        target=target.spec.name,
        kept=fates.how,
        conversion_error=fates.relative_errors(),
        bytes_before=bytes_before,
        bytes_after=roster.block_bytes(target),
        why=why,
    )
