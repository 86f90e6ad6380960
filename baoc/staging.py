"""How much staging memory host-placed blocks need while they are stepped; ledger and optimizer both ask here.

Blocks travel in pieces: neighbours that together stay below PIECE_BYTES, or one block that is larger. A buffer holds
the largest piece, and NUM_BUFFERS of them let one piece arrive and one leave while a third is stepped.
"""

from collections.abc import Sequence

from baoc.units import MIB

PIECE_BYTES = 48 * MIB  # pieces of 4 MB and more get the full rate of the link, see docs/methods.md#host-placement
NUM_BUFFERS = 3


def cut(sizes: Sequence[int], *, piece_bytes: int = PIECE_BYTES) -> list[range]:
    """Indices of neighbouring blocks that travel together; `sizes` are their bytes, in the order of travel."""
    pieces, first, held = [], 0, 0
    for index, size in enumerate(sizes):
        if index > first and held + size > piece_bytes:
            pieces.append(range(first, index))
            first, held = index, 0
        held += size
    return [*pieces, range(first, len(sizes))] if sizes else []


def capacity_bytes(sizes: Sequence[int], *, piece_bytes: int = PIECE_BYTES) -> int:
    """Bytes of one buffer: no piece is larger, however the blocks are cut."""
    return max(max(sizes, default=0), min(sum(sizes), piece_bytes))


def buffer_bytes(sizes: Sequence[int], *, piece_bytes: int = PIECE_BYTES, num_buffers: int = NUM_BUFFERS) -> int:
    """Bytes of all buffers; one is enough where a single piece holds everything."""
    capacity = capacity_bytes(sizes, piece_bytes=piece_bytes)
    return capacity if sum(sizes) <= capacity else num_buffers * capacity
