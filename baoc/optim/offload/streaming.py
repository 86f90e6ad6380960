"""Streamed blocks: their states come to the device to be stepped, and go back, while others are stepped.

A piece is a run of blocks that are copied and stepped together. Pieces travel through a ring of device memory, in which
each has a place of its own: as many as fit are on their way at a time, whatever their sizes. What waits for what, and
nothing else does:

    copy in (IN)     for the copies out of all that was in its place, and for this piece's own of the step before
    step (STEP)      for that copy in, and for what the caller has launched by then: gradients, and readers of weights
    copy out (OUT)   for that step
    the caller       at the end of the step for all steps, but for no copy out: forward reads weights, not states
    the host         for copies out before anything reads or writes states where they are kept (`synchronize`)

When a piece has left, what comes next in the order of travel is sent for at once, as far as there is room; after the
last of a step these are the first ones of the next step, which so are there before its first gradient is.
"""

import weakref
from collections.abc import Callable, Hashable, Sequence
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from baoc.optim.offload.arena import slab_of
from baoc.optim.offload.lanes import IN, MAIN, OUT, STEP, Lanes, lanes_for
from baoc.optim.state import LiveBlock, State, views
from baoc.planning.transfer import NUM_BUFFERS, PIECE_BYTES, capacity_bytes, cut

# A piece costs the host half a millisecond, whatever its size (H200, 16 cores: 98 of them 56 ms, more than backward
# leaves it), so that where the ring is large there are fewer; so many on their way keep both ways of the link at work.
NUM_PIECES = 4


class _Chunk:
    """Bytes of a piece's place that are copied by themselves, so that no large piece holds the link up."""

    def __init__(self, *, first: int, end: int, runs: list[tuple[Tensor, Tensor]]):
        self.first, self.end = first, end
        self.left: tuple[int, Any] = (0, None)  # number and mark of its last copy out
        self._runs = runs  # bytes on the host, bytes in the ring

    def meets(self, other: "_Chunk") -> bool:
        return self.first < other.end and other.first < self.end

    def copy_in(self) -> None:
        for host, staged in self._runs:
            staged.copy_(host, non_blocking=True)

    def copy_out(self) -> None:
        for host, staged in self._runs:
            host.copy_(staged, non_blocking=True)


class Piece:
    """Blocks that travel together. `staged` is their state as it lies in `memory` (uint8), for whoever steps them."""

    def __init__(
        self, blocks: Sequence[LiveBlock], *, home: dict[Tensor, State], memory: Tensor, first: int, chunk_bytes: int
    ):
        """Its place are the bytes of `memory`, which is the ring's, from `first` on."""
        self.blocks = list(blocks)
        self.first, self.end = first, first + sum(live.slab_bytes for live in self.blocks)
        self.order = self.index = 0  # which order of travel, and the place in that
        self.here = False  # its states are in its place, or on their way
        self.wanted = False  # and have not been stepped since they came
        self.ready: Any = None  # mark: a step may begin
        self._home = home
        self.staged: dict[Tensor, State] = {}
        begin = first
        for live in self.blocks:
            for slot in live.slots:
                steps = {"step": home[slot.param]["step"]} if slot.counts_steps else {}
                self.staged[slot.param] = {**steps, **views(slot, memory, begin=begin)}
                begin += slot.slab_bytes
        self.chunks = self._cut(memory, chunk_bytes=chunk_bytes)

    def _cut(self, memory: Tensor, *, chunk_bytes: int) -> list[_Chunk]:
        """What lies side by side on the host as it does in the ring is copied at once, up to `chunk_bytes`."""
        runs: list[Tensor] = []  # on the host
        for live in self.blocks:
            if live.slab_bytes:
                slab = slab_of(live, self._home)
                if runs and _adjacent(runs[-1], slab):
                    before = runs.pop()
                    slab = torch.as_strided(before, (before.nbytes + slab.nbytes,), (1,))
                runs.append(slab)
        chunks: list[_Chunk] = []
        begin = first = self.first
        held: list[tuple[Tensor, Tensor]] = []
        for host in (part for run in runs for part in run.split(chunk_bytes)):
            if held and begin + host.nbytes - first > chunk_bytes:
                chunks.append(_Chunk(first=first, end=begin, runs=held))
                held, first = [], begin
            held.append((host, memory[begin : begin + host.nbytes]))
            begin += host.nbytes
        return [*chunks, _Chunk(first=first, end=begin, runs=held)]

    @property
    def grads(self) -> list[Tensor]:
        return [slot.param.grad for live in self.blocks for slot in live.slots if slot.param.grad is not None]

    def share_steps(self) -> None:
        """Who steps fused keeps the counts in a tensor of its own: the states at home count with it."""
        for param, state in self.staged.items():
            if "step" in state:
                self._home[param]["step"] = state["step"]


