"""Means of g^2 along lines and columns, for shared v and Adafactor: sums by program, then jobs that finish them.

Elements that are not stepped count in no mean, and a mean of no elements leaves its average as it is. These kernels
update the averages (states, in mode "step" only) and store 1 / root of them in `vectors`, which the step of the weights
(`matrix`) multiplies by.
"""

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from baoc.kernels.triton import means_plan
from baoc.kernels.triton.device import GRAD_LIMIT, load_tile, product, reciprocal, signed_numbers
from baoc.kernels.triton.elementwise import (
    DTYPES,
    EPS,
    INV_BC2,
    M_AT,
    M_SCALE_AT,
    W1,
    W2,
    WIDTH,
    keep_finite,
    lerp,
    load_grad,
)
from baoc.kernels.triton.kinds import Call
from baoc.kernels.triton.storage import expand_m, load_m_codes, restore_m

if TYPE_CHECKING:
    from baoc.kernels.triton.table import FusedTable

LINE_VECTOR, COLUMN_VECTOR, LINE_SUMS, COLUMN_SUMS = (tl.constexpr(i) for i in range(4))
LINE_TILE, LINE_TILES, COLUMN_TILE, COLUMN_TILES = (tl.constexpr(i) for i in range(4, 8))
OFFSETS = tl.constexpr(means_plan.OFFSETS)
_FLOOR = tl.constexpr(1e-30)  # added to g^2, as baoc.optim.rules.adafactor
_CLIP = tl.constexpr(1.0)


@triton.jit
def stored_shape(shapes, tensor):
    """(lines, elements of a line) of a matrix as it lies in memory."""
    rows, cols = tl.load(shapes + tensor * 4 + 1), tl.load(shapes + tensor * 4 + 2)
    transposed = tl.load(shapes + tensor * 4 + 3) != 0
    return tl.where(transposed, cols, rows), tl.where(transposed, rows, cols)


@triton.jit
def inverse_root(v):
    """1 / sqrt(v), and 0 of a mean that never had an element."""
    return tl.where(v > 0.0, tl.rsqrt(tl.maximum(v, 1.2e-38)), 0.0)


