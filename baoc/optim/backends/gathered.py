"""Muon over matrices of which ranks hold some rows: each rank orthogonalizes its share of them, whole.

Matrices of one shape are stepped in batches. In a batch every rank averages the gradients of its rows, gets all rows of
its share of the matrices, and gives back the rows of what it made of them: two messages. The states never leave their
rank. The sums of matching are added up by one message more, before weights are touched. The kernels do so
(`ExchangedBackend`) where there are some and each rank has rows of every matrix; `GatheredBackend` does it in torch, a
matrix for each rank at a time, as `optim.rules.muon` with `optim.backends.eager` do on one device.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from baoc.kernels import Shape, available, fits
from baoc.kernels.triton import muon_plan
from baoc.optim.backends.base import Backend, StepInputs
from baoc.optim.backends.eager import TINY, apply_, changed, factors
from baoc.optim.backends.fused import FusedBackend
from baoc.optim.rules import Direction
from baoc.optim.rules.muon import orthogonalized
from baoc.optim.shards import Shard, Shards, local, shard_of
from baoc.optim.state import Bucket, LiveBlock, Slot, State
from baoc.types import Scaling

_PER_ELEMENT = 48  # bytes at most that a batch takes for each element that a rank has of it, in torch


def needs_gathering(block: LiveBlock) -> bool:
    """Whether the rule needs whole matrices of which this rank has some rows."""
    shards = [slot.shard.shards for slot in block.slots if slot.shard is not None]
    return block.rule.info.scaling is Scaling.SPECTRAL and any(each.size > 1 for each in shards)


def temporary_bytes(params: Iterable[Tensor]) -> int:
    """The most that a step of sharded `params` takes beside states, where all of their matrices run Muon."""
    most, by_kernel, size = 0, [], 1
    for param in params:
        shard = shard_of(param)
        if shard is None or param.ndim < 2 or not param.numel():
            continue
        rows, cols, size = len(param), param.numel() // len(param), shard.shards.size
        if available(param.device) and fits(local(param)) and _all_have_rows(shard):
            by_kernel.append(Shape(numel=param.numel(), rows=rows, cols=cols))
        else:
            most = max(most, _PER_ELEMENT * -(-rows // size) * cols * size)
    return max(most, muon_plan.temporary_bytes(by_kernel, ranks=size))


def _all_have_rows(shard: Shard) -> bool:
    size, rows = shard.shards.size, len(shard.owner)
    return (size - 1) * -(-rows // size) < rows


class ExchangedBackend(FusedBackend):
    """Blocks of Muon that `fully_shard` cuts, by kernels; nothing is captured, as ranks send messages between them."""

    name = "exchanged"

    def __init__(self, buckets: Sequence[Bucket], *, state: Mapping[Tensor, State]):
        super().__init__(buckets, state=state, graphs=False)

    @staticmethod
    def refusal(block: LiveBlock) -> str:
        """The same on all ranks."""
        if not needs_gathering(block):
            return "it steps matrices of which ranks hold some rows"
        if not all(slot.shard is not None and _all_have_rows(slot.shard) for slot in block.slots):
            return "a rank has no rows of one of its matrices"
        return FusedBackend.refusal(block)

    def capture(self, inputs: StepInputs) -> None:
        Backend.capture(self, inputs)  # which refuses it


@dataclass(frozen=True, slots=True, kw_only=True)
class _Batch:
    """Matrices of [rows, cols] as they are stored, of which this rank has `own` rows and none has more than `most`."""

    slots: tuple[Slot, ...]
    blocks: Tensor  # int64: index of the block of each
    rows: int
    cols: int
    own: int
    most: int
    gain: float  # what the polar factor is multiplied by


class GatheredBackend(Backend):
    """Blocks of Muon that `fully_shard` cuts."""

    name = "gathered"

    def __init__(self, buckets: Sequence[Bucket], *, state: Mapping[Tensor, State]):
        super().__init__(buckets, state=state)
        self.blocks = [block for bucket in self.buckets for block in bucket.blocks]

    @staticmethod
    def refusal(block: LiveBlock) -> str:
        return "" if needs_gathering(block) else "it steps matrices of which ranks hold some rows"

    @property
    def moved(self) -> bool:
        return any([changed(slot) for block in self.blocks for slot in block.slots])

    def __call__(self, inputs: StepInputs) -> None:
        shard = self.blocks[0].slots[0].shard
        assert shard is not None
        batches = list(self._batches(shard.shards))
        matched = inputs.matching and self.blocks[0].match is not None
        fresh = [block for block in self.blocks if block.fresh] if matched else []
        if fresh:  # the own RMS that this step will have
            sums = self._sums()
            for batch in batches:
                update, finite = _updates(batch, inputs, shards=shard.shards, store=False)
                self._add(sums, batch, update, finite=finite, shards=shard.shards)
            self._take(sums, blocks=fresh)
        sums = self._sums()
        for batch in batches:
            update, finite = _updates(batch, inputs, shards=shard.shards, store=True)
            by = self._add(sums, batch, update, finite=finite, shards=shard.shards) if matched else None
            for index, slot in enumerate(batch.slots):
                if slot.param.numel():
                    numerator = update[index].reshape(slot.param.shape)
                    factor = None if by is None else by[index]
                    finite_here = inputs.masks.get(slot.param)
                    apply_(slot, Direction(numerator=numerator), inputs=inputs, finite=finite_here, factor=factor)
        if matched:
            self._take(sums, blocks=self.blocks)

    def _batches(self, shards: Shards) -> Iterator[_Batch]:
        """The matrices that have a gradient, in the same order on all ranks."""
        found: dict[tuple[str, tuple[int, ...], torch.dtype, int, bool], list[tuple[int, Slot]]] = {}
        for index, block in enumerate(self.blocks):
            for slot in block.slots:
                if slot.param.grad is not None:
                    shape = tuple(slot.owner.shape)
                    key = (block.spec.name, shape, slot.param.dtype, slot.row, slot.info.transposed)
                    found.setdefault(key, []).append((index, slot))
        for (_, shape, _, _, turned), members in found.items():
            rows = shape[0]
            cols = members[0][1].owner.numel() // rows
            matrix = (cols, rows) if turned else (rows, cols)
            most = -(-rows // shards.size)
            for begin in range(0, len(members), shards.size):
                some = members[begin : begin + shards.size]
                slots = tuple(slot for _, slot in some)
                blocks = torch.tensor([index for index, _ in some], dtype=torch.int64, device="cpu")
                yield _Batch(
                    slots=slots,
                    blocks=blocks.to(slots[0].param.device),
                    rows=rows,
                    cols=cols,
                    own=slots[0].param.numel() // cols,
                    most=most,
                    gain=max(1.0, matrix[0] / matrix[1]) ** 0.5,
                )

    # -- update matching, as `baoc.optim.matching` defines it, for all matrices of a batch at once ------------------

    def _sums(self) -> Tensor:
        """By block: squares of the rule's own update, the same after matching, and elements."""
        return torch.zeros(3, len(self.blocks), dtype=torch.float64, device=self.blocks[0].slots[0].param.device)

    def _add(self, sums: Tensor, batch: _Batch, update: Tensor, *, finite: Tensor | None, shards: Shards) -> Tensor:
        """Factors of the batch's matrices, whose sums are added to those of their blocks."""
        kept = update if finite is None else torch.where(finite, update, 0.0)
        squares = kept.square().sum((1, 2), dtype=torch.float64)
        counts = torch.full_like(squares, float(batch.own * batch.cols))
        if finite is not None:
            counts = finite.sum((1, 2)).to(torch.float64)
        squares, counts = shards.total_(torch.stack([squares, counts]))
        matches = [self.blocks[index].match for index in batch.blocks.tolist()]
        target, own = torch.stack([match for match in matches if match is not None]).to(torch.float64).unbind(1)
        rms = (squares / counts.clamp(min=1)).sqrt()
        found = torch.where(rms > TINY, factors(target, own=own, rms=rms), 0.0)
        sums.index_add_(1, batch.blocks, torch.stack([squares, squares * found.square(), counts]))
        return found.to(torch.float32)

    def _take(self, sums: Tensor, *, blocks: Sequence[LiveBlock]) -> None:
        """The RMS of the update of blocks that were stepped."""
        own, applied = (sums[:2] / sums[2].clamp(min=1)).sqrt().to(torch.float32)
        for index, block in enumerate(self.blocks):
            stepped = any([slot.param.grad is not None for slot in block.slots])
            if block in blocks and stepped and block.match is not None:
                block.match[1] = own[index]
                block.applied = None if block.fresh else applied[index]
                block.fresh = False


