"""The 4-bit codecs of `baoc.optim.codecs` as device code: two codes per byte, groups of 64.

A chunk's tile is [groups of 32, 32]; here it is [groups, 64] in the same order, and its bytes are [groups, 32].
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportPossiblyUnboundVariable=false
# pyright: reportOperatorIssue=false, reportCallIssue=false, reportIndexIssue=false, reportRedeclaration=false
# Device code: Triton's compiler gives these names types that Python's annotations do not know.

import triton
import triton.language as tl

from baoc.kernels.triton.device import (
    BF16_MAX,
    ROUND,
    TINY,
    exp2,
    log2,
    reciprocal,
    root,
    round_down,
    round_up,
    with_sign,
)

_LARGEST, _ZERO = tl.constexpr(8.0 * 63), tl.constexpr(-100.0)  # eighths of an octave of v's root; below all octaves
_SLACK = tl.constexpr(2.0**-9)  # this and the next as baoc.optim.codecs
_LIMIT, _LIMIT_FINER = tl.constexpr(18.0 + 2.0**-9), tl.constexpr(16.0 + 2.0**-9)


@triton.jit
def _number(code):
    """0 ... 15 as fp32, by bits of 2^23: without the slow unit that converts."""
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
    """The inverse; `codes` are fp32, -8 ... 15, with ROUND added."""
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
    """The scale words of groups, int16, as int32 [CHUNK / 64, 1]."""
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
    """The lanes of a tile [groups, 64], read as the other tiles are, which keeps its layout."""
    GROUPS: tl.constexpr = SHAPE[0]
    at = tl.broadcast_to(tl.arange(0, 32)[None, :], [2 * GROUPS, 32])
    return tl.reshape(tl.load(thresholds + at), [GROUPS, 64])


@triton.jit
def _restore_root(code, word):
    signed = _number(code ^ 8) - 8.0
    return signed * tl.abs(signed) * ((1.0 / 49) * (word << 16).to(tl.float32, bitcast=True))


@triton.jit
def load_m4(addr, scale_addr, start, left, CHUNK: tl.constexpr, VEC: tl.constexpr, FULL: tl.constexpr):
    """m of root4 as fp32 [CHUNK / 32, 32]."""
    code = _load_codes(addr, start, left, CHUNK, VEC, FULL)
    m = _restore_root(code, _load_word(scale_addr, start, left, CHUNK, FULL))
    return tl.reshape(m, [CHUNK // 32, 32])


@triton.jit
def load_m4_at(addr, scale_addr, start, tile, inside):
    """Codes and the bits of scales at any places."""
    element = (start % 64).to(tl.int32) + tile
    byte = tl.load((addr + start // 64 * 32).to(tl.pointer_type(tl.uint8)) + element // 2, mask=inside, other=0)
    code = (byte.to(tl.int32) >> ((element & 1) * 4).to(tl.int32)) & 15
    at = (scale_addr + start // 64 * 2).to(tl.pointer_type(tl.int16)) + element // 64
    return code, tl.load(at, mask=inside, other=0)


@triton.jit
def restore_m4(code, bits):
    """m as fp32, from what `load_m4_at` read."""
    return _restore_root(code, bits.to(tl.int32))


@triton.jit
def store_m4(addr, scale_addr, m, thresholds, start, left, CHUNK: tl.constexpr, VEC: tl.constexpr,
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
def load_v4(addr, scale_addr, start, left, CHUNK: tl.constexpr, VEC: tl.constexpr, FULL: tl.constexpr):
    """v of lattice4 as fp32 [CHUNK / 32, 32], and the groups' words, int32 [CHUNK / 64, 1]."""
    code = _number(_load_codes(addr, start, left, CHUNK, VEC, FULL))
    word = _load_word(scale_addr, start, left, CHUNK, FULL)
    octaves = (8 >> (word & 3)).to(tl.float32) * 0.25  # of v by code; what is exact needs no order
    v = tl.where(
        code > 0.0, tl.maximum(exp2(code * octaves + ((word >> 2).to(tl.float32) * 0.25 - 15.0 * octaves)), TINY), 0.0
    )
    return tl.reshape(v, [CHUNK // 32, 32]), word


@triton.jit
def _finer(k, top, high, low, kept, FINER: tl.constexpr):
    """Lattice FINER, for groups that none finer than it has been found for and whose range it has."""
    UNIT: tl.constexpr = 8.0 / 2.0**FINER
    above = tl.ceil(high / UNIT - _SLACK) * UNIT
    fits = (k == 0) & (above - low <= tl.where(kept < FINER, _LIMIT_FINER, _LIMIT) * UNIT)
    return tl.where(fits, FINER, k), tl.where(fits, above, top)


@triton.jit
def store_v4(addr, scale_addr, s, word, thresholds, start, left, CHUNK: tl.constexpr, VEC: tl.constexpr,
             FULL: tl.constexpr):  # fmt: skip
    """Stores v, whose root is s; `word` is what `load_v4` gave."""
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
    # The share of the way between two codes' v that the threshold stands for, on their logarithm.
    up = log2(1.0 + _lanes(thresholds, s.shape) * (exp2((8 >> k).to(tl.float32) * 0.25) - 1.0))
    code = round_down(exponent * (8.0 * per_unit) + (16.0 - top * per_unit) - up * (4.0 * per_unit))
    code = tl.minimum(tl.maximum(code, ROUND + 1.0), ROUND + 15.0)
    _store_codes(addr, tl.where(exponent > _ZERO, code, ROUND), start, left, CHUNK, VEC, FULL)
