"""Device functions of all kernels: loads and stores of tiles and scales, and single instructions of the GPU.

Every access of a tile uses one layout, VEC elements per thread. Alignment hints are therefore limited to VEC elements:
with 16 bytes, Triton would load 16 int8 per thread and shuffle them through shared memory.
"""

import os

import triton
import triton.language as tl

from baoc.kernels import usable as _usable

GRAD_LIMIT = tl.constexpr(_usable.LIMIT)  # magnitude from which on a gradient element counts as non-finite
TINY = tl.constexpr(1.1754943508222875e-38)  # least normal fp32
BF16_MAX = tl.constexpr(3.3895313892515355e38)
ROUND = tl.constexpr(12582912.0)  # 1.5 * 2^23: adding it rounds to nearest even, and leaves the integer in the low bits
FINE = tl.constexpr(49152.0)  # 1.5 * 2^15: the same for multiples of 1/256

# Each function twice: the interpreter has no inline PTX, and truncates where it should round to bf16. Docstrings are
# at the compiled ones below.
if os.environ.get("TRITON_INTERPRET") == "1":

    @triton.jit
    def reciprocal(x):
        return 1.0 / x

    @triton.jit
    def product(a, b):
        return a * b

    @triton.jit
    def log2(x):
        return tl.log2(x)

    @triton.jit
    def exp2(x):
        return tl.exp2(x)

    @triton.jit
    def root(x):
        return tl.sqrt(x)

    @triton.jit
    def share_of(x, inverse):
        return tl.minimum(x * inverse, 1.0)

    @triton.jit
    def floor_code(x):
        return tl.floor(x * 255.0) + ROUND

    @triton.jit
    def ceil_code(x):
        return tl.ceil(x) + ROUND

    @triton.jit
    def round_down(x):
        return tl.floor(x) + ROUND

    @triton.jit
    def floor_bytes(x, per, base):
        return tl.floor(x * per + (base - FINE)).to(tl.int32).to(tl.int8)

    @triton.jit
    def signed_numbers(codes):
        return codes.to(tl.float32)

    @triton.jit
    def unsigned_times(codes, factor):
        return (codes.to(tl.int32) & 0xFF).to(tl.float32) * factor

    @triton.jit
    def widened(bits):
        return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)

    @triton.jit
    def narrowed(x):
        bits = x.to(tl.int32, bitcast=True)
        near = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(tl.int16)
        return near, widened(near)

    @triton.jit
    def twice_inverse_power(x):
        bits = tl.minimum(~x.to(tl.int32, bitcast=True) & 0x7F800000, 0x7F000000)
        return bits.to(tl.float32, bitcast=True)

    @triton.jit
    def differ(a, b):
        return tl.where((a < b) | (a > b), 1, 0)

    @triton.jit
    def usable(g):
        return tl.where(tl.abs(g) < GRAD_LIMIT, 1, 0)

    @triton.jit
    def usable_and_differ(g, a, b):
        return tl.where((tl.abs(g) < GRAD_LIMIT) & ((a < b) | (a > b)), 1, 0)

