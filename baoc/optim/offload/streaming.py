"""Streamed blocks: their states are copied to the device, stepped and copied back, while other blocks are stepped.

A piece is a run of blocks that are copied and stepped together. Pieces pass through a ring buffer of device memory, in
which each has a fixed range of bytes: as many as fit are under way at a time, whatever their sizes. These are the only
waits:

    copy in (IN)     for the copies out of all that was in its range, and for this piece's own of the step before
    step (STEP)      for that copy in, and for all work that the caller has launched by then: gradients, forward passes
    copy out (OUT)   for that step
    the caller       at the end of `optimizer.step` for the steps of all pieces, but for no copy out
    the host         before anything reads or writes states on the host, for all copies out (`synchronize`)

After a piece's copy out is launched, the next pieces are fetched as far as there is room. After the last piece of a
step these are the first ones of the next step, so that they are on the device before its first gradient.
"""

import weakref
from collections.abc import Callable, Hashable, Sequence
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from baoc.kernels.streams import IN, MAIN, OUT, STEP, CudaStreams, Streams
from baoc.optim.offload.arena import slab_of
from baoc.optim.state import LiveBlock, State, slab_views
from baoc.planning.transfer import NUM_BUFFERS, PIECE_BYTES, capacity_bytes, split_into_pieces

# A piece costs the host half a millisecond, whatever its size (H200, 16 cores: 98 of them 56 ms, more than backward
# leaves), so a large ring has larger pieces. This many under way keep both directions of the link busy.
NUM_PIECES = 4


class _Chunk:
    """Bytes of a piece's range that are copied in one go, so that a large piece does not hold up the link."""

    def __init__(self, *, first: int, end: int, copies: list[tuple[Tensor, Tensor]]):
        """`copies`: (bytes on the host, the same bytes in the ring)."""
        self.first, self.end = first, end
        self.last_copy_out: tuple[int, Any] = (0, None)  # its number, and the mark after it
        self._copies = copies

    def overlaps(self, other: "_Chunk") -> bool:
        return self.first < other.end and other.first < self.end

    def copy_in(self) -> None:
        for host, staged in self._copies:
            staged.copy_(host, non_blocking=True)

    def copy_out(self) -> None:
        for host, staged in self._copies:
            host.copy_(staged, non_blocking=True)


class Piece:
    """Blocks that are copied and stepped together.

    Attributes:
        staged: Parameter -> its states as views of the ring, for the backend.
        order: Index of the list of pieces that it belongs to; `index` is its own in that list.
        is_staged: True if its states are in its range, or are being copied there.
        awaits_step: True if they are to be stepped before another piece may take the range.
        ready: Mark after which its step may begin.
    """

    def __init__(
        self, blocks: Sequence[LiveBlock], *, home: dict[Tensor, State], memory: Tensor, first: int, chunk_bytes: int
    ):
        """`memory`: the ring's bytes (uint8), of which the piece has those from `first` on."""
        self.blocks = list(blocks)
        self.first, self.end = first, first + sum(live.slab_bytes for live in self.blocks)
        self.order = self.index = 0
        self.is_staged = self.awaits_step = False
        self.ready: Any = None
        self._home = home
        self.staged: dict[Tensor, State] = {}
        begin = first
        for live in self.blocks:
            for slot in live.slots:
                steps = {"step": home[slot.param]["step"]} if slot.counts_steps else {}
                self.staged[slot.param] = {**steps, **slab_views(slot, memory, begin=begin)}
                begin += slot.slab_bytes
        self.chunks = self._chunks(memory, chunk_bytes=chunk_bytes)

    def _chunks(self, memory: Tensor, *, chunk_bytes: int) -> list[_Chunk]:
        """Chunks of up to `chunk_bytes`. Slabs that are adjacent on the host are copied as one."""
        runs: list[Tensor] = []  # adjacent slabs on the host
        for live in self.blocks:
            if live.slab_bytes:
                slab = slab_of(live, self._home)
                last = runs[-1] if runs else slab
                same_memory = last.untyped_storage().data_ptr() == slab.untyped_storage().data_ptr()
                if same_memory and last.storage_offset() + last.nbytes == slab.storage_offset():
                    before = runs.pop()
                    slab = torch.as_strided(before, (before.nbytes + slab.nbytes,), (1,))
                runs.append(slab)
        chunks: list[_Chunk] = []
        begin = first = self.first
        copies: list[tuple[Tensor, Tensor]] = []
        for host in (split for run in runs for split in run.split(chunk_bytes)):
            if copies and begin + host.nbytes - first > chunk_bytes:
                chunks.append(_Chunk(first=first, end=begin, copies=copies))
                copies, first = [], begin
            copies.append((host, memory[begin : begin + host.nbytes]))
            begin += host.nbytes
        return [*chunks, _Chunk(first=first, end=begin, copies=copies)]

    @property
    def grads(self) -> list[Tensor]:
        return [slot.param.grad for live in self.blocks for slot in live.slots if slot.param.grad is not None]

    def share_steps(self) -> None:
        """Makes the host states' step counts those of `staged`, which a fused backend has replaced by its own."""
        for param, state in self.staged.items():
            if "step" in state:
                self._home[param]["step"] = state["step"]


