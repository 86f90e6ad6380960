"""The FOAM step: means over folds of the gradient, their averages, and the update from averages and residual.

A program steps the elements of ENTRIES folded numbers, in order of the folded tensor, so that it holds complete groups
of 32. Bytes moved per element: the gradient once, weights both ways, and the folded states over 2^level. The residual
is never stored. `_step_whole` steps full folds whose elements are all stepped, `_step_anywhere` all others. The eager
counterpart is `baoc.optim.rules.foam`.
"""

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from baoc.kernels.triton.device import differ, load_numbers, reciprocal, tile_of
from baoc.kernels.triton.elementwise import (
    REPAIRERS,
    count_skipped,
    launch_step,
    lerp,
    load_grad,
    load_row,
    matched_factor,
)
from baoc.kernels.triton.kinds import Call
from baoc.kernels.triton.matrix_kinds import FOLDS, entries
from baoc.kernels.triton.storage import load_m, load_param, load_v, store_m, store_param, store_v

if TYPE_CHECKING:
    from baoc.kernels.triton.table import FusedTable

_SURE = tl.constexpr(2.0**32)


@triton.jit
def _spread(x):
    """Folded numbers [groups, 32] -> [groups, 32, 1], to broadcast over the elements of their folds."""
    return x[:, :, None]


@triton.jit
def _new_weights(
    tensor, g, stepped, p, folded, m, v, at, row, repair, MODE: tl.constexpr, MATCHED: tl.constexpr,
):  # fmt: skip
    """Returns (weights after the step, update). `folded`, m and v are [groups, 32, 1], one number per fold."""
    decay, size, _w1, _w2, _b2, _inv_bc2, eps = row
    if MATCHED and MODE == "step":
        size *= matched_factor(at[6])
    residual = g - folded
    root = tl.sqrt(residual * residual + v)
    update = (residual + m) * reciprocal(root + eps)
    new = p
    if MODE == "step":
        new = p * decay - size * update
        if stepped is not True:
            new = tl.where(stepped, new, p)
    if MODE == "repair":
        new = tl.where(stepped, p - size * tl.load(repair + tensor) * update, p)
    return new, update


@triton.jit
def _is_plain(g, folded, p, new, inside, WEIGHTS: tl.constexpr, MARKED: tl.constexpr, RAGGED: tl.constexpr):
    """Whether all elements are stepped and, for split8, every weight changes. If not, `_step_anywhere` steps the chunk.

    Usable elements are recognised by the means over folds: a NaN, an infinity or an element beyond 2^48 makes the mean
    2^32 or more. One goes unnoticed only if others cancel it to 8 bits at least; it then counts as the number that it
    is, which does not harm the averages, because the mean is small."""
    plain = tl.min(tl.where(tl.abs(folded) < _SURE, 1, 0))
    if MARKED:
        plain = tl.minimum(plain, tl.min(tl.where(g.to(tl.int32, bitcast=True) != -2147483648, 1, 0)))
    if WEIGHTS == "split8":
        moved = differ(new, p)
        if RAGGED:
            moved = tl.where(inside, moved, 1)
        plain = tl.minimum(plain, tl.min(moved))
    return plain != 0


