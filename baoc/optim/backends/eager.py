"""The reference step, in torch operations on one tensor at a time: every other backend is tested against it.

One tensor takes these steps: `advance` decodes its states, runs the rule on the gradient, and encodes the states. It is
a generator, which yields where a rule needs sums over ranks (`run_in_lockstep`).
`apply_` then sets param <- (1 - lr wd) param - lr factor update. A block that is matched has one factor for all of its
tensors (`_step_together`, see `baoc.optim.matching`). For uniform AdamW the operations and their order are those of
torch.optim.AdamW(foreach=False, fused=False).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from baoc.optim import weights
from baoc.optim.backends.base import Backend, StepInputs
from baoc.optim.rules import Direction
from baoc.optim.rules.base import TINY, RuleContext
from baoc.optim.rules.matrix import RankSums, SummingRule
from baoc.optim.shards import ShardGroup
from baoc.optim.state import LiveBlock, Slot, State

T = TypeVar("T")
_ELEMENTS_PER_NORM = 2**16


class EagerBackend(Backend):
    """Every spec on every device."""

    name = "eager"

    def __init__(self, blocks: Sequence[LiveBlock], *, state: Mapping[Tensor, State]):
        super().__init__(blocks, state=state)
        self._slots = [slot for block in self.blocks for slot in block.slots]
        self._dtypes = [slot.param.dtype for slot in self._slots]

    @staticmethod
    def refusal(block: LiveBlock) -> str:
        return ""

    def __call__(self, inputs: StepInputs) -> None:
        together: list[LiveBlock] = []
        for block in self.blocks:
            if any(slot.shard is not None for slot in block.slots):
                together.append(block)
            elif inputs.matching and block.match is not None:
                _step_together([block], inputs)
            else:
                for slot in block.slots:
                    if slot.param.grad is not None and slot.param.numel():
                        _step_plain(slot, inputs)
        if together:
            _step_together(together, inputs)

    @property
    def moved(self) -> bool:
        return self._dtypes != [slot.param.dtype for slot in self._slots] or any(map(has_changed, self._slots))


def has_changed(slot: Slot) -> bool:
    """True if a parameter has another shape than its states, or another type than its weights format."""
    param = slot.param
    return (slot.weights != "native" and param.dtype is not torch.bfloat16) or param.shape != slot.info.shape


def _step_plain(slot: Slot, inputs: StepInputs) -> None:
    """Steps one tensor. Its temporaries are freed on return, so plans count those of one tensor."""
    finite = inputs.masks.get(slot.param)
    (direction,) = run_in_lockstep([advance(slot, inputs, finite=finite)], group=None)
    apply_(slot, direction, inputs=inputs, finite=finite)


def _step_together(blocks: Sequence[LiveBlock], inputs: StepInputs) -> None:
    """Steps blocks that are matched or sharded. Each sum over ranks of a batch of tensors is one message. Matrices of
    which a rule needs all rows are gathered one by one. Before its first step a block is stepped on copies of its
    states, to measure the own RMS that this step will have."""
    slots = [(block, slot) for block in blocks for slot in block.slots]
    group = next((slot.shard.group for _, slot in slots if slot.shard is not None), None)
    members = [
        (block, slot)
        for block, slot in slots
        if slot.param.grad is not None and (slot.param.numel() or slot.shard is not None)
    ]
    sizes = {block: UpdateSize() for block, _ in members}
    unmeasured = [
        (block, slot) for block, slot in members if inputs.matching and block.match is not None and block.rms_unmeasured
    ]
    for batch in _batches(unmeasured):
        for (block, _), (direction, norm, count) in zip(
            batch, _directions(batch, inputs, group=group, store=False), strict=True
        ):
            sizes[block].add(norm, count=count)
            del direction  # a tensor, which would be held during the next batch
    for block in dict.fromkeys(block for block, _ in unmeasured):
        assert block.match is not None
        block.match[1], block.rms_unmeasured = sizes[block].rms, False
        sizes[block] = UpdateSize()
    for batch in _batches(members):
        for (block, slot), (direction, norm, count) in zip(batch, _directions(batch, inputs, group=group), strict=True):
            scale = None
            if inputs.matching and block.match is not None:
                scale = matching_factor(block.match, norm=norm, count=count)
                sizes[block].add(norm, count=count)
            if slot.param.numel():
                apply_(slot, direction, inputs=inputs, finite=inputs.masks.get(slot.param), factor=scale)
            del direction
    for block, size in sizes.items():
        if inputs.matching and block.match is not None:
            block.match[1] = size.rms


def _batches(members: Sequence[tuple[LiveBlock, Slot]]) -> Iterator[list[tuple[LiveBlock, Slot]]]:
    """Batches of tensors that are stepped in lockstep, the same on all ranks. A batch has no more elements than the
    largest tensor, so that it takes no more memory. Unsharded tensors are batches of one."""
    if not any(slot.shard for _, slot in members):
        yield from ([member] for member in members)
        return
    sizes = [-(-slot.group_param.numel() // (slot.shard.group.size if slot.shard else 1)) for _, slot in members]
    batch: list[tuple[LiveBlock, Slot]] = []
    numel, limit = 0, max(sizes, default=0)
    for member, size in zip(members, sizes, strict=True):
        if batch and numel + size > limit:
            yield batch
            batch, numel = [], 0
        batch.append(member)
        numel += size
    if batch:
        yield batch


def _directions(
    batch: Sequence[tuple[LiveBlock, Slot]], inputs: StepInputs, *, group: ShardGroup | None, store: bool = True
) -> list[tuple[Direction, float | Tensor, int]]:
    """Direction, norm and number of elements of each tensor; the latter two are of all rows."""
    runs = [_direction_and_norm(slot, inputs, matched=block.match is not None, store=store) for block, slot in batch]
    return run_in_lockstep(runs, group=group)


def _direction_and_norm(
    slot: Slot, inputs: StepInputs, *, matched: bool, store: bool
) -> RankSums[tuple[Direction, float | Tensor, int]]:
    finite, norm, count = inputs.masks.get(slot.param), 0.0, 0
    if slot.param.numel() or slot.sums_over_ranks:
        direction = yield from advance(slot, inputs, finite=finite, store=store)
    else:  # this rank has no rows, and takes part in the other ranks' messages
        direction = Direction(numerator=slot.param)
        if slot.gathers_rows and slot.shard is not None:
            slot.shard.all_gather(torch.empty_like(slot.param, dtype=torch.float32))
    if not (matched and inputs.matching):
        return direction, norm, count
    if direction.denominator is not None:
        direction = Direction(numerator=direction.numerator / direction.denominator, divisor=direction.divisor)
    if slot.param.numel():
        norm, count = update_norm(direction.numerator, divisor=direction.divisor, finite=finite)
    if slot.shard is None:
        return direction, norm, count
    own = torch.zeros(2, dtype=torch.float64, device=slot.param.device)
    own[0], own[1] = norm * norm, count
    square, total_count = yield own
    norm = square.sqrt()
    return direction, (norm.item() if norm.is_cpu else norm.to(torch.float32)), int(total_count)


def run_in_lockstep(runs: Sequence[RankSums[T]], *, group: ShardGroup | None) -> list[T]:
    """Runs generators that yield this rank's part of sums. Sums that several ask for at once are one message.

    Returns:
        What each of `runs` returns.
    """
    results: dict[int, T] = {}
    sums: dict[int, Any] = dict.fromkeys(range(len(runs)))
    while sums:
        own: dict[int, Tensor] = {}
        for index, received in sums.items():
            try:
                own[index] = runs[index].send(received)
            except StopIteration as end:
                results[index] = end.value
        if not own:
            break
        assert group is not None
        flat = [part.to(torch.float64).flatten() for part in own.values()]
        totals = group.all_reduce_(torch.cat(flat)).split([len(part) for part in flat])
        sums = {index: total.view(own[index].shape) for index, total in zip(own, totals, strict=True)}
    return [results[index] for index in range(len(runs))]


def advance(slot: Slot, inputs: StepInputs, *, finite: Tensor | None, store: bool = True) -> RankSums[Direction]:
    """Runs the rule on the parameter's gradient. Yields this rank's part of each sum over ranks.

    `store`: counts the step and keeps the new states; else they are computed on copies.
    """
    state, options, grad = inputs.state[slot.param], inputs.options[slot.options_index], slot.param.grad
    assert grad is not None
    grad, states, step = grad if grad.dtype is torch.float32 else grad.float(), decoded(slot, state), 0
    if slot.counts_steps:
        step = int(state["step"].item()) + 1
        if store and slot.param.numel():  # the optimizer counts the steps of slots without rows
            state["step"].add_(1)
    if not store:
        states = {name: tensor.clone() for name, tensor in states.items()}
    ctx = RuleContext(
        step=step,
        beta1=options.betas[0],
        beta2=options.betas[1],
        eps=options.eps,
        finite=finite,
        matrix=slot.matrix,
        transposed=slot.info.transposed,
        shard=slot.shard if slot.gathers_rows or slot.sums_over_ranks else None,
    )
    old = {}  # states of excluded elements, which get them back
    if finite is not None:
        old = {each.decl.name: states[each.decl.name][~finite] for each in slot.states if each.is_full}
    if slot.sums_over_ranks:
        assert isinstance(slot.rule, SummingRule)
        direction = yield from slot.rule.steps(grad, states=states, ctx=ctx)
    else:
        direction = slot.rule.direction(grad, states=states, ctx=ctx)
    if store:
        if finite is not None:
            for name, values in old.items():
                states[name][~finite] = values
        for each in slot.encoded_states if slot.param.numel() else ():
            each.encode_(state, states[each.decl.name], phase=inputs.phase, new=finite)
    return direction


def decoded(slot: Slot, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A tensor's states as the rule works on them, in fp32. Without elements if this rank has no rows."""
    states = {name: state[name] for name in slot.in_place_states}
    for each in slot.encoded_states:
        states[each.decl.name] = each.decode(state)
    for decl in slot.rule.info.states if len(states) < len(slot.rule.info.states) else ():
        if decl.name not in states:
            states[decl.name] = torch.zeros(decl.shape(slot.info), device=slot.param.device)
    return states


