"""One Triton kernel for the elementwise rules: rule, storage and weights are switches, tensors come from a table.

A program steps one chunk of one tensor, seen as [chunk / 32, 32], so that a row is a quantiser's group. Its eager twin
is `baoc.rules` with `baoc.codecs`; payloads and scales are theirs, so either may take the next step.
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportPossiblyUnboundVariable=false
# pyright: reportOperatorIssue=false, reportCallIssue=false, reportIndexIssue=false
# Device code: Triton's compiler gives these names types that Python's annotations do not know.

import triton
import triton.language as tl

from baoc.kernels.storage import (
    load_m,
    load_param,
    load_tile,
    load_v,
    reciprocal,
    store_m,
    store_param,
    store_v,
    tile_of,
)

WIDTH = tl.constexpr(8)
# Columns of the table's addresses and settings, both 8 per tensor: `baoc.kernels.table` fills them in this order.
PARAM_AT, M_AT, M_SCALE_AT, V_AT, V_SCALE_AT, CORRECTION_AT = (tl.constexpr(i) for i in range(6))
DECAY, SIZE, W1, B2, W2, INV_BC2, EPS = (tl.constexpr(i) for i in range(7))


@triton.jit
def _lerp(a, b, weight):
    """torch's lerp: exact at both ends."""
    near = weight < 0.5
    return tl.where(near, a, b) + tl.where(near, weight, weight - 1.0) * (b - a)


@triton.jit
def _sign(x):
    return tl.where(x > 0.0, 1.0, tl.where(x < 0.0, -1.0, 0.0))


@triton.jit
def _update(g, m, s, inv_bc2, eps, RULE: tl.constexpr):
    """The rule's own update from the new averages; s is sqrt(v). Lion passes its interpolation as m."""
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
def _load_grad(grad_addr, mask_addr, start, tile, inside, GRAD: tl.constexpr, MASKED: tl.constexpr,
               VEC: tl.constexpr, FULL: tl.constexpr):  # fmt: skip
    """Gradient as fp32 with 0 where it is to be left out, and where it is not."""
    g = load_tile(grad_addr, start, tile, inside, GRAD, VEC, FULL).to(tl.float32)
    finite = tl.abs(g) < float("inf")
    if MASKED:  # noqa: SIM102 (one is known when compiled, the other at run time)
        if mask_addr != 0:
            finite = finite & (
                tl.load(mask_addr.to(tl.pointer_type(tl.uint8)) + start + tile, mask=inside, other=1) != 0
            )
    return tl.where(finite, g, 0.0), finite


