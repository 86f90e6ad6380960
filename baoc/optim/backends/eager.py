"""The reference step, in torch operations on one tensor at a time: every other backend is held against it.

For one tensor: decode its states (`advance`), run the rule on the gradient, encode the states, then
param <- (1 - lr wd) param - lr factor update (`apply_`). A block that is matched has one factor for all of its tensors
(`_step_matched`, see `baoc.optim.matching`). For uniform AdamW the operations and their order are those of
torch.optim.AdamW(foreach=False, fused=False).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from baoc.optim import weights
from baoc.optim.backends.base import Backend, StepInputs
from baoc.optim.rules import Direction, RuleContext
from baoc.optim.state import LiveBlock, Slot

TINY = 1e-30
_PIECE = 2**16


class EagerBackend(Backend):
    """Every spec on every device."""

    name = "eager"

    @staticmethod
    def refusal(block: LiveBlock) -> str:
        return ""

    def __call__(self, inputs: StepInputs) -> None:
        for bucket in self.buckets:
            for block in bucket.blocks:
                if inputs.matching and block.match is not None:
                    _step_matched(block, inputs)
                else:
                    for slot in block.slots:
                        if slot.param.grad is not None:
                            _step_plain(slot, inputs)

    @property
    def moved(self) -> bool:
        return any([changed(slot) for bucket in self.buckets for block in bucket.blocks for slot in block.slots])


def changed(slot: Slot) -> bool:
    """True if a parameter is no longer what its states and its kind of weights were made for."""
    param = slot.param
    return (slot.weights != "native" and param.dtype is not torch.bfloat16) or param.shape != slot.info.shape


def _step_plain(slot: Slot, inputs: StepInputs) -> None:
    """Steps one tensor. Its temporaries are freed on return, so plans count those of one tensor."""
    if not slot.param.numel():
        return _join(slot)
    finite = inputs.masks.get(slot.param)
    apply_(slot, advance(slot, inputs, finite=finite), inputs=inputs, finite=finite)


def _step_matched(block: LiveBlock, inputs: StepInputs) -> None:
    slots = [slot for slot in block.slots if slot.param.grad is not None and (slot.param.numel() or slot.shard)]
    if not slots:
        return
    match = block.match
    assert match is not None
    if block.fresh:  # the own RMS that this step will have, found by running it on copies of the states
        measure = Measure()
        for slot in slots:
            norm, count = _own_norm(slot, inputs)
            measure.add(norm, factor=1.0, count=count)
        match[1] = measure.rms()[0]
        block.fresh = False
    measure = Measure()
    for slot in slots:
        _step_scaled(slot, inputs, match=match, measure=measure)
    match[1], block.applied = measure.rms()


def _step_scaled(slot: Slot, inputs: StepInputs, *, match: Tensor, measure: "Measure") -> None:
    finite = inputs.masks.get(slot.param)
    if not slot.param.numel():  # others have the parts of it
        _join(slot)
        norm, count = over_ranks(slot, norm=0.0, count=0)
        measure.add(norm, factor=factor(match, norm=norm, count=count), count=count)
        return
    direction = advance(slot, inputs, finite=finite)
    update = _update_of(direction)
    norm, count = update_norm(update, divisor=direction.divisor, finite=finite, on_cpu=slot.on_cpu)
    norm, count = over_ranks(slot, norm=norm, count=count)
    scale = factor(match, norm=norm, count=count)
    measure.add(norm, factor=scale, count=count)
    matched = Direction(numerator=update, divisor=direction.divisor)
    apply_(slot, matched, inputs=inputs, finite=finite, factor=scale)


def _join(slot: Slot) -> None:
    """On a rank without rows of a tensor: takes part in the collective calls of the others."""
    if slot.gathers and slot.shard is not None:
        slot.shard.gathered(torch.empty_like(slot.param, dtype=torch.float32))


def _own_norm(slot: Slot, inputs: StepInputs) -> tuple[float | Tensor, int]:
    finite = inputs.masks.get(slot.param)
    if not slot.param.numel():
        _join(slot)
        return over_ranks(slot, norm=0.0, count=0)
    direction = advance(slot, inputs, finite=finite, store=False)
    norm, count = update_norm(_update_of(direction), divisor=direction.divisor, finite=finite, on_cpu=slot.on_cpu)
    return over_ranks(slot, norm=norm, count=count)


def over_ranks(slot: Slot, *, norm: float | Tensor, count: int) -> tuple[float | Tensor, int]:
    """Norm and number of elements of a whole tensor, from those of each rank's part of it."""
    if slot.shard is None or slot.shard.shards.size == 1:
        return norm, count
    shards, device = slot.shard.shards, slot.param.device
    sums = torch.zeros(2, dtype=torch.float64, device=device)
    sums[0], sums[1] = norm * norm, count
    shards.total_(sums)
    whole = sums[0].sqrt()
    return (whole.item() if slot.on_cpu else whole.to(torch.float32)), int(sums[1])


def _update_of(direction: Direction) -> Tensor:
    return direction.numerator if direction.denominator is None else direction.numerator / direction.denominator


