"""The FOAM step: folds of the gradient, their averages, and the update by averages and residual, in one pass.

A program steps the elements of some folded numbers, in order of the folded tensor, so that its groups of 32 are whole.
Bytes moved per element: gradient once, weights both ways, and the folded states over 2^level. The residual is never
stored. The eager twin is `baoc.optim.rules.foam`.
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportPossiblyUnboundVariable=false
# pyright: reportOperatorIssue=false, reportCallIssue=false, reportIndexIssue=false
# Device code: Triton's compiler gives these names types that Python's annotations do not know.

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from baoc.kernels.triton.device import differ, load_numbers, tile_of
from baoc.kernels.triton.elementwise import REPAIRERS, launch_step, lerp
from baoc.kernels.triton.foam_anywhere import facts, fold_sum, is_sure, spread, step_anywhere, stepped
from baoc.kernels.triton.kinds import Call
from baoc.kernels.triton.matrix_kinds import FOLDS, entries
from baoc.kernels.triton.storage import load_m, load_param, load_v, store_m, store_param, store_v

if TYPE_CHECKING:
    from baoc.kernels.triton.table import FusedTable


@triton.jit
def _is_plain(
    g,
    folded,
    p,
    new,
    inside,
    WEIGHTS: tl.constexpr,
    MARKED: tl.constexpr,
    RAGGED: tl.constexpr,
):
    """Whether all elements are stepped (else sums and weights are made again) and every split weight is another."""
    plain = tl.min(tl.where(is_sure(folded), 1, 0))
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
    """Elements one after the other, as `spread` has them."""
    return tl.reshape(x, [ENTRIES // 32, 32, FOLD])


@triton.jit
def _step_whole(
    tensor, grad_addr, first, left, start, tile, lane, inside, at, row, thresholds, repair,
    M: tl.constexpr, V: tl.constexpr, WEIGHTS: tl.constexpr, PARAM: tl.constexpr,
    GRAD: tl.constexpr, MATCHED: tl.constexpr, TRACK: tl.constexpr, MARKED: tl.constexpr, ENTRIES: tl.constexpr,
    FOLD: tl.constexpr, VEC: tl.constexpr, RAGGED: tl.constexpr,
):  # fmt: skip
    """Steps whole folds of plain elements, see `_step_folds`; does nothing where elements need care. Returns whether it
    is done, and the update's sum of squares. RAGGED folds begin anywhere, padded by what is not `inside`,
    which counts as zero."""
    FULL: tl.constexpr = not RAGGED
    # As many of a thread's folded numbers follow each other as its elements' folds do: no exchange between threads.
    KEPT: tl.constexpr = max(VEC // FOLD, 1)
    entry, groups = tile_of(ENTRIES)
    there = entry >= 0
    p_addr, correction_addr, m_addr, m_scale_addr, v_addr, v_scale_addr, _match = at
    _, _, w1, w2, _ = row
    g = _by_fold(load_numbers(grad_addr, start, tile, inside, GRAD, VEC, FULL), ENTRIES, FOLD)
    p, stored = load_param(p_addr, correction_addr, start, tile, inside, WEIGHTS, PARAM, VEC, FULL)
    p = _by_fold(p, ENTRIES, FOLD)
    m = load_m(m_addr, m_scale_addr, first, entry, there, groups, left, M, KEPT, True)
    v, scale_old = load_v(v_addr, v_scale_addr, first, entry, there, groups, left, V, KEPT, True)
    folded = fold_sum(g) * (1.0 / FOLD)
    m = lerp(m, folded, w1)
    v = lerp(v, folded * folded, w2)
    new, update = stepped(
        tensor, g, True, p, spread(folded), spread(m), spread(v), at, row, repair, "step",
        MATCHED,
    )  # fmt: skip
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
def _step_aligned(
    tensor, grad_addr, first, left, cols, width, at, row, thresholds, repair,
    M: tl.constexpr, V: tl.constexpr, WEIGHTS: tl.constexpr, PARAM: tl.constexpr,
    GRAD: tl.constexpr, MATCHED: tl.constexpr, TRACK: tl.constexpr, MARKED: tl.constexpr, ENTRIES: tl.constexpr,
    FOLD: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    """`_step_whole` where folds are whole and their elements aligned."""
    start, tile = first.to(tl.int64) * FOLD, tl.arange(0, ENTRIES * FOLD)
    lane = tile & 31
    done, square = _step_whole(
        tensor, grad_addr, first.to(tl.int64), left, start, tile, lane, tile >= 0, at, row, thresholds, repair,
        M, V, WEIGHTS, PARAM, GRAD, MATCHED, TRACK, MARKED, ENTRIES, FOLD, VEC, False,
    )  # fmt: skip
    return done, square


@triton.jit
def _step_ragged(
    tensor, grad_addr, first, left, cols, width, at, row, thresholds, repair,
    M: tl.constexpr, V: tl.constexpr, WEIGHTS: tl.constexpr, PARAM: tl.constexpr,
    GRAD: tl.constexpr, MATCHED: tl.constexpr, TRACK: tl.constexpr, MARKED: tl.constexpr, ENTRIES: tl.constexpr,
    FOLD: tl.constexpr,
):  # fmt: skip
    """As `_step_whole`, of matrices whose sides folds or groups do not divide: folds at an end are shorter, and none is
    aligned. A program sees two lines of folds at most, so that it does not divide."""
    above = first // width
    rest = first - above * width
    flat = tl.arange(0, ENTRIES * FOLD)
    entry, k = flat // FOLD, flat % FOLD  # the folded number that an element belongs to, and its place in that fold
    over = tl.where(rest + entry >= width, 1, 0)
    line, low = above + over, rest + entry - over * width
    tile, inside = line * cols + low * FOLD + k, low * FOLD + k < cols
    done, square = _step_whole(
        tensor, grad_addr, first.to(tl.int64), left, first.to(tl.int64) * 0, tile, (tile & 31).to(tl.int32), inside,
        at, row, thresholds, repair, M, V, WEIGHTS, PARAM, GRAD, MATCHED, TRACK, MARKED, ENTRIES, FOLD, 1, True,
    )  # fmt: skip
    return done, square


@triton.jit
def _program(
    tensor, index, grad_addr, rows, cols, transposed, at, row, thresholds, repair, left_out, bad,
    M: tl.constexpr, V: tl.constexpr, WEIGHTS: tl.constexpr, PARAM: tl.constexpr,
    GRAD: tl.constexpr, MODE: tl.constexpr, MATCHED: tl.constexpr, TRACK: tl.constexpr, COUNT: tl.constexpr,
    MARKED: tl.constexpr, ENTRIES: tl.constexpr, FOLD: tl.constexpr, WIDE: tl.constexpr,
    VEC: tl.constexpr,
):  # fmt: skip
    """Finds where the elements of ENTRIES folded numbers lie, and steps them. Returns the update's sum of squares.

    WIDE: places may need 64 bits, in which dividing is slow.
    """
    PLACE: tl.constexpr = tl.int64 if WIDE else tl.int32
    rows, cols = rows.to(PLACE), cols.to(PLACE)
    # A folded number's place is (high, low) with `width` of them to a high one.
    width = (cols + FOLD - 1) // FOLD
    total = rows * width
    first = index.to(PLACE) * ENTRIES
    left = tl.minimum(total - first, ENTRIES).to(tl.int32)
    regular = (left == ENTRIES) & (not transposed) & (width >= ENTRIES)
    done, square = False, tl.full([], 0.0, tl.float32)
    if MODE == "step":
        if regular & (cols % FOLD == 0):
            done, square = _step_aligned(
                tensor, grad_addr, first, left, cols, width, at, row, thresholds, repair, M, V, WEIGHTS,
                PARAM, GRAD, MATCHED, TRACK, MARKED, ENTRIES, FOLD, VEC,
            )  # fmt: skip
        elif regular:
            done, square = _step_ragged(
                tensor, grad_addr, first, left, cols, width, at, row, thresholds, repair, M, V,
                WEIGHTS, PARAM, GRAD, MATCHED, TRACK, MARKED, ENTRIES, FOLD,
            )  # fmt: skip
    if (left > 0) & (not done):
        square = step_anywhere(
            tensor, grad_addr, first, left, rows, cols, width, transposed, at, row, thresholds, repair, left_out,
            bad, M, V, WEIGHTS, PARAM, GRAD, MODE, MATCHED, TRACK, COUNT, MARKED, ENTRIES, FOLD,
        )  # fmt: skip
    return square


@triton.jit
def _sides(shapes, tensor):
    shape = shapes + tensor * 4
    return tl.load(shape + 1), tl.load(shape + 2), tl.load(shape + 3) != 0


@triton.jit
def foam_kernel(
    chunk_tensor,  # int32[programs]
    first_chunk,  # int32[tensors + 1]
    shapes,  # int64[tensors, 4]: numel, rows, cols, transposed
    ptrs,  # int64[tensors, 8]
    grad_ptrs,  # int64[tensors]
    settings,  # fp32[tensors, 8]
    thresholds,  # fp32[132]
    repair,  # fp32[tensors]
    partial,  # fp32[programs]
    left_out,  # int32[tensors]
    bad,  # int64[tensors]
    M: tl.constexpr, V: tl.constexpr, WEIGHTS: tl.constexpr, PARAM: tl.constexpr,
    GRAD: tl.constexpr, MODE: tl.constexpr, MATCHED: tl.constexpr, TRACK: tl.constexpr, COUNT: tl.constexpr,
    MARKED: tl.constexpr, ENTRIES: tl.constexpr, FOLD: tl.constexpr, WIDE: tl.constexpr,
    REPEAT: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    """One program per ENTRIES folded numbers. To repair, REPAIRERS programs share a tensor, so that one with nothing to
    repair costs little."""
    pid = tl.program_id(0)
    tensor = pid if MODE == "repair" else tl.load(chunk_tensor + pid)
    grad_addr = tl.load(grad_ptrs + tensor)
    if MODE == "repair":
        if (tl.load(repair + tensor) != 0.0) & (grad_addr != 0):
            programs = tl.load(first_chunk + tensor + 1) - tl.load(first_chunk + tensor)
            rows, cols, transposed = _sides(shapes, tensor)
            at, row = facts(tensor, ptrs, settings)
            for index in range(tl.program_id(1), programs * REPEAT, REPAIRERS):
                _program(
                    tensor, grad_addr * 0 + index, grad_addr, rows, cols, transposed, at, row, thresholds, repair,
                    left_out, bad, M, V, WEIGHTS, PARAM, GRAD, MODE, MATCHED, TRACK, COUNT, MARKED, ENTRIES, FOLD,
                    WIDE, VEC,
                )  # fmt: skip
    else:
        index = (pid - tl.load(first_chunk + tensor)).to(tl.int64)
        rows, cols, transposed = _sides(shapes, tensor)
        at, row = facts(tensor, ptrs, settings)
        if grad_addr != 0:
            square = tl.full([], 0.0, tl.float32)
            for part in range(REPEAT):
                square += _program(
                    tensor, index * REPEAT + part, grad_addr, rows, cols, transposed, at, row, thresholds, repair,
                    left_out, bad, M, V, WEIGHTS, PARAM, GRAD, MODE, MATCHED, TRACK, COUNT, MARKED, ENTRIES, FOLD,
                    WIDE, VEC,
                )  # fmt: skip
            if TRACK:
                tl.store(partial + pid, square)
        elif TRACK:
            tl.store(partial + pid, 0.0)


def launch(table: "FusedTable", call: Call) -> None:
    """The family's launch, see `kinds.Call`."""
    kind = table.kind
    launch_step(
        foam_kernel, table, call, sizes=table.shape_tensor, M=kind.m, V=kind.v, ENTRIES=entries(kind.rule, table.cut),
        FOLD=FOLDS[kind.rule], WIDE=any(shape.numel >= 2**31 for shape in table.shapes), REPEAT=table.cut.repeat,
    )  # fmt: skip
