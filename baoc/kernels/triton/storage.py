"""Loads and stores states and weights in the formats of `baoc.optim.codecs` and `baoc.optim.weights`.

Readers of m:

- `load_scaled_m` returns m / scale and the scale (1 if none), for steps by complete groups.
- `load_m` returns m, for FOAM.
- `load_m_codes` returns stored m and scale bits at any positions, `restore_m` m from these, for `means`.
- `expand_m` turns 8-bit codes into m / scale, for the functions above.

`load_v_codes`, `restore_v` and `load_v` do the same for v; `average_v` computes the new v straight from the codes.
"""

import triton
import triton.language as tl

from baoc.kernels.triton.device import (
    BF16_MAX,
    ROUND,
    TINY,
    bf16_bits,
    ceil_code,
    exp2,
    floor_bytes,
    floor_code,
    load_numbers,
    load_scale,
    load_tile,
    log2,
    low_byte,
    narrowed,
    reciprocal,
    root,
    round_down,
    round_up,
    share_of,
    signed_numbers,
    store_scale,
    store_tile,
    twice_inverse_power,
    unsigned_times,
    widened,
    with_sign,
)

_LEAST_ROOT = tl.constexpr(1e-30)  # below sqrt of every positive fp32; 255 / _LEAST_ROOT is finite
_SCALE_MAX = tl.constexpr(1.83e19)  # of sqrt(v): its square is finite
_KEEP_SCALE = tl.constexpr(0.87)  # a scale stays while the largest element is above this share of it
# Offsets in the engine's thresholds, see `kinds.kernel_thresholds`; the bits of the phase follow them.
_SLOPES, _OFFSETS, _FINE = (tl.constexpr(i) for i in (32, 64, 96))
PHASE_AT = tl.constexpr(128)
_LARGEST = tl.constexpr(8.0 * 63)  # log2 of the largest sqrt(v), in eighths
_ZERO = tl.constexpr(-100.0)  # below log2 of every positive sqrt(v)
_SLACK = tl.constexpr(2.0**-9)  # this and the next as baoc.optim.codecs
_LIMIT, _LIMIT_FINER = tl.constexpr(18.0 + 2.0**-9), tl.constexpr(16.0 + 2.0**-9)


# -- the 4-bit codecs: two codes per byte, groups of 64 -----------------------------------------------------------
#
# Tiles elsewhere are [groups of 32, 32]; here they are [groups of 64, 64] in the same order, and bytes [groups, 32].


