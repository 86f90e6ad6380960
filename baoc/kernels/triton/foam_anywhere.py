"""FOAM's general step, of padded folds and of elements that are left out, to which `foam` falls back; and the
arithmetic that both share.
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportPossiblyUnboundVariable=false
# pyright: reportOperatorIssue=false, reportCallIssue=false, reportIndexIssue=false
# Device code: Triton's compiler gives these names types that Python's annotations do not know.

import triton
import triton.language as tl

from baoc.kernels.triton.device import reciprocal, tile_of
from baoc.kernels.triton.elementwise import (
    CORRECTION_AT,
    DECAY,
    EPS,
    M_AT,
    M_SCALE_AT,
    MATCH_AT,
    PARAM_AT,
    SIZE,
    V_AT,
    V_SCALE_AT,
    W1,
    W2,
    WIDTH,
    count_left_out,
    lerp,
    load_grad,
    matched_factor,
)
from baoc.kernels.triton.storage import load_m, load_param, load_v, store_m, store_param, store_v

_SURE = tl.constexpr(2.0**32)


@triton.jit
def facts(tensor, ptrs, settings):
    """Addresses and settings of a tensor, asked for all at once before anything depends on them: a program lives as
    long as its chain of reads."""
    addrs, row = ptrs + tensor * WIDTH, settings + tensor * WIDTH
    at = (
        tl.load(addrs + PARAM_AT), tl.load(addrs + CORRECTION_AT), tl.load(addrs + M_AT), tl.load(addrs + M_SCALE_AT),
        tl.load(addrs + V_AT), tl.load(addrs + V_SCALE_AT), tl.load(addrs + MATCH_AT),
    )  # fmt: skip
    numbers = (tl.load(row + DECAY), tl.load(row + SIZE), tl.load(row + W1), tl.load(row + W2), tl.load(row + EPS))
    return at, numbers


@triton.jit
def spread(x):
    """Folded numbers [groups, 32] beside their elements: [groups, 32, 1]."""
    return x[:, :, None]


@triton.jit
def fold_sum(x):
    return tl.sum(x, axis=2)


@triton.jit
def is_sure(folded):
    """Whether means over folds tell that all elements are usable: a NaN, an infinity or one beyond 2^48
    brings them to 2^32 or more. Only where others cancel it, to 8 bits at least, is one not noticed; it then counts as
    the number that it is, and averages do not suffer, as the mean is small."""
    return tl.abs(folded) < _SURE


@triton.jit
def _averages(
    m, v, count, folded, row, MODE: tl.constexpr,
):  # fmt: skip
    """New m and v from sums over the folds, and the folded gradient. A fold of nothing keeps its averages."""
    _, _, w1, w2, _ = row
    num = tl.maximum(count, 1).to(tl.float32)
    folded = folded / num
    if MODE != "repair":
        m = tl.where(count > 0, lerp(m, folded, w1), m)
        v = tl.where(count > 0, lerp(v, folded * folded, w2), v)
    return m, v, folded


@triton.jit
def stepped(
    tensor, g, kept, p, folded, m, v, at, row, repair, MODE: tl.constexpr, MATCHED: tl.constexpr,
):  # fmt: skip
    """Weights after the step, and the update; what folds have in common lies beside their elements."""
    decay, size, _, _, eps = row
    if MATCHED and MODE == "step":
        size *= matched_factor(at[6])
    residual = g - folded
    root = tl.sqrt(residual * residual + v)
    update = (residual + m) * reciprocal(root + eps)
    new = p
    if MODE == "step":
        new = p * decay - size * update
        if kept is not True:
            new = tl.where(kept, new, p)
    if MODE == "repair":
        new = tl.where(kept, p - size * tl.load(repair + tensor) * update, p)
    return new, update


@triton.jit
def _step_folds(
    tensor, grad_addr, first, left, start, tile, inside, lane, at, row, thresholds, repair, left_out, bad,
    M: tl.constexpr, V: tl.constexpr, WEIGHTS: tl.constexpr, PARAM: tl.constexpr,
    GRAD: tl.constexpr, MODE: tl.constexpr, MATCHED: tl.constexpr, TRACK: tl.constexpr, COUNT: tl.constexpr,
    MARKED: tl.constexpr, ENTRIES: tl.constexpr,
):  # fmt: skip
    """Steps `left` folded numbers from `first`. Their elements, read once, are `start + tile` where `inside`.

    What is outside pads a fold and counts as zero. Returns the update's sum of squares.
    """
    entry, groups = tile_of(ENTRIES)
    p_addr, correction_addr, m_addr, m_scale_addr, v_addr, v_scale_addr, _match = at
    # All reads come first: a store in between would keep the compiler from moving them up.
    g, finite, kept = load_grad(grad_addr, start, tile, inside, GRAD, MARKED, 1, False)
    p, stored = g, 0
    if MODE != "measure":
        p, stored = load_param(p_addr, correction_addr, start, tile, inside, WEIGHTS, PARAM, 1, False)
    m = load_m(m_addr, m_scale_addr, first, entry, entry < left, groups, left, M, 1, False)
    v, scale_old = load_v(v_addr, v_scale_addr, first, entry, entry < left, groups, left, V, 1, False)
    folded = fold_sum(g)
    m, v, folded = _averages(m, v, fold_sum(tl.where(kept, 1, 0)), folded, row, MODE)
    new, update = stepped(tensor, g, kept, p, spread(folded), spread(m), spread(v), at, row, repair, MODE, MATCHED)
    if MODE == "step":
        store_m(m_addr, m_scale_addr, m, thresholds, first, entry, entry < left, groups, left, M, 1, False)
        store_v(v_addr, v_scale_addr, v, tl.sqrt(v), scale_old, thresholds, first, entry, entry < left, groups, left, V,
                1, False)  # fmt: skip
    if MODE != "measure":
        store_param(p_addr, correction_addr, new, p, stored, thresholds, lane, start, tile, inside, WEIGHTS, PARAM, 1,
                    False, False)  # fmt: skip
    if MODE != "repair":
        count_left_out(finite, kept, tensor, left_out, bad, TRACK, COUNT)
    return tl.sum(tl.where(kept & inside, update * update, 0.0)) if TRACK else 0.0


@triton.jit
def step_anywhere(
    tensor, grad_addr, first, left, rows, cols, width, transposed, at, row, thresholds, repair, left_out, bad,
    M: tl.constexpr, V: tl.constexpr, WEIGHTS: tl.constexpr, PARAM: tl.constexpr,
    GRAD: tl.constexpr, MODE: tl.constexpr, MATCHED: tl.constexpr, TRACK: tl.constexpr, COUNT: tl.constexpr,
    MARKED: tl.constexpr, ENTRIES: tl.constexpr, FOLD: tl.constexpr,
):  # fmt: skip
    """Steps folds that may be padded, in a matrix of any sides, stored either way."""
    entry, _ = tile_of(ENTRIES)
    above = first // width
    rest = first - above * width
    over = (rest + entry) // width
    low = rest + entry - over * width
    begins = (above + over) * tl.where(transposed, 1, cols) + low * tl.where(transposed, FOLD * rows, FOLD)
    place, k = first.to(tl.int64), tl.arange(0, FOLD)[None, None, :]
    inside = spread(entry < left) & (spread(low * FOLD) + k < cols)
    tile = spread(begins) + k * tl.where(transposed, rows, 1)
    return _step_folds(
        tensor, grad_addr, place, left, place * 0, tile, inside, (tile & 31).to(tl.int32), at, row, thresholds, repair,
        left_out, bad, M, V, WEIGHTS, PARAM, GRAD, MODE, MATCHED, TRACK, COUNT, MARKED, ENTRIES,
    )  # fmt: skip
