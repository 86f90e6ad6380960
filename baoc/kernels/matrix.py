"""The step of rules whose v is shared along lines or columns of a matrix: AdamW with shared v, and Adafactor.

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
from baoc.kernels.device import reciprocal, tile_of
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
    constants,
    count_left_out,
    grid,
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
    line_sums_kernel,
    lines_kernel,
    stored_shape,
)
from baoc.kernels.storage import load_m, load_param, store_m, store_param

if TYPE_CHECKING:
    from baoc.kernels.table import FusedTable

_WHOLE = tl.constexpr(means_plan.WHOLE)


@triton.jit
def _step_tile(
    tensor, grad_addr, start, left, inside, factor, ptrs, settings, thresholds, repair, left_out, bad,
    M: tl.constexpr, WEIGHTS: tl.constexpr, PARAM: tl.constexpr, GRAD: tl.constexpr, MODE: tl.constexpr,
    MATCHED: tl.constexpr, TRACK: tl.constexpr, COUNT: tl.constexpr, MARKED: tl.constexpr, CHUNK: tl.constexpr,
    VEC: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """Steps `left` elements from `start`; the update is m (or g) times `factor`. Returns its sum of squares."""
    row, addrs = settings + tensor * WIDTH, ptrs + tensor * WIDTH
    tile, groups = tile_of(CHUNK)
    lane = tl.arange(0, 32)[None, :]
    p_addr, correction_addr = tl.load(addrs + PARAM_AT), tl.load(addrs + CORRECTION_AT)
    m_addr, m_scale_addr = tl.load(addrs + M_AT), tl.load(addrs + M_SCALE_AT)
    decay, size, w1 = tl.load(row + DECAY), tl.load(row + SIZE), tl.load(row + W1)
    if MATCHED and MODE == "step":
        size *= matched_factor(tl.load(addrs + MATCH_AT))
    g, finite, kept = load_grad(grad_addr, start, tile, inside, GRAD, MARKED, VEC, FULL)
    if MODE != "measure":
        p, stored = load_param(p_addr, correction_addr, start, tile, inside, WEIGHTS, PARAM, VEC, FULL)
    m = g
    if M != "none":
        m_old = load_m(m_addr, m_scale_addr, start, tile, inside, groups, left, M, VEC, FULL)
        m = m_old if MODE == "repair" else lerp(m_old, g, w1)
    update = m * factor
    if MODE == "step":
        if M != "none":
            m = tl.where(kept, m, m_old)
            store_m(m_addr, m_scale_addr, m, thresholds, start, tile, inside, groups, left, M, VEC, FULL)
        new = tl.where(kept, p * decay - size * update, p)
        store_param(
            p_addr,
            correction_addr,
            new,
            p,
            stored,
            thresholds,
            lane,
            start,
            tile,
            inside,
            WEIGHTS,
            PARAM,
            VEC,
            FULL,
            False,
        )
    if MODE == "repair":
        new = tl.where(kept, p - size * tl.load(repair + tensor) * update, p)
        store_param(
            p_addr,
            correction_addr,
            new,
            p,
            stored,
            thresholds,
            lane,
            start,
            tile,
            inside,
            WEIGHTS,
            PARAM,
            VEC,
            FULL,
            False,
        )
    else:
        count_left_out(finite, kept, tensor, left_out, bad, TRACK, COUNT)
    return tl.sum(tl.where(kept & inside, update * update, 0.0)) if TRACK else 0.0


@triton.jit
def _line_factor(
    tensor, grad_addr, start, line, length, ptrs, settings, GRAD: tl.constexpr, MODE: tl.constexpr,
    MARKED: tl.constexpr, CHUNK: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    """AdamW's factor from the v of a whole line, brought up to date. Lines are whole groups."""
    row = settings + tensor * WIDTH
    state = tl.load(ptrs + tensor * WIDTH + V_AT).to(tl.pointer_type(tl.float32)) + line
    v = tl.load(state)
    if MODE != "repair":
        tile, groups = tile_of(CHUNK)
        total = tl.zeros([CHUNK // 32, 32], dtype=tl.float32)
        out = tl.zeros([CHUNK // 32, 32], dtype=tl.int32)
        for begin in range(0, length, CHUNK):
            inside = (groups * 32 < length - begin) & (tile >= 0)
            g, _, kept = load_grad(grad_addr, start + begin, tile, inside, GRAD, MARKED, VEC, False)
            total += g * g
            out += tl.where(kept, 0, 1)
        count = length - tl.sum(out)
        mean = tl.sum(total) / tl.maximum(count, 1).to(tl.float32)
        v = tl.where(count > 0, lerp(v, mean, tl.load(row + W2)), v)
        if MODE == "step":
            tl.store(state, v)
    return reciprocal(tl.sqrt(v) * tl.load(row + INV_BC2) + tl.load(row + EPS))


@triton.jit
def _gathered(line_at, column_at, line, line_inside, column, inside, vectors):
    """Product of a line's and a column's factor, 1 for what there is none of."""
    has_line, has_column = line_inside & (line * 0 + line_at >= 0), inside & (column * 0 + column_at >= 0)
    by_line = tl.load(vectors + tl.maximum(line_at, 0) + line, mask=has_line, other=1.0)
    return by_line * tl.load(vectors + tl.maximum(column_at, 0) + column, mask=has_column, other=1.0)


@triton.jit
def _program(
    tensor, index, grad_addr, shapes, ptrs, settings, places, vectors, scales, thresholds, repair, left_out, bad,
    ADAFACTOR: tl.constexpr, M: tl.constexpr, WEIGHTS: tl.constexpr, PARAM: tl.constexpr, GRAD: tl.constexpr,
    MODE: tl.constexpr, MATCHED: tl.constexpr, TRACK: tl.constexpr, COUNT: tl.constexpr, MARKED: tl.constexpr,
    WIDE: tl.constexpr, CHUNK: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    """Steps a whole line, or a chunk of any. Returns the sum of squares of the update."""
    lines, length = stored_shape(shapes, tensor)
    line_at = tl.load(places + tensor * PLACES + LINE_VECTOR)
    column_at = tl.load(places + tensor * PLACES + COLUMN_VECTOR)
    tile, groups = tile_of(CHUNK)
    square = tl.sum(tl.zeros([CHUNK], dtype=tl.float32))
    if line_at == _WHOLE:
        size = length.to(tl.int32)
        factor = _line_factor(
            tensor, grad_addr, index * length, index, size, ptrs, settings, GRAD, MODE, MARKED, CHUNK, VEC
        )
        for begin in range(0, size, CHUNK):
            square += _step_tile(
                tensor, grad_addr, index * length + begin, tl.minimum(size - begin, CHUNK),
                (groups * 32 < size - begin) & (tile >= 0), factor, ptrs, settings, thresholds, repair, left_out, bad,
                M, WEIGHTS, PARAM, GRAD, MODE, MATCHED, TRACK, COUNT, MARKED, CHUNK, VEC, False,
            )  # fmt: skip
    else:
        start = index * CHUNK
        left = tl.minimum(lines * length - start, CHUNK).to(tl.int32)
        first_line = start // length if WIDE else (start.to(tl.int32) // length.to(tl.int32)).to(tl.int64)
        rest = (start - first_line * length).to(tl.int32)
        scale = tl.load(scales + tensor) if ADAFACTOR else 1.0
        line_at, width = tl.where(line_at >= 0, line_at + first_line, line_at), length.to(tl.int32)
        if width % 32 == 0:  # a group lies in one line
            grouped = (groups * 32 < left) & (tile >= 0)
            unit = (rest // 32 + groups) // (width // 32)
            column = (rest // 32 + groups - unit * (width // 32)) * 32 + tl.arange(0, 32)[None, :]
            by_group = scale * _gathered(line_at, column_at, unit, groups * 32 < left, column, grouped, vectors)
            square += _step_tile(
                tensor, grad_addr, start, left, grouped, by_group, ptrs, settings, thresholds, repair, left_out, bad, M,
                WEIGHTS, PARAM, GRAD, MODE, MATCHED, TRACK, COUNT, MARKED, CHUNK, VEC, False,
            )  # fmt: skip
        else:
            line = (rest + tile) // width
            place = rest + tile - line * width
            factors = scale * _gathered(line_at, column_at, line, tile < left, place, tile < left, vectors)
            if left == CHUNK:
                square += _step_tile(
                    tensor, grad_addr, start, left, tile < left, factors, ptrs, settings, thresholds, repair, left_out,
                    bad, M, WEIGHTS, PARAM, GRAD, MODE, MATCHED, TRACK, COUNT, MARKED, CHUNK, VEC, True,
                )  # fmt: skip
            else:
                square += _step_tile(
                    tensor, grad_addr, start, left, tile < left, factors, ptrs, settings, thresholds, repair, left_out,
                    bad, M, WEIGHTS, PARAM, GRAD, MODE, MATCHED, TRACK, COUNT, MARKED, CHUNK, VEC, False,
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
    ADAFACTOR: tl.constexpr, M: tl.constexpr, WEIGHTS: tl.constexpr, PARAM: tl.constexpr, GRAD: tl.constexpr,
    MODE: tl.constexpr, MATCHED: tl.constexpr, TRACK: tl.constexpr, COUNT: tl.constexpr, MARKED: tl.constexpr,
    WIDE: tl.constexpr, CHUNK: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    """One program per whole line or chunk."""
    pid = tl.program_id(0)
    tensor = tl.load(chunk_tensor + pid)
    grad_addr = tl.load(grad_ptrs + tensor)
    if grad_addr != 0:
        index = (pid - tl.load(first_chunk + tensor)).to(tl.int64)
        square = _program(
            tensor, index, grad_addr, shapes, ptrs, settings, places, vectors, scales, thresholds, repair, left_out,
            bad, ADAFACTOR, M, WEIGHTS, PARAM, GRAD, MODE, MATCHED, TRACK, COUNT, MARKED, WIDE, CHUNK, VEC,
        )  # fmt: skip
        if TRACK:
            tl.store(partial + pid, square)
    elif TRACK:
        tl.store(partial + pid, 0.0)


@triton.jit
def repair_kernel(
    chunk_tensor, first_chunk, shapes, ptrs, grad_ptrs, settings, places, vectors, scales, thresholds, repair, partial,
    left_out, bad,
    ADAFACTOR: tl.constexpr, M: tl.constexpr, WEIGHTS: tl.constexpr, PARAM: tl.constexpr, GRAD: tl.constexpr,
    MODE: tl.constexpr, MATCHED: tl.constexpr, TRACK: tl.constexpr, COUNT: tl.constexpr, MARKED: tl.constexpr,
    WIDE: tl.constexpr, CHUNK: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    """As `apply_kernel`, but REPAIRERS programs share a tensor, so that one with nothing to repair costs little."""
    tensor = tl.program_id(0)
    grad_addr = tl.load(grad_ptrs + tensor)
    if (tl.load(repair + tensor) != 0.0) & (grad_addr != 0):
        programs = tl.load(first_chunk + tensor + 1) - tl.load(first_chunk + tensor)
        for index in range(tl.program_id(1), programs, REPAIRERS):
            _program(
                tensor, grad_addr * 0 + index, grad_addr, shapes, ptrs, settings, places, vectors, scales, thresholds,
                repair, left_out, bad, ADAFACTOR, M, WEIGHTS, PARAM, GRAD, MODE, MATCHED, TRACK, COUNT, MARKED, WIDE,
                CHUNK, VEC,
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
            num_warps=max(width // 512, 4),
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
            plan.squares, plan.counts, plan.vectors, plan.tiles, ADAFACTOR=plan.adafactor, SQUARES=squares, MODE=mode,
            LENGTH=means_plan.JOB_LENGTH,
        )  # fmt: skip
