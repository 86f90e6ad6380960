"""The reference step, in torch operations on one tensor at a time: every other backend is held against it.

For uniform AdamW the operations and their order are those of torch.optim.AdamW(foreach=False, fused=False).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from baoc.optim import matching, weights
from baoc.optim.backends.base import Backend, Options, StepInputs
from baoc.optim.rules import Direction
from baoc.optim.state import Bucket, LiveBlock, Slot, changed


class EagerBackend(Backend):
    """Every spec on every device."""

    name = "eager"

    @staticmethod
    def refusal(block: LiveBlock) -> str:
        return ""

    def __call__(self, inputs: StepInputs) -> None:
        for bucket in self.buckets:
            step_bucket(bucket, inputs)

    @property
    def moved(self) -> bool:
        return any(changed(slot) for bucket in self.buckets for block in bucket.blocks for slot in block.slots)


def step_bucket(bucket: Bucket, inputs: StepInputs) -> None:
    """One step of every block in the bucket whose parameters have gradients."""
    for block in bucket.blocks:
        if inputs.matching and block.matched:
            _step_matched(block, inputs)
        else:
            for slot in block.slots:
                if slot.param.grad is not None and slot.param.numel():
                    _step_plain(slot, inputs)


def _step_plain(slot: Slot, inputs: StepInputs) -> None:
    """A function, so that nothing of one tensor's step is there in that of the next: a plan counts one of them."""
    options, finite = inputs.options[slot.row], inputs.masks.get(slot.param)
    direction = advance(slot, inputs, finite=finite)
    apply_(slot, direction, inputs=inputs, options=options, finite=finite)


def _step_matched(block: LiveBlock, inputs: StepInputs) -> None:
    slots = [slot for slot in block.slots if slot.param.grad is not None and slot.param.numel()]
    if not slots:
        return
    match = block.match
    assert match is not None
    if block.fresh:
        match[1] = _measure(slots, inputs)
        block.fresh = False
    measure = matching.Measure()
    for slot in slots:
        _step_scaled(slot, inputs, match=match, measure=measure)
    own, block.applied = measure.rms()
    match[1] = own


def _step_scaled(slot: Slot, inputs: StepInputs, *, match: Tensor, measure: matching.Measure) -> None:
    finite = inputs.masks.get(slot.param)
    direction = advance(slot, inputs, finite=finite)
    update = direction.update()
    norm, count = matching.update_norm(update, divisor=direction.divisor, finite=finite, on_cpu=slot.on_cpu)
    factor = matching.factor(match, norm=norm, count=count)
    measure.add(norm, factor=factor, count=count)
    matched = Direction(numerator=update, divisor=direction.divisor)
    options = inputs.options[slot.row]
    apply_(slot, matched, inputs=inputs, options=options, finite=finite, factor=factor)


def _measure(slots: Sequence[Slot], inputs: StepInputs) -> float | Tensor:
    """Own RMS that the coming step will have, found by running it on copies of the states."""
    measure = matching.Measure()
    for slot in slots:
        norm, count = _own_norm(slot, inputs)
        measure.add(norm, factor=1.0, count=count)
    return measure.rms()[0]


def _own_norm(slot: Slot, inputs: StepInputs) -> tuple[float | Tensor, int]:
    finite = inputs.masks.get(slot.param)
    direction = advance(slot, inputs, finite=finite, store=False)
    return matching.update_norm(direction.update(), divisor=direction.divisor, finite=finite, on_cpu=slot.on_cpu)


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
    ctx = slot.context(step=step, betas=options.betas, eps=options.eps, finite=finite)
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
    options: Options,
    finite: Tensor | None,
    factor: float | Tensor | None = None,
) -> None:
    """param <- (1 - lr wd) param - lr factor update, excluded elements keeping their value.

    16-bit parameters are updated in fp32, with their correction where they have one, and rounded once.
    """
    param, state = slot.param, inputs.state[slot.param]
    work = weights.master(param, state)
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
    weights.store_(param, state, work, weights=slot.weights, name=slot.name, phase=inputs.phase)
