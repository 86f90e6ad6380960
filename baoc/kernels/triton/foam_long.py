"""FOAM's step of long folds along rows, one after the other: each is stepped as soon as its mean is known.

A warp holds one fold, so nothing is exchanged between warps and a gradient is read once. What folds share, their
group's scale, is only needed to store the averages, which are kept until all folds are stepped.
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportPossiblyUnboundVariable=false
# pyright: reportOperatorIssue=false, reportCallIssue=false, reportIndexIssue=false
# Device code: Triton's compiler gives these names types that Python's annotations do not know.

import triton
import triton.language as tl

from baoc.kernels.triton.device import differ, load_numbers, tile_of
from baoc.kernels.triton.elementwise import count_left_out, lerp, load_grad
from baoc.kernels.triton.foam_anywhere import is_sure, stepped
from baoc.kernels.triton.storage import load_m, load_param, load_v, store_m, store_param, store_v


@triton.jit
def _picked(x, index):
    """The number of a group [1, 32] at `index`."""
    return tl.sum(tl.gather(x, tl.full([1, 1], 0, tl.int32) + index, axis=1))


@triton.jit
def _plain_fold(
    tensor, grad_addr, start, size, m_old, v_old, at, row, thresholds, repair,
    WEIGHTS: tl.constexpr, PARAM: tl.constexpr, GRAD: tl.constexpr, MATCHED: tl.constexpr,
    TRACK: tl.constexpr, MARKED: tl.constexpr, FOLD: tl.constexpr, VEC: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """Steps the weights of a fold of `size` elements from `start`, all FOLD of them if FULL, unless some need care.
    Returns whether that is done, the fold's mean, and the update's sum of squares."""
    p_addr, correction_addr, _m, _ms, _v, _vs, _match = at
    _, _, w1, w2, _ = row
    # Tiles of one shape would get one layout, of wide accesses, whichever of them can have these.
    if VEC > 1:
        tile = tl.arange(0, FOLD)
        lane = tl.max_contiguous(tl.multiple_of(tile & 31, VEC), VEC)
    else:
        tile, _groups = tile_of(FOLD)
        lane = ((start & 31).to(tl.int32) + tl.arange(0, 32)[None, :]) & 31
    inside = tile < size
    g = load_numbers(grad_addr, start, tile, inside, GRAD, VEC, FULL)
    p, stored = load_param(p_addr, correction_addr, start, tile, inside, WEIGHTS, PARAM, VEC, FULL)
    folded = tl.sum(g) * (1.0 / FOLD)
    m, v = lerp(m_old, folded, w1), lerp(v_old, folded * folded, w2)
    new, update = stepped(tensor, g, True, p, folded, m, v, at, row, repair, "step", MATCHED)
    done = is_sure(folded)  # else some element may be left out
    if MARKED:
        done = done & (tl.min(tl.where(g.to(tl.int32, bitcast=True) != -2147483648, 1, 0)) != 0)
    if WEIGHTS == "split8":
        moved = differ(new, p)
        done = done & (tl.min(moved if FULL else tl.where(inside, moved, 1)) != 0)
    if done:
        store_param(p_addr, correction_addr, new, new, stored, thresholds, lane, start, tile, inside, WEIGHTS, PARAM,
                    VEC, FULL, True)  # fmt: skip
    square = 0.0
    if TRACK:
        square = tl.sum(update * update if FULL else tl.where(inside, update * update, 0.0))
    return done, folded, square


@triton.jit
def _careful_fold(
    tensor, grad_addr, start, size, m_old, v_old, at, row, thresholds, repair, left_out, bad,
    WEIGHTS: tl.constexpr, PARAM: tl.constexpr, GRAD: tl.constexpr, MATCHED: tl.constexpr,
    TRACK: tl.constexpr, COUNT: tl.constexpr, MARKED: tl.constexpr, FOLD: tl.constexpr,
):  # fmt: skip
    """The same of elements that may be left out or that do not move; says how many count instead of whether it is done.
    What pads a fold counts, as zero."""
    p_addr, correction_addr, _m, _ms, _v, _vs, _match = at
    _, _, w1, w2, _ = row
    tile, _groups = tile_of(FOLD)
    inside = tile < size
    g, finite, kept = load_grad(grad_addr, start, tile, inside, GRAD, MARKED, 1, False)
    p, stored = load_param(p_addr, correction_addr, start, tile, inside, WEIGHTS, PARAM, 1, False)
    lane = ((start & 31).to(tl.int32) + tl.arange(0, 32)[None, :]) & 31
    count = tl.sum(tl.where(kept, 1, 0))
    num = tl.maximum(count, 1).to(tl.float32)
    folded = tl.sum(g) / num
    m = tl.where(count > 0, lerp(m_old, folded, w1), m_old)
    v = tl.where(count > 0, lerp(v_old, folded * folded, w2), v_old)
    new, update = stepped(tensor, g, kept, p, folded, m, v, at, row, repair, "step", MATCHED)
    store_param(p_addr, correction_addr, new, p, stored, thresholds, lane, start, tile, inside, WEIGHTS, PARAM, 1,
                False, False)  # fmt: skip
    count_left_out(finite, kept, tensor, left_out, bad, TRACK, COUNT)
    square = tl.sum(tl.where(kept & inside, update * update, 0.0)) if TRACK else 0.0
    return count, folded, square


@triton.jit
def _fold(
    tensor, grad_addr, start, size, index, entry, m_old, v_old, found, at, row, thresholds, repair, left_out, bad,
    WEIGHTS: tl.constexpr, PARAM: tl.constexpr, GRAD: tl.constexpr, MATCHED: tl.constexpr,
    TRACK: tl.constexpr, COUNT: tl.constexpr, MARKED: tl.constexpr, FOLD: tl.constexpr, VEC: tl.constexpr,
    FULL: tl.constexpr,
):  # fmt: skip
    """Steps fold `index` of a group. `found`, which takes what is learned of it: means and numbers of
    elements of all folds, and the update's sum of squares."""
    means, counts, square = found
    m_one, v_one = _picked(m_old, index), _picked(v_old, index)
    count = index * 0 + 1
    done, mean, part = _plain_fold(
        tensor, grad_addr, start, size, m_one, v_one, at, row, thresholds, repair, WEIGHTS, PARAM, GRAD,
        MATCHED, TRACK, MARKED, FOLD, VEC, FULL,
    )  # fmt: skip
    if not done:
        count, mean, part = _careful_fold(
            tensor, grad_addr, start, size, m_one, v_one, at, row, thresholds, repair, left_out, bad, WEIGHTS,
            PARAM, GRAD, MATCHED, TRACK, COUNT, MARKED, FOLD,
        )  # fmt: skip
    here = entry == index
    means = tl.where(here, mean, means)
    return means, tl.where(here, count, counts), square + part


