"""Streamed blocks: their states are copied to the device, stepped and copied back, while other blocks are stepped.

A piece is a run of blocks that are copied and stepped together. Pieces travel through a ring of device memory, in which
each has a fixed place: as many as fit are on their way at a time, whatever their sizes. These are the only waits:

    copy in (IN)     for the copies out of all that was in its place, and for this piece's own of the step before
    step (STEP)      for that copy in, and for what the caller has launched by then: gradients, and readers of weights
    copy out (OUT)   for that step
    the caller       at the end of the step for all steps, but for no copy out: forward reads weights, not states
    the host         for copies out before anything reads or writes states where they are kept (`synchronize`)

When a piece has left, the next ones in the order of travel are fetched at once, as far as there is room. After the last
piece of a step these are the first ones of the next step, so that they are there before its first gradient.
"""

import weakref
from collections.abc import Callable, Hashable, Sequence
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from baoc.optim.offload.arena import slab_of
from baoc.optim.offload.streams import IN, MAIN, OUT, STEP, CudaStreams, Streams
from baoc.optim.state import LiveBlock, State, slab_views
from baoc.planning.transfer import NUM_BUFFERS, PIECE_BYTES, capacity_bytes, split_into_pieces

# A piece costs the host half a millisecond, whatever its size (H200, 16 cores: 98 of them 56 ms, more than backward
# leaves), so a large ring has larger pieces. This many on their way keep both directions of the link busy.
NUM_PIECES = 4


class _Chunk:
    """Bytes of a piece's place that are copied in one go, so that a large piece does not hold up the link."""

    def __init__(self, *, first: int, end: int, runs: list[tuple[Tensor, Tensor]]):
        self.first, self.end = first, end
        self.last_copy_out: tuple[int, Any] = (0, None)  # number and mark of its last copy out
        self._runs = runs  # bytes on the host, bytes in the ring

    def overlaps(self, other: "_Chunk") -> bool:
        return self.first < other.end and other.first < self.end

    def copy_in(self) -> None:
        for host, staged in self._runs:
            staged.copy_(host, non_blocking=True)

    def copy_out(self) -> None:
        for host, staged in self._runs:
            host.copy_(staged, non_blocking=True)


class Piece:
    """Blocks that travel together. `staged` are their states as views of `memory` (uint8), for their backend."""

    def __init__(
        self, blocks: Sequence[LiveBlock], *, home: dict[Tensor, State], memory: Tensor, first: int, chunk_bytes: int
    ):
        """The piece's place is in `memory`, the ring's bytes, from `first` on."""
        self.blocks = list(blocks)
        self.first, self.end = first, first + sum(live.slab_bytes for live in self.blocks)
        self.order = self.index = 0  # its order of travel, and its index there
        self.is_staged = False  # its states are in its place, or on their way
        self.awaits_step = False  # they are to be stepped before they leave
        self.ready: Any = None  # mark after which its step may begin
        self._home = home
        self.staged: dict[Tensor, State] = {}
        begin = first
        for live in self.blocks:
            for slot in live.slots:
                steps = {"step": home[slot.param]["step"]} if slot.counts_steps else {}
                self.staged[slot.param] = {**steps, **slab_views(slot, memory, begin=begin)}
                begin += slot.slab_bytes
        self.chunks = self._cut(memory, chunk_bytes=chunk_bytes)

    def _cut(self, memory: Tensor, *, chunk_bytes: int) -> list[_Chunk]:
        """Cuts the place into chunks of up to `chunk_bytes`. Slabs that are adjacent on the host are copied as one."""
        runs: list[Tensor] = []  # on the host
        for live in self.blocks:
            if live.slab_bytes:
                slab = slab_of(live, self._home)
                last = runs[-1] if runs else slab
                same = last.untyped_storage().data_ptr() == slab.untyped_storage().data_ptr()
                if same and last.storage_offset() + last.nbytes == slab.storage_offset():
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
        """Lets the states at home count steps in the tensors of `staged`, which a fused backend replaces."""
        for param, state in self.staged.items():
            if "step" in state:
                self._home[param]["step"] = state["step"]


