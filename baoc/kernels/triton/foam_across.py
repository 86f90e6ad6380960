"""FOAM's step of short folds across rows that begin anywhere, as where rows are of odd length.

Rows that are not aligned are read number by number, so a warp's threads lie beside each other in a row, and each has
all of its folds: tiles are [fold, groups, 32]. They share no shape with aligned tiles, as the compiler gives loads of
one shape one layout, that of the widest.
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportPossiblyUnboundVariable=false
# pyright: reportOperatorIssue=false, reportCallIssue=false, reportIndexIssue=false
# Device code: Triton's compiler gives these names types that Python's annotations do not know.

import triton
import triton.language as tl

from baoc.kernels.triton.device import differ, load_numbers
from baoc.kernels.triton.elementwise import lerp
from baoc.kernels.triton.foam_anywhere import is_sure, stepped
from baoc.kernels.triton.storage import load_m, load_param, load_v, store_m, store_param, store_v


@triton.jit
def step_across(
    tensor, grad_addr, first, left, cols, at, row, thresholds, repair,
    M: tl.constexpr, V: tl.constexpr, SQUARES: tl.constexpr, WEIGHTS: tl.constexpr, PARAM: tl.constexpr,
    GRAD: tl.constexpr, MATCHED: tl.constexpr, TRACK: tl.constexpr, MARKED: tl.constexpr, ENTRIES: tl.constexpr,
    FOLD: tl.constexpr,
):  # fmt: skip
    """Steps ENTRIES folded numbers from `first`, all of one row of folds, none of which is padded; does nothing where
    elements need care. Returns whether it is done, and the update's sum of squares."""
    GROUPS: tl.constexpr = ENTRIES // 32
    p_addr, correction_addr, m_addr, m_scale_addr, v_addr, v_scale_addr, _match = at
    _, _, w1, w2, _ = row
    place = first.to(tl.int64)
    above = first // cols
    start = above.to(tl.int64) * (FOLD * cols) + (first - above * cols)
    k, lanes = tl.arange(0, FOLD)[:, None, None], tl.arange(0, 32)[None, None, :]
    groups = tl.arange(0, GROUPS)[None, :, None]
    rows = (k * cols).to(tl.int32) + lanes
    tile, lane = rows + groups * 32, ((start & 31).to(tl.int32) + rows) & 31
    entry = groups * 32 + lanes
    g = load_numbers(grad_addr, start, tile, True, GRAD, 1, True)
    p, stored = load_param(p_addr, correction_addr, start, tile, True, WEIGHTS, PARAM, 1, True)
    m = load_m(m_addr, m_scale_addr, place, entry, True, groups, left, M, 1, True)
    v, scale_old = load_v(v_addr, v_scale_addr, place, entry, True, groups, left, V, 1, True)
    folded = tl.sum(g, axis=0, keep_dims=True) * (1.0 / FOLD)
    new_v = tl.sum(g * g, axis=0, keep_dims=True) * (1.0 / FOLD) if SQUARES else folded * folded
    m, v = lerp(m, folded, w1), lerp(v, new_v, w2)
    new, update = stepped(tensor, g, True, p, folded, m, v, at, row, repair, "step", MATCHED)
    plain = tl.min(tl.where(is_sure(folded, new_v, SQUARES), 1, 0))
    if MARKED:
        plain = tl.minimum(plain, tl.min(tl.where(g.to(tl.int32, bitcast=True) != -2147483648, 1, 0)))
    if WEIGHTS == "split8":
        plain = tl.minimum(plain, tl.min(differ(new, p)))
    done = plain != 0
    if done:
        store_m(m_addr, m_scale_addr, m, thresholds, place, entry, True, groups, left, M, 1, True)
        store_v(v_addr, v_scale_addr, v, tl.sqrt(v), scale_old, thresholds, place, entry, True, groups, left, V, 1,
                True)  # fmt: skip
        store_param(p_addr, correction_addr, new, new, stored, thresholds, lane, start, tile, True, WEIGHTS, PARAM, 1,
                    True, True)  # fmt: skip
    square = 0.0
    if TRACK:
        square = tl.where(done, tl.sum(update * update), 0.0)
    return done, square
