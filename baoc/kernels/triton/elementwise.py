"""One Triton kernel for all elementwise rules: rule, codecs and weights format are compile-time constants.

A program steps one chunk of one tensor, seen as [chunk / 32, 32], so that a row is a quantiser's group. The eager
counterpart is `baoc.optim.rules` with `baoc.optim.codecs`; stored bytes are the same, so either may take the next step.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from baoc.kernels.triton import kinds
from baoc.kernels.triton.device import GRAD_LIMIT, load_numbers, reciprocal, root, tile_of, usable, usable_and_differ
from baoc.kernels.triton.kinds import Call
from baoc.kernels.triton.storage import (
    average_v,
    lanes_like,
    load_param,
    load_scaled_m,
    load_v_codes,
    restore_v,
    store_m,
    store_param,
    store_v,
)
from baoc.kernels.triton.table import start

if TYPE_CHECKING:
    from baoc.kernels.triton.table import FusedTable

WIDTH = tl.constexpr(kinds.WIDTH)
# Columns of a tensor's addresses, which `FusedTable` fills, and of its settings, which functions of `kinds` compute.
PARAM_AT, M_AT, M_SCALE_AT, V_AT, V_SCALE_AT, CORRECTION_AT, MATCH_AT = map(tl.constexpr, kinds.ADDRESS_COLUMNS)
DECAY, SIZE, W1, B2, W2, INV_BC2, EPS, PER_LR = map(tl.constexpr, kinds.SETTING_COLUMNS)
REPAIRERS = tl.constexpr(64)  # programs per tensor of a repair, which nearly always has nothing to do


@triton.jit
def lerp(a, b, weight):
    """torch's lerp: exact at both ends."""
    near = weight < 0.5
    return tl.where(near, a, b) + tl.where(near, weight, weight - 1.0) * (b - a)


@triton.jit
def _sign(x):
    return tl.where(x > 0.0, 1.0, tl.where(x < 0.0, -1.0, 0.0))


@triton.jit
def average(x, scale, g, weight, M: tl.constexpr):
    """The new m, from the old m = x * scale and g. fp32 and bf16 m equal torch's lerp to the last bit, as ties need."""
    m = x * (scale * (1.0 - weight)) + weight * g
    if M == "fp32" or M == "bf16":
        m = lerp(x, g, weight)
    return m


@triton.jit
def _update(g, m, s, inv_bc2, eps, RULE: tl.constexpr):
    """The rule's update, from the new m and s = sqrt(new v). Lion passes its interpolation as m."""
    if RULE == "adamw":
        update = m * reciprocal(s * inv_bc2 + eps)
    elif RULE == "rmsprop":
        update = g * reciprocal(s * inv_bc2 + eps)
    elif RULE == "sign":
        update = _sign(g)
    else:
        update = _sign(m)
    return update


@triton.jit
def is_plain(g, p, new, WEIGHTS: tl.constexpr, MARKED: tl.constexpr):
    """Whether all elements of the chunk are stepped and, for split8, every weight changes."""
    plain = usable_and_differ(g, new, p) if WEIGHTS == "split8" else usable(g)
    if MARKED:
        plain = plain & (g.to(tl.int32, bitcast=True) != -2147483648).to(tl.int32)
    return tl.min(plain) != 0


@triton.jit
def matched_factor(match_addr):
    """The factor of an update: target / RMS of the update before. 0 at the first one, which `repair` then adds."""
    match = match_addr.to(tl.pointer_type(tl.float32))
    target, own = tl.load(match), tl.load(match + 1)
    return tl.where(own > 1e-30, target / tl.maximum(own, 1e-30), 0.0)


@triton.jit
def load_grad(grad_addr, start, tile, inside, GRAD: tl.constexpr, MARKED: tl.constexpr, VEC: tl.constexpr,
              FULL: tl.constexpr):  # fmt: skip
    """Returns (g, finite, stepped): the gradient as fp32 with 0 where it is not stepped, where it is usable
    (`kernels.usable`), and where it is stepped, which excludes marked elements too."""
    return keep_finite(load_numbers(grad_addr, start, tile, inside, GRAD, VEC, FULL), MARKED)


