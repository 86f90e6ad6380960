"""The step of rules that divide by means along lines or columns: AdamW with shared v, Adafactor, column norms.

`means` computes the means and the factors that follow from them, `apply_kernel` here steps the weights. Where v is
shared along lines, one program steps a complete line, and reads its gradient only once. Bytes moved per element, at
least: the gradient once (complete lines) or twice, m and weights both ways. The eager counterparts are in
`baoc.optim.rules`.
"""

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from baoc.kernels.triton import means_plan
from baoc.kernels.triton.device import GRAD_LIMIT, load_numbers, reciprocal, tile_of
from baoc.kernels.triton.elementwise import (
    REPAIRERS,
    average,
    count_skipped,
    is_plain,
    launch_step,
    lerp,
    load_grad,
    load_row,
    matched_factor,
)
from baoc.kernels.triton.kinds import Call
from baoc.kernels.triton.means import COLUMN_VECTOR, LINE_VECTOR, OFFSETS, inverse_root, stored_shape, update_means
from baoc.kernels.triton.storage import lanes_like, load_param, load_scaled_m, store_m, store_param

if TYPE_CHECKING:
    from baoc.kernels.triton.table import FusedTable

_WHOLE = tl.constexpr(means_plan.WHOLE)


# -- factors of a chunk's elements, by line and column of the stored matrix ------------------------------------------


@triton.jit
def _position(start, length, WIDE: tl.constexpr):
    """(line, position in it) of element `start`. WIDE: a tensor has 2^31 elements or more."""
    line = start // length if WIDE else (start.to(tl.int32) // length.to(tl.int32)).to(tl.int64)
    return line, (start - line * length).to(tl.int32)


@triton.jit
def _further(line, rest, part, width, CHUNK: tl.constexpr, REPEAT: tl.constexpr):
    """The position `part` chunks further on. Divides only where lines are short, because division is slow."""
    rest += part * CHUNK
    over = rest // width if width < CHUNK * REPEAT else tl.where(rest >= width, 1, 0)
    return line + over, rest - over * width


@triton.jit
def _line_factors(line_at, line, rest, width, inside, vectors, CHUNK: tl.constexpr, HOW: tl.constexpr):
    """Factors by line of a chunk's elements, in the shape of `line`; a chunk within two lines loads two numbers."""
    by_line = vectors + line_at
    if HOW == "aligned" or HOW == "two":
        first = tl.load(by_line)
        factors = tl.where(line == 0, first, tl.load(by_line + 1, mask=rest + CHUNK > width, other=1.0))
    elif HOW == "groups":
        factors = tl.load(by_line + line)
    else:
        factors = tl.load(by_line + line, mask=inside, other=1.0)
    return factors


@triton.jit
def _column_factors(column_at, place, inside, vectors, HOW: tl.constexpr):
    by_column = vectors + column_at // 32 * 32 + place  # tells the compiler that vectors begin at multiples of 32
    return tl.load(by_column, mask=inside, other=1.0) if HOW == "any" else tl.load(by_column)


@triton.jit
def _factors_of(
    line_at, column_at, rest, width, inside, scale, vectors, ADAFACTOR: tl.constexpr, CHUNK: tl.constexpr,
    HOW: tl.constexpr,
):  # fmt: skip
    """Factors of a chunk's updates: by line and column for Adafactor, else by the axis that has a vector."""
    line, place = _places(rest, width, CHUNK, HOW)
    if ADAFACTOR:
        factors = scale * _line_factors(line_at, line, rest, width, inside, vectors, CHUNK, HOW)
        factors = factors * _column_factors(column_at, place, inside, vectors, HOW)
    elif line_at >= 0:
        factors = _line_factors(line_at, line, rest, width, inside, vectors, CHUNK, HOW) + place * 0.0
    else:
        factors = _column_factors(column_at, place, inside, vectors, HOW)
    return factors


@triton.jit
def _places(rest, width, CHUNK: tl.constexpr, HOW: tl.constexpr):
    """(line, position in it) of the elements of a chunk that begins at position `rest` of line 0.

    Division by element is slow. HOW says what makes it unnecessary: the chunk lies within "two" lines, within two lines
    of complete groups ("aligned"), or each of its "groups" lies in one line. "any" divides.
    """
    tile, groups = tile_of(CHUNK)
    if HOW == "groups" or HOW == "aligned":
        group, num = rest // 32 + groups, width // 32
        line = group // num if HOW == "groups" else tl.where(group >= num, 1, 0)
        place = (group - line * num) * 32 + tl.arange(0, 32)[None, :]
    elif HOW == "two":
        line = tl.where(rest + tile >= width, 1, 0)
        place = rest + tile - line * width
    else:
        line = (rest + tile) // width
        place = rest + tile - line * width
    return line, place