@triton.jit
def _by_fold(x, ENTRIES: tl.constexpr, FOLD: tl.constexpr):
    """Consecutive elements -> [groups, 32, FOLD]."""
    return tl.reshape(x, [ENTRIES // 32, 32, FOLD])


@triton.jit
def _step_whole(
    tensor, grad_addr, first, left, start, tile, lane, inside, at, row, thresholds, repair,
    M: tl.constexpr, V: tl.constexpr, WEIGHTS: tl.constexpr, PARAM: tl.constexpr,
    GRAD: tl.constexpr, MATCHED: tl.constexpr, TRACK: tl.constexpr, MARKED: tl.constexpr, ENTRIES: tl.constexpr,
    FOLD: tl.constexpr, VEC: tl.constexpr, RAGGED: tl.constexpr,
):  # fmt: skip
    """Steps full folds if `_is_plain`, else does nothing. Returns (whether it has, the update's sum of squares).

    RAGGED folds begin anywhere; elements that are not `inside` pad them and count as zero."""
    FULL: tl.constexpr = not RAGGED
    # A thread holds consecutive folded numbers, those of its own elements: nothing is exchanged between threads.
    KEPT: tl.constexpr = max(VEC // FOLD, 1)
    entry, groups = tile_of(ENTRIES)
    there = entry >= 0
    p_addr, correction_addr, m_addr, m_scale_addr, v_addr, v_scale_addr, _match = at
    _decay, _size, w1, w2, _b2, _inv_bc2, _eps = row
    g = _by_fold(load_numbers(grad_addr, start, tile, inside, GRAD, VEC, FULL), ENTRIES, FOLD)
    p, stored = load_param(p_addr, correction_addr, start, tile, inside, WEIGHTS, PARAM, VEC, FULL)
    p = _by_fold(p, ENTRIES, FOLD)
    m = load_m(m_addr, m_scale_addr, first, entry, there, groups, left, M, KEPT, True)
    v, scale_old = load_v(v_addr, v_scale_addr, first, entry, there, groups, left, V, KEPT, True)
    folded = tl.sum(g, axis=2) * (1.0 / FOLD)
    m = lerp(m, folded, w1)
    v = lerp(v, folded * folded, w2)
    new, update = _new_weights(
        tensor, g, True, p, _spread(folded), _spread(m), _spread(v), at, row, repair, "step", MATCHED
    )
    inside_folds = _by_fold(inside, ENTRIES, FOLD)
    done = _is_plain(g, folded, p, new, inside_folds, WEIGHTS, MARKED, RAGGED)
    if done:
        store_m(m_addr, m_scale_addr, m, thresholds, first, entry, there, groups, left, M, KEPT, True)
        store_v(v_addr, v_scale_addr, v, tl.sqrt(v), scale_old, thresholds, first, entry, there, groups, left, V, KEPT,
                True)  # fmt: skip
        out = tl.reshape(new, tile.shape)
        store_param(p_addr, correction_addr, out, out, stored, thresholds, lane, start, tile, inside, WEIGHTS, PARAM,
                    VEC, FULL, True)  # fmt: skip
    square = 0.0
    if TRACK:
        of_each = tl.where(inside_folds, update * update, 0.0) if RAGGED else update * update
        square = tl.where(done, tl.sum(of_each), 0.0)
    return done, square


@triton.jit
def _step_ragged(
    tensor, grad_addr, first, left, cols, width, at, row, thresholds, repair,
    M: tl.constexpr, V: tl.constexpr, WEIGHTS: tl.constexpr, PARAM: tl.constexpr,
    GRAD: tl.constexpr, MATCHED: tl.constexpr, TRACK: tl.constexpr, MARKED: tl.constexpr, ENTRIES: tl.constexpr,
    FOLD: tl.constexpr,
):  # fmt: skip
    """`_step_whole` for matrices whose columns FOLD does not divide: the last fold of a line is shorter, and none is
    aligned. A program covers two lines of folds at most, so that it needs no division."""
    above = first // width
    rest = first - above * width
    flat = tl.arange(0, ENTRIES * FOLD)
    entry, k = flat // FOLD, flat % FOLD  # the folded number that an element belongs to, and its place in that fold
    over = tl.where(rest + entry >= width, 1, 0)
    line, low = above + over, rest + entry - over * width
    tile, inside = line * cols + low * FOLD + k, low * FOLD + k < cols
    return _step_whole(
        tensor, grad_addr, first.to(tl.int64), left, first.to(tl.int64) * 0, tile, (tile & 31).to(tl.int32), inside,
        at, row, thresholds, repair, M, V, WEIGHTS, PARAM, GRAD, MATCHED, TRACK, MARKED, ENTRIES, FOLD, 1, True,
    )  # fmt: skip


@triton.jit
def _step_anywhere(
    tensor, grad_addr, first, left, rows, cols, width, transposed, at, row, thresholds, repair, skipped, nonfinite,
    M: tl.constexpr, V: tl.constexpr, WEIGHTS: tl.constexpr, PARAM: tl.constexpr,
    GRAD: tl.constexpr, MODE: tl.constexpr, MATCHED: tl.constexpr, TRACK: tl.constexpr, COUNT: tl.constexpr,
    MARKED: tl.constexpr, ENTRIES: tl.constexpr, FOLD: tl.constexpr,
):  # fmt: skip
    """Steps `left` folded numbers from `first`, in a matrix of any shape, stored either way, with any gradients.
    Elements that pad a fold count as zero. Returns the update's sum of squares."""
    entry, groups = tile_of(ENTRIES)
    above = first // width
    rest = first - above * width
    over = (rest + entry) // width
    low = rest + entry - over * width
    begins = (above + over) * tl.where(transposed, 1, cols) + low * tl.where(transposed, FOLD * rows, FOLD)
    first, k = first.to(tl.int64), tl.arange(0, FOLD)[None, None, :]
    start = first * 0
    inside = _spread(entry < left) & (_spread(low * FOLD) + k < cols)
    tile = _spread(begins) + k * tl.where(transposed, rows, 1)
    lane = (tile & 31).to(tl.int32)
    p_addr, correction_addr, m_addr, m_scale_addr, v_addr, v_scale_addr, _match = at
    # All reads come first: a store in between would keep the compiler from moving them up.
    g, finite, stepped = load_grad(grad_addr, start, tile, inside, GRAD, MARKED, 1, False)
    p, stored = g, 0
    if MODE != "measure":
        p, stored = load_param(p_addr, correction_addr, start, tile, inside, WEIGHTS, PARAM, 1, False)
    m = load_m(m_addr, m_scale_addr, first, entry, entry < left, groups, left, M, 1, False)
    v, scale_old = load_v(v_addr, v_scale_addr, first, entry, entry < left, groups, left, V, 1, False)
    folded, count = tl.sum(g, axis=2), tl.sum(tl.where(stepped, 1, 0), axis=2)
    folded = folded / tl.maximum(count, 1).to(tl.float32)
    if MODE != "repair":  # a fold of nothing keeps its averages
        _decay, _size, w1, w2, _b2, _inv_bc2, _eps = row
        m = tl.where(count > 0, lerp(m, folded, w1), m)
        v = tl.where(count > 0, lerp(v, folded * folded, w2), v)
    new, update = _new_weights(
        tensor, g, stepped, p, _spread(folded), _spread(m), _spread(v), at, row, repair, MODE, MATCHED
    )
    if MODE == "step":
        store_m(m_addr, m_scale_addr, m, thresholds, first, entry, entry < left, groups, left, M, 1, False)
        store_v(v_addr, v_scale_addr, v, tl.sqrt(v), scale_old, thresholds, first, entry, entry < left, groups, left, V,
                1, False)  # fmt: skip
    if MODE != "measure":
        store_param(p_addr, correction_addr, new, p, stored, thresholds, lane, start, tile, inside, WEIGHTS, PARAM, 1,
                    False, False)  # fmt: skip
    if MODE != "repair":
        count_skipped(finite, stepped, tensor, skipped, nonfinite, TRACK, COUNT)
    return tl.sum(tl.where(stepped & inside, update * update, 0.0)) if TRACK else 0.0


@triton.jit
def _program(
    tensor, index, grad_addr, rows, cols, transposed, at, row, thresholds, repair, skipped, nonfinite,
    M: tl.constexpr, V: tl.constexpr, WEIGHTS: tl.constexpr, PARAM: tl.constexpr,
    GRAD: tl.constexpr, MODE: tl.constexpr, MATCHED: tl.constexpr, TRACK: tl.constexpr, COUNT: tl.constexpr,
    MARKED: tl.constexpr, ENTRIES: tl.constexpr, FOLD: tl.constexpr, WIDE: tl.constexpr,
    VEC: tl.constexpr,
):  # fmt: skip
    """Steps ENTRIES folded numbers by the fastest function that can. Returns the update's sum of squares.

    WIDE: positions need 64 bits, in which division is slow.
    """
    PLACE: tl.constexpr = tl.int64 if WIDE else tl.int32
    rows, cols = rows.to(PLACE), cols.to(PLACE)
    # Folded numbers form lines of `width` each.
    width = (cols + FOLD - 1) // FOLD
    total = rows * width
    first = index.to(PLACE) * ENTRIES
    left = tl.minimum(total - first, ENTRIES).to(tl.int32)
    regular = (left == ENTRIES) & (not transposed) & (width >= ENTRIES)
    done, square = False, tl.full([], 0.0, tl.float32)
    if MODE == "step":
        if regular & (cols % FOLD == 0):
            start, tile = first.to(tl.int64) * FOLD, tl.arange(0, ENTRIES * FOLD)
            done, square = _step_whole(
                tensor, grad_addr, first.to(tl.int64), left, start, tile, tile & 31, tile >= 0, at, row, thresholds,
                repair, M, V, WEIGHTS, PARAM, GRAD, MATCHED, TRACK, MARKED, ENTRIES, FOLD, VEC, False,
            )  # fmt: skip
        elif regular:
            done, square = _step_ragged(
                tensor, grad_addr, first, left, cols, width, at, row, thresholds, repair, M, V,
                WEIGHTS, PARAM, GRAD, MATCHED, TRACK, MARKED, ENTRIES, FOLD,
            )  # fmt: skip
    if (left > 0) & (not done):
        square = _step_anywhere(
            tensor, grad_addr, first, left, rows, cols, width, transposed, at, row, thresholds, repair, skipped,
            nonfinite, M, V, WEIGHTS, PARAM, GRAD, MODE, MATCHED, TRACK, COUNT, MARKED, ENTRIES, FOLD,
        )  # fmt: skip
    return square


@triton.jit
def _sides(shapes, tensor):
    shape = shapes + tensor * 4
    return tl.load(shape + 1), tl.load(shape + 2), tl.load(shape + 3) != 0


@triton.jit
def foam_kernel(
    program_tensor,  # int32[programs]
    first_program,  # int32[tensors + 1]
    shapes,  # int64[tensors, 4]: numel, rows, cols, transposed
    ptrs,  # int64[tensors, 8]
    grad_ptrs,  # int64[tensors]
    settings,  # fp32[tensors, 8]
    thresholds,  # fp32[132]
    repair,  # fp32[tensors]
    partial,  # fp32[programs]
    skipped,  # int32[tensors]
    nonfinite,  # int64[tensors]
    M: tl.constexpr, V: tl.constexpr, WEIGHTS: tl.constexpr, PARAM: tl.constexpr,
    GRAD: tl.constexpr, MODE: tl.constexpr, MATCHED: tl.constexpr, TRACK: tl.constexpr, COUNT: tl.constexpr,
    MARKED: tl.constexpr, ENTRIES: tl.constexpr, FOLD: tl.constexpr, WIDE: tl.constexpr,
    REPEAT: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    """One program per ENTRIES * REPEAT folded numbers. In mode "repair", REPAIRERS programs share a tensor, so that a
    tensor without anything to repair costs little."""
    pid = tl.program_id(0)
    tensor = pid if MODE == "repair" else tl.load(program_tensor + pid)
    grad_addr = tl.load(grad_ptrs + tensor)
    if MODE == "repair":
        if (tl.load(repair + tensor) != 0.0) & (grad_addr != 0):
            programs = tl.load(first_program + tensor + 1) - tl.load(first_program + tensor)
            rows, cols, transposed = _sides(shapes, tensor)
            at, row = load_row(tensor, ptrs, settings)
            for index in range(tl.program_id(1), programs * REPEAT, REPAIRERS):
                _program(
                    tensor, grad_addr * 0 + index, grad_addr, rows, cols, transposed, at, row, thresholds, repair,
                    skipped, nonfinite, M, V, WEIGHTS, PARAM, GRAD, MODE, MATCHED, TRACK, COUNT, MARKED, ENTRIES, FOLD,
                    WIDE, VEC,
                )  # fmt: skip
    else:
        index = (pid - tl.load(first_program + tensor)).to(tl.int64)
        rows, cols, transposed = _sides(shapes, tensor)
        at, row = load_row(tensor, ptrs, settings)
        if grad_addr != 0:
            square = tl.full([], 0.0, tl.float32)
            for part in range(REPEAT):
                square += _program(
                    tensor, index * REPEAT + part, grad_addr, rows, cols, transposed, at, row, thresholds, repair,
                    skipped, nonfinite, M, V, WEIGHTS, PARAM, GRAD, MODE, MATCHED, TRACK, COUNT, MARKED, ENTRIES, FOLD,
                    WIDE, VEC,
                )  # fmt: skip
            if TRACK:
                tl.store(partial + pid, square)
        elif TRACK:
            tl.store(partial + pid, 0.0)


def launch(table: "FusedTable", call: Call) -> None:
    """Launches the FOAM step, see `kinds.Call`."""
    kind = table.kind
    launch_step(
        foam_kernel, table, call, sizes=table.shape_tensor, M=kind.m, V=kind.v,
        ENTRIES=entries(kind.rule, table.config), FOLD=FOLDS[kind.rule],
        WIDE=any(shape.numel >= 2**31 for shape in table.shapes), REPEAT=table.config.repeat,
    )  # fmt: skip