@triton.jit
def keep_finite(raw, MARKED: tl.constexpr):
    """`load_grad`'s results for a gradient that was read already."""
    g = raw.to(tl.float32)
    finite = tl.abs(g) < GRAD_LIMIT
    stepped = finite
    if MARKED:
        stepped = finite & (g.to(tl.int32, bitcast=True) != -2147483648)
    return tl.where(stepped, g, 0.0), finite, stepped


@triton.jit
def count_skipped(finite, stepped, tensor, skipped, nonfinite, TRACK: tl.constexpr, COUNT: tl.constexpr):
    """Adds the elements that were not finite to `nonfinite`, and those not stepped to `skipped`. Elements outside of
    the tensor were read as 0 and count as stepped."""
    if COUNT:
        num_nonfinite = tl.sum(tl.where(finite, 0, 1))
        tl.atomic_add(nonfinite + tensor, num_nonfinite.to(tl.int64), mask=num_nonfinite > 0, sem="relaxed")
    if TRACK:
        num_skipped = tl.sum(tl.where(stepped, 0, 1))
        tl.atomic_add(skipped + tensor, num_skipped, mask=num_skipped > 0, sem="relaxed")


@triton.jit
def _new_m(m_old, scale, g, w1, w2, RULE: tl.constexpr, M: tl.constexpr, MODE: tl.constexpr):
    """The m that the update is computed from: Lion's interpolation, else the new m."""
    m = m_old * scale
    if MODE == "repair":  # m is the new one already; Lion's update needs the old one
        m = lerp(m + (m - g) * (w2 / (1.0 - w2)), g, w1) if RULE == "lion" else m
    elif RULE == "adamw":
        m = average(m_old, scale, g, w1, M)
    else:  # as torch has it to the last bit, which may be that of the sign
        m = lerp(m, g, w1)
    return m


@triton.jit
def _new_weights(g, p, m, s, decay, size, inv_bc2, eps, RULE: tl.constexpr, TRACK: tl.constexpr):
    """Returns (weights after the step, update). AdamW without TRACK does not compute the update."""
    if RULE == "adamw" and not TRACK:
        per = reciprocal(size)
        moves = tl.abs(size) > 1e-37
        divisor = s * tl.where(moves, inv_bc2 * per, 0.0) + tl.where(moves, eps * per, float("inf"))
        update = m
        new = p * decay - m * reciprocal(divisor)
    else:
        update = _update(g, m, s, inv_bc2, eps, RULE)
        new = p * decay - size * update
    return new, update


@triton.jit
def load_row(tensor, ptrs, settings):
    """Loads a tensor's addresses (param, correction, m, m.scale, v, v.scale, match) and settings (decay, size, w1, w2,
    b2, inv_bc2, eps), all at once before anything depends on them: a program lives as long as its chain of loads."""
    addrs, row = ptrs + tensor * WIDTH, settings + tensor * WIDTH
    at = (
        tl.load(addrs + PARAM_AT), tl.load(addrs + CORRECTION_AT), tl.load(addrs + M_AT), tl.load(addrs + M_SCALE_AT),
        tl.load(addrs + V_AT), tl.load(addrs + V_SCALE_AT), tl.load(addrs + MATCH_AT),
    )  # fmt: skip
    numbers = (
        tl.load(row + DECAY), tl.load(row + SIZE), tl.load(row + W1), tl.load(row + W2), tl.load(row + B2),
        tl.load(row + INV_BC2), tl.load(row + EPS),
    )  # fmt: skip
    return at, numbers


