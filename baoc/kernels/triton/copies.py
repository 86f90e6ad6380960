"""Copies between pinned host memory and the device that are kernels, so that a CUDA graph holds them cheaply.

A copy of torch takes the host 10 us outside of a graph, and 7 us as a node of one. A kernel reads and writes pinned
memory by its address. One program is enough: what a step uploads is some kilobytes.
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportPossiblyUnboundVariable=false
# pyright: reportOperatorIssue=false, reportCallIssue=false, reportIndexIssue=false
# Device code: Triton's compiler gives these names types that Python's annotations do not know.

import triton
import triton.language as tl

COPY_BLOCK_SIZE = 1024  # words of 8 bytes that are read at once


@triton.jit
def copy_slot_kernel(
    slots,  # int64[NUM_SLOTS, slot_words] in pinned memory
    uploaded,  # int64[>= words] on the device
    num_copied,  # int64[1] on the device: launches so far
    num_copied_host,  # int64[1] in pinned memory: takes `num_copied` when the slot has been read
    words, slot_words,
    NUM_SLOTS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """uploaded[:words] = slots[num_copied % NUM_SLOTS, :words]; num_copied += 1. For one program.

    `.cv` reads past the caches, which may hold what an older step put there.
    """
    count = tl.load(num_copied)
    slot = slots + (count % NUM_SLOTS) * slot_words
    offsets = tl.arange(0, BLOCK_SIZE)
    for start in range(0, words, BLOCK_SIZE):
        mask = start + offsets < words
        tl.store(
            uploaded + start + offsets, tl.load(slot + start + offsets, mask=mask, cache_modifier=".cv"), mask=mask
        )
    tl.debug_barrier()  # every thread has read the count and its part of the slot
    tl.store(num_copied, count + 1)
    tl.store(num_copied_host, count + 1)


@triton.jit
def copy_kernel(
    source,  # int64[words] on the device
    target,  # int64[words] in pinned memory
    words,
    BLOCK_SIZE: tl.constexpr,
):
    """target = source. For one program."""
    offsets = tl.arange(0, BLOCK_SIZE)
    for start in range(0, words, BLOCK_SIZE):
        mask = start + offsets < words
        tl.store(target + start + offsets, tl.load(source + start + offsets, mask=mask), mask=mask)
