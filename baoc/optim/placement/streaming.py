"""Streamed blocks: their states come to the device to be stepped, and go back, while others are stepped.

Blocks travel in pieces through a ring of device buffers. What waits for what, and nothing else does:

    copy in (IN)     for the last copy out of the same buffer, and with it for this piece's own of the step before
    step (STEP)      for that copy in, and for what the caller has launched by then: gradients, and readers of weights
    copy out (OUT)   for that step
    the caller       at the end of the step for all steps, but for no copy out: forward reads weights, not states
    the host         for copies out before anything reads or writes states where they are kept (`settle`)

When a piece has left, the next one for its buffer is sent for at once; after the last of a step these are the first
ones of the next step, which so are there before its first gradient is.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from baoc.optim.placement.arena import slab_of
from baoc.optim.placement.lanes import IN, MAIN, OUT, STEP
from baoc.optim.placement.ring import Ring
from baoc.optim.state import LiveBlock, State, views


class _Buffer:
    """Memory on the device. `held`: the piece whose states are in it or on their way; `ready` and `free` are marks."""

    def __init__(self, memory: Tensor, *, free: Any):
        self.memory = memory
        self.held: Piece | None = None
        self.ready: Any = None  # when a step may begin
        self.free: Any = free  # when it may be overwritten


class Piece:
    """Blocks that travel together. `staged` is their state as it lies in the buffer, for whoever steps them."""

    def __init__(self, blocks: Sequence[LiveBlock], *, home: dict[Tensor, State], buffer: _Buffer):
        self.blocks = list(blocks)
        self.buffer = buffer
        self.mates: Sequence[Piece] = [self]  # in the same buffer
        self._home = home
        self.staged: dict[Tensor, State] = {}
        self._runs: list[tuple[Tensor, Tensor]] = []  # bytes on the host, bytes in the buffer
        begin = 0
        for live in self.blocks:
            for slot in live.slots:
                steps = {"step": home[slot.param]["step"]} if slot.counts_steps else {}
                self.staged[slot.param] = {**steps, **views(slot, buffer.memory, begin=begin)}
                begin += slot.slab_bytes
        self._lay_out_runs()

    def _lay_out_runs(self) -> None:
        """What lies side by side on the host as it does in the buffer is copied at once."""
        begin = 0
        for live in self.blocks:
            if not live.slab_bytes:
                continue
            slab = slab_of(live, self._home)
            end = begin + slab.nbytes
            if self._runs and _adjacent(self._runs[-1][0], slab):
                before, staged = self._runs.pop()
                slab = torch.as_strided(before, (before.nbytes + slab.nbytes,), (1,))
                begin -= staged.nbytes
            self._runs.append((slab, self.buffer.memory[begin:end]))
            begin = end

    @property
    def grads(self) -> list[Tensor]:
        return [slot.param.grad for live in self.blocks for slot in live.slots if slot.param.grad is not None]

    def copy_in(self) -> None:
        for host, staged in self._runs:
            staged.copy_(host, non_blocking=True)

    def copy_out(self) -> None:
        for host, staged in self._runs:
            host.copy_(staged, non_blocking=True)

    def share_steps(self) -> None:
        """Who steps fused keeps the counts in a tensor of its own: the states at home count with it."""
        for param, state in self.staged.items():
            if "step" in state:
                self._home[param]["step"] = state["step"]


def _adjacent(a: Tensor, b: Tensor) -> bool:
    same = a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
    return same and a.storage_offset() + a.nbytes == b.storage_offset()


class Streaming(Ring[Piece, _Buffer]):
    """The streamed blocks of one device; its buffers are there."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._stepped: Any = None
        self._turn: set[int] = set()  # pieces that were stepped in the step in progress

    @staticmethod
    def size_of(live: LiveBlock) -> int:
        return live.slab_bytes

    def make_buffer(self) -> _Buffer:
        memory = torch.empty(self.capacity, dtype=torch.uint8, device=self.device)
        return _Buffer(memory, free=self.lanes.mark(MAIN))

    def make_piece(self, blocks: Sequence[LiveBlock], *, buffer: _Buffer) -> Piece:
        return Piece(blocks, home=self.home, buffer=buffer)

    def step(self, piece: Piece, work: Callable[[], object], *, releases: bool = False) -> None:
        """Does `work`, which steps the piece's staged states, in its lane; returns at once.

        `releases`: the caller drops the gradients before the step is over.
        """
        lanes, buffer = self.lanes, piece.buffer
        if buffer.held is not piece:
            self._load(piece)
        lanes.wait(STEP, lanes.mark(MAIN))
        lanes.wait(STEP, buffer.ready)
        if releases:
            lanes.keep(piece.grads, lane=STEP)
        lanes.run(STEP, work)
        self._stepped = lanes.mark(STEP)
        lanes.wait(OUT, self._stepped)
        lanes.run(OUT, piece.copy_out)
        buffer.ready = buffer.free = lanes.mark(OUT)
        self._turn.add(id(piece))
        after = self._next(piece)
        if after is not piece:
            self._load(after)

    def _next(self, piece: Piece) -> Piece:
        """The next one for the piece's buffer that is not stepped yet; after the last of a step, the first."""
        at = piece.mates.index(piece)
        ahead = [*piece.mates[at + 1 :], *piece.mates[:at]]
        return next((mate for mate in ahead if id(mate) not in self._turn), piece.mates[0])

    def _load(self, piece: Piece) -> None:
        lanes, buffer = self.lanes, piece.buffer
        lanes.wait(IN, buffer.free)
        lanes.run(IN, piece.copy_in)
        buffer.held, buffer.ready = piece, lanes.mark(IN)

    def join(self) -> None:
        if self._stepped is not None:
            self.lanes.wait(MAIN, self._stepped)
            self._stepped = None
        self._turn.clear()

    def settle(self) -> None:
        self.lanes.wait_here(self.lanes.mark(OUT))
        self.lanes.wait_here(self.lanes.mark(IN))

    def forget(self) -> None:
        for buffer in self.buffers:
            buffer.held = None
