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

from baoc.kernels.device import reciprocal, tile_of
from baoc.kernels.elementwise import (
    CORRECTION_AT,
    DECAY,
    EPS,
    M_AT,
    M_SCALE_AT,
    MATCH_AT,
    PARAM_AT,
    REPAIRERS,
    SIZE,
    V_AT,
    V_SCALE_AT,
    W1,
    W2,
    WIDTH,
    constants,
    count_left_out,
    grid,
    lerp,
    load_grad,
    matched_factor,
)
from baoc.kernels.kinds import Call
from baoc.kernels.matrix_kinds import FOLDS, entries
from baoc.kernels.storage import load_m, load_param, load_v, store_m, store_param, store_v

if TYPE_CHECKING:
    from baoc.kernels.table import FusedTable

_REGISTERS = 128  # of a thread at most, so that some programs share a multiprocessor
_WIDEST = tl.constexpr(2**20)  # columns up to which offsets in a program fit 32 bits


@triton.jit
def _spread(x, ACROSS: tl.constexpr):
    """Folded numbers [groups, 32] beside their elements: [groups, 32, 1], or [1, groups, 32] where folds cross rows."""
    return x[None, :, :] if ACROSS else x[:, :, None]


@triton.jit
def _fold_sum(x, ACROSS: tl.constexpr):
    return tl.sum(x, axis=0) if ACROSS else tl.sum(x, axis=2)


@triton.jit
def _averages(
    m, v, count, folded, square, settings, MODE: tl.constexpr, SQUARES: tl.constexpr,
):  # fmt: skip
    """New m and v from sums over the folds, and the folded gradient. A fold of nothing keeps its averages."""
    num = tl.maximum(count, 1).to(tl.float32)
    folded = folded / num
    if MODE != "repair":
        m = tl.where(count > 0, lerp(m, folded, tl.load(settings + W1)), m)
        new = square / num if SQUARES else folded * folded
        v = tl.where(count > 0, lerp(v, new, tl.load(settings + W2)), v)
    return m, v, folded


@triton.jit
def _stepped(
    tensor, g, kept, p, folded, m, v, addrs, settings, repair,
    MODE: tl.constexpr, MATCHED: tl.constexpr, ACROSS: tl.constexpr,
):  # fmt: skip
    """Weights after the step, and the update."""
    decay, size, eps = tl.load(settings + DECAY), tl.load(settings + SIZE), tl.load(settings + EPS)
    if MATCHED and MODE == "step":
        size *= matched_factor(tl.load(addrs + MATCH_AT))
    residual = g - _spread(folded, ACROSS)
    root = tl.sqrt(residual * residual + _spread(v, ACROSS))
    update = (residual + _spread(m, ACROSS)) * reciprocal(root + eps)
    new = p
    if MODE == "step":
        new = tl.where(kept, p * decay - size * update, p)
    if MODE == "repair":
        new = tl.where(kept, p - size * tl.load(repair + tensor) * update, p)
    return new, update


