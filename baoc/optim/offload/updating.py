"""Updated blocks: their states stay on the host, and so does their step; the gradient comes out, the weight goes back.

Gradient and weight pass through a ring of host buffers, where the host's processors step them as parameters of its own.
The weight comes out with the gradient, so that the step always starts from what the model has, whoever wrote it. On a
GPU the host works in a thread of its own: it fetches the next piece, steps this one, and sends it back, while the
caller goes on; only `join` waits for it. Gradients may also be flushed, which brings them out in backward and no more:
they then wait on the host, in memory of their own, until the piece is stepped.
"""

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from baoc.kernels.host_memory import Lock, host_memory
from baoc.optim.offload.pipeline import IN, MAIN, OUT, StagingPipeline
from baoc.optim.state import LiveBlock, Slot, State
from baoc.planning.cost import aligned
from baoc.types import Placement


class _Buffer:
    def __init__(self, memory: Tensor, *, device: torch.device):
        self.memory = memory
        self.lock = Lock(memory, device=device)
        self.free: Any = None  # mark: it may be overwritten


def passing_bytes(live: LiveBlock) -> int:
    """What a block takes in a buffer: its weights and as much for gradients."""
    return sum(2 * aligned(slot.param.nbytes) for slot in live.slots)


def on_host(live: LiveBlock, params: Sequence[Tensor]) -> LiveBlock:
    """The block as the host steps it: with `params` in place of its own, and the same states and match."""
    slots = [
        replace(slot, param=param, on_cpu=True, placement=Placement.DEVICE)
        for slot, param in zip(live.slots, params, strict=True)
    ]
    return replace(live, slots=slots, spec=replace(live.spec, placement=Placement.DEVICE))


class Piece:
    """Blocks that pass together. `twins` are the same as the host steps them, `state` is by parameter of those."""

    def __init__(self, blocks: Sequence[LiveBlock], *, home: dict[Tensor, State], buffer: _Buffer):
        self.blocks, self.buffer = list(blocks), buffer
        self.twins: list[LiveBlock] = []
        self.state: dict[Tensor, State] = {}
        self._pairs: list[tuple[Slot, Tensor, Tensor]] = []  # slot, the host's weight and gradient
        self._moving: list[tuple[Slot, Tensor, Tensor]] = []  # those with a gradient in this step
        self.grads: list[Tensor] = []  # which they are, on the device
        self.lot: _Buffer | None = None  # for flushed gradients
        self.parked: dict[Tensor, Tensor] = {}  # the host's weight -> its gradient, flushed in this step
        begin = 0
        for live in self.blocks:
            weights = []
            for slot in live.slots:
                weight = _place(slot.param, buffer.memory, begin=begin)
                grad = _place(slot.param, buffer.memory, begin=begin + aligned(slot.param.nbytes))
                begin += 2 * aligned(slot.param.nbytes)
                weights.append(weight)
                self.state[weight] = home[slot.param]
                self._pairs.append((slot, weight, grad))
            self.twins.append(on_host(live, weights))
        self._device = self._pairs[0][0].param.device if self._pairs else None

    @property
    def has_gradients(self) -> bool:
        return any(slot.param.grad is not None for slot, _, _ in self._pairs)

    @property
    def moved(self) -> bool:
        """True if parameters are on another device, or of another type or shape, than what stands for them here."""
        device = self._pairs[0][0].param.device if self._pairs else None
        return device != self._device or any(
            slot.param.dtype is not weight.dtype or slot.param.shape != weight.shape for slot, weight, _ in self._pairs
        )

    def twin_of(self) -> dict[Tensor, Tensor]:
        """Parameter -> the host's."""
        return {slot.param: weight for slot, weight, _ in self._pairs}

    def take_gradients(self) -> None:
        """Holds the gradients of this step until they are fetched."""
        self._moving = [pair for pair in self._pairs if pair[0].param.grad is not None]
        self.grads = [slot.param.grad for slot, _, _ in self._moving if slot.param.grad is not None]

    def drop_gradients(self) -> list[Tensor]:
        grads, self.grads = self.grads, []
        return grads

    @property
    def flushed(self) -> bool:
        return bool(self.parked)

    def park(self) -> list[tuple[Tensor, Tensor]]:
        """Room for the gradients where nothing else passes, and the copies to be made: (to, from)."""
        if self.lot is None:
            nbytes = sum(aligned(slot.param.nbytes) for slot, _, _ in self._pairs)
            memory = host_memory(nbytes, what="flushed gradients of blocks that the host updates")
            self.lot = _Buffer(memory, device=self._pairs[0][0].param.device)
        self.parked, begin = {}, 0
        for slot, weight, _ in self._moving:
            self.parked[weight] = _place(slot.param, self.lot.memory, begin=begin)
            begin += aligned(slot.param.nbytes)
        return list(zip(self.parked.values(), self.drop_gradients(), strict=True))

    def fetch(self) -> None:
        for (slot, weight, own), grad in zip(self._moving, self.grads, strict=True):
            weight.copy_(slot.param.detach(), non_blocking=True)
            if weight not in self.parked:
                own.copy_(grad, non_blocking=True)

    def step(self, work: Callable[[], object]) -> None:
        """Does `work` with the gradients that were fetched."""
        for _, weight, own in self._moving:
            weight.grad = self.parked.get(weight, own)
        for live, twin in zip(self.blocks, self.twins, strict=True):
            twin.fresh, twin.applied, twin.match = live.fresh, live.applied, live.match
        work()
        for live, twin in zip(self.blocks, self.twins, strict=True):
            live.fresh, live.applied = twin.fresh, twin.applied
        for _, weight, _ in self._moving:
            weight.grad = None
        self.parked = {}

    def send(self) -> None:
        for slot, weight, _ in self._moving:
            slot.param.detach().copy_(weight, non_blocking=True)


