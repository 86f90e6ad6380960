"""The step of rules that divide by means along lines or columns: AdamW with shared v, Adafactor, column norms.

Bytes moved per element, at least: the gradient once where a whole line is a program's (v shared along lines), else
twice, m and weights both ways. Means are `baoc.kernels.means`; the eager twins are in `baoc.rules`.
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportPossiblyUnboundVariable=false
# pyright: reportOperatorIssue=false, reportCallIssue=false, reportIndexIssue=false
# Device code: Triton's compiler gives these names types that Python's annotations do not know.

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from baoc.kernels import means_plan
from baoc.kernels.device import load_numbers, reciprocal, tile_of
from baoc.kernels.elementwise import (
    CORRECTION_AT,
    DECAY,
    DTYPES,
    EPS,
    INV_BC2,
    M_AT,
    M_SCALE_AT,
    MATCH_AT,
    PARAM_AT,
    REPAIRERS,
    SIZE,
    V_AT,
    W1,
    W2,
    WIDTH,
    average,
    constants,
    count_left_out,
    grid,
    is_plain,
    lerp,
    load_grad,
    matched_factor,
)
from baoc.kernels.kinds import Call
from baoc.kernels.means import (
    COLUMN_VECTOR,
    LINE_VECTOR,
    PLACES,
    clip_kernel,
    column_sums_kernel,
    finish_kernel,
    inverse_root,
    line_sums_kernel,
    lines_kernel,
    stored_shape,
)
from baoc.kernels.storage import lanes_like, load_param, load_scaled_m, store_m, store_param

if TYPE_CHECKING:
    from baoc.kernels.table import FusedTable

_WHOLE = tl.constexpr(means_plan.WHOLE)


@triton.jit
def _step_tile(
    tensor, grad_addr, start, left, inside, factor, ptrs, settings, thresholds, repair, left_out, bad,
    M: tl.constexpr, WEIGHTS: tl.constexpr, PARAM: tl.constexpr, GRAD: tl.constexpr, MODE: tl.constexpr,
    MATCHED: tl.constexpr, TRACK: tl.constexpr, COUNT: tl.constexpr, MARKED: tl.constexpr, CHUNK: tl.constexpr,
    VEC: tl.constexpr, QUICK: tl.constexpr,
):  # fmt: skip
    """Steps `left` elements from `start`; the update is m (or g) times `factor`. Returns whether that is done, and its
    sum of squares. QUICK promises a whole chunk, and leaves it alone if elements need care, as in `elementwise`."""
    row, addrs = settings + tensor * WIDTH, ptrs + tensor * WIDTH
    tile, groups = tile_of(CHUNK)
    lane = lanes_like(tile)
    p_addr, correction_addr = tl.load(addrs + PARAM_AT), tl.load(addrs + CORRECTION_AT)
    m_addr, m_scale_addr = tl.load(addrs + M_AT), tl.load(addrs + M_SCALE_AT)
    decay, size, w1 = tl.load(row + DECAY), tl.load(row + SIZE), tl.load(row + W1)
    if MATCHED and MODE == "step":
        size *= matched_factor(tl.load(addrs + MATCH_AT))
    if QUICK:
        g = load_numbers(grad_addr, start, tile, inside, GRAD, VEC, True)
    else:
        g, whole, kept = load_grad(grad_addr, start, tile, inside, GRAD, MARKED, VEC, False)
    if MODE != "measure":
        p, stored = load_param(p_addr, correction_addr, start, tile, inside, WEIGHTS, PARAM, VEC, QUICK)
    m = g
    if M != "none":
        m_old, scale = load_scaled_m(m_addr, m_scale_addr, start, tile, inside, groups, left, M, VEC, QUICK)
        m = m_old * scale if MODE == "repair" else average(m_old, scale, g, w1, M)
    update = m * factor
    done = True
    if MODE == "step":
        new = p * decay - size * update
        if QUICK:
            done = is_plain(g, p, new, "", WEIGHTS, MARKED)
        else:
            new = tl.where(kept, new, p)
            if M != "none":
                m = tl.where(kept, m, m_old * scale)
        if done:
            if M != "none":
                store_m(m_addr, m_scale_addr, m, thresholds, start, tile, inside, groups, left, M, VEC, QUICK)
            store_param(
                p_addr, correction_addr, new, p, stored, thresholds, lane, start, tile, inside, WEIGHTS, PARAM, VEC,
                QUICK, QUICK,
            )  # fmt: skip
    if MODE == "repair":
        new = tl.where(kept, p - size * tl.load(repair + tensor) * update, p)
        store_param(
            p_addr, correction_addr, new, p, stored, thresholds, lane, start, tile, inside, WEIGHTS, PARAM, VEC, False,
            False,
        )  # fmt: skip
    square = 0.0
    if QUICK:
        if TRACK:
            square = tl.where(done, tl.sum(update * update), 0.0)
    else:
        if MODE != "repair":
            count_left_out(whole, kept, tensor, left_out, bad, TRACK, COUNT)
        if TRACK:
            square = tl.sum(tl.where(kept & inside, update * update, 0.0))
    return done, square


@triton.jit
def _line_sum(
    grad_addr, start, length, GRAD: tl.constexpr, MARKED: tl.constexpr, CHUNK: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    """Sum of g^2 over a line, and of how many elements; those that are left out are looked for only if there are."""
    tile, groups = tile_of(CHUNK)
    total = tl.zeros([CHUNK // 32, 32], dtype=tl.float32)
    for begin in range(0, length, CHUNK):
        inside = (groups * 32 < length - begin) & (tile >= 0)
        g = load_numbers(grad_addr, start + begin, tile, inside, GRAD, VEC, False)
        total += g * g
    square, count = tl.sum(total), length
    if MARKED or not square < float("inf"):
        total = tl.zeros([CHUNK // 32, 32], dtype=tl.float32)
        out = tl.zeros([CHUNK // 32, 32], dtype=tl.int32)
        for begin in range(0, length, CHUNK):
            inside = (groups * 32 < length - begin) & (tile >= 0)
            g, _, kept = load_grad(grad_addr, start + begin, tile, inside, GRAD, MARKED, VEC, False)
            total += g * g
            out += tl.where(kept, 0, 1)
        square, count = tl.sum(total), length - tl.sum(out)
    return square, count


@triton.jit
def _line_factor(
    tensor, grad_addr, start, line, length, ptrs, settings, NORM: tl.constexpr, GRAD: tl.constexpr,
    MODE: tl.constexpr, MARKED: tl.constexpr, CHUNK: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    """AdamW's factor from the v of a whole line, brought up to date, or that of its norm. Lines are whole groups."""
    row = settings + tensor * WIDTH
    if NORM or MODE != "repair":
        total, count = _line_sum(grad_addr, start, length, GRAD, MARKED, CHUNK, VEC)
    if NORM:
        factor = inverse_root(total)
    else:
        state = tl.load(ptrs + tensor * WIDTH + V_AT).to(tl.pointer_type(tl.float32)) + line
        v = tl.load(state)
        if MODE != "repair":
            mean = total / tl.maximum(count, 1).to(tl.float32)
            v = tl.where(count > 0, lerp(v, mean, tl.load(row + W2)), v)
            if MODE == "step":
                tl.store(state, v)
        factor = reciprocal(tl.sqrt(v) * tl.load(row + INV_BC2) + tl.load(row + EPS))
    return factor


