"""One Triton kernel for the elementwise rules: rule, storage and weights are constexpr switches, tensors come from a table.

A program steps one chunk of one tensor, seen as [chunk / 32, 32], so that a row is a quantiser's group. Its eager twin is
`baoc.rules` with `baoc.codecs`; payloads and scales are theirs, bit for bit in format and within rounding in value.
"""

import triton
import triton.language as tl

from baoc.kernels.storage import load_m, load_param, load_tile, load_v, store_m, store_param, store_v, tile_of

# Columns of the table's settings, one row of 8 per tensor; `baoc.kernels.table` fills them.
DECAY = tl.constexpr(0)  # 1 - lr weight_decay
SIZE = tl.constexpr(1)  # lr / (1 - beta1^t)
W1 = tl.constexpr(2)  # 1 - beta1
B2 = tl.constexpr(3)
W2 = tl.constexpr(4)  # 1 - beta2
INV_BC2 = tl.constexpr(5)  # 1 / sqrt(1 - beta2^t)
EPS = tl.constexpr(6)
WIDTH = tl.constexpr(8)


@triton.jit
def _lerp(a, b, weight):
    """torch's lerp: exact at both ends."""
    near = weight < 0.5
    return tl.where(near, a, b) + tl.where(near, weight, weight - 1.0) * (b - a)


@triton.jit
def _sign(x):
    return tl.where(x > 0.0, 1.0, tl.where(x < 0.0, -1.0, 0.0))


@triton.jit
def _update(g, m, s, row, RULE: tl.constexpr):
    """The rule's own update from the new averages; s is sqrt(v). Lion passes its interpolation as m."""
    if RULE == "adamw":
        update = m / (s * tl.load(row + INV_BC2) + tl.load(row + EPS))
    elif RULE == "rmsprop":
        update = g / (s * tl.load(row + INV_BC2) + tl.load(row + EPS))
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
    if MASKED:
        pointer = mask_addr.to(tl.pointer_type(tl.uint8)) + start + tile
        finite = finite & (tl.load(pointer, mask=inside & (mask_addr != 0), other=1) != 0)
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
    mask_addr = tl.load(mask_ptrs + tensor) if MASKED else grad_addr
    g, finite = _load_grad(grad_addr, mask_addr, start, tile, inside, GRAD, MASKED, VEC, FULL)
    if STORE:
        p = load_param(addrs, start, tile, inside, WEIGHTS, PARAM, VEC, FULL)
    m = g
    s = g
    w1 = tl.load(row + W1)
    if HAS_M:
        m_old = load_m(addrs, start, tile, inside, groups, left, M, VEC, FULL)
        m = _lerp(m_old, g, w1)
    if HAS_V:
        v_old, scale_old = load_v(addrs, start, tile, inside, groups, left, V, VEC, FULL)
        v = tl.where(finite, v_old * tl.load(row + B2) + tl.load(row + W2) * g * g, v_old)
        s = tl.sqrt(v)
    update = _update(g, m, s, row, RULE)
    kept = finite
    if not FULL:
        kept = finite & inside
    if TRACK:
        tl.store(partial + pid, tl.sum(tl.where(kept, update * update, 0.0)))
    if COUNT:
        num_bad = tl.sum(tl.where(finite, 0, 1))  # elements outside were loaded as 0
        tl.atomic_add(bad + tensor, num_bad, mask=num_bad > 0)
    if STORE:
        if HAS_M:
            if RULE == "lion":
                m = _lerp(m_old, g, tl.load(row + W2))
            store_m(addrs, tl.where(finite, m, m_old), start, tile, inside, groups, left, M, VEC, FULL)
        if HAS_V:
            store_v(addrs, v, s, scale_old, thresholds, start, tile, inside, groups, left, V, VEC, FULL)
        size = tl.load(row + SIZE)
        if MATCHED:
            size *= tl.load(factors + tensor)
        new = tl.where(finite, p * tl.load(row + DECAY) - size * update, p)
        store_param(addrs, new, start, tile, inside, WEIGHTS, PARAM, VEC, FULL)


@triton.jit
def step_kernel(
    chunk_tensor,  # int32[chunks]: tensor of each chunk
    first_chunk,  # int32[tensors + 1]
    numels,  # int64[tensors]
    ptrs,  # int64[tensors, 8]: addresses of param, m, m.scale, v, v.scale, correction
    grad_ptrs,  # int64[tensors]: addresses, 0 where there is no gradient
    mask_ptrs,  # int64[tensors]: addresses of bool masks, True where finite; 0 for none
    settings,  # fp32[tensors, 8]
    thresholds,  # fp32[32]
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