class StagingPipeline:
    """The streamed blocks of one device in the order in which they are stepped, and their ring. A piece always passes
    through the same range of it, so that its backend may keep the addresses."""

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
        # Of the largest rank, because all ranks step the same pieces together if parameters are sharded.
        self._sizes = {id(live): live.largest_slab_bytes for live in self.blocks}
        sizes = list(self._sizes.values())
        capacity = capacity_bytes(sizes, piece_bytes=piece_bytes)
        self.nbytes = capacity if sum(sizes) <= capacity else num_buffers * capacity  # as in `transfer.buffer_bytes`
        self._chunk_bytes = piece_bytes
        self._piece_bytes = max(piece_bytes, self.nbytes // NUM_PIECES)
        self._memory = torch.empty(self.nbytes, dtype=torch.uint8, device=self.device)
        # When the ring is gone, its memory must not be reused before the streams are done with it.
        weakref.finalize(self, self.streams.finish).atexit = False
        self._memory_free: Any = self.streams.mark(MAIN)  # mark after which its former owner is done
        self._orders: list[list[Piece]] = []  # `pieces` makes one, and `single` another of the same blocks
        self._order: list[Piece] = []  # the one in use
        # Pieces with ring bytes in common. Not in the pieces, as a cycle of references would keep the memory alive.
        self._overlapping: dict[Piece, list[Piece]] = {}
        self.overlapping_chunks: dict[_Chunk, list[_Chunk]] = {}
        self._stepped_indices: set[int] = set()  # indices in `_order` of the pieces that were stepped in this step
        self._next = 0  # index in `_order` to fetch next; from its length on, for the next step
        self._num_copies_out = 0
        self._stepped: Any = None  # mark of the last piece's step, until the caller has waited for it
        self._step_before_last: Any = None  # the same of the piece before, if its gradients are dropped
        self._singles: dict[str, Piece] = {}

    def pieces(self, kind_of: Callable[[LiveBlock], Hashable]) -> dict[Any, list[Piece]]:
        """Kind -> pieces of that kind, of all blocks. A piece has blocks of one kind."""
        runs: list[list[LiveBlock]] = []
        for live in self.blocks:
            if not runs or kind_of(runs[-1][-1]) != kind_of(live):
                runs.append([])
            runs[-1].append(live)
        blocks_of_pieces = [
            [run[index] for index in indices]
            for run in runs
            for indices in split_into_pieces([self._sizes[id(live)] for live in run], piece_bytes=self._piece_bytes)
        ]
        by_kind: dict[Any, list[Piece]] = {}
        for piece in self.place(blocks_of_pieces):
            by_kind.setdefault(kind_of(piece.blocks[0]), []).append(piece)
        return by_kind

    def single(self, name: str) -> Piece:
        if not self._singles:
            pieces = self.place([[live] for live in self.blocks])
            self._singles = {piece.blocks[0].block.name: piece for piece in pieces}
        return self._singles[name]

    def place(self, blocks_of_pieces: Sequence[Sequence[LiveBlock]]) -> list[Piece]:
        """Makes pieces, side by side in the ring in this order, and from its beginning again when it is full."""
        pieces: list[Piece] = []
        first = 0
        for blocks in blocks_of_pieces:
            if first + sum(live.slab_bytes for live in blocks) > self.nbytes:
                first = 0
            piece = Piece(blocks, home=self.home, memory=self._memory, first=first, chunk_bytes=self._chunk_bytes)
            pieces.append(piece)
            first = piece.end
        for index, piece in enumerate(pieces):
            piece.order, piece.index = len(self._orders), index
        self._orders.append(pieces)
        all_pieces = [piece for order in self._orders for piece in order]
        for piece in all_pieces:
            overlapping = [p for p in all_pieces if p is not piece and p.first < piece.end and piece.first < p.end]
            self._overlapping[piece] = overlapping
            for chunk in piece.chunks:
                chunks = [other for each in overlapping for other in each.chunks if other.overlaps(chunk)]
                self.overlapping_chunks[chunk] = chunks
        return pieces

    def step(self, piece: Piece, work: Callable[[], object], *, releases: bool = False) -> None:
        """Runs `work`, which steps the piece's staged states, in its stream. Returns at once. `releases`: the caller
        drops the gradients before the step is over, whose memory is not free until then. So the host waits for the
        piece before the last one, not to run ahead of the link until gradients fill the device."""
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
        """Notes that the piece is stepped. A piece that is stepped a second time begins the next step."""
        if self._orders[piece.order] is not self._order:  # the other one has the same blocks in other pieces
            self.invalidate()
            self.streams.wait(IN, self.streams.mark(OUT))
            self._order = self._orders[piece.order]
            self._stepped_indices.clear()
        if piece.index in self._stepped_indices:
            self._stepped_indices.clear()
            self._next = max(self._next - len(self._order), 0)
        self._stepped_indices.add(piece.index)

    def _prefetch(self) -> None:
        """Fetches the next pieces, up to one whose range has another piece that is still to be stepped."""
        num = len(self._order)
        while self._next < 2 * num:
            piece = self._order[self._next % num]
            stepped = piece.index in self._stepped_indices
            if self._next < num if stepped else piece.awaits_step:
                pass  # stepped in this round, or fetched for the next one
            elif (self._next >= num and not stepped) or any(other.awaits_step for other in self._overlapping[piece]):
                return
            elif piece.is_staged:
                piece.awaits_step = True
            else:
                self.load(piece)
            self._next += 1

    def load(self, piece: Piece) -> None:
        """Copies the piece's states into its range, after the last copies out of all that it overwrites."""
        streams = self.streams
        if self._memory_free is not None:
            streams.wait(IN, self._memory_free)
            self._memory_free = None
        for chunk in piece.chunks:
            copies_out = [each.last_copy_out for each in (chunk, *self.overlapping_chunks[chunk])]
            streams.wait(IN, max(copies_out, key=itemgetter(0))[1])  # OUT is in order, so the last one is enough
            streams.run(IN, chunk.copy_in)
        for other in self._overlapping[piece]:
            other.is_staged = other.awaits_step = False
        piece.is_staged = piece.awaits_step = True
        piece.ready = streams.mark(IN)

    def join(self) -> None:
        """Makes work that the caller launches from now on wait for all steps."""
        if self._stepped is not None:
            self.streams.wait(MAIN, self._stepped)
            self._stepped = None

    def drain(self) -> None:
        """The host waits until all steps are over, so that the memory of dropped gradients is free. `join` first."""
        self.streams.wait_on_host(self.streams.mark(STEP))

    def synchronize(self) -> None:
        """The host waits until all states are on the host and no copy is under way."""
        self.streams.wait_on_host(self.streams.mark(OUT))
        self.streams.wait_on_host(self.streams.mark(IN))

    def invalidate(self) -> None:
        """Makes all states be fetched again, because those on the host were changed."""
        for piece in self._overlapping:
            piece.is_staged = piece.awaits_step = False
        self._next = 0
