"""Host placement: the pieces in which states travel between host and device, and the seconds that this takes.

Staging. Blocks travel in pieces: neighbours that together stay below PIECE_BYTES, or one block that is larger. A buffer
holds the largest piece, and NUM_BUFFERS of them let one piece arrive and one leave while a third is stepped.

Seconds. A step with states on the host is a pipeline on three engines: copy in, kernels, copy out. Each engine works
through its blocks one after another, so a step lasts as long as the slowest engine plus the pipeline's fill and drain.
As blocks may be streamed once backward is done with them, the copy engines have `hidden_s` seconds before the
optimizer's own time begins. With F the seconds of forward and backward, K_b the kernel and L_b the copies of block b,

    step = max(F + sum_b K_b,  F - hidden + sum_b L_b + drain).

So step <= limit says the same as two limits that are sums over blocks: limit - F for sum K_b on the device, and
limit - F + hidden - drain for sum L_b. The overlap becomes linear for the allocators, and each engine is a resource of
its own. The maximum over engines is the cost model of Deep Optimizer States (arXiv 2410.21316), whose
t_gpu is max(in, out) S / B on a full-duplex link; docs/methods.md#host-placement has both.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from baoc.types import LinkRates
from baoc.units import MIB

PIECE_BYTES = 48 * MIB  # pieces of 4 MB and more get the full rate of the link, see docs/methods.md#host-placement
NUM_BUFFERS = 3


def split_into_pieces(sizes: Sequence[int], *, piece_bytes: int = PIECE_BYTES) -> list[range]:
    """Indices of neighbouring blocks that travel together; `sizes` are their bytes, in the order of travel."""
    pieces: list[range] = []
    first, held = 0, 0
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


PAGE_BYTES = 4096  # pinned memory is locked by pages
BACKWARD_SHARE = 2 / 3  # of forward and backward: a backward pass is two products for each of the forward's

# One H100, pinned memory (docs/methods.md#host-placement): 54 GB/s one way; both ways 42 GB/s in pieces of 1 MB and 92
# from 4 MB on. Of 1 MB only the sum of both ways is known: half of it stands for each.
STORED_RATES = LinkRates(
    sizes=(10**6, 4 * 10**6),
    in_rates=(21e9, 54e9),
    out_rates=(21e9, 54e9),
    both_rates=(42e9, 92e9),
    source="stored",
)


def slower_link(link: LinkRates, *, factor: float) -> LinkRates:
    """The same link with rates divided by `factor`."""

    def less(rates: Sequence[float]) -> tuple[float, ...]:
        return tuple(rate / factor for rate in rates)

    rates = {"in_rates": less(link.in_rates), "out_rates": less(link.out_rates), "both_rates": less(link.both_rates)}
    return replace(link, **rates)


def copy_seconds(num_bytes: int, *, link: LinkRates) -> float:
    """Seconds that a block of `num_bytes` adds to a stream in which as many go out as come in.

    At the rate of whole pieces, as small blocks travel with their neighbours (`baoc.planning.transfer`).
    """
    return num_bytes * _seconds(PIECE_BYTES, sizes=link.sizes, rates=link.both_rates) * 2 / PIECE_BYTES


def drain_seconds(piece_bytes: int, *, link: LinkRates) -> float:
    """Pipeline fill and drain time: the copies of the last piece, which no other piece's step hides."""
    return _seconds(piece_bytes, sizes=link.sizes, rates=link.in_rates) if piece_bytes else 0.0


def _seconds(num_bytes: int, *, sizes: Sequence[int], rates: Sequence[float]) -> float:
    """Seconds of a piece, on lines through the measured sizes; one below the smallest of them takes as long as that."""
    times = [size / rate for size, rate in zip(sizes, rates, strict=True)]
    if num_bytes <= sizes[0]:
        return times[0]
    for (low, high), (quick, slow) in zip(pairwise(sizes), pairwise(times), strict=True):
        if num_bytes <= high:
            return quick + (slow - quick) * (num_bytes - low) / (high - low)
    return num_bytes / rates[-1]


def hidden_seconds(base_step_s: float, *, accumulation: int) -> float:
    """Seconds of the last micro-batch's backward pass, in which blocks can be streamed where gradients are final then.

    `base_step_s`: forward and backward of all micro-batches.
    """
    return BACKWARD_SHARE * base_step_s / accumulation


def pinned_bytes(num_bytes: int) -> int:
    """Pinned bytes of an arena of `num_bytes`, as memory is locked by whole pages."""
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES


def pinned_room(num_bytes: int) -> int:
    """The largest arena that `num_bytes` of pinned memory hold."""
    return num_bytes // PAGE_BYTES * PAGE_BYTES
