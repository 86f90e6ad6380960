"""The FOAM step: folds of the gradient, their averages, and the update by averages and residual, in one pass.

A program steps the elements of some folded numbers, in order of the folded tensor, so that its groups of 32 are whole.
Bytes moved per element: gradient once, weights both ways, and the folded states over 2^level. The residual is never
stored. The eager twin is `baoc.rules.foam`.
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportPossiblyUnboundVariable=false
# pyright: reportOperatorIssue=false, reportCallIssue=false, reportIndexIssue=false
# Device code: Triton's compiler gives these names types that Python's annotations do not know.

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from baoc.kernels.device import load_numbers, tile_of
from baoc.kernels.elementwise import (
    CORRECTION_AT,
    M_AT,
    M_SCALE_AT,
    PARAM_AT,
    REPAIRERS,
    V_AT,
    V_SCALE_AT,
    W1,
    W2,
    WIDTH,
    constants,
    grid,
    lerp,
)
from baoc.kernels.foam_anywhere import fold_sum, spread, step_anywhere, stepped
from baoc.kernels.kinds import Call
from baoc.kernels.matrix_kinds import FOLDS, entries
from baoc.kernels.storage import load_m, load_param, load_v, store_m, store_param, store_v

if TYPE_CHECKING:
    from baoc.kernels.table import FusedTable

_PIECE = tl.constexpr(64)  # elements of a long fold that are held at once
_WIDEST = tl.constexpr(2**20)  # columns up to which offsets in a program fit 32 bits


@triton.jit
def _is_plain(g, folded, p, new, inside, WEIGHTS: tl.constexpr, MARKED: tl.constexpr, RAGGED: tl.constexpr):
    """Whether all elements are stepped (else their sums were no numbers) and every split weight is another."""
    plain = tl.min(tl.where(tl.abs(folded) < float("inf"), 1, 0))
    if MARKED:
        plain = tl.minimum(plain, tl.min(tl.where(g.to(tl.int32, bitcast=True) != -2147483648, 1, 0)))
    if WEIGHTS == "split8":
        moved = (new < p) | (new > p)
        if RAGGED:
            moved = moved | ~inside
        plain = tl.minimum(plain, tl.min(tl.where(moved, 1, 0)))
    return plain != 0


@triton.jit
def _step_whole(
    tensor, grad_addr, first, left, start, tile, lane, inside, ptrs, settings, thresholds, repair,
    M: tl.constexpr, V: tl.constexpr, SQUARES: tl.constexpr, WEIGHTS: tl.constexpr, PARAM: tl.constexpr,
    GRAD: tl.constexpr, MATCHED: tl.constexpr, TRACK: tl.constexpr, MARKED: tl.constexpr, ENTRIES: tl.constexpr,
    FOLD: tl.constexpr, ACROSS: tl.constexpr, VEC: tl.constexpr, RAGGED: tl.constexpr,
):  # fmt: skip
    """Steps whole folds of plain elements, see `_step_folds`; does nothing where elements need care. Returns whether it
    is done, and the update's sum of squares. RAGGED folds begin anywhere, padded by what is not `inside`,
    which counts as zero."""
    FULL: tl.constexpr = not RAGGED
    addrs, row = ptrs + tensor * WIDTH, settings + tensor * WIDTH
    # As many of a thread's folded numbers follow each other as its elements' folds do: no exchange between threads.
    KEPT: tl.constexpr = VEC if ACROSS else 1
    entry, groups = tile_of(ENTRIES)
    there = entry >= 0
    p_addr, correction_addr = tl.load(addrs + PARAM_AT), tl.load(addrs + CORRECTION_AT)
    m_addr, m_scale_addr = tl.load(addrs + M_AT), tl.load(addrs + M_SCALE_AT)
    v_addr, v_scale_addr = tl.load(addrs + V_AT), tl.load(addrs + V_SCALE_AT)
    g = load_numbers(grad_addr, start, tile, inside, GRAD, VEC, FULL)
    p, stored = load_param(p_addr, correction_addr, start, tile, inside, WEIGHTS, PARAM, VEC, FULL)
    m = load_m(m_addr, m_scale_addr, first, entry, there, groups, left, M, KEPT, True)
    v, scale_old = load_v(v_addr, v_scale_addr, first, entry, there, groups, left, V, KEPT, True)
    folded = fold_sum(g, ACROSS) * (1.0 / FOLD)
    new_v = fold_sum(g * g, ACROSS) * (1.0 / FOLD) if SQUARES else folded * folded
    m = lerp(m, folded, tl.load(row + W1))
    v = lerp(v, new_v, tl.load(row + W2))
    new, update = stepped(tensor, g, True, p, folded, m, v, addrs, row, repair, "step", MATCHED, ACROSS)
    done = _is_plain(g, folded, p, new, inside, WEIGHTS, MARKED, RAGGED)
    if done:
        store_m(m_addr, m_scale_addr, m, thresholds, first, entry, there, groups, left, M, KEPT, True)
        store_v(v_addr, v_scale_addr, v, tl.sqrt(v), scale_old, thresholds, first, entry, there, groups, left, V, KEPT,
                True)  # fmt: skip
        store_param(p_addr, correction_addr, new, p, stored, thresholds, lane, start, tile, inside, WEIGHTS, PARAM, VEC,
                    FULL, True)  # fmt: skip
    square = 0.0
    if TRACK:
        of_each = tl.where(inside, update * update, 0.0) if RAGGED else update * update
        square = tl.where(done, tl.sum(of_each), 0.0)
    return done, square


@triton.jit
def _step_whole_long(
    tensor, grad_addr, first, left, start, base, units, limit, ptrs, settings, thresholds, repair,
    M: tl.constexpr, V: tl.constexpr, SQUARES: tl.constexpr, WEIGHTS: tl.constexpr, PARAM: tl.constexpr,
    GRAD: tl.constexpr, MATCHED: tl.constexpr, TRACK: tl.constexpr, MARKED: tl.constexpr, ENTRIES: tl.constexpr,
    FOLD: tl.constexpr, ACROSS: tl.constexpr, VEC: tl.constexpr, RAGGED: tl.constexpr,
):  # fmt: skip
    """As `_step_whole` of long folds, piece by piece: gradients are read twice, the second time from a cache, which
    takes registers enough for several programs to share a multiprocessor. RAGGED folds end after `limit` elements."""
    FULL: tl.constexpr = not RAGGED
    addrs, row = ptrs + tensor * WIDTH, settings + tensor * WIDTH
    KEPT: tl.constexpr = VEC if ACROSS else 1
    entry, groups = tile_of(ENTRIES)
    there = entry >= 0
    p_addr, correction_addr = tl.load(addrs + PARAM_AT), tl.load(addrs + CORRECTION_AT)
    m_addr, m_scale_addr = tl.load(addrs + M_AT), tl.load(addrs + M_SCALE_AT)
    v_addr, v_scale_addr = tl.load(addrs + V_AT), tl.load(addrs + V_SCALE_AT)
    m = load_m(m_addr, m_scale_addr, first, entry, there, groups, left, M, KEPT, True)
    v, scale_old = load_v(v_addr, v_scale_addr, first, entry, there, groups, left, V, KEPT, True)
    sums = (_piece(base, units, 0, ACROSS) * 0).to(tl.float32)
    squares = sums
    marks = sums
    for more in range(0, FOLD, _PIECE):
        inside = _is_inside(limit, more, there, ACROSS, RAGGED)
        g = load_numbers(grad_addr, start, _piece(base, units, more, ACROSS), inside, GRAD, VEC, FULL)
        sums += g
        if SQUARES:
            squares += g * g
        if MARKED:
            marks += tl.where(g.to(tl.int32, bitcast=True) == -2147483648, 1.0, 0.0)
    folded = fold_sum(sums, ACROSS) * (1.0 / FOLD)
    new_v = fold_sum(squares, ACROSS) * (1.0 / FOLD) if SQUARES else folded * folded
    plain = tl.min(tl.where(tl.abs(folded) < float("inf"), 1, 0)) != 0
    if MARKED:
        plain = plain & (tl.sum(marks) == 0.0)
    total = sums * 0.0
    if plain:
        m = lerp(m, folded, tl.load(row + W1))
        v = lerp(v, new_v, tl.load(row + W2))
        store_m(m_addr, m_scale_addr, m, thresholds, first, entry, there, groups, left, M, KEPT, True)
        store_v(v_addr, v_scale_addr, v, tl.sqrt(v), scale_old, thresholds, first, entry, there, groups, left, V, KEPT,
                True)  # fmt: skip
        for more in range(0, FOLD, _PIECE):
            tile = _piece(base, units, more, ACROSS)
            lane, inside = (tile & 31).to(tl.int32), _is_inside(limit, more, there, ACROSS, RAGGED)
            g = load_numbers(grad_addr, start, tile, inside, GRAD, VEC, FULL)
            p, stored = load_param(p_addr, correction_addr, start, tile, inside, WEIGHTS, PARAM, VEC, FULL)
            new, update = stepped(tensor, g, True, p, folded, m, v, addrs, row, repair, "step", MATCHED, ACROSS)
            store_param(p_addr, correction_addr, new, p, stored, thresholds, lane, start, tile, inside, WEIGHTS, PARAM,
                        VEC, FULL, False)  # fmt: skip
            total += tl.where(inside, update * update, 0.0) if RAGGED else update * update
    return plain, tl.sum(total) if TRACK else 0.0


@triton.jit
def _is_inside(limit, more, there, ACROSS: tl.constexpr, RAGGED: tl.constexpr):
    """Which of the elements `_piece` finds a fold has."""
    inside = there
    if RAGGED:
        inside = tl.arange(0, _PIECE)[None, None, :] + more < limit
    return inside


@triton.jit
def _piece(base, units, more, ACROSS: tl.constexpr):
    """Places of the elements `more` ... `more + _PIECE - 1` of each fold."""
    if ACROSS:
        k = tl.arange(0, _PIECE)[:, None, None] + more
        tile = (base + k * units) * 32 + tl.arange(0, 32)[None, None, :]
    else:
        tile = base + (tl.arange(0, _PIECE)[None, None, :] + more)
    return tile


@triton.jit
def _step_aligned(
    tensor, grad_addr, first, left, cols, width, entry, groups, k, ptrs, settings, thresholds, repair,
    M: tl.constexpr, V: tl.constexpr, SQUARES: tl.constexpr, WEIGHTS: tl.constexpr, PARAM: tl.constexpr,
    GRAD: tl.constexpr, MATCHED: tl.constexpr, TRACK: tl.constexpr, MARKED: tl.constexpr, ENTRIES: tl.constexpr,
    FOLD: tl.constexpr, ACROSS: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    """`_step_whole`, or of long folds `_step_whole_long`, where folds are whole and their elements aligned."""
    if ACROSS:
        units = (cols // 32).to(tl.int32)  # a group lies in one row of folds
        high = first // width
        begin = ((first - high * width) // 32).to(tl.int32)
        line = (begin + groups) // units
        base = spread(line * (FOLD - 1) * units + begin + groups, ACROSS)
        start, tile, lane = high.to(tl.int64) * FOLD * cols, base + k * units, tl.arange(0, 32)[None, None, :]
        tile = tile * 32 + lane
    else:
        units = 1
        lane = k & 31 if FOLD >= 32 else (tl.arange(0, 32)[None, :, None] * FOLD + k) & 31
        base = spread(entry * FOLD, ACROSS)
        start, tile = first.to(tl.int64) * FOLD, base + k
    if FOLD > 32:
        done, square = _step_whole_long(
            tensor, grad_addr, first.to(tl.int64), left, start, base, units, FOLD, ptrs, settings,
            thresholds, repair, M, V, SQUARES, WEIGHTS, PARAM, GRAD, MATCHED, TRACK, MARKED, ENTRIES, FOLD,
            ACROSS, VEC, False,
        )  # fmt: skip
    else:
        done, square = _step_whole(
            tensor, grad_addr, first.to(tl.int64), left, start, tile, lane, tile >= 0, ptrs,
            settings, thresholds, repair, M, V, SQUARES, WEIGHTS, PARAM, GRAD, MATCHED, TRACK, MARKED, ENTRIES,
            FOLD, ACROSS, VEC, False,
        )  # fmt: skip
    return done, square


@triton.jit
def _step_ragged(
    tensor, grad_addr, first, left, cols, width, entry, k, ptrs, settings, thresholds, repair,
    M: tl.constexpr, V: tl.constexpr, SQUARES: tl.constexpr, WEIGHTS: tl.constexpr, PARAM: tl.constexpr,
    GRAD: tl.constexpr, MATCHED: tl.constexpr, TRACK: tl.constexpr, MARKED: tl.constexpr, ENTRIES: tl.constexpr,
    FOLD: tl.constexpr,
):  # fmt: skip
    """As `_step_whole`, of lines that folds do not divide: the last fold of each is shorter, and none is aligned. Short
    folds must be as many in a line as the program has, so that it sees two lines at most and does not divide."""
    above = first // width
    rest = first - above * width
    over = (rest + entry) // width if FOLD > 32 else tl.where(rest + entry >= width, 1, 0)
    low = rest + entry - over * width
    base = spread((above + over) * cols + low * FOLD, False)
    size = tl.minimum(cols - low * FOLD, FOLD)
    start = first.to(tl.int64) * 0
    if FOLD > 32:
        done, square = _step_whole_long(
            tensor, grad_addr, first.to(tl.int64), left, start, base, 1, spread(size, False), ptrs, settings,
            thresholds, repair, M, V, SQUARES, WEIGHTS, PARAM, GRAD, MATCHED, TRACK, MARKED, ENTRIES, FOLD, False, 1,
            True,
        )  # fmt: skip
    else:
        tile, inside = base + k, k < spread(size, False)
        done, square = _step_whole(
            tensor, grad_addr, first.to(tl.int64), left, start, tile, (tile & 31).to(tl.int32), inside, ptrs,
            settings, thresholds, repair, M, V, SQUARES, WEIGHTS, PARAM, GRAD, MATCHED, TRACK, MARKED, ENTRIES, FOLD,
            False, 1, True,
        )  # fmt: skip
    return done, square


@triton.jit
def _program(
    tensor, index, grad_addr, shapes, ptrs, settings, thresholds, repair, left_out, bad,
    M: tl.constexpr, V: tl.constexpr, SQUARES: tl.constexpr, WEIGHTS: tl.constexpr, PARAM: tl.constexpr,
    GRAD: tl.constexpr, MODE: tl.constexpr, MATCHED: tl.constexpr, TRACK: tl.constexpr, COUNT: tl.constexpr,
    MARKED: tl.constexpr, ENTRIES: tl.constexpr, FOLD: tl.constexpr, ACROSS: tl.constexpr, WIDE: tl.constexpr,
    VEC: tl.constexpr,
):  # fmt: skip
    """Finds where the elements of ENTRIES folded numbers lie, and steps them. Returns the update's sum of squares.

    WIDE: places may need 64 bits, in which dividing is slow.
    """
    PLACE: tl.constexpr = tl.int64 if WIDE else tl.int32
    rows, cols = tl.load(shapes + tensor * 4 + 1).to(PLACE), tl.load(shapes + tensor * 4 + 2).to(PLACE)
    transposed = tl.load(shapes + tensor * 4 + 3) != 0
    # A folded number's place is (high, low) with `width` of them to a high one.
    width = cols if ACROSS else (cols + FOLD - 1) // FOLD
    total = ((rows + FOLD - 1) // FOLD) * cols if ACROSS else rows * width
    first = index.to(PLACE) * ENTRIES
    left = tl.minimum(total - first, ENTRIES).to(tl.int32)
    entry, groups = tile_of(ENTRIES)
    k = tl.arange(0, FOLD)[:, None, None] if ACROSS else tl.arange(0, FOLD)[None, None, :]
    whole = (left == ENTRIES) & (not transposed)
    if ACROSS:
        last = (first + ENTRIES - 1) // width  # no fold of the program is padded
        whole = whole & (cols % 32 == 0) & (cols <= _WIDEST) & ((last + 1) * FOLD <= rows)
    else:
        whole = whole & (cols % FOLD == 0)
    done, square = False, tl.sum(tl.zeros([ENTRIES], dtype=tl.float32))
    if MODE == "step":
        plain = whole & (first >= 0)
        if plain:
            done, square = _step_aligned(
                tensor, grad_addr, first, left, cols, width, entry, groups, k, ptrs, settings, thresholds, repair, M, V,
                SQUARES, WEIGHTS, PARAM, GRAD, MATCHED, TRACK, MARKED, ENTRIES, FOLD, ACROSS, VEC,
            )  # fmt: skip
        elif not ACROSS:  # noqa: SIM102 (of the compiler, the other of the device)
            if (left == ENTRIES) & (not transposed) & ((FOLD > 32) | (width >= ENTRIES)):
                done, square = _step_ragged(
                    tensor, grad_addr, first, left, cols, width, entry, k, ptrs, settings, thresholds, repair, M, V,
                    SQUARES, WEIGHTS, PARAM, GRAD, MATCHED, TRACK, MARKED, ENTRIES, FOLD,
                )  # fmt: skip
    if not done:
        square = step_anywhere(
            tensor, grad_addr, first, left, rows, cols, width, transposed, ptrs, settings, thresholds, repair, left_out,
            bad, M, V, SQUARES, WEIGHTS, PARAM, GRAD, MODE, MATCHED, TRACK, COUNT, MARKED, ENTRIES, FOLD, ACROSS,
        )  # fmt: skip
    return square


@triton.jit
def foam_kernel(
    chunk_tensor,  # int32[programs]
    first_chunk,  # int32[tensors + 1]
    shapes,  # int64[tensors, 4]: numel, rows, cols, transposed
    ptrs,  # int64[tensors, 8]
    grad_ptrs,  # int64[tensors]
    settings,  # fp32[tensors, 8]
    thresholds,  # fp32[164]
    repair,  # fp32[tensors]
    partial,  # fp32[programs]
    left_out,  # int32[tensors]
    bad,  # int64[tensors]
    M: tl.constexpr, V: tl.constexpr, SQUARES: tl.constexpr, WEIGHTS: tl.constexpr, PARAM: tl.constexpr,
    GRAD: tl.constexpr, MODE: tl.constexpr, MATCHED: tl.constexpr, TRACK: tl.constexpr, COUNT: tl.constexpr,
    MARKED: tl.constexpr, ENTRIES: tl.constexpr, FOLD: tl.constexpr, ACROSS: tl.constexpr, WIDE: tl.constexpr,
    VEC: tl.constexpr,
):  # fmt: skip
    """One program per ENTRIES folded numbers."""
    pid = tl.program_id(0)
    tensor = tl.load(chunk_tensor + pid)
    grad_addr = tl.load(grad_ptrs + tensor)
    if grad_addr != 0:
        index = (pid - tl.load(first_chunk + tensor)).to(tl.int64)
        square = _program(
            tensor, index, grad_addr, shapes, ptrs, settings, thresholds, repair, left_out, bad, M, V, SQUARES, WEIGHTS,
            PARAM, GRAD, MODE, MATCHED, TRACK, COUNT, MARKED, ENTRIES, FOLD, ACROSS, WIDE, VEC,
        )  # fmt: skip
        if TRACK:
            tl.store(partial + pid, square)
    elif TRACK:
        tl.store(partial + pid, 0.0)


@triton.jit
def repair_kernel(
    chunk_tensor, first_chunk, shapes, ptrs, grad_ptrs, settings, thresholds, repair, partial, left_out, bad,
    M: tl.constexpr, V: tl.constexpr, SQUARES: tl.constexpr, WEIGHTS: tl.constexpr, PARAM: tl.constexpr,
    GRAD: tl.constexpr, MODE: tl.constexpr, MATCHED: tl.constexpr, TRACK: tl.constexpr, COUNT: tl.constexpr,
    MARKED: tl.constexpr, ENTRIES: tl.constexpr, FOLD: tl.constexpr, ACROSS: tl.constexpr, WIDE: tl.constexpr,
    VEC: tl.constexpr,
):  # fmt: skip
    """As `foam_kernel`, but REPAIRERS programs share a tensor, so that one with nothing to repair costs little."""
    tensor = tl.program_id(0)
    grad_addr = tl.load(grad_ptrs + tensor)
    if (tl.load(repair + tensor) != 0.0) & (grad_addr != 0):
        programs = tl.load(first_chunk + tensor + 1) - tl.load(first_chunk + tensor)
        for index in range(tl.program_id(1), programs, REPAIRERS):
            _program(
                tensor, grad_addr * 0 + index, grad_addr, shapes, ptrs, settings, thresholds, repair, left_out, bad, M,
                V, SQUARES, WEIGHTS, PARAM, GRAD, MODE, MATCHED, TRACK, COUNT, MARKED, ENTRIES, FOLD, ACROSS, WIDE,
                VEC,
            )  # fmt: skip


def launch(table: "FusedTable", call: Call) -> None:
    """The family's launch, see `kinds.Call`."""
    kind = table.kind
    fold, across, of_squares = FOLDS[kind.rule]
    kernel = repair_kernel if call.mode == "repair" else foam_kernel
    kernel[grid(table, call)](
        table.chunk_tensor,
        table.first_chunk,
        table.shape_tensor,
        table.ptrs,
        table.grad_ptrs,
        table.settings,
        table.thresholds,
        table.repair,
        table.partial,
        table.left_out,
        table.num_bad,
        M=kind.m,
        V=kind.v,
        SQUARES=of_squares,
        ENTRIES=entries(kind.rule, table.cut),
        FOLD=fold,
        ACROSS=across,
        WIDE=any(shape.numel >= 2**31 for shape in table.shapes),
        **constants(table, call),
    )
