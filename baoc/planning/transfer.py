"""Host placement: the pieces in which states are copied between host and device, and the seconds that this takes.

Staging. Blocks are copied in pieces: neighbours of at most PIECE_BYTES together, or one block that is larger. A buffer
holds the largest piece, and NUM_BUFFERS of them let one piece arrive and one leave while a third is stepped.

Seconds. A step with states on the host is a pipeline on three engines: copy in, kernels, copy out. Each engine works
through its blocks one after another, so a step lasts as long as the slowest engine plus the pipeline's fill and drain.
As blocks may be streamed once backward has finished with them, the copy engines can start `hidden_s` seconds before the
optimizer's step begins. With F the seconds of forward and backward, K_b the kernel and L_b the copies of block b,

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
    """Indices of neighbouring blocks that are copied together; `sizes` are their bytes, in the order of copying."""
    pieces: list[range] = []
    first, num_bytes = 0, 0
    for index, size in enumerate(sizes):
        if index > first and num_bytes + size > piece_bytes:
            pieces.append(range(first, index))
            first, num_bytes = index, 0
        num_bytes += size
    return [*pieces, range(first, len(sizes))] if sizes else []


def capacity_bytes(sizes: Sequence[int], *, piece_bytes: int = PIECE_BYTES) -> int:
    """Bytes of one buffer, an upper bound of every piece of such blocks."""
    return max(max(sizes, default=0), min(sum(sizes), piece_bytes))


def buffer_bytes(sizes: Sequence[int], *, piece_bytes: int = PIECE_BYTES, num_buffers: int = NUM_BUFFERS) -> int:
    """Bytes of all buffers; a single one if all blocks fit into it."""
    capacity = capacity_bytes(sizes, piece_bytes=piece_bytes)
    return capacity if sum(sizes) <= capacity else num_buffers * capacity


PAGE_BYTES = 4096  # the unit in which memory is pinned
BACKWARD_SHARE = 2 / 3  # of the time of forward and backward: backward has two matrix products for each one of forward

# One H100, pinned memory (docs/methods.md#host-placement): 54 GB/s one way; both ways 42 GB/s in pieces of 1 MB and 92
# from 4 MB on. Of 1 MB only the sum of both ways is known: half of it stands for each.
STORED_RATES = LinkRates(
    sizes=(10**6, 4 * 10**6), in_rates=(21e9, 54e9), out_rates=(21e9, 54e9), both_rates=(42e9, 92e9), source="stored"
)


def slower_link(link: LinkRates, *, factor: float) -> LinkRates:
    def divided(rates: Sequence[float]) -> tuple[float, ...]:
        return tuple(rate / factor for rate in rates)

    return replace(
        link, in_rates=divided(link.in_rates), out_rates=divided(link.out_rates), both_rates=divided(link.both_rates)
    )


def copy_seconds(num_bytes: int, *, link: LinkRates) -> float:
    """Seconds that a block of `num_bytes` adds to a stream that copies it to the device and back. At the rate of full
    pieces, as small blocks are copied with their neighbours."""
    return num_bytes * _seconds(PIECE_BYTES, sizes=link.sizes, rates=link.both_rates) * 2 / PIECE_BYTES


def drain_seconds(piece_bytes: int, *, link: LinkRates) -> float:
    """Seconds of the pipeline's fill and drain: the copy of one piece, which no other piece's step overlaps."""
    return _seconds(piece_bytes, sizes=link.sizes, rates=link.in_rates) if piece_bytes else 0.0


def _seconds(num_bytes: int, *, sizes: Sequence[int], rates: Sequence[float]) -> float:
    """Seconds of a piece, linear between the measured sizes; a smaller piece takes as long as the smallest."""
    times = [size / rate for size, rate in zip(sizes, rates, strict=True)]
    if num_bytes <= sizes[0]:
        return times[0]
    for (low, high), (quick, slow) in zip(pairwise(sizes), pairwise(times), strict=True):
        if num_bytes <= high:
            return quick + (slow - quick) * (num_bytes - low) / (high - low)
    return num_bytes / rates[-1]


def hidden_seconds(base_step_s: float, *, accumulation: int) -> float:
    """Seconds of the last micro-batch's backward pass, in which blocks of final gradients can be streamed.
    `base_step_s`: seconds of forward and backward of all micro-batches."""
    return BACKWARD_SHARE * base_step_s / accumulation


def pinned_bytes(num_bytes: int) -> int:
    """Pinned bytes of an arena of `num_bytes`, as memory is pinned by pages."""
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES


def pinned_room(num_bytes: int) -> int:
    """Bytes of the largest arena within `num_bytes` of pinned memory."""
    return num_bytes // PAGE_BYTES * PAGE_BYTES