# -- the step of a chunk, a line, a matrix ----------------------------------------------------------------------------


@triton.jit
def _step_tile(  # noqa: C901 (switches that are resolved when it is compiled)
    tensor, grad_addr, start, left, inside, factor, at, row, thresholds, repair, skipped, nonfinite,
    M: tl.constexpr, WEIGHTS: tl.constexpr, PARAM: tl.constexpr, GRAD: tl.constexpr, MODE: tl.constexpr,
    MATCHED: tl.constexpr, TRACK: tl.constexpr, COUNT: tl.constexpr, MARKED: tl.constexpr, CHUNK: tl.constexpr,
    VEC: tl.constexpr, QUICK: tl.constexpr,
):  # fmt: skip
    """Steps `left` elements from `start` by the update m (or g) times `factor`. Returns (whether it has, the update's
    sum of squares). QUICK is that of `elementwise._step_chunk`. `at` and `row` come from `load_row`."""
    tile, groups = tile_of(CHUNK)
    lane = lanes_like(tile)
    p_addr, correction_addr, m_addr, m_scale_addr, _v, _v_scale, match_addr = at
    decay, size, w1, _w2, _b2, _inv_bc2, _eps = row
    if MATCHED and MODE == "step":
        size *= matched_factor(match_addr)
    if QUICK:
        g = load_numbers(grad_addr, start, tile, inside, GRAD, VEC, True)
    else:
        g, finite, stepped = load_grad(grad_addr, start, tile, inside, GRAD, MARKED, VEC, False)
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
            done = is_plain(g, p, new, WEIGHTS, MARKED)
        else:
            new = tl.where(stepped, new, p)
            if M != "none":
                m = tl.where(stepped, m, m_old * scale)
        if done:
            if M != "none":
                store_m(m_addr, m_scale_addr, m, thresholds, start, tile, inside, groups, left, M, VEC, QUICK)
            store_param(
                p_addr, correction_addr, new, p, stored, thresholds, lane, start, tile, inside, WEIGHTS, PARAM, VEC,
                QUICK, QUICK,
            )  # fmt: skip
    if MODE == "repair":
        new = tl.where(stepped, p - size * tl.load(repair + tensor) * update, p)
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
            count_skipped(finite, stepped, tensor, skipped, nonfinite, TRACK, COUNT)
        if TRACK:
            square = tl.sum(tl.where(stepped & inside, update * update, 0.0))
    return done, square


