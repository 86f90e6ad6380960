"""What kernels read, write and compute with: tiles, scales, and instructions that the GPU has for fp32.

Every access of a tile uses one layout (VEC elements per thread), so promises of alignment are capped at VEC elements:
with the full 16 bytes, Triton would load 16 int8 per thread and shuffle them through shared memory.
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportPossiblyUnboundVariable=false
# pyright: reportOperatorIssue=false, reportCallIssue=false, reportIndexIssue=false, reportRedeclaration=false
# Device code: Triton's compiler gives these names types that Python's annotations do not know.

import os

import triton
import triton.language as tl

TINY = tl.constexpr(1.1754943508222875e-38)  # least normal fp32
BF16_MAX = tl.constexpr(3.3895313892515355e38)
ROUND = tl.constexpr(12582912.0)  # 1.5 * 2^23: adding and subtracting it rounds to nearest even

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
def pointer_to(addr, start, DTYPE: tl.constexpr, VEC: tl.constexpr):
    """Address of element `start` as a pointer, with the alignment that the table has checked."""
    BYTES: tl.constexpr = DTYPE.primitive_bitwidth // 8
    return tl.multiple_of((addr + start * BYTES).to(tl.pointer_type(DTYPE)), BYTES * VEC)


@triton.jit
def load_tile(addr, start, tile, inside, DTYPE: tl.constexpr, VEC: tl.constexpr, FULL: tl.constexpr):
    pointer = pointer_to(addr, start, DTYPE, VEC) + tile
    return tl.load(pointer) if FULL else tl.load(pointer, mask=inside, other=0)


@triton.jit
def store_tile(addr, values, start, tile, inside, DTYPE: tl.constexpr, VEC: tl.constexpr, FULL: tl.constexpr):
    pointer = pointer_to(addr, start, DTYPE, VEC) + tile
    if FULL:
        tl.store(pointer, values.to(DTYPE))
    else:
        tl.store(pointer, values.to(DTYPE), mask=inside)


@triton.jit
def _scale_pointer(addr, start, groups):
    return (addr + start // 16).to(tl.pointer_type(tl.int16)) + groups


@triton.jit
def load_scale(addr, start, groups, left, FULL: tl.constexpr):
    """bf16 scales as fp32 [groups, 1]."""
    pointer = _scale_pointer(addr, start, groups)
    bits = tl.load(pointer) if FULL else tl.load(pointer, mask=groups * 32 < left, other=0)
    return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def store_scale(addr, scale, start, groups, left, FULL: tl.constexpr):
    bits = (scale.to(tl.int32, bitcast=True) >> 16).to(tl.int16)
    pointer = _scale_pointer(addr, start, groups)
    if FULL:
        tl.store(pointer, bits)
    else:
        tl.store(pointer, bits, mask=groups * 32 < left)


@triton.jit
def round_up(x):
    """Non-negative fp32 -> the least bf16 that is not smaller, as fp32."""
    return ((x.to(tl.int32, bitcast=True) + 0xFFFF) & -65536).to(tl.float32, bitcast=True)


@triton.jit
def to_byte(code):
    """Rounds a number in [-128, 255] to nearest even and keeps the low byte of that."""
    return (code + ROUND).to(tl.int32, bitcast=True).to(tl.int8)


@triton.jit
def with_sign(size, of):
    """A non-negative number with the sign of another."""
    sign = of.to(tl.int32, bitcast=True) & -2147483648
    return (size.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)
