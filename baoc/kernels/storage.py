"""Loads and stores of the fused step: the codecs of `baoc.codecs`, and weights with an int8 correction, as Triton code.

Every access of a tile uses one layout (VEC elements per thread), so promises of alignment are capped at VEC elements:
with the full 16 bytes, Triton would load 16 int8 per thread and shuffle them through shared memory.
"""

import triton
import triton.language as tl

_TINY = tl.constexpr(1.1754943508222875e-38)  # least normal fp32
_BF16_MAX = tl.constexpr(3.3895313892515355e38)
_SCALE_MAX = tl.constexpr(1.83e19)  # of sqrt(v): its square is finite
_KEEP_SCALE = tl.constexpr(0.87)
_ROUND = tl.constexpr(12582912.0)  # 1.5 * 2^23: adding and subtracting it rounds to nearest even
_M_STEP = tl.constexpr(16.0 / 126)  # octaves per code
_V_STEP = tl.constexpr(20.0 / 254)
_M_ZERO = tl.constexpr(2.0**-17)  # log8m: what is smaller becomes 0
# Columns of the table's addresses.
_PARAM = tl.constexpr(0)
_M = tl.constexpr(1)
_M_SCALE = tl.constexpr(2)
_V = tl.constexpr(3)
_V_SCALE = tl.constexpr(4)
_CORRECTION = tl.constexpr(5)