@triton.jit
def step_long(
    tensor, grad_addr, first, left, cols, width, at, row, thresholds, repair, left_out, bad,
    M: tl.constexpr, V: tl.constexpr, WEIGHTS: tl.constexpr, PARAM: tl.constexpr,
    GRAD: tl.constexpr, MATCHED: tl.constexpr, TRACK: tl.constexpr, COUNT: tl.constexpr, MARKED: tl.constexpr,
    FOLD: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    """Steps `left` (at most 32) folds from folded number `first`, of rows of `width` folds. Returns the update's sum of
    squares."""
    entry, groups = tile_of(32)
    there, place = entry < left, first.to(tl.int64)
    _p, _c, m_addr, m_scale_addr, v_addr, v_scale_addr, _match = at
    _, _, w1, w2, _ = row
    m_old = load_m(m_addr, m_scale_addr, place, entry, there, groups, left, M, 1, False)
    v_old, scale_old = load_v(v_addr, v_scale_addr, place, entry, there, groups, left, V, 1, False)
    means = tl.zeros([1, 32], dtype=tl.float32)
    counts = tl.zeros([1, 32], dtype=tl.int32)
    square = tl.full([], 0.0, tl.float32)
    if cols % FOLD == 0:
        for index in range(0, left):
            means, counts, square = _fold(
                tensor, grad_addr, (place + index) * FOLD, left * 0 + FOLD, index, entry, m_old, v_old,
                (means, counts, square), at, row, thresholds, repair, left_out, bad, WEIGHTS, PARAM,
                GRAD, MATCHED, TRACK, COUNT, MARKED, FOLD, VEC, True,
            )  # fmt: skip
    else:
        line = first // width
        low = first - line * width
        start = (line * cols + low * FOLD).to(tl.int64)
        last = (cols - (width - 1) * FOLD).to(tl.int32)
        for index in range(0, left):
            ends = low == width - 1
            if ends:
                means, counts, square = _fold(
                    tensor, grad_addr, start, last, index, entry, m_old, v_old, (means, counts, square), at,
                    row, thresholds, repair, left_out, bad, WEIGHTS, PARAM, GRAD, MATCHED, TRACK, COUNT,
                    MARKED, FOLD, 1, False,
                )  # fmt: skip
            else:
                means, counts, square = _fold(
                    tensor, grad_addr, start, last * 0 + FOLD, index, entry, m_old, v_old,
                    (means, counts, square), at, row, thresholds, repair, left_out, bad, WEIGHTS,
                    PARAM, GRAD, MATCHED, TRACK, COUNT, MARKED, FOLD, 1, True,
                )  # fmt: skip
            start += tl.where(ends, last, FOLD)
            low = tl.where(ends, 0, low + 1)
    m = tl.where(counts > 0, lerp(m_old, means, w1), m_old)
    v = tl.where(counts > 0, lerp(v_old, means * means, w2), v_old)
    store_m(m_addr, m_scale_addr, m, thresholds, place, entry, there, groups, left, M, 1, False)
    store_v(v_addr, v_scale_addr, v, tl.sqrt(v), scale_old, thresholds, place, entry, there, groups, left, V, 1, False)
    return square
