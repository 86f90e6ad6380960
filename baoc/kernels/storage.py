"""Loads and stores of the fused step: the codecs of `baoc.codecs`, and weights with an int8 correction, as Triton code.

Every access of a tile uses one layout (VEC elements per thread), so promises of alignment are capped at VEC elements:
with the full 16 bytes, Triton would load 16 int8 per thread and shuffle them through shared memory.
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportPossiblyUnboundVariable=false
# pyright: reportOperatorIssue=false, reportCallIssue=false, reportIndexIssue=false, reportRedeclaration=false
# Device code: Triton's compiler gives these names types that Python's annotations do not know.

import os

import triton
import triton.language as tl

_TINY = tl.constexpr(1.1754943508222875e-38)  # least normal fp32
_LEAST_ROOT = tl.constexpr(1e-30)  # below every positive sqrt of an fp32; 255 times its reciprocal is finite
_BF16_MAX = tl.constexpr(3.3895313892515355e38)
_SCALE_MAX = tl.constexpr(1.83e19)  # of sqrt(v): its square is finite
_KEEP_SCALE = tl.constexpr(0.87)
_ROUND = tl.constexpr(12582912.0)  # 1.5 * 2^23: adding and subtracting it rounds to nearest even
_M_STEP = tl.constexpr(16.0 / 126)  # octaves per code
_V_STEP = tl.constexpr(20.0 / 254)
_M_ZERO = tl.constexpr(2.0**-17)  # log8m: what is smaller becomes 0

if os.environ.get("TRITON_INTERPRET") == "1":  # it knows no inline PTX, and cuts where it should round to bf16

    @triton.jit
    def reciprocal(x):
        return 1.0 / x

    @triton.jit
    def log2(x):
        return tl.log2(x)

    @triton.jit
    def exp2(x):
        return tl.exp2(x)

    @triton.jit
    def bf16_bits(x):
        bits = x.to(tl.int32, bitcast=True)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(tl.int16)

else:

    @triton.jit
    def reciprocal(x):
        """1 / x to one unit in the last place, in one instruction; Triton's `/` takes seven."""
        return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)

    @triton.jit
    def log2(x):
        """Of normal numbers; tl.log2 takes care of others at three times the price."""
        return tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)

    @triton.jit
    def exp2(x):
        return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)

    @triton.jit
    def bf16_bits(x):
        """Rounded to the nearest bf16, as int16."""
        return x.to(tl.bfloat16).to(tl.int16, bitcast=True)


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
    return tl.load(pointer) if FULL else tl.load(pointer, mask=inside, other=0)


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
    bits = tl.load(pointer) if FULL else tl.load(pointer, mask=groups * 32 < left, other=0)
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
def _byte(code):
    """Rounds a number in [-128, 255] to nearest even and keeps the low byte of that."""
    return (code + _ROUND).to(tl.int32, bitcast=True).to(tl.int8)


@triton.jit
def _with_sign(size, of):
    """A non-negative number with the sign of another."""
    sign = of.to(tl.int32, bitcast=True) & -2147483648
    return (size.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)


@triton.jit
def load_m(addr, scale_addr, start, tile, inside, groups, left, CODEC: tl.constexpr, VEC: tl.constexpr,
           FULL: tl.constexpr):  # fmt: skip
    """m as fp32."""
    if CODEC == "fp32":
        m = load_tile(addr, start, tile, inside, tl.float32, VEC, FULL)
    elif CODEC == "bf16":
        m = load_tile(addr, start, tile, inside, tl.bfloat16, VEC, FULL).to(tl.float32)
    else:
        code = load_tile(addr, start, tile, inside, tl.int8, VEC, FULL).to(tl.float32)
        scale = _load_scale(scale_addr, start, groups, left, FULL)
        if CODEC == "softsign8":
            m = code * reciprocal(254.0 - tl.abs(code)) * scale
        else:
            size = exp2((tl.abs(code) - 127.0) * _M_STEP)
            m = tl.where(code == 0.0, 0.0, _with_sign(size, code)) * scale
    return m


@triton.jit
def store_m(addr, scale_addr, m, start, tile, inside, groups, left, CODEC: tl.constexpr, VEC: tl.constexpr,
            FULL: tl.constexpr):  # fmt: skip
    if CODEC == "fp32":
        _store_tile(addr, m, start, tile, inside, tl.float32, VEC, FULL)
    elif CODEC == "bf16":
        m = tl.minimum(tl.maximum(m, -_BF16_MAX), _BF16_MAX)
        _store_tile(addr, bf16_bits(m), start, tile, inside, tl.int16, VEC, FULL)
    else:
        scale = _round_up(tl.minimum(tl.max(tl.abs(m), axis=1, keep_dims=True), _BF16_MAX))
        _store_scale(scale_addr, scale, start, groups, left, FULL)
        size = tl.minimum(tl.abs(m) * reciprocal(tl.maximum(scale, _TINY)), 1.0)
        if CODEC == "softsign8":
            code = size * reciprocal(size * (1.0 / 254) + (1.0 / 254))
        else:
            code = tl.maximum(log2(tl.maximum(size, _TINY)) * (1.0 / _M_STEP) + 127.0, 1.0)
            code = tl.where(size < _M_ZERO, 0.0, code)
        _store_tile(addr, _byte(_with_sign(code, m)), start, tile, inside, tl.int8, VEC, FULL)