@triton.jit
def _step_chunk(  # noqa: C901 (switches that are resolved when it is compiled)
    pid, tensor, grad_addr, start, left, ptrs, settings, thresholds, repair, partial, skipped, nonfinite,
    RULE: tl.constexpr, M: tl.constexpr, V: tl.constexpr, WEIGHTS: tl.constexpr, PARAM: tl.constexpr,
    GRAD: tl.constexpr, MODE: tl.constexpr, MATCHED: tl.constexpr, TRACK: tl.constexpr, COUNT: tl.constexpr,
    MARKED: tl.constexpr, CHUNK: tl.constexpr, VEC: tl.constexpr, QUICK: tl.constexpr,
):  # fmt: skip
    """Steps `left` (at most CHUNK) elements from `start`. Returns whether it has.

    QUICK needs a full chunk, and does nothing unless all elements are stepped and split8 weights all change. It saves
    the masks for other elements, a third of the instructions.
    """
    at, row = load_row(tensor, ptrs, settings)
    p_addr, correction_addr, m_addr, m_scale_addr, v_addr, v_scale_addr, match_addr = at
    decay, size, w1, w2, b2, inv_bc2, eps = row
    tile, groups = tile_of(CHUNK)
    lane, inside = lanes_like(tile), tile < left
    if MATCHED and MODE == "step":
        size *= matched_factor(match_addr)
    # All reads come first: a store in between would keep the compiler from moving them up.
    if QUICK:
        g = load_numbers(grad_addr, start, tile, inside, GRAD, VEC, True)
    else:
        g, finite, stepped = load_grad(grad_addr, start, tile, inside, GRAD, MARKED, VEC, False)
    p, stored = g, 0
    if MODE != "measure":
        p, stored = load_param(p_addr, correction_addr, start, tile, inside, WEIGHTS, PARAM, VEC, QUICK)
    m = g
    s = g
    if M != "none":
        m_old, m_scale = load_scaled_m(m_addr, m_scale_addr, start, tile, inside, groups, left, M, VEC, QUICK)
        m = _new_m(m_old, m_scale, g, w1, w2, RULE, M, MODE)
    if V != "none":
        v_old, scale_old = load_v_codes(v_addr, v_scale_addr, start, tile, inside, groups, left, V, VEC, QUICK)
        if QUICK:
            v = average_v(v_old, scale_old, g, b2, w2, V)
        else:
            v = restore_v(v_old, scale_old, V)
            if MODE != "repair":
                v = tl.where(stepped, average_v(v_old, scale_old, g, b2, w2, V), v)
        s = root(v) if V == "sqrt8" else tl.sqrt(v)
    done = True
    if MODE == "step":
        new, update = _new_weights(g, p, m, s, decay, size, inv_bc2, eps, RULE, TRACK)
        if QUICK:
            done = is_plain(g, p, new, WEIGHTS, MARKED)
        else:
            new = tl.where(stepped, new, p)
    else:
        update = _update(g, m, s, inv_bc2, eps, RULE)
        new = p
    if MODE == "repair":
        new = tl.where(stepped, p - size * tl.load(repair + tensor) * update, p)
    if done:
        if MODE == "step" and M != "none":
            m = lerp(m_old * m_scale, g, w2) if RULE == "lion" else m
            if not QUICK:
                m = tl.where(stepped, m, m_old * m_scale)
            store_m(m_addr, m_scale_addr, m, thresholds, start, tile, inside, groups, left, M, VEC, QUICK)
        if MODE == "step" and V != "none":
            store_v(v_addr, v_scale_addr, v, s, scale_old, thresholds, start, tile, inside, groups, left, V, VEC, QUICK)
        if MODE != "measure":
            store_param(p_addr, correction_addr, new, p, stored, thresholds, lane, start, tile, inside, WEIGHTS, PARAM,
                        VEC, QUICK, QUICK)  # fmt: skip
        if TRACK and MODE != "repair":
            square = update * update if QUICK else tl.where(stepped & inside, update * update, 0.0)
            tl.store(partial + pid, tl.sum(square))
    if not QUICK and MODE != "repair":
        count_skipped(finite, stepped, tensor, skipped, nonfinite, TRACK, COUNT)
    return done


