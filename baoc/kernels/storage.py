"""How the fused step keeps states and weights: codecs as in `baoc.codecs`, weights as in `baoc.kernels.weights`."""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportPossiblyUnboundVariable=false
# pyright: reportOperatorIssue=false, reportCallIssue=false, reportIndexIssue=false, reportRedeclaration=false
# Device code: Triton's compiler gives these names types that Python's annotations do not know.

import triton
import triton.language as tl

from baoc.kernels.device import (
    BF16_MAX,
    TINY,
    bf16_bits,
    exp2,
    load_scale,
    load_tile,
    log2,
    reciprocal,
    round_up,
    store_scale,
    store_tile,
    to_byte,
    with_sign,
)
from baoc.kernels.packed import load_m4, load_m4_at, load_v4, restore_m4, store_m4, store_v4

_LEAST_ROOT = tl.constexpr(1e-30)  # below every positive sqrt of an fp32; 255 times its reciprocal is finite
_SCALE_MAX = tl.constexpr(1.83e19)  # of sqrt(v): its square is finite
_KEEP_SCALE = tl.constexpr(0.87)
_M_STEP = tl.constexpr(16.0 / 126)  # octaves per code
_V_STEP = tl.constexpr(20.0 / 254)
_M_ZERO = tl.constexpr(2.0**-17)  # log8m: what is smaller becomes 0


@triton.jit
def _restore_m(code, scale, CODEC: tl.constexpr):
    """Codes of m and their scales -> m."""
    if CODEC == "softsign8":
        m = code * reciprocal(254.0 - tl.abs(code)) * scale
    elif CODEC == "root8m":
        root = code * (1.0 / 127)
        m = with_sign(root * root * root * root, code) * scale
    else:
        size = exp2((tl.abs(code) - 127.0) * _M_STEP)
        m = tl.where(code == 0.0, 0.0, with_sign(size, code)) * scale
    return m