def _adjacent(a: Tensor, b: Tensor) -> bool:
    same = a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
    return same and a.storage_offset() + a.nbytes == b.storage_offset()


class Streaming:
    """The streamed blocks of one device in the order in which they are to pass; its ring is there.

    A piece always passes through the same place, so that whoever steps it keeps the addresses.
    """

    def __init__(
        self,
        blocks: Sequence[LiveBlock],
        *,
        home: dict[Tensor, State],
        lanes: Lanes | None = None,
        piece_bytes: int = PIECE_BYTES,
        num_buffers: int = NUM_BUFFERS,
    ):
        self.blocks, self.home = list(blocks), home
        self.device = self.blocks[0].slots[0].param.device
        self.lanes = lanes or lanes_for(self.device)
        sizes = [live.slab_bytes for live in self.blocks]
        capacity = capacity_bytes(sizes, piece_bytes=piece_bytes)
        self.nbytes = capacity if sum(sizes) <= capacity else num_buffers * capacity  # as `transfer.buffer_bytes`
        self._chunk_bytes = piece_bytes
        self._piece_bytes = max(piece_bytes, self.nbytes // NUM_PIECES)
        self._memory = torch.empty(self.nbytes, dtype=torch.uint8, device=self.device)
        # When the ring is gone, its memory is no one's before the lanes have come to an end.
        weakref.finalize(self, self.lanes.finish).atexit = False
        self._given: Any = self.lanes.mark(MAIN)  # who had the memory before is done with it
        self._orders: list[list[Piece]] = []
        self._order: list[Piece] = []  # that is in use
        # What has bytes of the same place. Here, not with the pieces: they would keep each other, and so the memory.
        self._rivals: dict[Piece, list[Piece]] = {}
        self.rival_chunks: dict[_Chunk, list[_Chunk]] = {}
        self._turn: set[int] = set()  # places in it that were stepped in the step in progress
        self._next = 0  # who is sent for next; from the order's length on, for the step after
        self._num_left = 0
        self._stepped: Any = None
        self._before: Any = None  # mark of the step before the last one, of pieces whose gradients were dropped
        self._singles: dict[str, Piece] = {}

    def pieces(self, kind_of: Callable[[LiveBlock], Hashable]) -> dict[Any, list[Piece]]:
        """All blocks in pieces of one kind each, by kind."""
        runs: list[list[LiveBlock]] = []
        for live in self.blocks:
            if not runs or kind_of(runs[-1][-1]) != kind_of(live):
                runs.append([])
            runs[-1].append(live)
        parts = [
            [run[index] for index in part]
            for run in runs
            for part in cut([live.slab_bytes for live in run], piece_bytes=self._piece_bytes)
        ]
        found: dict[Any, list[Piece]] = {}
        for piece in self.place(parts):
            found.setdefault(kind_of(piece.blocks[0]), []).append(piece)
        return found

    def single(self, name: str) -> Piece:
        """The block as a piece of its own."""
        if not self._singles:
            pieces = self.place([[live] for live in self.blocks])
            self._singles = {piece.blocks[0].block.name: piece for piece in pieces}
        return self._singles[name]

    def place(self, parts: Sequence[Sequence[LiveBlock]]) -> list[Piece]:
        """The parts as pieces in this order: side by side, and from the beginning again where one has no room left."""
        pieces: list[Piece] = []
        first = 0
        for part in parts:
            if first + sum(live.slab_bytes for live in part) > self.nbytes:
                first = 0
            piece = Piece(part, home=self.home, memory=self._memory, first=first, chunk_bytes=self._chunk_bytes)
            pieces.append(piece)
            first = pieces[-1].end
        for index, piece in enumerate(pieces):
            piece.order, piece.index = len(self._orders), index
        self._orders.append(pieces)
        everyone = [piece for order in self._orders for piece in order]
        for piece in everyone:
            rivals = [p for p in everyone if p is not piece and p.first < piece.end and piece.first < p.end]
            self._rivals[piece] = rivals
            for chunk in piece.chunks:
                chunks = [other for rival in rivals for other in rival.chunks if other.meets(chunk)]
                self.rival_chunks[chunk] = chunks
        return pieces

    def step(self, piece: Piece, work: Callable[[], object], *, releases: bool = False) -> None:
        """Does `work`, which steps the piece's staged states, in its lane; returns at once.

        `releases`: the caller drops the gradients before the step is over. Their memory is no one's until then, so the
        caller waits for the piece before the last one: else it would run ahead of the link by as many gradients as the
        device has room for.
        """
        lanes = self.lanes
        if releases:
            lanes.wait_here(self._before)
            self._before = self._stepped
        self._take_turn(piece)
        if not piece.here:
            self.load(piece)
            self._next = max(self._next, piece.index + 1)
        lanes.wait(STEP, lanes.mark(MAIN))
        lanes.wait(STEP, piece.ready)
        if releases:
            lanes.keep(piece.grads, lane=STEP)
        lanes.run(STEP, work)
        self._stepped = lanes.mark(STEP)
        lanes.wait(OUT, self._stepped)
        for chunk in piece.chunks:
            lanes.run(OUT, chunk.copy_out)
            self._num_left += 1
            chunk.left = (self._num_left, lanes.mark(OUT))
        piece.ready, piece.wanted = piece.chunks[-1].left[1], False
        self._send_for_more()

    def _take_turn(self, piece: Piece) -> None:
        """One that comes a second time begins the next step."""
        if self._orders[piece.order] is not self._order:  # which may have the same blocks in other pieces
            self.invalidate()
            self.lanes.wait(IN, self.lanes.mark(OUT))
            self._order = self._orders[piece.order]
            self._turn.clear()
        if piece.index in self._turn:
            self._turn.clear()
            self._next = max(self._next - len(self._order), 0)
        self._turn.add(piece.index)

    def _send_for_more(self) -> None:
        """Those that come next, until one has its place where another waits to be stepped."""
        num = len(self._order)
        while self._next < 2 * num:
            piece = self._order[self._next % num]
            stepped = piece.index in self._turn
            if self._next < num if stepped else piece.wanted:
                pass  # it is not needed again before the step after, or has been sent for
            elif (self._next >= num and not stepped) or any(rival.wanted for rival in self._rivals[piece]):
                return
            elif piece.here:
                piece.wanted = True
            else:
                self.load(piece)
            self._next += 1

    def load(self, piece: Piece) -> None:
        lanes = self.lanes
        if self._given is not None:
            lanes.wait(IN, self._given)
            self._given = None
        for chunk in piece.chunks:
            lanes.wait(IN, max((one.left for one in (chunk, *self.rival_chunks[chunk])), key=itemgetter(0))[1])
            lanes.run(IN, chunk.copy_in)
        for rival in self._rivals[piece]:
            rival.here = rival.wanted = False
        piece.here = piece.wanted = True
        piece.ready = lanes.mark(IN)

    def join(self) -> None:
        """What the caller launches from now on sees the weights as they were stepped."""
        if self._stepped is not None:
            self.lanes.wait(MAIN, self._stepped)
            self._stepped = None

    def drain(self) -> None:
        """Waits until gradients that the caller dropped are no one's any more: once `join` was called, unless said."""
        self.lanes.wait_here(self.lanes.mark(STEP))

    def synchronize(self) -> None:
        """Waits until states are at home, and nothing is on its way."""
        self.lanes.wait_here(self.lanes.mark(OUT))
        self.lanes.wait_here(self.lanes.mark(IN))

    def invalidate(self) -> None:
        """States were changed at home: what is on the way is old."""
        for piece in self._rivals:
            piece.here = piece.wanted = False
        self._next = 0