def advance(slot: Slot, inputs: StepInputs, *, finite: Tensor | None, store: bool = True) -> Direction:
    """Runs the rule on the parameter's gradient and, unless told otherwise, stores the states it leaves."""
    state, options = inputs.state[slot.param], inputs.options[slot.row]
    step = 0
    if slot.counts_steps:
        count = state["step"]
        if store:
            count += 1
        step = int(count.item()) + (not store)
    grad = slot.param.grad
    assert grad is not None
    if grad.dtype is not torch.float32:
        grad = grad.to(torch.float32)
    states = {name: state[name] for name in slot.direct}
    for kept in slot.coded:
        states[kept.decl.name] = kept.decode(state)
    if not store:
        states = {name: tensor.clone() for name, tensor in states.items()}
    old = {k.decl.name: states[k.decl.name][~finite] for k in slot.kept if k.full} if finite is not None else {}
    ctx = RuleContext(
        step=step,
        beta1=options.betas[0],
        beta2=options.betas[1],
        eps=options.eps,
        finite=finite,
        matrix=slot.matrix,
        transposed=slot.info.transposed,
        shard=slot.shard if slot.gathers else None,
    )
    direction = slot.rule.direction(grad, states=states, ctx=ctx)
    if store:
        for name, values in old.items():
            states[name][~finite] = values  # pyright: ignore[reportOptionalOperand] (old is empty without a mask)
        for kept in slot.coded:
            kept.encode_(state, states[kept.decl.name], phase=inputs.phase, new=finite)
    return direction


def apply_(
    slot: Slot,
    direction: Direction,
    *,
    inputs: StepInputs,
    finite: Tensor | None,
    factor: float | Tensor | None = None,
) -> None:
    """param <- (1 - lr wd) param - lr factor update, excluded elements keeping their value.

    16-bit parameters are updated in fp32, with their correction where they have one, and rounded once.
    """
    param, state, options = slot.param, inputs.state[slot.param], inputs.options[slot.row]
    work = weights.master(param, state) if param.dtype in weights.ROUNDED else param
    old = work[~finite] if finite is not None else None
    if options.weight_decay != 0:
        work.mul_(1 - options.lr * options.weight_decay)
    size = -(options.lr / direction.divisor)
    if isinstance(factor, Tensor):
        work.addcmul_(direction.numerator, factor, value=size)
    elif factor is not None:
        work.add_(direction.numerator, alpha=size * factor)
    elif direction.denominator is None:
        work.add_(direction.numerator, alpha=size)
    else:
        work.addcdiv_(direction.numerator, direction.denominator, value=size)
    if finite is not None and old is not None:
        work[~finite] = old
    if work is not param:
        options = {"weights": slot.weights, "name": slot.name, "phase": inputs.phase, "first": slot.first}
        weights.store_(param, state, work, **options)


# -- update matching: what a block's update is multiplied by, see `baoc.optim.matching` -----------------------------


@dataclass(slots=True, kw_only=True)
class Measure:
    """Sums over the tensors of a block in one step; tensors without dimensions on devices other than the CPU."""

    own: float | Tensor = 0.0  # sum of squares of the rule's own update
    applied: float | Tensor = 0.0  # and after matching
    count: int = 0

    def add(self, norm: float | Tensor, *, factor: float | Tensor, count: int) -> None:
        self.own = self.own + norm * norm
        applied = norm * factor
        self.applied = self.applied + applied * applied
        self.count += count

    def rms(self) -> tuple[float | Tensor, float | Tensor]:
        """Own and applied RMS."""
        count = max(self.count, 1)
        return (self.own / count) ** 0.5, (self.applied / count) ** 0.5


def update_norm(update: Tensor, *, divisor: float, finite: Tensor | None, on_cpu: bool) -> tuple[float | Tensor, int]:
    """Euclidean norm of `update / divisor` over its finite elements, and their number."""
    count = update.numel()
    if finite is not None:
        update = torch.where(finite, update, 0.0)
        count = int(finite.sum())
    if on_cpu:  # in pieces, because the CPU kernel sums in fp32: off by 1 % at 10M equal elements
        pieces = update.reshape(-1).split(_PIECE) if count > _PIECE else (update,)
        norm = sum(torch.linalg.vector_norm(piece).item() ** 2 for piece in pieces) ** 0.5
    else:
        norm = torch.linalg.vector_norm(update)
    return norm / abs(divisor), count


def factor(match: Tensor, *, norm: float | Tensor, count: int) -> float | Tensor:
    """The factor of a tensor's update; `match` is (target, own RMS of the block), `norm` is this tensor's own."""
    if isinstance(norm, Tensor):
        return factors(match[0], own=match[1], rms=norm / max(count, 1) ** 0.5)
    target, own = match.tolist()
    rms = norm / max(count, 1) ** 0.5
    if rms <= TINY:
        return 0.0  # the update is zero
    if own <= TINY:
        return target / rms  # the block stood still until now
    return min(target / own, max(1.0, target) / rms)


def factors(target: Tensor, *, own: Tensor, rms: Tensor) -> Tensor:
    """`factor` of one tensor or of many, whose updates have `rms`, without a synchronisation."""
    rms = rms.clamp(min=TINY)
    usual = torch.minimum(target / own.clamp(min=TINY), target.clamp(min=1.0) / rms)
    return torch.where(own > TINY, usual, target / rms)