def _updates(batch: _Batch, inputs: StepInputs, *, shards: Shards, store: bool) -> tuple[Tensor, Tensor | None]:
    """This rank's rows of the updates, fp32 [matrices, own, cols], and which of their elements are finite."""
    ahead, finite = _momentum(batch, inputs, store=store)
    dtype = torch.bfloat16 if ahead.is_cuda else torch.float32
    share, size = -(-len(batch.slots) // shards.size), shards.size
    stack = ahead.new_zeros((share * size, batch.most, batch.cols), dtype=dtype)
    stack[: len(batch.slots), : batch.own] = ahead
    came = shards.exchange(stack.view(size, share, batch.most, batch.cols))  # [of rank, matrix, rows, cols]
    whole = came.transpose(0, 1).reshape(share, size * batch.most, batch.cols)
    whole[:, : batch.rows] = orthogonalized(whole[:, : batch.rows], dtype=dtype).to(dtype)
    gone = whole.view(share, size, batch.most, batch.cols).transpose(0, 1).contiguous()
    back = shards.exchange(gone).view(share * size, batch.most, batch.cols)
    return back[: len(batch.slots), : batch.own].to(torch.float32).mul_(batch.gain), finite


def _momentum(batch: _Batch, inputs: StepInputs, *, store: bool) -> tuple[Tensor, Tensor | None]:
    """Nesterov's momentum of this rank's rows, 0 where it is left out; stores the average that it is made of."""
    shape = (len(batch.slots), batch.own, batch.cols)
    grad = torch.stack([_grad(slot).reshape(batch.own, batch.cols).to(torch.float32) for slot in batch.slots])
    masks = [inputs.masks.get(slot.param) for slot in batch.slots]
    finite = None
    if any(mask is not None for mask in masks):
        finite = torch.stack([torch.ones_like(g, dtype=torch.bool) if m is None else m.reshape(g.shape)
                              for g, m in zip(grad, masks, strict=True)])  # fmt: skip
    if not batch.own:
        return grad, finite
    beta1 = inputs.options[batch.slots[0].row].betas[0]
    (kept,) = batch.slots[0].kept
    states = [inputs.state[slot.param] for slot in batch.slots]
    together = {key: torch.cat([state[key].reshape(-1) for state in states]) for _, key in kept.keys}
    old = kept.codec.decode({part: together[key] for part, key in kept.keys}, shape).reshape(shape)
    m = old.lerp(grad, 1 - beta1)
    if finite is not None:
        m = torch.where(finite, m, old)
    if store:
        new = None if finite is None else finite.reshape(-1)
        kept.encode_(together, m.reshape(-1), phase=inputs.phase, new=new)
        for _, key in kept.keys:
            parts = together[key].view(len(states), -1)
            torch._foreach_copy_([state[key].view(-1) for state in states], list(parts.unbind()))  # pyright: ignore[reportPrivateImportUsage]
    ahead = grad.lerp(m, beta1)
    return (ahead if finite is None else torch.where(finite, ahead, 0.0)), finite


def _grad(slot: Slot) -> Tensor:
    grad = slot.param.grad
    assert grad is not None
    return grad