class StagingPipeline:
    """The streamed blocks of one device in the order of travel, and their ring.

    A piece always passes through the same place, so that its backend may keep the addresses.
    """

    def __init__(
        self,
        blocks: Sequence[LiveBlock],
        *,
        home: dict[Tensor, State],
        streams: Streams | None = None,
        piece_bytes: int = PIECE_BYTES,
        num_buffers: int = NUM_BUFFERS,
    ):
        self.blocks, self.home = list(blocks), home
        self.device = self.blocks[0].slots[0].param.device
        self.streams = streams or (CudaStreams(self.device) if self.device.type == "cuda" else Streams())
        # Those of the rank that has most: pieces are stepped by all ranks together where parameters are sharded.
        self._sizes = {id(live): live.largest_slab_bytes for live in self.blocks}
        sizes = list(self._sizes.values())
        capacity = capacity_bytes(sizes, piece_bytes=piece_bytes)
        self.nbytes = capacity if sum(sizes) <= capacity else num_buffers * capacity  # as `transfer.buffer_bytes`
        self._chunk_bytes = piece_bytes
        self._piece_bytes = max(piece_bytes, self.nbytes // NUM_PIECES)
        self._memory = torch.empty(self.nbytes, dtype=torch.uint8, device=self.device)
        # When the ring is gone, its memory must not be reused before the streams are done with it.
        weakref.finalize(self, self.streams.finish).atexit = False
        self._memory_free: Any = self.streams.mark(MAIN)  # mark after which the memory's former owner is done
        self._orders: list[list[Piece]] = []
        self._order: list[Piece] = []  # the one in use
        # Pieces with bytes in common. Not in the pieces, as a cycle of references would keep the memory alive.
        self._overlapping: dict[Piece, list[Piece]] = {}
        self.overlapping_chunks: dict[_Chunk, list[_Chunk]] = {}
        self._stepped_indices: set[int] = set()  # indices in it that were stepped in this step
        self._next = 0  # index to fetch next; from the order's length on, for the next step
        self._num_copies_out = 0
        self._stepped: Any = None
        self._step_before_last: Any = None  # mark of the last but one step whose gradients are dropped
        self._singles: dict[str, Piece] = {}

    def pieces(self, kind_of: Callable[[LiveBlock], Hashable]) -> dict[Any, list[Piece]]:
        """Kind -> pieces of that kind, of all blocks."""
        runs: list[list[LiveBlock]] = []
        for live in self.blocks:
            if not runs or kind_of(runs[-1][-1]) != kind_of(live):
                runs.append([])
            runs[-1].append(live)
        parts = [
            [run[index] for index in part]
            for run in runs
            for part in split_into_pieces([self._sizes[id(live)] for live in run], piece_bytes=self._piece_bytes)
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
        """Makes a piece of each part, side by side in this order, and from the ring's beginning where no room is
        left."""
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
            self._overlapping[piece] = rivals
            for chunk in piece.chunks:
                chunks = [other for rival in rivals for other in rival.chunks if other.overlaps(chunk)]
                self.overlapping_chunks[chunk] = chunks
        return pieces

    def step(self, piece: Piece, work: Callable[[], object], *, releases: bool = False) -> None:
        """Runs `work`, which steps the piece's staged states, in its stream; returns at once.

        `releases`: the caller drops the gradients before the step is over. Their memory is not free until then. So the
        caller waits for the piece before the last one: else it would run ahead of the link until gradients fill the
        device.
        """
        streams = self.streams
        if releases:
            streams.wait_on_host(self._step_before_last)
            self._step_before_last = self._stepped
        self._note_step(piece)
        if not piece.is_staged:
            self.load(piece)
            self._next = max(self._next, piece.index + 1)
        streams.wait(STEP, streams.mark(MAIN))
        streams.wait(STEP, piece.ready)
        if releases:
            streams.record_use(piece.grads, name=STEP)
        streams.run(STEP, work)
        self._stepped = streams.mark(STEP)
        streams.wait(OUT, self._stepped)
        for chunk in piece.chunks:
            streams.run(OUT, chunk.copy_out)
            self._num_copies_out += 1
            chunk.last_copy_out = (self._num_copies_out, streams.mark(OUT))
        piece.ready, piece.awaits_step = piece.chunks[-1].last_copy_out[1], False
        self._prefetch()

    def _note_step(self, piece: Piece) -> None:
        """Notes that the piece is stepped. A piece that comes a second time begins the next step."""
        if self._orders[piece.order] is not self._order:  # which may have the same blocks in other pieces
            self.invalidate()
            self.streams.wait(IN, self.streams.mark(OUT))
            self._order = self._orders[piece.order]
            self._stepped_indices.clear()
        if piece.index in self._stepped_indices:
            self._stepped_indices.clear()
            self._next = max(self._next - len(self._order), 0)
        self._stepped_indices.add(piece.index)

    def _prefetch(self) -> None:
        """Fetches the next pieces, until the place of one is held by another that waits to be stepped."""
        num = len(self._order)
        while self._next < 2 * num:
            piece = self._order[self._next % num]
            stepped = piece.index in self._stepped_indices
            if self._next < num if stepped else piece.awaits_step:
                pass  # not needed in this round any more, or fetched already
            elif (self._next >= num and not stepped) or any(rival.awaits_step for rival in self._overlapping[piece]):
                return
            elif piece.is_staged:
                piece.awaits_step = True
            else:
                self.load(piece)
            self._next += 1

    def load(self, piece: Piece) -> None:
        streams = self.streams
        if self._memory_free is not None:
            streams.wait(IN, self._memory_free)
            self._memory_free = None
        for chunk in piece.chunks:
            streams.wait(
                IN, max((one.last_copy_out for one in (chunk, *self.overlapping_chunks[chunk])), key=itemgetter(0))[1]
            )
            streams.run(IN, chunk.copy_in)
        for rival in self._overlapping[piece]:
            rival.is_staged = rival.awaits_step = False
        piece.is_staged = piece.awaits_step = True
        piece.ready = streams.mark(IN)

    def join(self) -> None:
        """Work that the caller launches from now on sees the stepped weights."""
        if self._stepped is not None:
            self.streams.wait(MAIN, self._stepped)
            self._stepped = None

    def drain(self) -> None:
        """Waits until all steps are over, so that the memory of dropped gradients is free. `join` comes first."""
        self.streams.wait_on_host(self.streams.mark(STEP))

    def synchronize(self) -> None:
        """Waits until all states are at home and no copy is on its way."""
        self.streams.wait_on_host(self.streams.mark(OUT))
        self.streams.wait_on_host(self.streams.mark(IN))

    def invalidate(self) -> None:
        """Has all states fetched again, because those at home were changed."""
        for piece in self._overlapping:
            piece.is_staged = piece.awaits_step = False
        self._next = 0