else:

    @triton.jit
    def reciprocal(x):
        """1 / x to one unit in the last place, in one instruction; Triton's `/` takes seven."""
        return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)

    @triton.jit
    def product(a, b):
        """a * b, rounded, so that no addition is fused with it: threads that add unrounded products of their own to
        rounded ones of others would end with different sums in the last bit."""
        return tl.inline_asm_elementwise("mul.rn.f32 $0, $1, $2;", "=f,f,f", [a, b], tl.float32, is_pure=True, pack=1)

    @triton.jit
    def log2(x):
        """log2 of normal numbers; tl.log2 handles others at three times the cost."""
        return tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)

    @triton.jit
    def exp2(x):
        return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)

    @triton.jit
    def root(x):
        """sqrt of non-negative numbers; 0 for subnormal ones, which tl.sqrt handles at three times the cost."""
        return tl.inline_asm_elementwise("sqrt.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)

    @triton.jit
    def share_of(x, inverse):
        """min(x * inverse, 1) of non-negative numbers."""
        return tl.inline_asm_elementwise(
            "mul.sat.f32 $0, $1, $2;", "=f,f,f", [x, inverse], tl.float32, is_pure=True, pack=1
        )

    @triton.jit
    def floor_code(x):
        """ROUND + floor(255 x), so that the number's low bits are the floor's."""
        return tl.inline_asm_elementwise(
            "fma.rm.f32 $0, $1, 0f437F0000, 0f4B400000;", "=f,f", [x], tl.float32, is_pure=True, pack=1
        )

    @triton.jit
    def ceil_code(x):
        """ROUND + ceil(x)."""
        return tl.inline_asm_elementwise(
            "add.rp.f32 $0, $1, 0f4B400000;", "=f,f", [x], tl.float32, is_pure=True, pack=1
        )

    @triton.jit
    def round_down(x):
        """ROUND + floor(x)."""
        return tl.inline_asm_elementwise(
            "add.rm.f32 $0, $1, 0f4B400000;", "=f,f", [x], tl.float32, is_pure=True, pack=1
        )

    @triton.jit
    def floor_bytes(x, per, base):
        """floor(x * per + base - FINE) as int8. The sum has steps of 1/256, so the floor is its second byte."""
        return tl.inline_asm_elementwise(
            """
            { .reg .f32 a, b, c, d; .reg .b32 r, s, t, u;
            fma.rm.f32 a, $1, $5, $9; fma.rm.f32 b, $2, $6, $10;
            fma.rm.f32 c, $3, $7, $11; fma.rm.f32 d, $4, $8, $12;
            mov.b32 r, a; mov.b32 s, b; mov.b32 t, c; mov.b32 u, d;
            prmt.b32 r, r, s, 0x0051; prmt.b32 t, t, u, 0x0051; prmt.b32 $0, r, t, 0x5410; }
            """,
            "=r,f,f,f,f,f,f,f,f,f,f,f,f",
            [x, per, base],
            tl.int8,
            is_pure=True,
            pack=4,
        )

    @triton.jit
    def signed_numbers(codes):
        """int8 -> fp32 by bits: a byte in the low bits of 2^23, without the slow conversion unit."""
        return tl.inline_asm_elementwise(
            """
            { .reg .b32 x, r, s, t, u; .reg .f32 a, b, c, d;
            xor.b32 x, $4, 0x80808080;
            prmt.b32 r, x, 0x4B000000, 0x7540; prmt.b32 s, x, 0x4B000000, 0x7541;
            prmt.b32 t, x, 0x4B000000, 0x7542; prmt.b32 u, x, 0x4B000000, 0x7543;
            mov.b32 a, r; mov.b32 b, s; mov.b32 c, t; mov.b32 d, u;
            add.f32 $0, a, 0fCB000080; add.f32 $1, b, 0fCB000080;
            add.f32 $2, c, 0fCB000080; add.f32 $3, d, 0fCB000080; }
            """,
            "=f,=f,=f,=f,r",
            [codes],
            tl.float32,
            is_pure=True,
            pack=4,
        )

    @triton.jit
    def unsigned_times(codes, factor):
        """int8, read as uint8, times fp32, by bits too: (2^23 + code) factor - 2^23 factor, rounded once."""
        return tl.inline_asm_elementwise(
            """
            { .reg .b32 r, s, t, u; .reg .f32 a, b, c, d;
            prmt.b32 r, $4, 0x4B000000, 0x7540; prmt.b32 s, $4, 0x4B000000, 0x7541;
            prmt.b32 t, $4, 0x4B000000, 0x7542; prmt.b32 u, $4, 0x4B000000, 0x7543;
            mov.b32 a, r; mov.b32 b, s; mov.b32 c, t; mov.b32 d, u;
            fma.rn.f32 $0, a, $5, $9; fma.rn.f32 $1, b, $6, $10;
            fma.rn.f32 $2, c, $7, $11; fma.rn.f32 $3, d, $8, $12; }
            """,
            "=f,=f,=f,=f,r,f,f,f,f,f,f,f,f",
            [codes, factor, factor * -8388608.0],
            tl.float32,
            is_pure=True,
            pack=4,
        )

    @triton.jit
    def widened(bits):
        """bf16 as int16 -> fp32."""
        return tl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xFFFF0000;",
            "=&f,=f,r",
            [bits],
            tl.float32,
            is_pure=True,
            pack=2,
        )

    @triton.jit
    def narrowed(x):
        """fp32 rounded to the nearest bf16: (bits as int16, value as fp32)."""
        return tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $4, $3; shl.b32 $1, $0, 16; and.b32 $2, $0, 0xFFFF0000;",
            "=&r,=&f,=&f,f,f",
            [x],
            (tl.int16, tl.float32),
            is_pure=True,
            pack=2,
        )

    @triton.jit
    def twice_inverse_power(x):
        """2 / 2^e of a number with exponent e; infinite for zero and subnormal numbers."""
        return (~x.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)

    @triton.jit
    def differ(a, b):
        """1 if a < b or a > b for each of a thread's four elements, else 0."""
        return tl.inline_asm_elementwise(
            """
            { .reg .pred q;
            setp.ne.f32 q, $4, $8; setp.ne.and.f32 q, $5, $9, q;
            setp.ne.and.f32 q, $6, $10, q; setp.ne.and.f32 q, $7, $11, q;
            selp.b32 $0, 1, 0, q; mov.b32 $1, $0; mov.b32 $2, $0; mov.b32 $3, $0; }
            """,
            "=&r,=&r,=&r,=&r,f,f,f,f,f,f,f,f",
            [a, b],
            tl.int32,
            is_pure=True,
            pack=4,
        )

    @triton.jit
    def usable(g):
        """1 if |g| < GRAD_LIMIT for each of a thread's four elements, else 0."""
        return tl.inline_asm_elementwise(
            """
            { .reg .pred q; .reg .f32 a, b, c, d;
            abs.f32 a, $4; abs.f32 b, $5; abs.f32 c, $6; abs.f32 d, $7;
            setp.lt.f32 q, a, 0f57800000; setp.lt.and.f32 q, b, 0f57800000, q;
            setp.lt.and.f32 q, c, 0f57800000, q; setp.lt.and.f32 q, d, 0f57800000, q;
            selp.b32 $0, 1, 0, q; mov.b32 $1, $0; mov.b32 $2, $0; mov.b32 $3, $0; }
            """,
            "=&r,=&r,=&r,=&r,f,f,f,f",
            [g],
            tl.int32,
            is_pure=True,
            pack=4,
        )

    @triton.jit
    def usable_and_differ(g, a, b):
        """1 if `usable(g)` and `differ(a, b)`, else 0."""
        return tl.inline_asm_elementwise(
            """
            { .reg .pred q; .reg .f32 a, b, c, d;
            abs.f32 a, $4; abs.f32 b, $5; abs.f32 c, $6; abs.f32 d, $7;
            setp.lt.f32 q, a, 0f57800000; setp.lt.and.f32 q, b, 0f57800000, q;
            setp.lt.and.f32 q, c, 0f57800000, q; setp.lt.and.f32 q, d, 0f57800000, q;
            setp.ne.and.f32 q, $8, $12, q; setp.ne.and.f32 q, $9, $13, q;
            setp.ne.and.f32 q, $10, $14, q; setp.ne.and.f32 q, $11, $15, q;
            selp.b32 $0, 1, 0, q; mov.b32 $1, $0; mov.b32 $2, $0; mov.b32 $3, $0; }
            """,
            "=&r,=&r,=&r,=&r,f,f,f,f,f,f,f,f,f,f,f,f",
            [g, a, b],
            tl.int32,
            is_pure=True,
            pack=4,
        )