@triton.jit
def load_m_codes(addr, scale_addr, start, tile, inside, CODEC: tl.constexpr, VEC: tl.constexpr):
    """m as it is stored, at any places, which need not be whole groups, and the bits of its scales."""
    bits = 0
    if CODEC == "fp32":
        code = load_tile(addr, start, tile, inside, tl.float32, VEC, False)
    elif CODEC == "bf16":
        code = load_tile(addr, start, tile, inside, tl.bfloat16, VEC, False)
    elif CODEC == "root4":
        code, bits = load_m4_at(addr, scale_addr, start, tile, inside)
    else:
        code = load_tile(addr, start, tile, inside, tl.int8, VEC, False)
        group = ((start % 32).to(tl.int32) + tile) // 32  # not in 64 bits if the tile is not
        bits = tl.load((scale_addr + start // 32 * 2).to(tl.pointer_type(tl.int16)) + group, mask=inside, other=0)
    return code, bits


@triton.jit
def restore_m(code, bits, CODEC: tl.constexpr):
    """What `load_m_codes` read, as fp32."""
    if CODEC == "fp32" or CODEC == "bf16":
        m = code.to(tl.float32)
    elif CODEC == "root4":
        m = restore_m4(code, bits)
    else:
        m = _restore_m(code.to(tl.float32), (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True), CODEC)
    return m


@triton.jit
def load_m(addr, scale_addr, start, tile, inside, groups, left, CODEC: tl.constexpr, VEC: tl.constexpr,
           FULL: tl.constexpr):  # fmt: skip
    """m as fp32."""
    if CODEC == "fp32":
        m = load_tile(addr, start, tile, inside, tl.float32, VEC, FULL)
    elif CODEC == "bf16":
        m = load_tile(addr, start, tile, inside, tl.bfloat16, VEC, FULL).to(tl.float32)
    elif CODEC == "root4":
        m = load_m4(addr, scale_addr, start, left, tile.shape[0] * 32, VEC, FULL)
    else:
        code = load_tile(addr, start, tile, inside, tl.int8, VEC, FULL).to(tl.float32)
        m = _restore_m(code, load_scale(scale_addr, start, groups, left, FULL), CODEC)
    return m


@triton.jit
def store_m(addr, scale_addr, m, thresholds, start, tile, inside, groups, left, CODEC: tl.constexpr,
            VEC: tl.constexpr, FULL: tl.constexpr):  # fmt: skip
    """To nearest, but for 4 bits, which a step of an average would mostly be lost in."""
    if CODEC == "fp32":
        store_tile(addr, m, start, tile, inside, tl.float32, VEC, FULL)
    elif CODEC == "bf16":
        m = tl.minimum(tl.maximum(m, -BF16_MAX), BF16_MAX)
        store_tile(addr, bf16_bits(m), start, tile, inside, tl.int16, VEC, FULL)
    elif CODEC == "root4":
        store_m4(addr, scale_addr, m, thresholds, start, left, tile.shape[0] * 32, VEC, FULL)
    else:
        scale = round_up(tl.minimum(tl.max(tl.abs(m), axis=1, keep_dims=True), BF16_MAX))
        store_scale(scale_addr, scale, start, groups, left, FULL)
        size = tl.minimum(tl.abs(m) * reciprocal(tl.maximum(scale, TINY)), 1.0)
        if CODEC == "softsign8":
            code = size * reciprocal(size * (1.0 / 254) + (1.0 / 254))
        elif CODEC == "root8m":
            code = tl.sqrt(tl.sqrt(size)) * 127.0
        else:
            code = tl.maximum(log2(tl.maximum(size, TINY)) * (1.0 / _M_STEP) + 127.0, 1.0)
            code = tl.where(size < _M_ZERO, 0.0, code)
        store_tile(addr, to_byte(with_sign(code, m)), start, tile, inside, tl.int8, VEC, FULL)


@triton.jit
def load_v(addr, scale_addr, start, tile, inside, groups, left, CODEC: tl.constexpr, VEC: tl.constexpr,
           FULL: tl.constexpr):  # fmt: skip
    """v as fp32, and what its groups share (0 where they share nothing)."""
    scale = 0.0
    if CODEC == "fp32":
        v = load_tile(addr, start, tile, inside, tl.float32, VEC, FULL)
    elif CODEC == "bf16":
        v = load_tile(addr, start, tile, inside, tl.bfloat16, VEC, FULL).to(tl.float32)
    elif CODEC == "lattice4":
        v, scale = load_v4(addr, scale_addr, start, left, tile.shape[0] * 32, VEC, FULL)
    else:
        code = load_tile(addr, start, tile, inside, tl.uint8, VEC, FULL).to(tl.float32)
        scale = load_scale(scale_addr, start, groups, left, FULL)
        if CODEC == "sqrt8":
            s = code * (scale * (1.0 / 255))
        elif CODEC == "root8v":
            root = code * (1.0 / 255)
            s = root * root * root * root * scale
        else:
            s = tl.where(code == 0.0, 0.0, exp2((code - 255.0) * _V_STEP)) * scale
        v = s * s
        if CODEC == "root8v":
            v = tl.where(code > 0.0, tl.maximum(v, TINY), 0.0)
    return v, scale


@triton.jit
def _eighth(x):
    square = x * x
    return square * square * (square * square)


@triton.jit
def _v_codes(s, scale, threshold, CODEC: tl.constexpr):
    """sqrt(v) -> codes; a fraction of at least the threshold rounds up, and a positive one is never 0."""
    inverse = reciprocal(tl.maximum(scale, _LEAST_ROOT))
    if CODEC == "sqrt8":
        x = tl.minimum(s * (255.0 * inverse), 255.0)
        low = tl.floor(x)
        code = low + tl.where(x * x - low * low >= threshold * (2.0 * low + 1.0), 1.0, 0.0)
    elif CODEC == "root8v":
        x = tl.sqrt(tl.sqrt(tl.minimum(s * inverse, 1.0))) * 255.0
        low = tl.floor(x)
        below = _eighth(low)
        code = low + tl.where(_eighth(x) - below >= threshold * (_eighth(low + 1.0) - below), 1.0, 0.0)
        code = tl.minimum(code, 255.0)
    else:
        x = tl.minimum(s * inverse, 1.0)
        code = tl.floor(log2(tl.maximum(x, TINY)) * (1.0 / _V_STEP) + 255.0 + (1.0 - threshold))
        code = tl.where(s > 0.0, tl.minimum(code, 255.0), 0.0)
    return tl.maximum(code, tl.where(s > 0.0, 1.0, 0.0))


@triton.jit
def store_v(addr, scale_addr, v, s, scale_old, thresholds, start, tile, inside, groups, left, CODEC: tl.constexpr,
            VEC: tl.constexpr, FULL: tl.constexpr):  # fmt: skip
    """Stores v, whose root is s. Of the thresholds, the second 32 are those of the logarithm, for log8v."""
    if CODEC == "fp32":
        store_tile(addr, v, start, tile, inside, tl.float32, VEC, FULL)
    elif CODEC == "lattice4":
        store_v4(addr, scale_addr, s, scale_old, thresholds, start, left, tile.shape[0] * 32, VEC, FULL)
    else:
        threshold = tl.load(thresholds + (32 if CODEC == "log8v" else 0) + tl.arange(0, 32))[None, :]
        if CODEC == "bf16":
            bits = tl.minimum(v, BF16_MAX).to(tl.int32, bitcast=True) + ((1.0 - threshold) * 65536.0).to(tl.int32)
            store_tile(addr, bits >> 16, start, tile, inside, tl.int16, VEC, FULL)
        else:
            top = round_up(tl.minimum(tl.max(s, axis=1, keep_dims=True), _SCALE_MAX))
            keep = (top <= scale_old) & (top >= _KEEP_SCALE * scale_old)
            scale = tl.where(keep, scale_old, top)
            store_scale(scale_addr, scale, start, groups, left, FULL)
            store_tile(addr, to_byte(_v_codes(s, scale, threshold, CODEC)), start, tile, inside, tl.int8, VEC, FULL)


@triton.jit
def _power(x):
    """2^e of a number, and of zero and subnormal ones the least normal: 2^8 half units in a bf16's last place."""
    return tl.maximum((x.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True), TINY)


@triton.jit
def _random_bits(index, start):
    """16 random bits by element: `baoc.kernels.weights.random_bits`; all arithmetic wraps."""
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
    """The weight as fp32, and for split8 also as it is stored, for `store_param`.

    Weights rounded at random have their seed in place of a correction's address.
    """
    stored = 0
    if WEIGHTS == "split8":
        bits = load_tile(addr, start, tile, inside, tl.int16, VEC, FULL).to(tl.int32)
        near = (bits << 16).to(tl.float32, bitcast=True)
        correction = load_tile(correction_addr, start, tile, inside, tl.int8, VEC, FULL).to(tl.int32)
        p = near + correction.to(tl.float32) * (2.0**-8 / 127) * _power(near)
        stored = (bits << 8) | (correction & 0xFF)
    elif WEIGHTS == "split16":
        bits = load_tile(addr, start, tile, inside, tl.int16, VEC, FULL).to(tl.int32) << 16
        low = load_tile(correction_addr, start, tile, inside, tl.int16, VEC, FULL).to(tl.int32)
        p = (bits + low).to(tl.float32, bitcast=True)
    else:
        p = load_tile(addr, start, tile, inside, PARAM, VEC, FULL).to(tl.float32)
    return p, stored


@triton.jit
def store_param(addr, correction_addr, p, old, stored, thresholds, lane, start, tile, inside, WEIGHTS: tl.constexpr,
                PARAM: tl.constexpr, VEC: tl.constexpr, FULL: tl.constexpr):  # fmt: skip
    """Stores weight p; `old` and `stored` are what `load_param` gave, `lane` the elements' places modulo 32."""
    if WEIGHTS == "split8":
        bits = bf16_bits(p).to(tl.int32)
        near = (bits << 16).to(tl.float32, bitcast=True)
        # 2^-e by its bits; the rest is at most 2^(e - 8), so no step overflows. To nearest, a step of less than half a
        # code would be lost every time; by thresholds the mean over steps is exact.
        inverse = (0x7F000000 - _power(near).to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)
        rest = (p - near) * inverse * (2.0**8 * 127)
        code = tl.minimum(tl.floor(rest + (1.0 - tl.load(thresholds + lane))), 127.0)
        # A weight that did not change stays as it is: merging has rounded, and some numbers can be split in two ways.
        same = p == old
        bits = tl.where(same, stored >> 8, bits)
        code = tl.where(same, stored.to(tl.int8), to_byte(code))
        store_tile(addr, bits.to(tl.int16), start, tile, inside, tl.int16, VEC, FULL)
        store_tile(correction_addr, code, start, tile, inside, tl.int8, VEC, FULL)
    elif WEIGHTS == "split16":  # rounded to nearest, halves up; the correction is the low half with its sign
        bits = p.to(tl.int32, bitcast=True)
        store_tile(addr, ((bits + 0x8000) >> 16).to(tl.int16), start, tile, inside, tl.int16, VEC, FULL)
        store_tile(correction_addr, ((bits << 16) >> 16).to(tl.int16), start, tile, inside, tl.int16, VEC, FULL)
    elif WEIGHTS == "bf16_sr":
        bits = p.to(tl.int32, bitcast=True)
        step = tl.load(thresholds.to(tl.pointer_type(tl.int32)) + 64)
        noise = _random_bits((start + tile).to(tl.int32), correction_addr.to(tl.int32) + step)
        rounded = ((bits + noise) & -65536).to(tl.float32, bitcast=True)
        rounded = tl.minimum(tl.maximum(rounded, -BF16_MAX), BF16_MAX)
        near = bf16_bits(tl.where(tl.abs(p) < float("inf"), rounded, p))
        store_tile(addr, near, start, tile, inside, tl.int16, VEC, FULL)
    elif PARAM.primitive_bitwidth == 16:
        store_tile(addr, bf16_bits(p), start, tile, inside, tl.int16, VEC, FULL)
    else:
        store_tile(addr, p, start, tile, inside, PARAM, VEC, FULL)
