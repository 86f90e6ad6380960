"""Matches the RMS of updates to their targets: two small kernels between the step of a table and its repair.

A step scales updates by target / RMS, with the RMS of the block's update before, and sums the squares of its own.
`sum_kernel` adds these sums up by tensor. `match_kernel` turns them into the new RMS and into the factor that the step
should have used (`baoc.optim.backends.eager.matching_factor`). Where both factors differ, as after a surge of the
gradient, a launch of the step's kernel in mode "repair" adds the difference.
"""

import triton
import triton.language as tl

from baoc.kernels.triton.elementwise import MATCH_AT, PER_LR, WIDTH, matched_factor

_TINY = tl.constexpr(1e-30)  # as baoc.optim.rules.base


@triton.jit
def sum_kernel(
    partial,  # fp32[programs]
    spans,  # int32[tensors, 2]: first and last program, excluded, of each tensor
    settings,  # fp32[tensors, 8]
    sums,  # fp32[tensors]
    BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """sums[tensor] = sum of squares of its update per lr, in an order that depends on the table alone."""
    tensor = tl.program_id(0)
    last = tl.load(spans + 2 * tensor + 1)
    lanes = tl.arange(0, BLOCK_SIZE)
    total = tl.zeros([BLOCK_SIZE], dtype=tl.float32)
    for begin in range(tl.load(spans + 2 * tensor), last, BLOCK_SIZE):
        total += tl.load(partial + begin + lanes, mask=begin + lanes < last, other=0.0)
    per_lr = tl.load(settings + tensor * WIDTH + PER_LR)
    tl.store(sums + tensor, tl.sum(total) * per_lr * per_lr)


@triton.jit
def match_kernel(
    blocks,  # int32[blocks + 1]: where the tensors of each block begin in `members`
    members,  # int32[]: tensors
    numels,  # int64[tensors]
    grad_ptrs,  # int64[tensors]
    ptrs,  # int64[tensors, 8]
    sums,  # fp32[tensors]
    skipped,  # int32[tensors]: read and reset to 0
    repair,  # fp32[tensors]: takes right factor - used factor
    MEASURE: tl.constexpr,  # only store the RMS of blocks that have none
    BLOCK_SIZE: tl.constexpr,
):
    """Stores the RMS of each block's update. One program per block; a block without gradients stays as it is."""
    block = tl.program_id(0)
    first, last = tl.load(blocks + block), tl.load(blocks + block + 1)
    match_addr = tl.load(ptrs + tl.load(members + first) * WIDTH + MATCH_AT)
    match = match_addr.to(tl.pointer_type(tl.float32))
    target, own = tl.load(match), tl.load(match + 1)
    used = matched_factor(match_addr)
    lanes = tl.arange(0, BLOCK_SIZE)
    own_square = tl.zeros([BLOCK_SIZE], dtype=tl.float32)
    count = tl.zeros([BLOCK_SIZE], dtype=tl.float32)
    stepped = tl.zeros([BLOCK_SIZE], dtype=tl.int32)
    for begin in range(first, last, BLOCK_SIZE):
        inside = begin + lanes < last
        tensor = tl.load(members + begin + lanes, mask=inside, other=0)
        there = tl.load(grad_ptrs + tensor, mask=inside, other=0) != 0
        total = tl.load(sums + tensor, mask=there, other=0.0)
        num = (tl.load(numels + tensor, mask=there, other=0) - tl.load(skipped + tensor, mask=there, other=0)).to(
            tl.float32
        )
        rms = tl.maximum(tl.sqrt(total / tl.maximum(num, 1.0)), _TINY)
        usual = tl.minimum(used, tl.maximum(target, 1.0) / rms)
        factor = tl.where(own > _TINY, usual, target / rms)
        factor = tl.where(rms > _TINY, factor, used)  # the update is zero, so there is nothing to repair
        own_square += total
        count += num
        stepped += there.to(tl.int32)
        tl.debug_barrier()  # a warp may load again what another has stored
        tl.store(skipped + tensor, 0, mask=there)
        if not MEASURE:
            tl.store(repair + tensor, tl.where(there, factor - used, 0.0), mask=inside)
    if tl.sum(stepped) > 0:
        num = tl.maximum(tl.sum(count), 1.0)
        new = tl.sqrt(tl.sum(own_square) / num)
        tl.store(match + 1, tl.where(own < 0.0, new, own) if MEASURE else new)
