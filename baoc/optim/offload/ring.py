"""A ring through which blocks pass in pieces: what streamed and updated blocks have in common."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Generic, Protocol, TypeVar

from torch import Tensor

from baoc.optim.offload.lanes import Lanes, lanes_for
from baoc.optim.state import LiveBlock, State
from baoc.planning.transfer import NUM_BUFFERS, PIECE_BYTES, capacity_bytes, cut


class RingPiece(Protocol):
    """Blocks that pass together."""

    blocks: list[LiveBlock]


P = TypeVar("P", bound=RingPiece)


class Ring(ABC, Generic[P]):
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
    def settle(self) -> None:
        """Waits until states are at home, and nothing is on its way."""

    def forget(self) -> None:
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