def apply_(
    slot: Slot, direction: Direction, *, inputs: StepInputs, finite: Tensor | None, factor: float | Tensor | None = None
) -> None:
    """param <- (1 - lr wd) param - lr factor update, excluded elements keeping their value.

    16-bit parameters are updated in fp32, with their correction if they have one, and rounded once.
    """
    param, state, options = slot.param, inputs.state[slot.param], inputs.options[slot.options_index]
    work = weights.master(param, state) if param.dtype in weights.SIXTEEN_BIT_DTYPES else param
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
        weights.store_(param, state, work, weights=slot.weights, name=slot.name, phase=inputs.phase, first=slot.offset)


# -- update matching: what a block's update is multiplied by, see `baoc.optim.matching` -----------------------------


@dataclass(slots=True, kw_only=True)
class UpdateSize:
    """Size of a block's update in one step, before matching. `square` is a tensor if the updates are on a GPU."""

    square: float | Tensor = 0.0
    count: int = 0

    def add(self, norm: float | Tensor, *, count: int) -> None:
        self.square = self.square + norm * norm
        self.count += count

    @property
    def rms(self) -> float | Tensor:
        return (self.square / max(self.count, 1)) ** 0.5


def update_norm(update: Tensor, *, divisor: float, finite: Tensor | None) -> tuple[float | Tensor, int]:
    """Euclidean norm of `update / divisor` over its finite elements, and their number."""
    count = update.numel()
    if finite is not None:
        update = torch.where(finite, update, 0.0)
        count = int(finite.sum())
    if update.is_cpu:  # in pieces, because torch's CPU kernel sums in fp32: off by 1 % at 10M equal elements
        pieces = update.reshape(-1).split(_ELEMENTS_PER_NORM) if count > _ELEMENTS_PER_NORM else (update,)
        norm = sum(torch.linalg.vector_norm(piece).item() ** 2 for piece in pieces) ** 0.5
    else:
        norm = torch.linalg.vector_norm(update)
    return norm / abs(divisor), count


def matching_factor(match: Tensor, *, norm: float | Tensor, count: int) -> float | Tensor:
    """The factor of a tensor's update. `match`: (target, own RMS of the block); `norm`: this tensor's own."""
    if isinstance(norm, Tensor):  # without a synchronisation
        own, rms = match[1], (norm / max(count, 1) ** 0.5).clamp(min=TINY)
        usual = torch.minimum(match[0] / own.clamp(min=TINY), match[0].clamp(min=1.0) / rms)
        return torch.where(own > TINY, usual, match[0] / rms)
    target, own = match.tolist()
    rms = norm / max(count, 1) ** 0.5
    if rms <= TINY:
        return 0.0  # the update is zero
    if own <= TINY:
        return target / rms  # the block stood still until now
    return min(target / own, max(1.0, target) / rms)