def _copy(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    for to, source in pairs:
        to.copy_(source, non_blocking=True)


def _place(param: Tensor, memory: Tensor, *, begin: int) -> Tensor:
    """A tensor like the parameter in the buffer's bytes, from `begin` on."""
    like = torch.empty_like(param, device="meta")
    flat = memory[begin : begin + param.nbytes].view(param.dtype)
    return flat.as_strided(like.shape, like.stride())


def beside(device: torch.device) -> ThreadPoolExecutor | None:
    """The thread in which the host steps beside the caller; None where both have the same processors."""
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix="baoc-host") if device.type == "cuda" else None


@dataclass(slots=True, kw_only=True, eq=False)
class _Task:
    piece: Piece
    work: Callable[[], object]
    given: Any  # mark of the caller's lane: gradients are final
    fetched: Any = None  # mark
    asked: bool = False  # for it to be fetched


class Updating(StagingPipeline[Piece]):
    """The updated blocks of one device; the buffers are on the host."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._buffers = [self._make_buffer() for _ in range(self.num_buffers)]
        self.queue: deque[_Task] = deque()
        self._pending: list[Future[None]] = []
        self._host = beside(self.device)
        self._sent: Any = None
        self._out: Any = None  # mark of the last gradients that were flushed

    @staticmethod
    def size_of(live: LiveBlock) -> int:
        return passing_bytes(live)

    def _make_buffer(self) -> _Buffer:
        memory = host_memory(self.capacity, what="gradients and weights of blocks that the host updates")
        return _Buffer(memory, device=self.device)

    def place(self, parts: Sequence[Sequence[LiveBlock]]) -> list[Piece]:
        return [
            Piece(part, home=self.home, buffer=self._buffers[index % self.num_buffers])
            for index, part in enumerate(parts)
        ]

    def step(self, piece: Piece, work: Callable[[], object], *, releases: bool = False) -> None:
        """Does `work`, which steps the piece's twins; on a GPU beside the caller.

        `releases`: the caller drops the gradients when this returns. They are then sent for at once, which waits for
        the piece before: else those of a whole backward would gather on the device, which is faster than the host.
        """
        if releases:
            self.synchronize()
        piece.take_gradients()
        task = _Task(piece=piece, work=work, given=self.lanes.mark(MAIN))
        if releases:
            with torch.no_grad():
                self._fetch(task)
        self.queue.append(task)
        if self._host is None:
            self._do_next()
        else:
            self._pending.append(self._host.submit(self._do_next))

    def flush(self, piece: Piece) -> None:
        """Sends for the gradients alone; the caller may not change them before `join`."""
        piece.take_gradients()
        self.lanes.wait(OUT, self.lanes.mark(MAIN))
        copies = piece.park()
        self.lanes.run(OUT, lambda: _copy(copies))
        self.lanes.keep([grad for _, grad in copies], lane=OUT)
        self._out = self.lanes.mark(OUT)

    @torch.no_grad()
    def _do_next(self) -> None:
        task = self.queue.popleft()
        self._fetch(task)
        if self.queue and self.queue[0].piece.buffer is not task.piece.buffer:
            self._fetch(self.queue[0])
        self.lanes.wait_here(task.fetched)
        task.piece.step(task.work)
        self.lanes.run(IN, task.piece.send)
        task.piece.buffer.free = self._sent = self.lanes.mark(IN)

    def _fetch(self, task: _Task) -> None:
        if task.asked:
            return
        task.asked = True
        self.lanes.wait(OUT, task.given)
        self.lanes.wait(OUT, task.piece.buffer.free)
        self.lanes.run(OUT, task.piece.fetch)
        self.lanes.keep(task.piece.drop_gradients(), lane=OUT)
        task.fetched = self.lanes.mark(OUT)

    def join(self) -> None:
        self.synchronize()
        for mark in (self._sent, self._out):
            if mark is not None:
                self.lanes.wait(MAIN, mark)
        self._sent = self._out = None

    def synchronize(self) -> None:
        pending, self._pending = self._pending, []
        try:
            for future in pending:
                future.result()
        finally:
            if pending:
                wait(pending)