@triton.jit
def _step_folds(
    tensor, grad_addr, first, left, start, tile, inside, lane, ptrs, settings, thresholds, repair, left_out, bad,
    M: tl.constexpr, V: tl.constexpr, SQUARES: tl.constexpr, WEIGHTS: tl.constexpr, PARAM: tl.constexpr,
    GRAD: tl.constexpr, MODE: tl.constexpr, MATCHED: tl.constexpr, TRACK: tl.constexpr, COUNT: tl.constexpr,
    MARKED: tl.constexpr, ENTRIES: tl.constexpr, ACROSS: tl.constexpr, VEC: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """Steps `left` folded numbers from `first`. Their elements, read once, are `start + tile` where `inside`.

    What is outside pads a fold and counts as zero; FULL promises that nothing is. Returns the update's sum of squares.
    """
    addrs = ptrs + tensor * WIDTH
    # As many of a thread's folded numbers follow each other as its elements' folds do: no exchange between threads.
    KEPT: tl.constexpr = VEC if ACROSS else 1
    entry, groups = tile_of(ENTRIES)
    p_addr, correction_addr = tl.load(addrs + PARAM_AT), tl.load(addrs + CORRECTION_AT)
    m_addr, m_scale_addr = tl.load(addrs + M_AT), tl.load(addrs + M_SCALE_AT)
    v_addr, v_scale_addr = tl.load(addrs + V_AT), tl.load(addrs + V_SCALE_AT)
    # All reads come first: a store in between would keep the compiler from moving them up.
    g, finite, kept = load_grad(grad_addr, start, tile, inside, GRAD, MARKED, VEC, FULL)
    p, stored = g, 0
    if MODE != "measure":
        p, stored = load_param(p_addr, correction_addr, start, tile, inside, WEIGHTS, PARAM, VEC, FULL)
    m = load_m(m_addr, m_scale_addr, first, entry, entry < left, groups, left, M, KEPT, FULL)
    v, scale_old = load_v(v_addr, v_scale_addr, first, entry, entry < left, groups, left, V, KEPT, FULL)
    row = settings + tensor * WIDTH
    folded = _fold_sum(g, ACROSS)
    square = _fold_sum(g * g, ACROSS) if SQUARES else folded
    m, v, folded = _averages(m, v, _fold_sum(tl.where(kept, 1, 0), ACROSS), folded, square, row, MODE, SQUARES)
    new, update = _stepped(tensor, g, kept, p, folded, m, v, addrs, row, repair, MODE, MATCHED, ACROSS)
    if MODE == "step":
        store_m(m_addr, m_scale_addr, m, thresholds, first, entry, entry < left, groups, left, M, KEPT, FULL)
        store_v(v_addr, v_scale_addr, v, tl.sqrt(v), scale_old, thresholds, first, entry, entry < left, groups, left, V,
                KEPT, FULL)  # fmt: skip
    if MODE != "measure":
        store_param(p_addr, correction_addr, new, p, stored, thresholds, lane, start, tile, inside, WEIGHTS, PARAM, VEC,
                    FULL, False)  # fmt: skip
    if MODE != "repair":
        count_left_out(finite, kept, tensor, left_out, bad, TRACK, COUNT)
    stepped = kept if FULL else kept & inside
    return tl.sum(tl.where(stepped, update * update, 0.0)) if TRACK else 0.0


@triton.jit
def _step_long_folds(
    tensor, grad_addr, first, left, base, step, begin, size, ptrs, settings, thresholds, repair, left_out, bad,
    M: tl.constexpr, V: tl.constexpr, SQUARES: tl.constexpr, WEIGHTS: tl.constexpr, PARAM: tl.constexpr,
    GRAD: tl.constexpr, MODE: tl.constexpr, MATCHED: tl.constexpr, TRACK: tl.constexpr, COUNT: tl.constexpr,
    MARKED: tl.constexpr, ENTRIES: tl.constexpr, FOLD: tl.constexpr, ACROSS: tl.constexpr,
):  # fmt: skip
    """The same piece by piece, where places of elements take registers; they are read twice, the second time from a
    cache. Elements of a fold are at `base + k * step` as long as `begin + k < size`."""
    PIECE: tl.constexpr = 64
    row, addrs = settings + tensor * WIDTH, ptrs + tensor * WIDTH
    entry, groups = tile_of(ENTRIES)
    there = _spread(entry < left, ACROSS)
    k = tl.arange(0, PIECE)[:, None, None] if ACROSS else tl.arange(0, PIECE)[None, None, :]
    p_addr, correction_addr = tl.load(addrs + PARAM_AT), tl.load(addrs + CORRECTION_AT)
    m_addr, m_scale_addr = tl.load(addrs + M_AT), tl.load(addrs + M_SCALE_AT)
    v_addr, v_scale_addr = tl.load(addrs + V_AT), tl.load(addrs + V_SCALE_AT)
    m = load_m(m_addr, m_scale_addr, first, entry, entry < left, groups, left, M, 1, False)
    v, scale_old = load_v(v_addr, v_scale_addr, first, entry, entry < left, groups, left, V, 1, False)
    sums = (base + k) * 0.0
    squares = sums
    counts = sums
    for more in range(0, FOLD, PIECE):
        inside = there & (begin + (k + more) < size)
        g, _, kept = load_grad(grad_addr, first * 0, base + (k + more) * step, inside, GRAD, MARKED, 1, False)
        sums += g
        counts += tl.where(kept, 1.0, 0.0)
        if SQUARES:
            squares += g * g
    m, v, folded = _averages(
        m, v, _fold_sum(counts, ACROSS), _fold_sum(sums, ACROSS), _fold_sum(squares, ACROSS), row, MODE, SQUARES
    )
    if MODE == "step":
        store_m(m_addr, m_scale_addr, m, thresholds, first, entry, entry < left, groups, left, M, 1, False)
        store_v(v_addr, v_scale_addr, v, tl.sqrt(v), scale_old, thresholds, first, entry, entry < left, groups, left, V,
                1, False)  # fmt: skip
    total = sums * 0.0
    for more in range(0, FOLD, PIECE):
        tile, inside = base + (k + more) * step, there & (begin + (k + more) < size)
        g, finite, kept = load_grad(grad_addr, first * 0, tile, inside, GRAD, MARKED, 1, False)
        p, stored = g, 0
        if MODE != "measure":
            p, stored = load_param(p_addr, correction_addr, first * 0, tile, inside, WEIGHTS, PARAM, 1, False)
        new, update = _stepped(tensor, g, kept, p, folded, m, v, addrs, row, repair, MODE, MATCHED, ACROSS)
        if MODE != "measure":
            store_param(p_addr, correction_addr, new, p, stored, thresholds, (tile & 31).to(tl.int32), first * 0, tile,
                        inside, WEIGHTS, PARAM, 1, False, False)  # fmt: skip
        if MODE != "repair":
            count_left_out(finite, kept, tensor, left_out, bad, TRACK, COUNT)
        total += tl.where(kept & inside, update * update, 0.0)
    return tl.sum(total) if TRACK else 0.0


@triton.jit
def _step_anywhere(
    tensor, grad_addr, first, left, rows, cols, width, transposed, ptrs, settings, thresholds, repair, left_out, bad,
    M: tl.constexpr, V: tl.constexpr, SQUARES: tl.constexpr, WEIGHTS: tl.constexpr, PARAM: tl.constexpr,
    GRAD: tl.constexpr, MODE: tl.constexpr, MATCHED: tl.constexpr, TRACK: tl.constexpr, COUNT: tl.constexpr,
    MARKED: tl.constexpr, ENTRIES: tl.constexpr, FOLD: tl.constexpr, ACROSS: tl.constexpr,
):  # fmt: skip
    """Steps folds that may be padded, in a matrix of any sides, stored either way."""
    entry, _ = tile_of(ENTRIES)
    above = first // width
    rest = first - above * width
    over = (rest + entry) // width
    low = rest + entry - over * width
    if ACROSS:
        at = (above + over) * tl.where(transposed, FOLD, FOLD * cols) + low * tl.where(transposed, rows, 1)
        step, size, begin = tl.where(transposed, 1, cols), rows, (above + over) * FOLD
    else:
        at = (above + over) * tl.where(transposed, 1, cols) + low * tl.where(transposed, FOLD * rows, FOLD)
        step, size, begin = tl.where(transposed, rows, 1), cols, low * FOLD
    base, from_, place = _spread(at, ACROSS), _spread(begin, ACROSS), first.to(tl.int64)
    if FOLD <= 32:
        k = tl.arange(0, FOLD)[:, None, None] if ACROSS else tl.arange(0, FOLD)[None, None, :]
        inside = _spread(entry < left, ACROSS) & (from_ + k < size)
        tile = base + k * step
        square = _step_folds(
            tensor, grad_addr, place, left, place * 0, tile, inside, (tile & 31).to(tl.int32), ptrs, settings,
            thresholds, repair, left_out, bad, M, V, SQUARES, WEIGHTS, PARAM, GRAD, MODE, MATCHED, TRACK, COUNT, MARKED,
            ENTRIES, ACROSS, 1, False,
        )  # fmt: skip
    else:
        square = _step_long_folds(
            tensor, grad_addr, place, left, base, step, from_, size, ptrs, settings, thresholds, repair, left_out, bad,
            M, V, SQUARES, WEIGHTS, PARAM, GRAD, MODE, MATCHED, TRACK, COUNT, MARKED, ENTRIES, FOLD, ACROSS,
        )  # fmt: skip
    return square


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
    if whole:
        if ACROSS:
            units = (cols // 32).to(tl.int32)  # a group lies in one row of folds
            high = first // width
            begin = ((first - high * width) // 32).to(tl.int32)
            line = (begin + groups) // units
            unit = _spread(line * (FOLD - 1) * units + begin + groups, ACROSS) + k * units
            lane = tl.arange(0, 32)[None, None, :]
            start, tile = high.to(tl.int64) * FOLD * cols, unit * 32 + lane
        else:
            lane = k & 31 if FOLD >= 32 else (tl.arange(0, 32)[None, :, None] * FOLD + k) & 31
            start, tile = first.to(tl.int64) * FOLD, _spread(entry * FOLD, ACROSS) + k
        square = _step_folds(
            tensor, grad_addr, first.to(tl.int64), left, start, tile, tile >= 0, lane, ptrs, settings, thresholds,
            repair, left_out, bad, M, V, SQUARES, WEIGHTS, PARAM, GRAD, MODE, MATCHED, TRACK, COUNT, MARKED, ENTRIES,
            ACROSS, VEC, True,
        )  # fmt: skip
    else:
        square = _step_anywhere(
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
        maxnreg=_REGISTERS,
    )