@triton.jit
def _number(code):
    """0 ... 15 as fp32, by the bits of 2^23, without the slow conversion unit."""
    return (code | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0


@triton.jit
def _load_codes(addr, start, left, CHUNK: tl.constexpr, VEC: tl.constexpr, FULL: tl.constexpr):
    """Codes 0 ... 15 as int32 [CHUNK / 64, 64]."""
    at = tl.arange(0, CHUNK // 64)[:, None] * 32 + tl.arange(0, 32)[None, :]
    pointer = tl.multiple_of((addr + start // 2).to(tl.pointer_type(tl.uint8)), (VEC + 1) // 2) + at
    byte = (tl.load(pointer) if FULL else tl.load(pointer, mask=at * 2 < left, other=0)).to(tl.int32)
    return tl.reshape(tl.join(byte & 15, byte >> 4), [CHUNK // 64, 64])


@triton.jit
def _store_codes(addr, codes, start, left, CHUNK: tl.constexpr, VEC: tl.constexpr, FULL: tl.constexpr):
    """Stores codes -8 ... 15, given as fp32 with ROUND added."""
    low, high = tl.split(tl.reshape(codes.to(tl.int32, bitcast=True), [CHUNK // 64, 32, 2]))
    at = tl.arange(0, CHUNK // 64)[:, None] * 32 + tl.arange(0, 32)[None, :]
    pointer = tl.multiple_of((addr + start // 2).to(tl.pointer_type(tl.uint8)), (VEC + 1) // 2) + at
    byte = ((low & 15) | (high << 4)).to(tl.uint8)
    if FULL:
        tl.store(pointer, byte)
    else:
        tl.store(pointer, byte, mask=at * 2 < left)


@triton.jit
def _load_word(addr, start, left, CHUNK: tl.constexpr, FULL: tl.constexpr):
    """The int16 scale words of the groups, as int32 [CHUNK / 64, 1]."""
    group = tl.arange(0, CHUNK // 64)[:, None]
    pointer = (addr + start // 64 * 2).to(tl.pointer_type(tl.int16)) + group
    return (tl.load(pointer) if FULL else tl.load(pointer, mask=group * 64 < left, other=0)).to(tl.int32)


@triton.jit
def _store_word(addr, word, start, left, CHUNK: tl.constexpr, FULL: tl.constexpr):
    group = tl.arange(0, CHUNK // 64)[:, None]
    pointer = (addr + start // 64 * 2).to(tl.pointer_type(tl.int16)) + group
    if FULL:
        tl.store(pointer, word.to(tl.int16))
    else:
        tl.store(pointer, word.to(tl.int16), mask=group * 64 < left)


@triton.jit
def _lanes(thresholds, SHAPE: tl.constexpr):
    """Thresholds of a tile [groups, 64], loaded like the other tiles to keep their layout."""
    GROUPS: tl.constexpr = SHAPE[0]
    at = tl.broadcast_to(tl.arange(0, 32)[None, :], [2 * GROUPS, 32])
    return tl.reshape(tl.load(thresholds + at), [GROUPS, 64])


@triton.jit
def _restore_root(code, word):
    signed = _number(code ^ 8) - 8.0
    return signed * tl.abs(signed) * ((1.0 / 49) * (word << 16).to(tl.float32, bitcast=True))


@triton.jit
def _load_m4(addr, scale_addr, start, left, CHUNK: tl.constexpr, VEC: tl.constexpr, FULL: tl.constexpr):
    """m of root4 as fp32 [CHUNK / 32, 32]."""
    code = _load_codes(addr, start, left, CHUNK, VEC, FULL)
    m = _restore_root(code, _load_word(scale_addr, start, left, CHUNK, FULL))
    return tl.reshape(m, [CHUNK // 32, 32])


@triton.jit
def _load_m4_at(addr, scale_addr, start, tile, inside):
    """(codes, bits of scales) of m at any positions."""
    element = (start % 64).to(tl.int32) + tile
    byte = tl.load((addr + start // 64 * 32).to(tl.pointer_type(tl.uint8)) + element // 2, mask=inside, other=0)
    code = (byte.to(tl.int32) >> ((element & 1) * 4).to(tl.int32)) & 15
    at = (scale_addr + start // 64 * 2).to(tl.pointer_type(tl.int16)) + element // 64
    return code, tl.load(at, mask=inside, other=0)


@triton.jit
def _restore_m4(code, bits):
    """m as fp32, from what `_load_m4_at` read."""
    return _restore_root(code, bits.to(tl.int32))


@triton.jit
def _store_m4(addr, scale_addr, m, thresholds, start, left, CHUNK: tl.constexpr, VEC: tl.constexpr,
             FULL: tl.constexpr):  # fmt: skip
    m = tl.reshape(m, [CHUNK // 64, 64])
    scale = round_up(tl.minimum(tl.max(tl.abs(m), axis=1, keep_dims=True), BF16_MAX))
    _store_word(scale_addr, scale.to(tl.int32, bitcast=True) >> 16, start, left, CHUNK, FULL)
    y = tl.abs(m) * reciprocal(tl.maximum(scale, TINY)) * 49.0
    low, lanes = tl.minimum(round_down(root(y)), ROUND + 6.0) - ROUND, _lanes(thresholds, m.shape)
    code = low + tl.where(y >= low * (low + 2.0 * lanes) + lanes, 1.0, 0.0)
    code = tl.where(y >= 0.5, code, 0.0)
    _store_codes(addr, with_sign(code, m) + ROUND, start, left, CHUNK, VEC, FULL)


@triton.jit
def _load_v4(addr, scale_addr, start, left, CHUNK: tl.constexpr, VEC: tl.constexpr, FULL: tl.constexpr):
    """v of lattice4 as fp32 [CHUNK / 32, 32], and the groups' words, int32 [CHUNK / 64, 1]."""
    code = _number(_load_codes(addr, start, left, CHUNK, VEC, FULL))
    word = _load_word(scale_addr, start, left, CHUNK, FULL)
    octaves = (8 >> (word & 3)).to(tl.float32) * 0.25  # of v per code
    v = tl.where(
        code > 0.0, tl.maximum(exp2(code * octaves + ((word >> 2).to(tl.float32) * 0.25 - 15.0 * octaves)), TINY), 0.0
    )
    return tl.reshape(v, [CHUNK // 32, 32]), word


@triton.jit
def _finer(k, top, high, low, kept, FINER: tl.constexpr):
    """Chooses lattice FINER for groups without a finer one (k == 0), if the lattice covers their range."""
    UNIT: tl.constexpr = 8.0 / 2.0**FINER
    above = tl.ceil(high / UNIT - _SLACK) * UNIT
    fits = (k == 0) & (above - low <= tl.where(kept < FINER, _LIMIT_FINER, _LIMIT) * UNIT)
    return tl.where(fits, FINER, k), tl.where(fits, above, top)


@triton.jit
def _store_v4(addr, scale_addr, s, word, thresholds, start, left, CHUNK: tl.constexpr, VEC: tl.constexpr,
             FULL: tl.constexpr):  # fmt: skip
    """Stores v by its root s; `word` comes from `_load_v4`."""
    s = tl.reshape(s, [CHUNK // 64, 64])
    exponent = log2(tl.maximum(s, TINY))  # of a positive root it is at least -75
    high = tl.minimum(tl.max(exponent, axis=1, keep_dims=True) * 8.0, _LARGEST)
    low = tl.minimum(tl.min(tl.where(exponent > _ZERO, exponent, 250.0), axis=1, keep_dims=True) * 8.0, _LARGEST)
    kept = word & 3
    k, top = _finer(kept * 0, tl.ceil(high * 0.125 - _SLACK) * 8.0, high, low, kept, 3)
    k, top = _finer(k, top, high, low, kept, 2)
    k, top = _finer(k, top, high, low, kept, 1)
    some = high > _ZERO * 8.0
    _store_word(scale_addr, tl.where(some, top.to(tl.int32) * 4 + k, 0), start, left, CHUNK, FULL)
    per_unit = (1 << k).to(tl.float32) * 0.125
    # Where the threshold lies between the v of two codes, on their logarithm.
    up = log2(1.0 + _lanes(thresholds, s.shape) * (exp2((8 >> k).to(tl.float32) * 0.25) - 1.0))
    code = round_down(exponent * (8.0 * per_unit) + (16.0 - top * per_unit) - up * (4.0 * per_unit))
    code = tl.minimum(tl.maximum(code, ROUND + 1.0), ROUND + 15.0)
    _store_codes(addr, tl.where(exponent > _ZERO, code, ROUND), start, left, CHUNK, VEC, FULL)


# -- all codecs, and weights ----------------------------------------------------------------------------------------


@triton.jit
def expand_m(code, CODEC: tl.constexpr):
    """Codes of m -> m / scale."""
    if CODEC == "softsign8":
        m = code * reciprocal(254.0 - tl.abs(code))
    else:  # root8m
        x = code * (1.0 / 127)
        m = with_sign(x * x * x * x, code)
    return m


@triton.jit
def load_m_codes(addr, scale_addr, start, tile, inside, CODEC: tl.constexpr, VEC: tl.constexpr):
    """(m as stored, bits of its scales) at any positions."""
    bits = 0
    if CODEC == "fp32":
        code = load_tile(addr, start, tile, inside, tl.float32, VEC, False)
    elif CODEC == "bf16":
        code = load_tile(addr, start, tile, inside, tl.bfloat16, VEC, False)
    elif CODEC == "root4":
        code, bits = _load_m4_at(addr, scale_addr, start, tile, inside)
    else:
        code = load_tile(addr, start, tile, inside, tl.int8, VEC, False)
        group = ((start % 32).to(tl.int32) + tile) // 32  # in 32 bits if the tile is
        bits = tl.load((scale_addr + start // 32 * 2).to(tl.pointer_type(tl.int16)) + group, mask=inside, other=0)
    return code, bits


@triton.jit
def restore_m(code, bits, CODEC: tl.constexpr):
    """m as fp32, from `load_m_codes`'s results."""
    if CODEC == "fp32" or CODEC == "bf16":
        m = code.to(tl.float32)
    elif CODEC == "root4":
        m = _restore_m4(code, bits)
    else:
        m = expand_m(code.to(tl.float32), CODEC) * (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return m


@triton.jit
def load_scaled_m(addr, scale_addr, start, tile, inside, groups, left, CODEC: tl.constexpr, VEC: tl.constexpr,
                  FULL: tl.constexpr):  # fmt: skip
    """(m / scale as fp32, scale); the scale is 1 for fp32, bf16 and root4."""
    scale = 1.0
    if CODEC == "fp32":
        m = load_tile(addr, start, tile, inside, tl.float32, VEC, FULL)
    elif CODEC == "bf16":
        m = load_numbers(addr, start, tile, inside, tl.bfloat16, VEC, FULL)
    elif CODEC == "root4":
        m = _load_m4(addr, scale_addr, start, left, tile.shape[0] * 32, VEC, FULL)
    else:
        m = expand_m(signed_numbers(load_tile(addr, start, tile, inside, tl.int8, VEC, FULL)), CODEC)
        scale = load_scale(scale_addr, start, groups, left, FULL)
    return m, scale


@triton.jit
def load_m(addr, scale_addr, start, tile, inside, groups, left, CODEC: tl.constexpr, VEC: tl.constexpr,
           FULL: tl.constexpr):  # fmt: skip
    """m as fp32."""
    m, scale = load_scaled_m(addr, scale_addr, start, tile, inside, groups, left, CODEC, VEC, FULL)
    return m * scale


@triton.jit
def store_m(addr, scale_addr, m, thresholds, start, tile, inside, groups, left, CODEC: tl.constexpr,
            VEC: tl.constexpr, FULL: tl.constexpr):  # fmt: skip
    """Stores m, rounded to nearest; 4-bit m by thresholds, because most steps of an average would round to nothing."""
    if CODEC == "fp32":
        store_tile(addr, m, start, tile, inside, tl.float32, VEC, FULL)
    elif CODEC == "bf16":
        m = tl.minimum(tl.maximum(m, -BF16_MAX), BF16_MAX)
        store_tile(addr, bf16_bits(m), start, tile, inside, tl.int16, VEC, FULL)
    elif CODEC == "root4":
        _store_m4(addr, scale_addr, m, thresholds, start, left, tile.shape[0] * 32, VEC, FULL)
    else:
        scale = round_up(tl.minimum(tl.max(tl.abs(m), axis=-1, keep_dims=True), BF16_MAX))
        store_scale(scale_addr, scale, start, groups, left, FULL)
        x = m * reciprocal(tl.maximum(scale, TINY))
        if CODEC == "softsign8":  # of slightly more than 1 it is slightly more than 127, which rounds to that
            code = x * reciprocal(tl.abs(x) * (1.0 / 254) + (1.0 / 254)) + ROUND
        else:  # root8m
            code = with_sign(tl.sqrt(tl.sqrt(tl.minimum(tl.abs(x), 1.0))) * 127.0, m) + ROUND
        store_tile(addr, low_byte(code), start, tile, inside, tl.int8, VEC, FULL)


@triton.jit
def load_v_codes(addr, scale_addr, start, tile, inside, groups, left, CODEC: tl.constexpr, VEC: tl.constexpr,
                 FULL: tl.constexpr):  # fmt: skip
    """(v as fp32, or codes of 8-bit v; what groups share: scales of 8 bits, words of 4 bits, else 0)."""
    scale = 0.0
    if CODEC == "fp32":
        v = load_tile(addr, start, tile, inside, tl.float32, VEC, FULL)
    elif CODEC == "bf16":
        v = load_numbers(addr, start, tile, inside, tl.bfloat16, VEC, FULL)
    elif CODEC == "lattice4":
        v, scale = _load_v4(addr, scale_addr, start, left, tile.shape[0] * 32, VEC, FULL)
    else:
        v = load_tile(addr, start, tile, inside, tl.int8, VEC, FULL)
        scale = load_scale(scale_addr, start, groups, left, FULL)
    return v, scale


@triton.jit
def restore_v(v, scale, CODEC: tl.constexpr):
    """v as fp32, from `load_v_codes`'s results."""
    if CODEC == "sqrt8":
        s = unsigned_times(v, scale * (1.0 / 255))
        v = s * s
    elif CODEC == "root8v":
        x = unsigned_times(v, 1.0 / 255 + scale * 0.0)
        s = x * x * x * x * scale
        v = tl.where(x > 0.0, tl.maximum(s * s, TINY), 0.0)
    return v


@triton.jit
def average_v(v, scale, g, b2, w2, CODEC: tl.constexpr):
    """b2 v + w2 g^2, from `load_v_codes`'s results."""
    if CODEC == "sqrt8":
        s, part = unsigned_times(v, scale * (root(b2) * (1.0 / 255))), g * root(w2)
        new = s * s + part * part
    else:
        new = restore_v(v, scale, CODEC) * b2 + w2 * g * g
    return new


@triton.jit
def load_v(addr, scale_addr, start, tile, inside, groups, left, CODEC: tl.constexpr, VEC: tl.constexpr,
           FULL: tl.constexpr):  # fmt: skip
    """(v as fp32, what groups share as in `load_v_codes`)."""
    v, scale = load_v_codes(addr, scale_addr, start, tile, inside, groups, left, CODEC, VEC, FULL)
    return restore_v(v, scale, CODEC), scale


@triton.jit
def _eighth(x):
    square = x * x
    return square * square * (square * square)


@triton.jit
def lanes_like(tile):
    """Positions of a tile's elements in their groups of 32, to load thresholds by. A tile [n, 32] gets all of its own
    shape, so that the loads have its layout; [1, n, 32] gets [1, 1, 32], whose loads stay narrow."""
    lanes = tl.arange(0, 32)[None, :]
    return lanes[None, :, :] if len(tile.shape) == 3 else tl.broadcast_to(lanes, tile.shape)


@triton.jit
def _v_codes(s, scale, thresholds, CODEC: tl.constexpr):
    """s = sqrt(v) -> codes + ROUND. A fraction of at least the threshold rounds up, and a positive s is never 0."""
    inverse = reciprocal(tl.maximum(scale, _LEAST_ROOT))
    lane = lanes_like(s)
    if CODEC == "sqrt8":
        x = share_of(s, inverse)
        code = tl.maximum(floor_code(x), ceil_code(x))  # ceil(x) is 1, or 0 for 0
        low = code - ROUND
        # rounds up if x^2 >= (low^2 + threshold (2 low + 1)) / 255^2
        slope, offset = tl.load(thresholds + _SLOPES + lane), tl.load(thresholds + _OFFSETS + lane)
        between = low * (low * (1.0 / 65025) + slope) + offset
        code += tl.where(x * x >= between, 1.0, 0.0)
    else:  # root8v
        threshold = tl.load(thresholds + lane)
        x = tl.sqrt(tl.sqrt(tl.minimum(s * inverse, 1.0))) * 255.0
        low = tl.floor(x)
        below = _eighth(low)
        code = low + tl.where(_eighth(x) - below >= threshold * (_eighth(low + 1.0) - below), 1.0, 0.0)
        code = tl.maximum(tl.minimum(code, 255.0), tl.where(s > 0.0, 1.0, 0.0)) + ROUND
    return code


@triton.jit
def store_v(addr, scale_addr, v, s, scale_old, thresholds, start, tile, inside, groups, left, CODEC: tl.constexpr,
            VEC: tl.constexpr, FULL: tl.constexpr):  # fmt: skip
    """Stores v; s is its root, `scale_old` what `load_v_codes` returned."""
    if CODEC == "fp32":
        store_tile(addr, v, start, tile, inside, tl.float32, VEC, FULL)
    elif CODEC == "lattice4":
        _store_v4(addr, scale_addr, s, scale_old, thresholds, start, left, tile.shape[0] * 32, VEC, FULL)
    elif CODEC == "bf16":
        threshold = tl.load(thresholds + lanes_like(v))
        bits = tl.minimum(v, BF16_MAX).to(tl.int32, bitcast=True) + ((1.0 - threshold) * 65536.0).to(tl.int32)
        store_tile(addr, bits >> 16, start, tile, inside, tl.int16, VEC, FULL)
    else:
        top = round_up(tl.minimum(tl.max(s, axis=-1, keep_dims=True), _SCALE_MAX))
        keep = (top <= scale_old) & (top >= _KEEP_SCALE * scale_old)
        scale = tl.where(keep, scale_old, top)
        store_scale(scale_addr, scale, start, groups, left, FULL)
        code = low_byte(_v_codes(s, scale, thresholds, CODEC))
        store_tile(addr, code, start, tile, inside, tl.int8, VEC, FULL)


@triton.jit
def _random_bits(index, start):
    """16 pseudo-random bits per element, those of `baoc.optim.weights.random_bits`; all arithmetic wraps."""
    h = index * -1640531535 + start
    h = h ^ ((h >> 16) & 0xFFFF)
    h = h * 0x7FEB352D
    h = h ^ ((h >> 15) & 0x1FFFF)
    h = h * -2073254261
    h = h ^ ((h >> 16) & 0xFFFF)
    return h & 0xFFFF


@triton.jit
def load_param(addr, correction_addr, start, tile, inside, WEIGHTS: tl.constexpr, PARAM: tl.constexpr,
               VEC: tl.constexpr, FULL: tl.constexpr):  # fmt: skip
    """(weight as fp32, bits as stored for `store_param`: of split8, else 0)."""
    stored = 0
    if WEIGHTS == "split8":
        bits = load_tile(addr, start, tile, inside, tl.int16, VEC, FULL)
        near = widened(bits)
        correction = load_tile(correction_addr, start, tile, inside, tl.int8, VEC, FULL)
        power = (near.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
        p = near + signed_numbers(correction) * (2.0**-8 / 127) * power
        stored = (bits.to(tl.int32) << 8) | (correction.to(tl.int32) & 0xFF)
    else:
        p = load_numbers(addr, start, tile, inside, PARAM, VEC, FULL)
    return p, stored


@triton.jit
def store_param(addr, correction_addr, p, old, stored, thresholds, lane, start, tile, inside, WEIGHTS: tl.constexpr,
                PARAM: tl.constexpr, VEC: tl.constexpr, FULL: tl.constexpr, MOVED: tl.constexpr):  # fmt: skip
    """Stores weight p; `old` and `stored` come from `load_param`, `lane` are element positions modulo 32. MOVED
    promises that every weight changes. For bf16_sr, `correction_addr` is the tensor's seed."""
    if WEIGHTS == "split8":
        bits, near = narrowed(p)
        # 2^e is 2^8 half units in the last place of a bf16, and the rest is at most one of them. A number too small to
        # have a 2^e has no correction either. The code is rounded by thresholds, so that its mean over steps is exact;
        # to nearest, a step of less than half a code would be lost every time.
        rest = (p - near) * twice_inverse_power(near)
        fine = tl.load(tl.multiple_of(thresholds + _FINE, 4 * VEC) + lane)  # no wider than the other loads
        fine = tl.broadcast_to(fine, p.shape)
        code = floor_bytes(rest, tl.full(p.shape, 2.0**7 * 127, tl.float32), fine)
        if not MOVED:
            # An unchanged weight keeps its bits: merging has rounded, and some numbers can be split in two ways.
            same = p == old
            bits = tl.where(same, (stored >> 8).to(tl.int16), bits)
            code = tl.where(same, stored.to(tl.int8), code)
        store_tile(addr, bits, start, tile, inside, tl.int16, VEC, FULL)
        store_tile(correction_addr, code, start, tile, inside, tl.int8, VEC, FULL)
    elif WEIGHTS == "bf16_sr":
        bits = p.to(tl.int32, bitcast=True)
        step = tl.load(thresholds.to(tl.pointer_type(tl.int32)) + PHASE_AT)
        noise = _random_bits((start + tile).to(tl.int32), correction_addr.to(tl.int32) + step)
        rounded = ((bits + noise) & -65536).to(tl.float32, bitcast=True)
        rounded = tl.minimum(tl.maximum(rounded, -BF16_MAX), BF16_MAX)
        near = bf16_bits(tl.where(tl.abs(p) < float("inf"), rounded, p))
        store_tile(addr, near, start, tile, inside, tl.int16, VEC, FULL)
    elif PARAM.primitive_bitwidth == 16:
        store_tile(addr, bf16_bits(p), start, tile, inside, tl.int16, VEC, FULL)
    else:
        store_tile(addr, p, start, tile, inside, PARAM, VEC, FULL)