@triton.jit
def step_kernel(
    program_tensor,  # int32[programs]: tensor of each program
    first_program,  # int32[tensors + 1]
    numels,  # int64[tensors]
    ptrs,  # int64[tensors, 8]: addresses of param, m, m.scale, v, v.scale, correction, match
    grad_ptrs,  # int64[tensors]: addresses, 0 where there is no gradient
    settings,  # fp32[tensors, 8]
    thresholds,  # fp32[132]: see `kinds.kernel_thresholds`
    repair,  # fp32[tensors]
    partial,  # fp32[programs]: sum of squares of the update
    skipped,  # int32[tensors]: counts elements that are not stepped
    nonfinite,  # int64[tensors]: counts non-finite elements
    RULE: tl.constexpr, M: tl.constexpr, V: tl.constexpr, WEIGHTS: tl.constexpr, PARAM: tl.constexpr,
    GRAD: tl.constexpr, MODE: tl.constexpr, MATCHED: tl.constexpr, TRACK: tl.constexpr, COUNT: tl.constexpr,
    MARKED: tl.constexpr, CHUNK: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    """One program per chunk; a tensor without gradient stays as it is. In mode "repair", REPAIRERS programs share a
    tensor, so that a tensor without anything to repair costs little."""
    pid = tl.program_id(0)
    if MODE == "repair":
        grad_addr = tl.load(grad_ptrs + pid)
        if (tl.load(repair + pid) != 0.0) & (grad_addr != 0):
            numel = tl.load(numels + pid)
            chunks = tl.load(first_program + pid + 1) - tl.load(first_program + pid)
            for chunk in range(tl.program_id(1), chunks, REPAIRERS):
                start = (numel * 0 + chunk) * CHUNK  # in 64 bits
                left = tl.minimum(numel - start, CHUNK).to(tl.int32)
                _step_chunk(
                    chunk, pid, grad_addr, start, left, ptrs, settings, thresholds, repair, partial, skipped, nonfinite,
                    RULE, M, V, WEIGHTS, PARAM, GRAD, MODE, MATCHED, TRACK, COUNT, MARKED, CHUNK, VEC, False,
                )  # fmt: skip
    else:
        tensor = tl.load(program_tensor + pid)
        grad_addr = tl.load(grad_ptrs + tensor)
        start = (pid - tl.load(first_program + tensor)).to(tl.int64) * CHUNK
        left = tl.minimum(tl.load(numels + tensor) - start, CHUNK).to(tl.int32)
        if grad_addr != 0:
            done = False
            if MODE == "step":
                is_full = left == CHUNK
                if is_full:
                    done = _step_chunk(
                        pid, tensor, grad_addr, start, left, ptrs, settings, thresholds, repair, partial, skipped,
                        nonfinite, RULE, M, V, WEIGHTS, PARAM, GRAD, MODE, MATCHED, TRACK, COUNT, MARKED, CHUNK, VEC,
                        True,
                    )  # fmt: skip
            if not done:
                _step_chunk(
                    pid, tensor, grad_addr, start, left, ptrs, settings, thresholds, repair, partial, skipped,
                    nonfinite, RULE, M, V, WEIGHTS, PARAM, GRAD, MODE, MATCHED, TRACK, COUNT, MARKED, CHUNK, VEC, False,
                )  # fmt: skip
        elif TRACK:
            tl.store(partial + pid, 0.0)


DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16}


def launch_step(
    kernel: Any, table: "FusedTable", call: Call, *, sizes: Tensor, buffers: Sequence[Tensor] = (), **constants: Any
) -> None:
    """Launches a stepping kernel: a program per chunk, or REPAIRERS per tensor in mode "repair".

    Args:
        sizes: `table.numels` or `table.shape_tensor`, whichever the kernel takes.
        buffers: arguments of the family's own, which follow the settings.
        constants: compile-time constants of the family's own.
    """

    def start_kernel() -> None:
        repairs = call.mode == "repair"
        limits = {"maxnreg": table.config.registers} if table.config.registers else {}
        start(
            kernel, (len(table.params), REPAIRERS.value) if repairs else (table.num_programs,),
            table.program_tensor, table.first_program, sizes, table.ptrs, table.grad_ptrs, table.settings, *buffers,
            table.thresholds, table.repair, table.partial, table.num_skipped, table.num_nonfinite,
            **constants, WEIGHTS=table.kind.weights, PARAM=DTYPES[table.dtype], GRAD=DTYPES[table.grad_dtype],
            MODE=call.mode, MATCHED=call.matched, TRACK=call.track and not repairs,
            COUNT=call.count and call.mode == "step", MARKED=call.marked, VEC=table.vector,
            num_warps=table.config.warps, **limits,
        )  # fmt: skip

    table.launches.run((kernel, call, table.grad_dtype, table.vector), start_kernel, of=table.ptrs)


def launch(table: "FusedTable", call: Call) -> None:
    """Launches the step of the elementwise rules, see `kinds.Call`."""
    kind, traits = table.kind, table.kind.traits
    m, v = kind.m if traits.has_m else "none", kind.v if traits.has_v else "none"
    launch_step(step_kernel, table, call, sizes=table.numels, RULE=kind.rule, M=m, V=v, CHUNK=table.config.chunk)
