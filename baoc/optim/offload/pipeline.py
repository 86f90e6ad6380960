"""What streaming and CPU updates have in common: a pipeline of pieces through a ring of buffers, and its lanes.

A piece is a run of host-placed blocks that are copied and stepped together. `StagingPipeline` cuts blocks into pieces;
`Streaming` and `Updating` move them. Work runs in lanes: on a GPU a CUDA stream each (`Streams`), elsewhere at once in
the caller's order (`Inline`). Within a lane work is done in order. Between lanes it is ordered by marks alone: a mark,
a CUDA event, is taken when a lane has come so far, and another lane waits for it. `MAIN` is the caller's own lane, in
which forward and backward run.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from baoc.optim.state import LiveBlock, State
from baoc.planning.transfer import NUM_BUFFERS, PIECE_BYTES, capacity_bytes, cut

MAIN, IN, STEP, OUT = "main", "in", "step", "out"
_OWN = (IN, STEP, OUT)


class Lanes(Protocol):
    def run(self, lane: str, work: Callable[[], object]) -> None:
        """Does `work` in the lane, now or when the lane comes to it."""
        ...

    def mark(self, lane: str) -> Any:
        """How far the lane has been given work by now."""
        ...

    def wait(self, lane: str, mark: Any) -> None:
        """What the lane is given from now on waits for the mark."""
        ...

    def wait_here(self, mark: Any) -> None:
        """The calling thread waits for the mark."""
        ...

    def keep(self, tensors: Iterable[Tensor], *, lane: str) -> None:
        """The memory of tensors that the caller lets go of is not used again before the lane has come so far."""
        ...

    def finish(self) -> None:
        """The calling thread waits for all lanes but its own."""
        ...


class Inline:
    """All work is done at once, in the caller's order: on the CPU, where nothing runs beside anything."""

    def run(self, lane: str, work: Callable[[], object]) -> None:
        work()

    def mark(self, lane: str) -> Any:
        return None

    def wait(self, lane: str, mark: Any) -> None:
        pass

    def wait_here(self, mark: Any) -> None:
        pass

    def keep(self, tensors: Iterable[Tensor], *, lane: str) -> None:
        pass

    def finish(self) -> None:
        pass


class Streams:
    """Lanes that are CUDA streams; marks are events, so no lane keeps the calling thread."""

    def __init__(self, device: torch.device):
        self.device = device
        # Steps are short and copies wait for them: they go before what backward has launched already.
        self._streams = {lane: torch.cuda.Stream(device, priority=-1 if lane == STEP else 0) for lane in _OWN}

    def _stream(self, lane: str) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self.device) if lane == MAIN else self._streams[lane]

    def run(self, lane: str, work: Callable[[], object]) -> None:
        with torch.cuda.stream(self._stream(lane)):
            work()

    def mark(self, lane: str) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(self._stream(lane))
        return event

    def wait(self, lane: str, mark: torch.cuda.Event | None) -> None:
        if mark is not None:
            self._stream(lane).wait_event(mark)

    def wait_here(self, mark: torch.cuda.Event | None) -> None:
        if mark is not None:
            mark.synchronize()

    def keep(self, tensors: Iterable[Tensor], *, lane: str) -> None:
        stream = self._stream(lane)
        for tensor in tensors:
            tensor.record_stream(stream)

    def finish(self) -> None:
        for stream in self._streams.values():
            stream.synchronize()


def lanes_for(device: torch.device) -> Lanes:
    return Streams(device) if device.type == "cuda" else Inline()


class StagedPiece(Protocol):
    """Blocks that pass together."""

    blocks: list[LiveBlock]


P = TypeVar("P", bound=StagedPiece)


class StagingPipeline(ABC, Generic[P]):
    """The blocks of one device in the order in which they are to pass, their room, and the lanes beside the caller's.

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
        self.blocks = list(blocks)
        self.device = next(slot.param.device for live in self.blocks for slot in live.slots)
        self.lanes = lanes or lanes_for(self.device)
        self.home, self._piece_bytes = home, piece_bytes
        sizes = [self.size_of(live) for live in self.blocks]
        self.capacity = capacity_bytes(sizes, piece_bytes=piece_bytes)
        self.num_buffers = 1 if sum(sizes) <= self.capacity else num_buffers
        self._singles: dict[str, P] = {}

    @staticmethod
    @abstractmethod
    def size_of(live: LiveBlock) -> int:
        """Bytes of the block where it passes."""

    @abstractmethod
    def place(self, parts: Sequence[Sequence[LiveBlock]]) -> list[P]:
        """The parts as pieces, in this order."""

    @abstractmethod
    def join(self) -> None:
        """What the caller launches from now on sees the weights as they were stepped."""

    @abstractmethod
    def synchronize(self) -> None:
        """Waits until states are at home, and nothing is on its way."""

    def invalidate(self) -> None:
        """States were changed at home: what is on the way is old."""

    def drain(self) -> None:
        """Waits until gradients that the caller dropped are no one's any more: once `join` was called, unless said."""

    @property
    def nbytes(self) -> int:
        """Bytes of all that passes at a time, see `baoc.planning.transfer.buffer_bytes`."""
        return self.capacity * self.num_buffers

    def pieces(self, kind_of: Callable[[LiveBlock], Hashable]) -> dict[Any, list[P]]:
        """All blocks in pieces of one kind each, by kind."""
        runs: list[list[LiveBlock]] = []
        for live in self.blocks:
            if not runs or kind_of(runs[-1][-1]) != kind_of(live):
                runs.append([])
            runs[-1].append(live)
        parts = [
            [run[index] for index in part]
            for run in runs
            for part in cut([self.size_of(live) for live in run], piece_bytes=self._piece_bytes)
        ]
        found: dict[Any, list[P]] = {}
        for piece in self.place(parts):
            found.setdefault(kind_of(piece.blocks[0]), []).append(piece)
        return found

    def single(self, name: str) -> P:
        """The block as a piece of its own."""
        if not self._singles:
            pieces = self.place([[live] for live in self.blocks])
            self._singles = {piece.blocks[0].block.name: piece for piece in pieces}
        return self._singles[name]