@triton.jit
def _step_chunk(
    pid, tensor, grad_addr, mask_ptrs, start, left, ptrs, settings, thresholds, factors, partial, bad,
    RULE: tl.constexpr, M: tl.constexpr, V: tl.constexpr, WEIGHTS: tl.constexpr, PARAM: tl.constexpr,
    GRAD: tl.constexpr, MATCHED: tl.constexpr, TRACK: tl.constexpr, COUNT: tl.constexpr, MASKED: tl.constexpr,
    STORE: tl.constexpr, CHUNK: tl.constexpr, VEC: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """Steps `left` (at most CHUNK) elements from `start`; FULL promises that it is CHUNK, so nothing is masked."""
    HAS_M: tl.constexpr = M != "none"
    HAS_V: tl.constexpr = V != "none"
    row = settings + tensor * WIDTH
    addrs = ptrs + tensor * WIDTH
    tile, groups = tile_of(CHUNK)
    inside = tile < left
    # All reads come first: a store in between would keep the compiler from moving them up.
    mask_addr = tl.load(mask_ptrs + tensor) if MASKED else grad_addr
    p_addr, correction_addr = tl.load(addrs + PARAM_AT), tl.load(addrs + CORRECTION_AT)
    m_addr, m_scale_addr = tl.load(addrs + M_AT), tl.load(addrs + M_SCALE_AT)
    v_addr, v_scale_addr = tl.load(addrs + V_AT), tl.load(addrs + V_SCALE_AT)
    decay, size, w1, w2 = tl.load(row + DECAY), tl.load(row + SIZE), tl.load(row + W1), tl.load(row + W2)
    b2, inv_bc2, eps = tl.load(row + B2), tl.load(row + INV_BC2), tl.load(row + EPS)
    if MATCHED:
        size *= tl.load(factors + tensor)
    g, finite = _load_grad(grad_addr, mask_addr, start, tile, inside, GRAD, MASKED, VEC, FULL)
    if STORE:
        p = load_param(p_addr, correction_addr, start, tile, inside, WEIGHTS, PARAM, VEC, FULL)
    m = g
    s = g
    if HAS_M:
        m_old = load_m(m_addr, m_scale_addr, start, tile, inside, groups, left, M, VEC, FULL)
        m = _lerp(m_old, g, w1)
    if HAS_V:
        v_old, scale_old = load_v(v_addr, v_scale_addr, start, tile, inside, groups, left, V, VEC, FULL)
        v = tl.where(finite, v_old * b2 + w2 * g * g, v_old)
        s = tl.sqrt(v)
    update = _update(g, m, s, inv_bc2, eps, RULE)
    if STORE:
        if HAS_M:
            if RULE == "lion":
                m = _lerp(m_old, g, w2)
            m = tl.where(finite, m, m_old)
            store_m(m_addr, m_scale_addr, m, start, tile, inside, groups, left, M, VEC, FULL)
        if HAS_V:
            store_v(v_addr, v_scale_addr, v, s, scale_old, thresholds, start, tile, inside, groups, left, V, VEC, FULL)
        new = tl.where(finite, p * decay - size * update, p)
        store_param(p_addr, correction_addr, new, thresholds, start, tile, inside, WEIGHTS, PARAM, VEC, FULL)
    if TRACK:
        kept = finite if FULL else finite & inside
        tl.store(partial + pid, tl.sum(tl.where(kept, update * update, 0.0)))
    if COUNT:
        num_bad = tl.sum(tl.where(finite, 0, 1))  # what is outside was read as 0
        tl.atomic_add(bad + tensor, num_bad, mask=num_bad > 0, sem="relaxed")


@triton.jit
def step_kernel(
    chunk_tensor,  # int32[chunks]: tensor of each chunk
    first_chunk,  # int32[tensors + 1]
    numels,  # int64[tensors]
    ptrs,  # int64[tensors, 8]: addresses of param, m, m.scale, v, v.scale, correction
    grad_ptrs,  # int64[tensors]: addresses, 0 where there is no gradient
    mask_ptrs,  # int64[tensors]: addresses of bool masks, True where finite; 0 for none
    settings,  # fp32[tensors, 8]
    thresholds,  # fp32[64]: for the weights, and for v
    factors,  # fp32[tensors]
    partial,  # fp32[chunks]: sum of squares of the update
    bad,  # int32[tensors]: counts non-finite elements
    RULE: tl.constexpr, M: tl.constexpr, V: tl.constexpr, WEIGHTS: tl.constexpr, PARAM: tl.constexpr,
    GRAD: tl.constexpr, MATCHED: tl.constexpr, TRACK: tl.constexpr, COUNT: tl.constexpr, MASKED: tl.constexpr,
    STORE: tl.constexpr, CHUNK: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    """One program per chunk; a tensor without gradient is left as it is."""
    pid = tl.program_id(0)
    tensor = tl.load(chunk_tensor + pid)
    grad_addr = tl.load(grad_ptrs + tensor)
    start = (pid - tl.load(first_chunk + tensor)).to(tl.int64) * CHUNK
    left = tl.minimum(tl.load(numels + tensor) - start, CHUNK).to(tl.int32)
    if grad_addr != 0:
        if left == CHUNK:
            _step_chunk(
                pid, tensor, grad_addr, mask_ptrs, start, left, ptrs, settings, thresholds, factors, partial, bad,
                RULE, M, V, WEIGHTS, PARAM, GRAD, MATCHED, TRACK, COUNT, MASKED, STORE, CHUNK, VEC, True,
            )  # fmt: skip
        else:
            _step_chunk(
                pid, tensor, grad_addr, mask_ptrs, start, left, ptrs, settings, thresholds, factors, partial, bad,
                RULE, M, V, WEIGHTS, PARAM, GRAD, MATCHED, TRACK, COUNT, MASKED, STORE, CHUNK, VEC, False,
            )  # fmt: skip
    elif TRACK:
        tl.store(partial + pid, 0.0)


@triton.jit
def sum_kernel(partial, first_chunk, sums, BLOCK: tl.constexpr):
    """sums[tensor] = sum of its chunks' partial sums, in an order that depends on the table alone. One program each."""
    tensor = tl.program_id(0)
    last = tl.load(first_chunk + tensor + 1)
    lanes = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for begin in range(tl.load(first_chunk + tensor), last, BLOCK):
        total += tl.load(partial + begin + lanes, mask=begin + lanes < last, other=0.0)
    tl.store(sums + tensor, tl.sum(total))