@triton.jit
def tile_of(CHUNK: tl.constexpr):
    """Element index [CHUNK / 32, 32] and group index [CHUNK / 32, 1] in the chunk."""
    groups = tl.arange(0, CHUNK // 32)[:, None]
    return groups * 32 + tl.arange(0, 32)[None, :], groups


@triton.jit
def _pointer(addr, start, DTYPE: tl.constexpr, VEC: tl.constexpr):
    """Address of element `start` as a pointer, with the alignment that the table has checked."""
    BYTES: tl.constexpr = DTYPE.primitive_bitwidth // 8
    return tl.multiple_of((addr + start * BYTES).to(tl.pointer_type(DTYPE)), BYTES * VEC)


@triton.jit
def load_tile(addr, start, tile, inside, DTYPE: tl.constexpr, VEC: tl.constexpr, FULL: tl.constexpr):
    pointer = _pointer(addr, start, DTYPE, VEC) + tile
    if FULL:
        values = tl.load(pointer)
    else:
        values = tl.load(pointer, mask=inside, other=0)
    return values


@triton.jit
def _store_tile(addr, values, start, tile, inside, DTYPE: tl.constexpr, VEC: tl.constexpr, FULL: tl.constexpr):
    pointer = _pointer(addr, start, DTYPE, VEC) + tile
    if FULL:
        tl.store(pointer, values.to(DTYPE))
    else:
        tl.store(pointer, values.to(DTYPE), mask=inside)


@triton.jit
def _scale_pointer(addr, start, groups):
    return (addr + start // 16).to(tl.pointer_type(tl.int16)) + groups


@triton.jit
def _load_scale(addr, start, groups, left, FULL: tl.constexpr):
    """bf16 scales as fp32 [groups, 1]."""
    pointer = _scale_pointer(addr, start, groups)
    if FULL:
        bits = tl.load(pointer)
    else:
        bits = tl.load(pointer, mask=groups * 32 < left, other=0)
    return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def _store_scale(addr, scale, start, groups, left, FULL: tl.constexpr):
    bits = (scale.to(tl.int32, bitcast=True) >> 16).to(tl.int16)
    pointer = _scale_pointer(addr, start, groups)
    if FULL:
        tl.store(pointer, bits)
    else:
        tl.store(pointer, bits, mask=groups * 32 < left)


@triton.jit
def _round_up(x):
    """Non-negative fp32 -> the least bf16 that is not smaller, as fp32."""
    return ((x.to(tl.int32, bitcast=True) + 0xFFFF) & -65536).to(tl.float32, bitcast=True)


@triton.jit
def load_m(addrs, start, tile, inside, groups, left, CODEC: tl.constexpr, VEC: tl.constexpr, FULL: tl.constexpr):
    addr = tl.load(addrs + _M)
    if CODEC == "fp32":
        m = load_tile(addr, start, tile, inside, tl.float32, VEC, FULL)
    elif CODEC == "bf16":
        m = load_tile(addr, start, tile, inside, tl.bfloat16, VEC, FULL).to(tl.float32)
    else:
        code = load_tile(addr, start, tile, inside, tl.int8, VEC, FULL).to(tl.float32)
        scale = _load_scale(tl.load(addrs + _M_SCALE), start, groups, left, FULL)
        if CODEC == "softsign8":
            m = code / (254.0 - tl.abs(code)) * scale
        else:
            size = tl.exp2((tl.abs(code) - 127.0) * _M_STEP)
            m = tl.where(code == 0.0, 0.0, tl.where(code < 0.0, -size, size)) * scale
    return m


@triton.jit
def store_m(
    addrs, m, start, tile, inside, groups, left, CODEC: tl.constexpr, VEC: tl.constexpr, FULL: tl.constexpr
):
    addr = tl.load(addrs + _M)
    if CODEC == "fp32":
        _store_tile(addr, m, start, tile, inside, tl.float32, VEC, FULL)
    elif CODEC == "bf16":
        m = tl.minimum(tl.maximum(m, -_BF16_MAX), _BF16_MAX)
        _store_tile(addr, m, start, tile, inside, tl.bfloat16, VEC, FULL)
    else:
        scale = _round_up(tl.minimum(tl.max(tl.abs(m), axis=1, keep_dims=True), _BF16_MAX))
        _store_scale(tl.load(addrs + _M_SCALE), scale, start, groups, left, FULL)
        x = m * (1.0 / tl.maximum(scale, _TINY))
        x = tl.minimum(tl.maximum(x, -1.0), 1.0)
        size = tl.abs(x)
        if CODEC == "softsign8":
            code = x * 254.0 / (1.0 + size) + _ROUND - _ROUND
        else:
            code = tl.log2(tl.maximum(size, _TINY)) * (1.0 / _M_STEP) + 127.0 + _ROUND - _ROUND
            code = tl.minimum(tl.maximum(code, 1.0), 127.0)
            code = tl.where(size < _M_ZERO, 0.0, tl.where(x < 0.0, -code, code))
        _store_tile(addr, code, start, tile, inside, tl.int8, VEC, FULL)


@triton.jit
def load_v(addrs, start, tile, inside, groups, left, CODEC: tl.constexpr, VEC: tl.constexpr, FULL: tl.constexpr):
    """v, and the scales of its groups (0 where it has none)."""
    addr = tl.load(addrs + _V)
    scale = 0.0
    if CODEC == "fp32":
        v = load_tile(addr, start, tile, inside, tl.float32, VEC, FULL)
    elif CODEC == "bf16":
        v = load_tile(addr, start, tile, inside, tl.bfloat16, VEC, FULL).to(tl.float32)
    else:
        code = load_tile(addr, start, tile, inside, tl.uint8, VEC, FULL).to(tl.float32)
        scale = _load_scale(tl.load(addrs + _V_SCALE), start, groups, left, FULL)
        if CODEC == "sqrt8":
            s = code * (scale * (1.0 / 255))
        else:
            s = tl.where(code == 0.0, 0.0, tl.exp2((code - 255.0) * _V_STEP)) * scale
        v = s * s
    return v, scale


@triton.jit
def _v_codes(s, scale, threshold, CODEC: tl.constexpr):
    """sqrt(v) -> codes; a fraction of at least the threshold rounds up, and a positive one is never 0."""
    x = tl.minimum(s * (1.0 / tl.maximum(scale, _TINY)), 1.0)
    if CODEC == "sqrt8":
        x = x * 255.0
        low = tl.floor(x)
        code = low + tl.where(x * x - low * low >= threshold * (2.0 * low + 1.0), 1.0, 0.0)
    else:
        code = tl.floor(tl.log2(tl.maximum(x, _TINY)) * (1.0 / _V_STEP) + 255.0 + (1.0 - threshold))
    return tl.where(s > 0.0, tl.minimum(tl.maximum(code, 1.0), 255.0), 0.0)


@triton.jit
def store_v(
    addrs, v, s, scale_old, thresholds, start, tile, inside, groups, left,
    CODEC: tl.constexpr, VEC: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """Stores v, whose root is s. The thresholds are those of the codec: of the logarithm for log8v."""
    addr = tl.load(addrs + _V)
    if CODEC == "fp32":
        _store_tile(addr, v, start, tile, inside, tl.float32, VEC, FULL)
    else:
        threshold = tl.load(thresholds + tl.arange(0, 32))[None, :]
        if CODEC == "bf16":
            bits = tl.minimum(v, _BF16_MAX).to(tl.int32, bitcast=True) + ((1.0 - threshold) * 65536.0).to(tl.int32)
            _store_tile(addr, bits >> 16, start, tile, inside, tl.int16, VEC, FULL)
        else:
            top = _round_up(tl.minimum(tl.max(s, axis=1, keep_dims=True), _SCALE_MAX))
            keep = (top <= scale_old) & (top >= _KEEP_SCALE * scale_old)
            scale = tl.where(keep, scale_old, top)
            _store_scale(tl.load(addrs + _V_SCALE), scale, start, groups, left, FULL)
            _store_tile(addr, _v_codes(s, scale, threshold, CODEC), start, tile, inside, tl.uint8, VEC, FULL)


@triton.jit
def _units(bits):
    """bf16 bits [int32] -> 2^e of the number, which is 2^8 half units in its last place, and 2^-e (METHODS 3)."""
    exponent = tl.minimum(tl.maximum((bits >> 7) & 0xFF, 1), 253)
    unit = (exponent << 23).to(tl.float32, bitcast=True)
    inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    return unit, inverse


@triton.jit
def load_param(
    addrs, start, tile, inside, WEIGHTS: tl.constexpr, PARAM: tl.constexpr, VEC: tl.constexpr, FULL: tl.constexpr
):
    """The weight as fp32."""
    addr = tl.load(addrs + _PARAM)
    if WEIGHTS == "split8":
        bits = load_tile(addr, start, tile, inside, tl.int16, VEC, FULL).to(tl.int32)
        unit, _ = _units(bits)
        correction = load_tile(tl.load(addrs + _CORRECTION), start, tile, inside, tl.int8, VEC, FULL).to(tl.float32)
        p = (bits << 16).to(tl.float32, bitcast=True) + correction * (unit * (2.0**-8 / 127))
    else:
        p = load_tile(addr, start, tile, inside, PARAM, VEC, FULL).to(tl.float32)
    return p


@triton.jit
def store_param(
    addrs, p, start, tile, inside, WEIGHTS: tl.constexpr, PARAM: tl.constexpr, VEC: tl.constexpr, FULL: tl.constexpr
):
    addr = tl.load(addrs + _PARAM)
    if WEIGHTS == "split8":
        near = p.to(tl.bfloat16)
        bits = near.to(tl.int16, bitcast=True)
        _, inverse = _units(bits.to(tl.int32))
        rest = (p - near.to(tl.float32)) * 256.0 * inverse
        rest = tl.minimum(tl.maximum(rest, -1.0), 1.0) * 127.0
        code = tl.where(rest < 0.0, -tl.floor(0.5 - rest), tl.floor(rest + 0.5))
        _store_tile(addr, bits, start, tile, inside, tl.int16, VEC, FULL)
        _store_tile(tl.load(addrs + _CORRECTION), code, start, tile, inside, tl.int8, VEC, FULL)
    else:
        _store_tile(addr, p, start, tile, inside, PARAM, VEC, FULL)