@triton.jit
def load_v(addr, scale_addr, start, tile, inside, groups, left, CODEC: tl.constexpr, VEC: tl.constexpr,
           FULL: tl.constexpr):  # fmt: skip
    """v as fp32, and the scales of its groups (0 where it has none)."""
    scale = 0.0
    if CODEC == "fp32":
        v = load_tile(addr, start, tile, inside, tl.float32, VEC, FULL)
    elif CODEC == "bf16":
        v = load_tile(addr, start, tile, inside, tl.bfloat16, VEC, FULL).to(tl.float32)
    else:
        code = load_tile(addr, start, tile, inside, tl.uint8, VEC, FULL).to(tl.float32)
        scale = _load_scale(scale_addr, start, groups, left, FULL)
        if CODEC == "sqrt8":
            s = code * (scale * (1.0 / 255))
        else:
            s = tl.where(code == 0.0, 0.0, exp2((code - 255.0) * _V_STEP)) * scale
        v = s * s
    return v, scale


@triton.jit
def _v_codes(s, scale, threshold, CODEC: tl.constexpr):
    """sqrt(v) -> codes; a fraction of at least the threshold rounds up, and a positive one is never 0."""
    inverse = reciprocal(tl.maximum(scale, _LEAST_ROOT))
    if CODEC == "sqrt8":
        x = tl.minimum(s * (255.0 * inverse), 255.0)
        low = tl.floor(x)
        code = low + tl.where(x * x - low * low >= threshold * (2.0 * low + 1.0), 1.0, 0.0)
    else:
        x = tl.minimum(s * inverse, 1.0)
        code = tl.floor(log2(tl.maximum(x, _TINY)) * (1.0 / _V_STEP) + 255.0 + (1.0 - threshold))
        code = tl.where(s > 0.0, tl.minimum(code, 255.0), 0.0)
    return tl.maximum(code, tl.where(s > 0.0, 1.0, 0.0))


@triton.jit
def store_v(addr, scale_addr, v, s, scale_old, thresholds, start, tile, inside, groups, left, CODEC: tl.constexpr,
            VEC: tl.constexpr, FULL: tl.constexpr):  # fmt: skip
    """Stores v, whose root is s. The thresholds are those of the codec: of the logarithm for log8v."""
    if CODEC == "fp32":
        _store_tile(addr, v, start, tile, inside, tl.float32, VEC, FULL)
    else:
        threshold = tl.load(thresholds + 32 + tl.arange(0, 32))[None, :]
        if CODEC == "bf16":
            bits = tl.minimum(v, _BF16_MAX).to(tl.int32, bitcast=True) + ((1.0 - threshold) * 65536.0).to(tl.int32)
            _store_tile(addr, bits >> 16, start, tile, inside, tl.int16, VEC, FULL)
        else:
            top = _round_up(tl.minimum(tl.max(s, axis=1, keep_dims=True), _SCALE_MAX))
            keep = (top <= scale_old) & (top >= _KEEP_SCALE * scale_old)
            scale = tl.where(keep, scale_old, top)
            _store_scale(scale_addr, scale, start, groups, left, FULL)
            _store_tile(addr, _byte(_v_codes(s, scale, threshold, CODEC)), start, tile, inside, tl.int8, VEC, FULL)


@triton.jit
def _power(x):
    """2^e of a number, and of zero and subnormal ones the least normal: 2^8 half units in a bf16's last place."""
    return tl.maximum((x.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True), _TINY)


@triton.jit
def load_param(addr, correction_addr, start, tile, inside, WEIGHTS: tl.constexpr, PARAM: tl.constexpr,
               VEC: tl.constexpr, FULL: tl.constexpr):  # fmt: skip
    """The weight as fp32."""
    if WEIGHTS == "split8":
        bits = load_tile(addr, start, tile, inside, tl.int16, VEC, FULL).to(tl.int32)
        near = (bits << 16).to(tl.float32, bitcast=True)
        correction = load_tile(correction_addr, start, tile, inside, tl.int8, VEC, FULL).to(tl.float32)
        p = near + correction * (2.0**-8 / 127) * _power(near)
    else:
        p = load_tile(addr, start, tile, inside, PARAM, VEC, FULL).to(tl.float32)
    return p


@triton.jit
def store_param(addr, correction_addr, p, thresholds, start, tile, inside, WEIGHTS: tl.constexpr, PARAM: tl.constexpr,
                VEC: tl.constexpr, FULL: tl.constexpr):  # fmt: skip
    if WEIGHTS == "split8":
        bits = bf16_bits(p)
        near = (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)
        # 2^-e by its bits; the rest is at most 2^(e - 8), so no step overflows. To nearest, a step of less than half a
        # code would be lost every time; by thresholds the mean over steps is exact.
        inverse = (0x7F000000 - _power(near).to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)
        rest = (p - near) * inverse * (2.0**8 * 127)
        threshold = tl.load(thresholds + tl.arange(0, 32))[None, :]
        code = tl.minimum(tl.floor(rest + (1.0 - threshold)), 127.0)
        _store_tile(addr, bits, start, tile, inside, tl.int16, VEC, FULL)
        _store_tile(correction_addr, _byte(code), start, tile, inside, tl.int8, VEC, FULL)
    elif PARAM.primitive_bitwidth == 16:
        _store_tile(addr, bf16_bits(p), start, tile, inside, tl.int16, VEC, FULL)
    else:
        _store_tile(addr, p, start, tile, inside, PARAM, VEC, FULL)