@triton.jit
def _line_sum(
    grad_addr, start, length, GRAD: tl.constexpr, MARKED: tl.constexpr, CHUNK: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    """(sum of g^2 over a line, its number of stepped elements). Elements are checked if the sum shows a bad one."""
    tile, groups = tile_of(CHUNK)
    total = tl.zeros([CHUNK // 32, 32], dtype=tl.float32)
    for begin in range(0, length, CHUNK):
        inside = (groups * 32 < length - begin) & (tile >= 0)
        g = load_numbers(grad_addr, start + begin, tile, inside, GRAD, VEC, False)
        total += g * g
    square, count = tl.sum(total), length
    if MARKED or not square < GRAD_LIMIT * GRAD_LIMIT:
        total = tl.zeros([CHUNK // 32, 32], dtype=tl.float32)
        out = tl.zeros([CHUNK // 32, 32], dtype=tl.int32)
        for begin in range(0, length, CHUNK):
            inside = (groups * 32 < length - begin) & (tile >= 0)
            g, _, stepped = load_grad(grad_addr, start + begin, tile, inside, GRAD, MARKED, VEC, False)
            total += g * g
            out += tl.where(stepped, 0, 1)
        square, count = tl.sum(total), length - tl.sum(out)
    return square, count


@triton.jit
def _line_factor(
    grad_addr, start, line, length, v_addr, row, NORM: tl.constexpr, GRAD: tl.constexpr,
    MODE: tl.constexpr, MARKED: tl.constexpr, CHUNK: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    """Factor of a complete line's update: 1 / norm, or AdamW's from the line's v, which is updated here."""
    _decay, _size, _w1, w2, _b2, inv_bc2, eps = row
    if NORM:
        total, _ = _line_sum(grad_addr, start, length, GRAD, MARKED, CHUNK, VEC)
        factor = inverse_root(total)
    else:
        state = v_addr.to(tl.pointer_type(tl.float32)) + line
        v = tl.load(state)
        if MODE != "repair":
            total, count = _line_sum(grad_addr, start, length, GRAD, MARKED, CHUNK, VEC)
            mean = total / tl.maximum(count, 1).to(tl.float32)
            new = tl.where(count > 0, lerp(v, mean, w2), v)
            if MODE == "step":
                tl.debug_barrier()  # each warp loads v itself: none may find what another has stored
                tl.store(state, new)
            v = new
        factor = reciprocal(tl.sqrt(v) * inv_bc2 + eps)
    return factor


@triton.jit
def _step_line(
    tensor, index, grad_addr, width, at, row, thresholds, repair, skipped, nonfinite,
    NORM: tl.constexpr, M: tl.constexpr, WEIGHTS: tl.constexpr, PARAM: tl.constexpr, GRAD: tl.constexpr,
    MODE: tl.constexpr, MATCHED: tl.constexpr, TRACK: tl.constexpr, COUNT: tl.constexpr, MARKED: tl.constexpr,
    CHUNK: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    """Steps line `index` of `width` elements, in complete groups. Returns the update's sum of squares."""
    tile, groups = tile_of(CHUNK)
    first = index * width
    square = tl.full([], 0.0, tl.float32)
    factor = _line_factor(grad_addr, first, index, width, at[4], row, NORM, GRAD, MODE, MARKED, CHUNK, VEC)
    for begin in range(0, width, CHUNK):
        left = tl.minimum(width - begin, CHUNK)
        inside = (groups * 32 < left) & (tile >= 0)
        done = False
        if MODE == "step":
            is_full = left == CHUNK
            if is_full:
                done, part = _step_tile(
                    tensor, grad_addr, first + begin, left, inside, factor, at, row, thresholds,
                    repair, skipped, nonfinite, M, WEIGHTS, PARAM, GRAD, MODE, MATCHED, TRACK, COUNT, MARKED, CHUNK,
                    VEC, True,
                )  # fmt: skip
                square += part
        if not done:
            _, part = _step_tile(
                tensor, grad_addr, first + begin, left, inside, factor, at, row, thresholds, repair,
                skipped, nonfinite, M, WEIGHTS, PARAM, GRAD, MODE, MATCHED, TRACK, COUNT, MARKED, CHUNK, VEC, False,
            )  # fmt: skip
            square += part
    return square


@triton.jit
def _step_part(
    tensor, index, first_line, rest, grad_addr, lines, length, line_at, column_at, scale, vectors, at, row, thresholds,
    repair, skipped, nonfinite,
    ADAFACTOR: tl.constexpr, M: tl.constexpr, WEIGHTS: tl.constexpr, PARAM: tl.constexpr, GRAD: tl.constexpr,
    MODE: tl.constexpr, MATCHED: tl.constexpr, TRACK: tl.constexpr, COUNT: tl.constexpr, MARKED: tl.constexpr,
    CHUNK: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    """Steps chunk `index` of a matrix, which begins at position `rest` of line `first_line`, by factors of lines and
    columns. Returns the update's sum of squares."""
    width = length.to(tl.int32)
    square = tl.full([], 0.0, tl.float32)
    start = index * CHUNK
    left = tl.minimum(lines * length - start, CHUNK).to(tl.int32)
    line_at = tl.where(line_at >= 0, line_at + first_line, line_at)
    tile, _groups = tile_of(CHUNK)
    inside = tile < left
    done = False
    if MODE == "step":
        groups, wide = (left == CHUNK) & (width % 32 == 0), (left == CHUNK) & (width >= CHUNK)
        if groups & wide:
            factors = _factors_of(line_at, column_at, rest, width, inside, scale, vectors, ADAFACTOR, CHUNK, "aligned")
            done, part = _step_tile(
                tensor, grad_addr, start, left, inside, factors, at, row, thresholds, repair, skipped, nonfinite,
                M, WEIGHTS, PARAM, GRAD, MODE, MATCHED, TRACK, COUNT, MARKED, CHUNK, VEC, True,
            )  # fmt: skip
            square += part
        elif wide:
            factors = _factors_of(line_at, column_at, rest, width, inside, scale, vectors, ADAFACTOR, CHUNK, "two")
            done, part = _step_tile(
                tensor, grad_addr, start, left, inside, factors, at, row, thresholds, repair, skipped, nonfinite,
                M, WEIGHTS, PARAM, GRAD, MODE, MATCHED, TRACK, COUNT, MARKED, CHUNK, VEC, True,
            )  # fmt: skip
            square += part
        elif groups:
            factors = _factors_of(line_at, column_at, rest, width, inside, scale, vectors, ADAFACTOR, CHUNK, "groups")
            done, part = _step_tile(
                tensor, grad_addr, start, left, inside, factors, at, row, thresholds, repair, skipped, nonfinite,
                M, WEIGHTS, PARAM, GRAD, MODE, MATCHED, TRACK, COUNT, MARKED, CHUNK, VEC, True,
            )  # fmt: skip
            square += part
    if not done:
        factors = _factors_of(line_at, column_at, rest, width, inside, scale, vectors, ADAFACTOR, CHUNK, "any")
        _, part = _step_tile(
            tensor, grad_addr, start, left, inside, factors, at, row, thresholds, repair, skipped, nonfinite, M,
            WEIGHTS, PARAM, GRAD, MODE, MATCHED, TRACK, COUNT, MARKED, CHUNK, VEC, False,
        )  # fmt: skip
        square += part
    return square


@triton.jit
def _program(
    tensor, index, first_line, rest, grad_addr, lines, length, line_at, column_at, at, row, scale, vectors, thresholds,
    repair, skipped, nonfinite,
    ADAFACTOR: tl.constexpr, NORM: tl.constexpr, M: tl.constexpr, WEIGHTS: tl.constexpr, PARAM: tl.constexpr,
    GRAD: tl.constexpr, MODE: tl.constexpr, MATCHED: tl.constexpr, TRACK: tl.constexpr, COUNT: tl.constexpr,
    MARKED: tl.constexpr, KINDS: tl.constexpr, GUARDED: tl.constexpr, CHUNK: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    """Steps complete line `index`, or chunk `index`. Returns the update's sum of squares.

    KINDS: whether the table has tensors of complete "lines", of "parts" (chunks), or "both". GUARDED: `index` may lie
    beyond the last one.
    """
    square = tl.full([], 0.0, tl.float32)
    there = grad_addr != 0  # True here; stands for a condition that needs no branch
    if KINDS != "parts":
        is_line = line_at == _WHOLE if KINDS == "both" else there
        if is_line & (index < lines if GUARDED else there):
            square = _step_line(
                tensor, index, grad_addr, length.to(tl.int32), at, row, thresholds, repair, skipped, nonfinite, NORM, M,
                WEIGHTS, PARAM, GRAD, MODE, MATCHED, TRACK, COUNT, MARKED, CHUNK, VEC,
            )  # fmt: skip
    if KINDS != "lines":
        is_part = line_at != _WHOLE if KINDS == "both" else there
        if is_part & (index * CHUNK < lines * length if GUARDED else there):
            square = _step_part(
                tensor, index, first_line, rest, grad_addr, lines, length, line_at, column_at, scale, vectors, at, row,
                thresholds, repair, skipped, nonfinite, ADAFACTOR, M, WEIGHTS, PARAM, GRAD, MODE, MATCHED, TRACK, COUNT,
                MARKED, CHUNK, VEC,
            )  # fmt: skip
    return square


@triton.jit
def apply_kernel(
    program_tensor,  # int32[programs]
    first_program,  # int32[tensors + 1]
    shapes,  # int64[tensors, 4]: numel, rows, cols, transposed
    ptrs,  # int64[tensors, 8]
    grad_ptrs,  # int64[tensors]
    settings,  # fp32[tensors, 8]
    offsets,  # int64[tensors, 8]: see means_plan.Plan
    vectors,  # fp32: factors by line and by column
    scales,  # fp32[tensors]: factors by tensor, for Adafactor
    thresholds,  # fp32[132]
    repair,  # fp32[tensors]
    partial,  # fp32[programs]
    skipped,  # int32[tensors]
    nonfinite,  # int64[tensors]
    ADAFACTOR: tl.constexpr, NORM: tl.constexpr, M: tl.constexpr, WEIGHTS: tl.constexpr, PARAM: tl.constexpr,
    GRAD: tl.constexpr, MODE: tl.constexpr, MATCHED: tl.constexpr, TRACK: tl.constexpr, COUNT: tl.constexpr,
    MARKED: tl.constexpr, WIDE: tl.constexpr, KINDS: tl.constexpr, REPEAT: tl.constexpr, CHUNK: tl.constexpr,
    VEC: tl.constexpr,
):  # fmt: skip
    """One program per REPEAT complete lines or chunks. In mode "repair", REPAIRERS programs share a tensor, so that a
    tensor without anything to repair costs little."""
    pid = tl.program_id(0)
    tensor = pid if MODE == "repair" else tl.load(program_tensor + pid)
    grad_addr = tl.load(grad_ptrs + tensor)
    if MODE == "repair":
        if (tl.load(repair + tensor) != 0.0) & (grad_addr != 0):
            programs = tl.load(first_program + tensor + 1) - tl.load(first_program + tensor)
            lines, length = stored_shape(shapes, tensor)
            line_at = tl.load(offsets + tensor * OFFSETS + LINE_VECTOR)
            column_at = tl.load(offsets + tensor * OFFSETS + COLUMN_VECTOR)
            at, row = load_row(tensor, ptrs, settings)
            scale = tl.load(scales + tensor) if ADAFACTOR else 1.0
            for part in range(tl.program_id(1), programs * REPEAT, REPAIRERS):
                index = grad_addr * 0 + part
                line, rest = _position(index * CHUNK, length, WIDE)
                _program(
                    tensor, index, line, rest, grad_addr, lines, length, line_at, column_at, at, row, scale, vectors,
                    thresholds, repair, skipped, nonfinite, ADAFACTOR, NORM, M, WEIGHTS, PARAM, GRAD, MODE, MATCHED,
                    TRACK, COUNT, MARKED, KINDS, REPEAT > 1, CHUNK, VEC,
                )  # fmt: skip
    else:
        index = (pid - tl.load(first_program + tensor)).to(tl.int64)
        lines, length = stored_shape(shapes, tensor)
        line_at = tl.load(offsets + tensor * OFFSETS + LINE_VECTOR)
        column_at = tl.load(offsets + tensor * OFFSETS + COLUMN_VECTOR)
        at, row = load_row(tensor, ptrs, settings)
        scale = tl.load(scales + tensor) if ADAFACTOR else 1.0
        if grad_addr != 0:
            square = tl.full([], 0.0, tl.float32)
            first_line, first_rest = index, 0
            if KINDS != "lines":
                first_line, first_rest = _position(index * REPEAT * CHUNK, length, WIDE)
            for part in range(REPEAT):
                line, rest = first_line, first_rest
                if KINDS != "lines":
                    line, rest = _further(first_line, first_rest, part, length.to(tl.int32), CHUNK, REPEAT)
                square += _program(
                    tensor, index * REPEAT + part, line, rest, grad_addr, lines, length, line_at, column_at, at, row,
                    scale, vectors, thresholds, repair, skipped, nonfinite, ADAFACTOR, NORM, M, WEIGHTS, PARAM, GRAD,
                    MODE, MATCHED, TRACK, COUNT, MARKED, KINDS, REPEAT > 1, CHUNK, VEC,
                )  # fmt: skip
            if TRACK:
                tl.store(partial + pid, square)
        elif TRACK:
            tl.store(partial + pid, 0.0)


def launch(table: "FusedTable", call: Call) -> None:
    """Launches the step of these rules, see `kinds.Call`. A repair uses the means that the step stored."""
    plan = means_plan.plan_of(table)
    if call.mode != "repair":
        update_means(table, plan, call)
    launch_step(
        apply_kernel, table, call, sizes=table.shape_tensor, buffers=(plan.offsets, plan.vectors, plan.scales),
        ADAFACTOR=plan.adafactor, NORM=plan.norm, M=table.kind.m if table.kind.traits.has_m else "none",
        WIDE=any(shape.numel >= 2**31 for shape in table.shapes), KINDS=plan.kinds, REPEAT=table.config.repeat,
        CHUNK=table.config.chunk,
    )  # fmt: skip