@triton.jit
def bf16_bits(x):
    """Bits of x rounded to the nearest bf16, as int16."""
    bits, _ = narrowed(x)
    return bits


@triton.jit
def tile_of(CHUNK: tl.constexpr):
    """(element index [CHUNK / 32, 32], group index [CHUNK / 32, 1]) in a chunk."""
    groups = tl.arange(0, CHUNK // 32)[:, None]
    return groups * 32 + tl.arange(0, 32)[None, :], groups


@triton.jit
def pointer_to(addr, start, DTYPE: tl.constexpr, VEC: tl.constexpr):
    """Pointer to element `start`, with the alignment that `FusedTable.aligned` promises."""
    BYTES: tl.constexpr = DTYPE.primitive_bitwidth // 8
    return tl.multiple_of((addr + start * BYTES).to(tl.pointer_type(DTYPE)), BYTES * VEC)


@triton.jit
def load_tile(addr, start, tile, inside, DTYPE: tl.constexpr, VEC: tl.constexpr, FULL: tl.constexpr):
    pointer = pointer_to(addr, start, DTYPE, VEC) + tile
    return tl.load(pointer) if FULL else tl.load(pointer, mask=inside, other=0)


@triton.jit
def load_numbers(addr, start, tile, inside, DTYPE: tl.constexpr, VEC: tl.constexpr, FULL: tl.constexpr):
    """A tile as fp32."""
    if tl.bfloat16 == DTYPE:
        numbers = widened(load_tile(addr, start, tile, inside, tl.int16, VEC, FULL))
    else:
        numbers = load_tile(addr, start, tile, inside, DTYPE, VEC, FULL).to(tl.float32)
    return numbers


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
def low_byte(rounded):
    """The low byte of an integer to which ROUND was added."""
    return rounded.to(tl.int32, bitcast=True).to(tl.int8)


@triton.jit
def with_sign(size, of):
    """A non-negative number with the sign of another."""
    sign = of.to(tl.int32, bitcast=True) & -2147483648
    return (size.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)