@triton.jit
def _line_sums(grad_addr, line, first, lines, length, LINES: tl.constexpr, PIECE: tl.constexpr, GRAD: tl.constexpr,
               MARKED: tl.constexpr, VEC: tl.constexpr):  # fmt: skip
    """Sums of g^2 and counts of skipped elements, over PIECE elements of each of LINES lines."""
    STEP: tl.constexpr = 64
    width = (length // VEC) * VEC  # equals length, and tells the compiler that VEC divides it
    rows = line + tl.arange(0, LINES)[:, None].to(tl.int64)
    total = tl.zeros([LINES, STEP], dtype=tl.float32)
    out = tl.zeros([LINES, STEP], dtype=tl.int32)
    for begin in range(first, tl.minimum(first + PIECE, length).to(tl.int32), STEP):
        columns = begin + tl.arange(0, STEP)[None, :]
        inside = (columns < width) & (rows < lines)
        tile = rows * (length // VEC) * VEC + columns
        g, _, stepped = load_grad(grad_addr, lines * 0, tile, inside, GRAD, MARKED, VEC, False)
        total += g * g
        out += tl.where(stepped, 0, 1)
    return tl.sum(total, axis=1), tl.sum(out, axis=1)


@triton.jit
def line_sums_kernel(
    owner,  # int32[programs]: tensor of each program
    first_program,  # int32[tensors]
    shapes,  # int64[tensors, 4]
    grad_ptrs,  # int64[tensors]
    offsets,  # int64[tensors, 8]
    sums,  # fp32: takes partial sums of g^2 by line
    counts,  # int16: takes the number of skipped elements in them
    GRAD: tl.constexpr, MARKED: tl.constexpr, LINES: tl.constexpr, PIECE: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    tensor = tl.load(owner + pid)
    grad_addr = tl.load(grad_ptrs + tensor)
    if grad_addr != 0:
        lines, length = stored_shape(shapes, tensor)
        pieces = ((length + PIECE - 1) // PIECE).to(tl.int32)
        index = pid - tl.load(first_program + tensor)
        block = index // pieces
        piece = index - block * pieces
        line, first = block * LINES, piece * PIECE
        if length % VEC == 0:
            total, out = _line_sums(grad_addr, line, first, lines, length, LINES, PIECE, GRAD, MARKED, VEC)
        else:
            total, out = _line_sums(grad_addr, line, first, lines, length, LINES, PIECE, GRAD, MARKED, 1)
        rows = line + tl.arange(0, LINES)
        at = tl.load(offsets + tensor * OFFSETS + LINE_SUMS) + piece * lines + rows
        tl.store(sums + at, total, mask=rows < lines)
        tl.store(counts + at, out.to(tl.int16), mask=rows < lines)


@triton.jit
def _column_sums(grad_addr, m_addr, m_scale_addr, w1, factors, line, column, lines, length, ROWS: tl.constexpr,
                 COLUMNS: tl.constexpr, ADAFACTOR: tl.constexpr, M: tl.constexpr, GRAD: tl.constexpr,
                 MARKED: tl.constexpr, VEC: tl.constexpr):  # fmt: skip
    """Sums over ROWS lines, by column: of g^2, of (x * the line's factor)^2 for Adafactor, and of skipped elements."""
    STEP: tl.constexpr = 16
    width = (length // VEC) * VEC
    columns = column + tl.arange(0, COLUMNS)[None, :]
    total = tl.zeros([STEP, COLUMNS], dtype=tl.float32)
    square = tl.zeros([STEP, COLUMNS], dtype=tl.float32)
    out = tl.zeros([STEP, COLUMNS], dtype=tl.int32)
    for begin in range(line, tl.minimum(line + ROWS, lines).to(tl.int32), STEP):
        rows = begin + tl.arange(0, STEP)[:, None].to(tl.int64)
        inside = (columns < width) & (rows < lines)
        tile = rows * (length // VEC) * VEC + columns
        g, _, stepped = load_grad(grad_addr, lines * 0, tile, inside, GRAD, MARKED, VEC, False)
        total += g * g
        out += tl.where(stepped, 0, 1)
        if ADAFACTOR:
            x = g
            if M != "none":
                code, bits = load_m_codes(m_addr, m_scale_addr, lines * 0, tile, inside, M, VEC)
                x = lerp(restore_m(code, bits, M), g, w1)
            y = tl.where(stepped & inside, x * tl.load(factors + rows, mask=rows < lines, other=0.0), 0.0)
            square += y * y
    return tl.sum(total, axis=0), tl.sum(square, axis=0), tl.sum(out, axis=0)


@triton.jit
def column_sums_kernel(
    owner,  # int32[programs]
    first_program,  # int32[tensors]
    shapes,  # int64[tensors, 4]
    ptrs,  # int64[tensors, 8]
    grad_ptrs,  # int64[tensors]
    settings,  # fp32[tensors, 8]
    offsets,  # int64[tensors, 8]
    vectors,  # fp32: the lines' factors, for Adafactor
    sums,  # fp32: takes partial sums of g^2 by column
    squares,  # fp32: takes partial sums of squared updates, for Adafactor
    counts,  # int16
    ADAFACTOR: tl.constexpr, M: tl.constexpr, GRAD: tl.constexpr, MARKED: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    tensor = tl.load(owner + pid)
    grad_addr = tl.load(grad_ptrs + tensor)
    if grad_addr != 0:
        lines, length = stored_shape(shapes, tensor)
        pieces = ((length + COLUMNS - 1) // COLUMNS).to(tl.int32)
        index = pid - tl.load(first_program + tensor)
        block = index // pieces
        line, column = block * ROWS, (index - block * pieces) * COLUMNS
        addrs, place = ptrs + tensor * WIDTH, offsets + tensor * OFFSETS
        m_addr, m_scale_addr = tl.load(addrs + M_AT), tl.load(addrs + M_SCALE_AT)
        w1 = tl.load(settings + tensor * WIDTH + W1)
        factors = vectors + tl.maximum(tl.load(place + LINE_VECTOR), 0)
        if length % VEC == 0:
            total, square, out = _column_sums(grad_addr, m_addr, m_scale_addr, w1, factors, line, column, lines, length,
                                              ROWS, COLUMNS, ADAFACTOR, M, GRAD, MARKED, VEC)  # fmt: skip
        else:
            total, square, out = _column_sums(grad_addr, m_addr, m_scale_addr, w1, factors, line, column, lines, length,
                                              ROWS, COLUMNS, ADAFACTOR, M, GRAD, MARKED, 1)  # fmt: skip
        columns = column + tl.arange(0, COLUMNS)
        at = tl.load(place + COLUMN_SUMS) + block * length + columns
        tl.store(sums + at, total, mask=columns < length)
        tl.store(counts + at, out.to(tl.int16), mask=columns < length)
        if ADAFACTOR:
            tl.store(squares + at, square, mask=columns < length)


@triton.jit
def _read_lines(grad_addr, m_addr, m_scale_addr, state, start, part, num, stride, M: tl.constexpr, GRAD: tl.constexpr,
                WIDEST: tl.constexpr, GROUPED: tl.constexpr, VEC: tl.constexpr):  # fmt: skip
    """Loads gradients, stored m, bits of its scales and averages of lines `part`. GROUPED lines are complete groups."""
    columns = tl.arange(0, WIDEST)[None, :]
    tile = (part[:, None] * stride) * VEC + columns
    inside = (part[:, None] < num) & (columns < stride * VEC)
    raw = load_tile(grad_addr, start, tile, inside, GRAD, VEC, False)
    code, bits = raw, 0
    if GROUPED:
        code = load_tile(m_addr, start, tile, inside, tl.int8, VEC, False)
        group, groups = tl.arange(0, WIDEST // 32)[None, :], stride * VEC // 32
        pointer = (m_scale_addr + start // 16).to(tl.pointer_type(tl.int16)) + (part[:, None] * groups + group)
        bits = tl.load(pointer, mask=(part[:, None] < num) & (group < groups), other=0)
    elif M != "none":
        code, bits = load_m_codes(m_addr, m_scale_addr, start, tile, inside, M, VEC)
    return raw, code, bits, tl.load(state + part, mask=part < num, other=0.0)


@triton.jit
def _restored(code, bits, share, M: tl.constexpr, GROUPED: tl.constexpr):
    """m as fp32, from what `_read_lines` loaded. A coded m is multiplied by `share`, its weight in the new average."""
    if GROUPED:
        LINES: tl.constexpr = code.shape[0]
        GROUPS: tl.constexpr = code.shape[1] // 32
        scale = tl.reshape((bits.to(tl.int32) << 16).to(tl.float32, bitcast=True) * share, [LINES, GROUPS, 1])
        m = tl.reshape(tl.reshape(expand_m(signed_numbers(code), M), [LINES, GROUPS, 32]) * scale, code.shape)
    elif M == "fp32" or M == "bf16":
        m = restore_m(code, bits, M)
    else:
        m = restore_m(code, bits, M) * share
    return m


@triton.jit
def _averaged(m, g, weight, M: tl.constexpr):
    """The new m from `_restored`'s result and g, as `elementwise.average` computes it."""
    return lerp(m, g, weight) if M == "fp32" or M == "bf16" else m + weight * g


@triton.jit
def _count_columns(grad_addr, start, num, stride, GRAD: tl.constexpr, MARKED: tl.constexpr, WIDEST: tl.constexpr,
                   LINES: tl.constexpr, VEC: tl.constexpr):  # fmt: skip
    """Number of skipped elements of each column."""
    out = tl.zeros([WIDEST], dtype=tl.int32)
    columns = tl.arange(0, WIDEST)[None, :]
    for begin in range(0, num, LINES):
        part = begin + tl.arange(0, LINES)[:, None]
        inside = (part < num) & (columns < stride * VEC)
        _, _, stepped = load_grad(grad_addr, start, part * stride * VEC + columns, inside, GRAD, MARKED, VEC, False)
        out += tl.sum(tl.where(stepped, 0, 1), axis=0)
    return out


@triton.jit
def _sum_lines(
    grad_addr, m_addr, m_scale_addr, state, factors, start, num, length, w1, w2, M: tl.constexpr, GRAD: tl.constexpr,
    MODE: tl.constexpr, MARKED: tl.constexpr, WIDEST: tl.constexpr, LINES: tl.constexpr, GROUPED: tl.constexpr,
    VEC: tl.constexpr,
):  # fmt: skip
    """Sums over `num` lines, LINES at a time. Returns sums by column of g^2 and of squared updates, the sum of the
    lines' new averages, and the number of skipped elements.

    `state` and `factors` point to the first line's; both are updated. Elements are checked one by one only if a line's
    sum shows that one is not usable.
    """
    stride = (length // VEC).to(tl.int32)
    total = tl.zeros([WIDEST], dtype=tl.float32)
    square = tl.zeros([WIDEST], dtype=tl.float32)
    of_lines = tl.zeros([LINES], dtype=tl.float32)
    any_out = tl.zeros([LINES], dtype=tl.int32)
    part = tl.arange(0, LINES)
    raw, code, bits, v = _read_lines(
        grad_addr, m_addr, m_scale_addr, state, start, part, num, stride, M, GRAD, WIDEST, GROUPED, VEC
    )
    for begin in range(0, num, LINES):
        now, m, v_old = raw.to(tl.float32), raw.to(tl.float32), v
        if M != "none":
            m = _restored(code, bits, 1.0 - w1, M, GROUPED)
        # Load the next lines before the sums over these make all warps wait.
        raw, code, bits, v = _read_lines(
            grad_addr, m_addr, m_scale_addr, state, start, begin + LINES + part, num, stride, M, GRAD, WIDEST, GROUPED,
            VEC,
        )  # fmt: skip
        g2 = product(now, now) if LINES > 1 else now * now  # see `product`; a single line exchanges nothing
        x = now if M == "none" else _averaged(m, now, w1, M)
        of_line = tl.sum(g2, axis=1)
        num_out = tl.zeros([LINES], dtype=tl.int32)
        out = tl.max(tl.where(of_line < GRAD_LIMIT * GRAD_LIMIT, 0, 1)) > 0
        if MARKED or out:
            g, _, stepped = keep_finite(now, MARKED)
            g2 = product(g, g) if LINES > 1 else g * g
            if M != "none":
                x = tl.where(stepped, _averaged(m, g, w1, M), 0.0)
            of_line, num_out = tl.sum(g2, axis=1), tl.sum(tl.where(stepped, 0, 1), axis=1)
        there = begin + part < num
        count = length.to(tl.int32) - num_out
        mean = of_line * reciprocal(tl.maximum(count, 1).to(tl.float32)) + _FLOOR
        v_new = tl.where(count > 0, lerp(v_old, mean, w2), v_old)
        factor = inverse_root(v_new)
        if MODE == "step":
            tl.store(state + begin + part, v_new, mask=there)
        tl.store(factors + begin + part, factor, mask=there)
        of_lines += tl.where(there, v_new, 0.0)
        total += tl.sum(g2, axis=0)
        y = g2 if M == "none" else x * factor[:, None]
        by = (factor * factor)[:, None] if M == "none" else y
        square += tl.sum(product(y, tl.broadcast_to(by, y.shape)) if LINES > 1 else y * by, axis=0)
        any_out += num_out
    return total, square, tl.sum(of_lines), tl.sum(any_out)


@triton.jit
def lines_kernel(
    owner,  # int32[programs]
    first_program,  # int32[tensors]
    shapes,  # int64[tensors, 4]
    ptrs,  # int64[tensors, 8]
    grad_ptrs,  # int64[tensors]
    settings,  # fp32[tensors, 8]
    offsets,  # int64[tensors, 8]
    vectors,  # fp32: takes the lines' factors
    sums, squares,  # fp32: take partial sums by column
    counts,  # int16
    tiles,  # fp32[tiles, 3]: takes the sum of the program's line averages
    per_program,  # lines of a program
    M: tl.constexpr, GRAD: tl.constexpr, MODE: tl.constexpr, MARKED: tl.constexpr, WIDEST: tl.constexpr,
    LINES: tl.constexpr, GROUPED: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    """Adafactor's sums where a line has at most WIDEST elements, LINES lines at a time. Gradients are read only once,
    because a line's new average is known before its elements' squared updates are added to the columns' sums."""
    pid = tl.program_id(0)
    tensor = tl.load(owner + pid)
    grad_addr = tl.load(grad_ptrs + tensor)
    if grad_addr != 0:
        lines, length = stored_shape(shapes, tensor)
        row, addrs, place = settings + tensor * WIDTH, ptrs + tensor * WIDTH, offsets + tensor * OFFSETS
        m_addr, m_scale_addr = tl.load(addrs + M_AT), tl.load(addrs + M_SCALE_AT)
        w1, w2 = tl.load(row + W1), tl.load(row + W2)
        transposed = tl.load(shapes + tensor * 4 + 3) != 0
        state = tl.load(addrs + tl.where(transposed, 4, 3)).to(tl.pointer_type(tl.float32))
        factors = vectors + tl.load(place + LINE_VECTOR)
        block = pid - tl.load(first_program + tensor)
        first = block.to(tl.int64) * per_program
        num = tl.minimum(lines - first, per_program).to(tl.int32)
        start = first * length
        total, square, of_lines, any_out = _sum_lines(
            grad_addr, m_addr, m_scale_addr, state + first, factors + first, start, num, length, w1, w2, M, GRAD, MODE,
            MARKED, WIDEST, LINES, GROUPED, VEC,
        )  # fmt: skip
        column = tl.arange(0, WIDEST)
        at = tl.load(place + COLUMN_SUMS) + block * length
        tl.store(sums + at + column, total, mask=column < length)
        tl.store(squares + at + column, square, mask=column < length)
        tl.store(tiles + (tl.load(place + LINE_TILE) + block) * 3, of_lines)
        out = tl.zeros([WIDEST], dtype=tl.int32)
        if any_out > 0:  # rare; counting them above would take registers
            stride = (length // VEC).to(tl.int32)
            out = _count_columns(grad_addr, start, num, stride, GRAD, MARKED, WIDEST, LINES, VEC)
        tl.store(counts + at + column, out.to(tl.int16), mask=column < length)


@triton.jit
def finish_kernel(
    owner,  # int32[programs]: job of each program
    first_program,  # int32[jobs]
    jobs,  # int64[jobs, 8]: see means_plan.Jobs
    ptrs,  # int64[tensors, 8]
    grad_ptrs,  # int64[tensors]
    settings,  # fp32[tensors, 8]
    sums, squares,  # fp32
    counts,  # int16
    vectors,  # fp32: takes the factors
    tiles,  # fp32[tiles, 3]: takes sums of means, of squares over means, and the number of elements in them
    ADAFACTOR: tl.constexpr, NORM: tl.constexpr, SQUARES: tl.constexpr, MODE: tl.constexpr, LENGTH: tl.constexpr,
):  # fmt: skip
    """Finishes LENGTH means of one job: updates their averages and stores the factors of the update.

    NORM: no averages; the factors make the squares of each line or column add up to 1.
    """
    pid = tl.program_id(0)
    job = tl.load(owner + pid)
    fields = jobs + job * 8
    tensor = tl.load(fields)
    if tl.load(grad_ptrs + tensor) != 0:
        parts, length = tl.load(fields + 2).to(tl.int32), tl.load(fields + 3)
        block = pid - tl.load(first_program + job)
        index = block * LENGTH + tl.arange(0, LENGTH)
        inside = index < length
        at = tl.load(fields + 1) + index
        total = tl.zeros([LENGTH], dtype=tl.float32)
        square = tl.zeros([LENGTH], dtype=tl.float32)
        out = tl.zeros([LENGTH], dtype=tl.int32)
        for _ in range(parts):
            total += tl.load(sums + at, mask=inside, other=0.0)
            out += tl.load(counts + at, mask=inside, other=0).to(tl.int32)
            if SQUARES:
                square += tl.load(squares + at, mask=inside, other=0.0)
            at += length
        if NORM:
            factor = inverse_root(total)
        else:
            row = settings + tensor * WIDTH
            count = tl.load(fields + 5) - out
            mean = total / tl.maximum(count, 1).to(tl.float32)
            if ADAFACTOR:
                mean += _FLOOR
            state = tl.load(ptrs + tensor * WIDTH + tl.load(fields + 6)).to(tl.pointer_type(tl.float32)) + index
            v = tl.load(state, mask=inside, other=0.0)
            v = tl.where(count > 0, lerp(v, mean, tl.load(row + W2)), v)
            if MODE == "step":
                tl.store(state, v, mask=inside)
            if ADAFACTOR:
                factor = inverse_root(v)
                tile = tiles + (tl.load(fields + 7) + block) * 3
                tl.store(tile, tl.sum(tl.where(inside, v, 0.0)))
                if SQUARES:
                    tl.store(tile + 1, tl.sum(square * factor * factor))
                    tl.store(tile + 2, tl.sum(tl.where(inside, count, 0)).to(tl.float32))
            else:
                factor = reciprocal(tl.sqrt(v) * tl.load(row + INV_BC2) + tl.load(row + EPS))
        tl.store(vectors + tl.load(fields + 4) + index, factor, mask=inside)


@triton.jit
def clip_kernel(
    shapes,  # int64[tensors, 4]
    grad_ptrs,  # int64[tensors]
    settings,  # fp32[tensors, 8]
    offsets,  # int64[tensors, 8]
    tiles,  # fp32[tiles, 3]
    scales,  # fp32[tensors]: takes the factor of the update
    BLOCK_SIZE: tl.constexpr,
):
    """Adafactor's factor of a tensor's update, one program per tensor: sqrt(mean of the row averages) times m's bias
    correction, over max(1, RMS of the update)."""
    tensor = tl.program_id(0)
    if tl.load(grad_ptrs + tensor) != 0:
        place = offsets + tensor * OFFSETS
        rows = tl.load(shapes + tensor * 4 + 1)
        transposed = tl.load(shapes + tensor * 4 + 3) != 0
        lanes = tl.arange(0, BLOCK_SIZE)
        line_tile, column_tile = tl.load(place + LINE_TILE), tl.load(place + COLUMN_TILE)
        of_lines = tl.zeros([BLOCK_SIZE], dtype=tl.float32)
        of_columns = tl.zeros([BLOCK_SIZE], dtype=tl.float32)
        square = tl.zeros([BLOCK_SIZE], dtype=tl.float32)
        count = tl.zeros([BLOCK_SIZE], dtype=tl.float32)
        num = tl.load(place + LINE_TILES).to(tl.int32)
        for begin in range(0, num, BLOCK_SIZE):
            tile = tiles + (line_tile + begin + lanes) * 3
            of_lines += tl.load(tile, mask=begin + lanes < num, other=0.0)
        num = tl.load(place + COLUMN_TILES).to(tl.int32)
        for begin in range(0, num, BLOCK_SIZE):
            tile = tiles + (column_tile + begin + lanes) * 3
            of_columns += tl.load(tile, mask=begin + lanes < num, other=0.0)
            square += tl.load(tile + 1, mask=begin + lanes < num, other=0.0)
            count += tl.load(tile + 2, mask=begin + lanes < num, other=0.0)
        mean = tl.where(transposed, tl.sum(of_columns), tl.sum(of_lines)) / rows.to(tl.float32)
        correction = tl.load(settings + tensor * WIDTH + INV_BC2)
        scale = tl.sqrt(mean) * correction
        rms = scale * tl.sqrt(tl.sum(square) / tl.maximum(tl.sum(count), 1.0))
        tl.store(scales + tensor, scale / tl.maximum(rms / _CLIP, 1.0))


def update_means(table: "FusedTable", plan: means_plan.Plan, call: Call) -> None:
    """Updates the averages that several programs share, and the factors of the update (`plan.vectors`, `scales`)."""
    adafactor, mode = plan.adafactor, call.mode
    grads = {"GRAD": DTYPES[table.grad_dtype], "MARKED": call.marked}
    m = table.kind.m if table.kind.traits.has_m else "none"
    buffers = (table.shape_tensor, table.ptrs, table.grad_ptrs, table.settings, plan.offsets, plan.vectors)
    sums = (plan.sums, plan.squares, plan.counts)
    for (width, aligned, grouped), programs in plan.both_sums.items():
        lines_kernel[(programs.count,)](
            programs.owner, programs.first, *buffers, *sums, plan.tiles, plan.lines_per_program(width), M=m, **grads,
            MODE=mode, WIDEST=width, LINES=max(means_plan.TILE // width, 1), GROUPED=grouped,
            VEC=table.vector if aligned else 1,
            num_warps=min(max(width, means_plan.TILE) // plan.per_warp, 32),
        )  # fmt: skip
    if plan.line_sums.count:
        line_sums_kernel[(plan.line_sums.count,)](
            plan.line_sums.owner, plan.line_sums.first, table.shape_tensor, table.grad_ptrs, plan.offsets, plan.sums,
            plan.counts, **grads, LINES=means_plan.LINES, PIECE=means_plan.PIECE, VEC=table.vector, num_warps=4,
        )  # fmt: skip
        _finish(table, plan, plan.line_jobs, mode=mode, squares=False)
    if plan.column_sums.count:
        column_sums_kernel[(plan.column_sums.count,)](
            plan.column_sums.owner, plan.column_sums.first, *buffers, *sums, ADAFACTOR=adafactor, M=m, **grads,
            ROWS=means_plan.ROWS, COLUMNS=means_plan.COLUMNS, VEC=table.vector, num_warps=4,
        )  # fmt: skip
    _finish(table, plan, plan.column_jobs, mode=mode, squares=adafactor)
    if adafactor:
        clip_kernel[(len(table.params),)](
            table.shape_tensor, table.grad_ptrs, table.settings, plan.offsets, plan.tiles, plan.scales, BLOCK_SIZE=128
        )


def _finish(table: "FusedTable", plan: means_plan.Plan, jobs: means_plan.Jobs, *, mode: str, squares: bool) -> None:
    if jobs.programs.count:
        finish_kernel[(jobs.programs.count,)](
            jobs.programs.owner, jobs.programs.first, jobs.rows, table.ptrs, table.grad_ptrs, table.settings, plan.sums,
            plan.squares, plan.counts, plan.vectors, plan.tiles, ADAFACTOR=plan.adafactor, NORM=plan.norm,
            SQUARES=squares, MODE=mode, LENGTH=means_plan.JOB_LENGTH,
        )  # fmt: skip