@triton.jit
def _gathered(line_at, column_at, line, line_inside, column, inside, vectors):
    """Product of a line's and a column's factor, 1 for what there is none of."""
    has_line, has_column = line_inside & (line * 0 + line_at >= 0), inside & (column * 0 + column_at >= 0)
    by_line = tl.load(vectors + tl.maximum(line_at, 0) + line, mask=has_line, other=1.0)
    return by_line * tl.load(vectors + tl.maximum(column_at, 0) + column, mask=has_column, other=1.0)


@triton.jit
def _places(rest, width, CHUNK: tl.constexpr, HOW: tl.constexpr):
    """Line, and place in it, of the elements of a chunk that begins at place `rest` of line 0. Dividing by element is
    slow; HOW says what makes it needless: "groups" lie in one line each, or "two" lines are all there can be."""
    tile, groups = tile_of(CHUNK)
    if HOW == "groups":
        line = (rest // 32 + groups) // (width // 32)
        place = (rest // 32 + groups - line * (width // 32)) * 32 + tl.arange(0, 32)[None, :]
    elif HOW == "two":
        line = tl.where(rest + tile >= width, 1, 0)
        place = rest + tile - line * width
    else:
        line = (rest + tile) // width
        place = rest + tile - line * width
    return line, place


@triton.jit
def _step_line(
    tensor, index, grad_addr, width, ptrs, settings, thresholds, repair, left_out, bad,
    NORM: tl.constexpr, M: tl.constexpr, WEIGHTS: tl.constexpr, PARAM: tl.constexpr, GRAD: tl.constexpr,
    MODE: tl.constexpr, MATCHED: tl.constexpr, TRACK: tl.constexpr, COUNT: tl.constexpr, MARKED: tl.constexpr,
    CHUNK: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    """Steps line `index`, of `width` elements, which are whole groups. Returns the sum of squares of the update."""
    tile, groups = tile_of(CHUNK)
    first = index * width
    square = tl.sum(tl.zeros([CHUNK], dtype=tl.float32))
    factor = _line_factor(tensor, grad_addr, first, index, width, ptrs, settings, NORM, GRAD, MODE, MARKED, CHUNK, VEC)
    for begin in range(0, width, CHUNK):
        left = tl.minimum(width - begin, CHUNK)
        inside = (groups * 32 < left) & (tile >= 0)
        done = False
        if MODE == "step":
            is_whole = left == CHUNK
            if is_whole:
                done, part = _step_tile(
                    tensor, grad_addr, first + begin, left, inside, factor, ptrs, settings, thresholds,
                    repair, left_out, bad, M, WEIGHTS, PARAM, GRAD, MODE, MATCHED, TRACK, COUNT, MARKED, CHUNK, VEC,
                    True,
                )  # fmt: skip
                square += part
        if not done:
            _, part = _step_tile(
                tensor, grad_addr, first + begin, left, inside, factor, ptrs, settings, thresholds, repair,
                left_out, bad, M, WEIGHTS, PARAM, GRAD, MODE, MATCHED, TRACK, COUNT, MARKED, CHUNK, VEC, False,
            )  # fmt: skip
            square += part
    return square


@triton.jit
def _step_part(
    tensor, index, grad_addr, lines, length, line_at, column_at, vectors, scales, ptrs, settings, thresholds, repair,
    left_out, bad,
    ADAFACTOR: tl.constexpr, M: tl.constexpr, WEIGHTS: tl.constexpr, PARAM: tl.constexpr, GRAD: tl.constexpr,
    MODE: tl.constexpr, MATCHED: tl.constexpr, TRACK: tl.constexpr, COUNT: tl.constexpr, MARKED: tl.constexpr,
    WIDE: tl.constexpr, CHUNK: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    """Steps chunk `index` of a matrix, by factors of lines and columns. Returns the sum of squares of the update."""
    width = length.to(tl.int32)
    square = tl.sum(tl.zeros([CHUNK], dtype=tl.float32))
    start = index * CHUNK
    left = tl.minimum(lines * length - start, CHUNK).to(tl.int32)
    first_line = start // length if WIDE else (start.to(tl.int32) // width).to(tl.int64)
    rest = (start - first_line * length).to(tl.int32)
    scale = tl.load(scales + tensor) if ADAFACTOR else 1.0
    line_at = tl.where(line_at >= 0, line_at + first_line, line_at)
    tile, _groups = tile_of(CHUNK)
    inside = tile < left
    done = False
    if MODE == "step":
        if (left == CHUNK) & (width % 32 == 0):
            line, place = _places(rest, width, CHUNK, "groups")
            factors = scale * _gathered(line_at, column_at, line, line >= 0, place, place >= 0, vectors)
            done, part = _step_tile(
                tensor, grad_addr, start, left, inside, factors, ptrs, settings, thresholds, repair, left_out, bad,
                M, WEIGHTS, PARAM, GRAD, MODE, MATCHED, TRACK, COUNT, MARKED, CHUNK, VEC, True,
            )  # fmt: skip
            square += part
        elif (left == CHUNK) & (width >= CHUNK):
            line, place = _places(rest, width, CHUNK, "two")
            factors = scale * _gathered(line_at, column_at, line, line >= 0, place, place >= 0, vectors)
            done, part = _step_tile(
                tensor, grad_addr, start, left, inside, factors, ptrs, settings, thresholds, repair, left_out, bad,
                M, WEIGHTS, PARAM, GRAD, MODE, MATCHED, TRACK, COUNT, MARKED, CHUNK, VEC, True,
            )  # fmt: skip
            square += part
    if not done:
        line, place = _places(rest, width, CHUNK, "any")
        factors = scale * _gathered(line_at, column_at, line, inside, place, inside, vectors)
        _, part = _step_tile(
            tensor, grad_addr, start, left, inside, factors, ptrs, settings, thresholds, repair, left_out, bad, M,
            WEIGHTS, PARAM, GRAD, MODE, MATCHED, TRACK, COUNT, MARKED, CHUNK, VEC, False,
        )  # fmt: skip
        square += part
    return square


@triton.jit
def _program(
    tensor, index, grad_addr, shapes, ptrs, settings, places, vectors, scales, thresholds, repair, left_out, bad,
    ADAFACTOR: tl.constexpr, NORM: tl.constexpr, M: tl.constexpr, WEIGHTS: tl.constexpr, PARAM: tl.constexpr,
    GRAD: tl.constexpr, MODE: tl.constexpr, MATCHED: tl.constexpr, TRACK: tl.constexpr, COUNT: tl.constexpr,
    MARKED: tl.constexpr, WIDE: tl.constexpr, CHUNK: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    """Steps a whole line, or a chunk of any. Returns the sum of squares of the update."""
    lines, length = stored_shape(shapes, tensor)
    line_at = tl.load(places + tensor * PLACES + LINE_VECTOR)
    column_at = tl.load(places + tensor * PLACES + COLUMN_VECTOR)
    if line_at == _WHOLE:
        square = _step_line(
            tensor, index, grad_addr, length.to(tl.int32), ptrs, settings, thresholds, repair, left_out, bad, NORM, M,
            WEIGHTS, PARAM, GRAD, MODE, MATCHED, TRACK, COUNT, MARKED, CHUNK, VEC,
        )  # fmt: skip
    else:
        square = _step_part(
            tensor, index, grad_addr, lines, length, line_at, column_at, vectors, scales, ptrs, settings, thresholds,
            repair, left_out, bad, ADAFACTOR, M, WEIGHTS, PARAM, GRAD, MODE, MATCHED, TRACK, COUNT, MARKED, WIDE, CHUNK,
            VEC,
        )  # fmt: skip
    return square


@triton.jit
def apply_kernel(
    chunk_tensor,  # int32[programs]
    first_chunk,  # int32[tensors + 1]
    shapes,  # int64[tensors, 4]: numel, rows, cols, transposed
    ptrs,  # int64[tensors, 8]
    grad_ptrs,  # int64[tensors]
    settings,  # fp32[tensors, 8]
    places,  # int64[tensors, 8]: see means_plan
    vectors,  # fp32: factors by line and by column
    scales,  # fp32[tensors]: and by tensor, for Adafactor
    thresholds,  # fp32[164]
    repair,  # fp32[tensors]
    partial,  # fp32[programs]
    left_out,  # int32[tensors]
    bad,  # int64[tensors]
    ADAFACTOR: tl.constexpr, NORM: tl.constexpr, M: tl.constexpr, WEIGHTS: tl.constexpr, PARAM: tl.constexpr,
    GRAD: tl.constexpr, MODE: tl.constexpr, MATCHED: tl.constexpr, TRACK: tl.constexpr, COUNT: tl.constexpr,
    MARKED: tl.constexpr, WIDE: tl.constexpr, CHUNK: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    """One program per whole line or chunk."""
    pid = tl.program_id(0)
    tensor = tl.load(chunk_tensor + pid)
    grad_addr = tl.load(grad_ptrs + tensor)
    if grad_addr != 0:
        index = (pid - tl.load(first_chunk + tensor)).to(tl.int64)
        square = _program(
            tensor, index, grad_addr, shapes, ptrs, settings, places, vectors, scales, thresholds, repair, left_out,
            bad, ADAFACTOR, NORM, M, WEIGHTS, PARAM, GRAD, MODE, MATCHED, TRACK, COUNT, MARKED, WIDE, CHUNK, VEC,
        )  # fmt: skip
        if TRACK:
            tl.store(partial + pid, square)
    elif TRACK:
        tl.store(partial + pid, 0.0)


@triton.jit
def repair_kernel(
    chunk_tensor, first_chunk, shapes, ptrs, grad_ptrs, settings, places, vectors, scales, thresholds, repair, partial,
    left_out, bad,
    ADAFACTOR: tl.constexpr, NORM: tl.constexpr, M: tl.constexpr, WEIGHTS: tl.constexpr, PARAM: tl.constexpr,
    GRAD: tl.constexpr, MODE: tl.constexpr, MATCHED: tl.constexpr, TRACK: tl.constexpr, COUNT: tl.constexpr,
    MARKED: tl.constexpr, WIDE: tl.constexpr, CHUNK: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    """As `apply_kernel`, but REPAIRERS programs share a tensor, so that one with nothing to repair costs little."""
    tensor = tl.program_id(0)
    grad_addr = tl.load(grad_ptrs + tensor)
    if (tl.load(repair + tensor) != 0.0) & (grad_addr != 0):
        programs = tl.load(first_chunk + tensor + 1) - tl.load(first_chunk + tensor)
        for index in range(tl.program_id(1), programs, REPAIRERS):
            _program(
                tensor, grad_addr * 0 + index, grad_addr, shapes, ptrs, settings, places, vectors, scales, thresholds,
                repair, left_out, bad, ADAFACTOR, NORM, M, WEIGHTS, PARAM, GRAD, MODE, MATCHED, TRACK, COUNT, MARKED,
                WIDE, CHUNK, VEC,
            )  # fmt: skip


def launch(table: "FusedTable", call: Call) -> None:
    """The family's launch, see `kinds.Call`. A repair goes by the means that the step left."""
    plan = means_plan.plan_of(table)
    if call.mode != "repair":
        _average(table, plan, call)
    kind = table.kind
    kernel = repair_kernel if call.mode == "repair" else apply_kernel
    kernel[grid(table, call)](
        table.chunk_tensor,
        table.first_chunk,
        table.shape_tensor,
        table.ptrs,
        table.grad_ptrs,
        table.settings,
        plan.places,
        plan.vectors,
        plan.scales,
        table.thresholds,
        table.repair,
        table.partial,
        table.left_out,
        table.num_bad,
        ADAFACTOR=plan.adafactor,
        NORM=plan.norm,
        M=kind.m if kind.traits.has_m else "none",
        WIDE=any(shape.numel >= 2**31 for shape in table.shapes),
        CHUNK=table.cut.chunk,
        **constants(table, call),
    )


def _average(table: "FusedTable", plan: means_plan.Plan, call: Call) -> None:
    """Brings the means up to date that are not a single program's, and what the updates are multiplied by."""
    adafactor, mode = plan.adafactor, call.mode
    grads = {"GRAD": DTYPES[table.grad_dtype], "MARKED": call.marked}
    m = table.kind.m if table.kind.traits.has_m else "none"
    places = (table.shape_tensor, table.ptrs, table.grad_ptrs, table.settings, plan.places, plan.vectors)
    sums = (plan.sums, plan.squares, plan.counts)
    for (width, aligned), programs in plan.whole.items():
        lines_kernel[(programs.count,)](
            programs.owner, programs.first, *places, *sums, plan.tiles, plan.lines_per_program, M=m, **grads, MODE=mode,
            WIDEST=width, LINES=max(means_plan.TILE // width, 1), VEC=table.vector if aligned else 1,
            num_warps=max(width // means_plan.PER_WARP, 4),
        )  # fmt: skip
    if plan.line_sums.count:
        line_sums_kernel[(plan.line_sums.count,)](
            plan.line_sums.owner, plan.line_sums.first, table.shape_tensor, table.grad_ptrs, plan.places, plan.sums,
            plan.counts, **grads, LINES=means_plan.LINES, PIECE=means_plan.PIECE, VEC=table.vector, num_warps=4,
        )  # fmt: skip
        _finish(table, plan, plan.line_jobs, mode=mode, squares=False)
    if plan.column_sums.count:
        column_sums_kernel[(plan.column_sums.count,)](
            plan.column_sums.owner, plan.column_sums.first, *places, *sums, ADAFACTOR=adafactor, M=m, **grads,
            ROWS=means_plan.ROWS, COLUMNS=means_plan.COLUMNS, VEC=table.vector, num_warps=4,
        )  # fmt: skip
    _finish(table, plan, plan.column_jobs, mode=mode, squares=adafactor)
    if adafactor:
        clip_kernel[(len(table.params),)](
            table.shape_tensor, table.grad_ptrs, table.settings, plan.places, plan.tiles, plan.scales, LANES=128
        )


def _finish(table: "FusedTable", plan: means_plan.Plan, jobs: means_plan.Jobs, *, mode: str, squares: bool) -> None:
    if jobs.programs.count:
        finish_kernel[(jobs.programs.count,)](
            jobs.programs.owner, jobs.programs.first, jobs.rows, table.ptrs, table.grad_ptrs, table.settings, plan.sums,
            plan.squares, plan.counts, plan.vectors, plan.tiles, ADAFACTOR=plan.adafactor, NORM=plan.norm,
            SQUARES=squares, MODE=mode, LENGTH=means_plan.JOB_LENGTH,
        )  # fmt: skip
