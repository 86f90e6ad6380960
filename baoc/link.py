"""Seconds of the link between host and device, and how much of them a step hides: what host placement costs in time.

A step with states on the host is a pipeline on three engines (copy in, kernels, copy out; the host's processors are a
fourth for blocks that are updated there), each of which works through its blocks one after another. Its length is that
of the slowest engine plus what fills and drains it. As streaming begins in the backward pass, when a block's gradient
is final, the copy engines have `hidden_s` seconds before the optimizer's own time begins. With F the seconds of forward
and backward, K_b the kernel, L_b the copies and H_b the host's update of block b,

    step = max(F + sum_b K_b,  F - hidden + sum_b L_b + drain,  F - hidden + sum_b H_b).

So step <= limit says the same as three limits that are sums over blocks: sum K_b <= limit - F for the device, and
limit - F + hidden (less drain) for sum L_b and sum H_b. That is how an overlap becomes linear for the allocators: each
engine is a resource of its own. The pipeline is the one that was measured for METHODS section 8 (copy in, kernel, copy
out on three streams); its `max` over engines is the cost model of Deep Optimizer States (arXiv 2410.21316, section 4 of
METHODS: t_gpu = max(in, out) S / B when full duplex).
"""

from collections.abc import Iterable
from itertools import pairwise

from baoc.types import LinkRates

STAGING_BUFFERS = 3  # one is filled, one stepped, one emptied
BUCKET_BYTES = 64 * 2**20  # a larger slab passes in pieces of this size: from 4 MB on the link has its full rate
PAGE_BYTES = 4096  # pinned memory is locked by pages

# One H100, pinned memory (METHODS section 8). Of 1 MB only the rate of both ways together is known, so that half of it
# stands for each. The host: torch's fused AdamW on 16 cores, 22 ms for 100M elements.
STORED = LinkRates(
    sizes=(10**6, 4 * 10**6),
    in_rates=(21e9, 54e9),
    out_rates=(21e9, 54e9),
    both_rates=(42e9, 92e9),
    host_element_s=2.2e-10,
    source="stored: one H100, PCIe 5",
)


def slower(link: LinkRates, *, factor: float, source: str) -> LinkRates:
    """The same link with rates divided by `factor`; the host is as fast."""
    rates = {
        name: tuple(rate / factor for rate in getattr(link, name)) for name in ("in_rates", "out_rates", "both_rates")
    }
    return LinkRates(sizes=link.sizes, **rates, host_element_s=link.host_element_s, source=source)


def copy_seconds(num_bytes: int, *, link: LinkRates) -> float:
    """Seconds of `num_bytes` in and as many out at once, in pieces of BUCKET_BYTES at most.

    On lines through the measured sizes; a piece smaller than the smallest of them takes as long as that one.
    """
    if not num_bytes:
        return 0.0
    whole, rest = divmod(num_bytes, BUCKET_BYTES)
    return whole * _piece(BUCKET_BYTES, link) + (_piece(rest, link) if rest else 0.0)


def _piece(num_bytes: int, link: LinkRates) -> float:
    times = [2 * size / rate for size, rate in zip(link.sizes, link.both_rates, strict=True)]
    if num_bytes <= link.sizes[0]:
        return times[0]
    for (low, high), (quick, slow) in zip(pairwise(link.sizes), pairwise(times), strict=True):
        if num_bytes <= high:
            return quick + (slow - quick) * (num_bytes - low) / (high - low)
    return 2 * num_bytes / link.both_rates[-1]


def staging_bytes(slabs: Iterable[int]) -> int:
    """Device bytes of the buffers that streamed slabs of these sizes pass through: none where nothing is streamed."""
    return STAGING_BUFFERS * min(max(slabs, default=0), BUCKET_BYTES)


def pinned_bytes(num_bytes: int) -> int:
    """What an arena of `num_bytes` takes in pinned memory, which is locked by whole pages."""
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES


def drain_seconds(largest_slab: int, *, link: LinkRates) -> float:
    """What fills and drains the pipeline: the first piece comes in, and the last one goes out, beside nothing else."""
    piece = min(largest_slab, BUCKET_BYTES)
    return piece / link.in_rates[-1] + piece / link.out_rates[-1]
