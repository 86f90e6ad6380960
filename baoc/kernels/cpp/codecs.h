// bf16 and the 8-bit codecs of baoc.optim.codecs, in which groups of 32 elements share a scale.
#pragma once
#include <cmath>

#include "numbers.h"

enum Codec { FP32, BF16, SOFTSIGN8, SQRT8, ROOT8M, ROOT8V, ROOT4, LATTICE4 };
constexpr int GROUP = 32, PACKED = 64;  // elements that share a scale, in 8 and in 4 bits
constexpr float ROOT_OF_MAX = 1.844674297419792e19f, ROOT_MAX = 1.83e19f, KEEP_SCALE = 0.87f;

// One state tensor as it is kept.
struct Kept {
  int codec;
  void* payload;
  uint16_t* scale;
};

// Thresholds of one step, [lanes, lane]: those of baoc.optim.codecs, and of lattice4 for each k. The same of one half
// follow, for elements whose state does not change.
enum Lanes { PLAIN = 0, OF_LATTICE4 = GROUP, HALVES = 5 * GROUP };

BAOC_INLINE int padded(int n) { return (n + PACKED - 1) / PACKED * PACKED; }

// -- from codes: `count` elements of a group whose scale is `by` ---------------------------------------------------

static BAOC_INLINE void restore_softsign(const uint8_t* code, float by, float* out, int count) {
  const Quotient by127(127.f);
  for (int i = 0; i < count; ++i) {
    float y = by127.fast(float(int8_t(code[i])));
    out[i] = y / (2.f - std::fabs(y)) * by;
  }
}

static BAOC_INLINE void restore_sqrt(const uint8_t* code, float by, float* out, int count) {
  const Quotient by255(255.f);
  for (int i = 0; i < count; ++i) {
    float s = by255.fast(float(code[i])) * by;
    out[i] = s * s;
  }
}

static BAOC_INLINE void restore_root8m(const uint8_t* code, float by, float* out, int count) {
  const Quotient by127(127.f);
  for (int i = 0; i < count; ++i) {
    const float q = float(int8_t(code[i])), y = by127.fast(std::fabs(q));
    const float square = y * y;
    out[i] = square * square * sign_of(q) * by;
  }
}

static BAOC_INLINE void restore_root8v(const uint8_t* code, float by, float* out, int count) {
  const Quotient by255(255.f);
  for (int i = 0; i < count; ++i) {
    const float y = by255.fast(float(code[i])), square = y * y;
    const float s = square * square * by, v = s * s;
    out[i] = s > 0.f ? most(v, TINY) : 0.f;
  }
}

static BAOC_INLINE void restore8(int codec, const uint8_t* __restrict code, uint16_t scale, float* __restrict out,
                                 int count) {
  const float by = from_bf16(scale);
  switch (codec) {
    case SOFTSIGN8: restore_softsign(code, by, out, count); break;
    case SQRT8: restore_sqrt(code, by, out, count); break;
    case ROOT8M: restore_root8m(code, by, out, count); break;
    default: restore_root8v(code, by, out, count);
  }
}

static void decode8(const Kept& kept, int64_t start, int n, float* out) {
  const uint8_t* code = static_cast<const uint8_t*>(kept.payload) + start;
  const uint16_t* scale = kept.scale + start / GROUP;
  int i = 0;
  for (; i + GROUP <= n; i += GROUP) restore8(kept.codec, code + i, scale[i / GROUP], out + i, GROUP);
  if (i < n) restore8(kept.codec, code + i, scale[i / GROUP], out + i, n - i);
}

static void decode_bf16(const uint16_t* __restrict from, float* __restrict out, int n) {
  for (int i = 0; i < n; ++i) out[i] = from_bf16(from[i]);
}

// -- to codes: a whole group, whose numbers become codes as `coded` has them ---------------------------------------------------------------------------------------

// The largest magnitude, as bits; more than infinity's if there is a NaN. Bits compare as the numbers do.
template <int SIZE = GROUP>
static BAOC_INLINE int32_t top_of(const float* x) {
  int32_t top = 0;
  for (int i = 0; i < SIZE; ++i) {
    const int32_t size = int32_t(bits_of(x[i]) & 0x7FFFFFFFu);
    top = size > top ? size : top;
  }
  return top;
}

// The least bf16 that is not smaller than the largest magnitude of a group, at most `largest` (before rounding). Groups
// that are not all finite are made so: NaN becomes 0 and infinity `infinite`.
template <int SIZE = GROUP>
static BAOC_INLINE uint16_t scale_of(float* x, float largest, float infinite) {
  int32_t top = top_of<SIZE>(x);
  if (top >= 0x7F800000) {
    for (int i = 0; i < SIZE; ++i) x[i] = most(least(x[i] == x[i] ? x[i] : 0.f, infinite), -infinite);
    top = top_of<SIZE>(x);
  }
  return uint16_t((bits_of(least(from_bits(uint32_t(top)), largest)) + 0xFFFFu) >> 16);
}

// What divides a group by its scale. Where the scale does not allow the short way, the group is divided here and now.
template <int SIZE = GROUP>
static BAOC_INLINE Quotient by_scale(float* x, uint16_t scale) {
  const Quotient by(most(from_bf16(scale), TINY));
  if (by.usable) return by;
  for (int i = 0; i < SIZE; ++i) x[i] = x[i] / by.divisor;
  return Quotient(1.f);
}

static BAOC_INLINE void quantise_softsign(float* x, Quotient by) {
  const Quotient by254(254.f);
  for (int i = 0; i < GROUP; ++i) {
    const float wide = by.fast(x[i]) * 254.f;
    x[i] = coded(wide / (by254.fast(std::fabs(wide)) + 1.f));  // of |x| up to 1.01, which stays below 127.5
  }
}

// Roots are not negative here, nor NaN.
static BAOC_INLINE void quantise_sqrt(float* x, Quotient by, const float* threshold) {
  for (int i = 0; i < GROUP; ++i) {
    const float y = by.fast(x[i]), wide = y * 255.f, low = __builtin_floorf(wide);
    const float bound = fma_(low, low, fma_(2.f, low, 1.f) * threshold[i]);  // low^2 and 2 low + 1 are exact
    const float q = most(least(low + (wide * wide >= bound ? 1.f : 0.f), 255.f), 1.f);
    x[i] = coded(y > 0.f ? q : 0.f);
  }
}

static BAOC_INLINE void quantise_root8m(float* x, Quotient by) {
  for (int i = 0; i < GROUP; ++i) {
    const float q = __builtin_sqrtf(__builtin_sqrtf(by.fast(std::fabs(x[i])))) * 127.f;  // of |x| up to 1.01: below 127.5
    x[i] = coded(std::copysign(q, x[i]));
  }
}

BAOC_INLINE float eighth_power(float x) {
  x *= x;
  x *= x;
  return x * x;
}

static BAOC_INLINE void quantise_root8v(float* x, Quotient by, const float* threshold) {
  for (int i = 0; i < GROUP; ++i) {
    const float y = by.fast(x[i]), place = __builtin_sqrtf(__builtin_sqrtf(y)) * 255.f;
    float q = __builtin_floorf(place);
    float low = eighth_power(q), high = eighth_power(q + 1.f), weight = threshold[i];
    float bound = weight < 0.5f ? fma_(weight, high - low, low) : fma_(weight - 1.f, high - low, high);
    q += eighth_power(place) >= bound ? 1.f : 0.f;
    x[i] = coded(y > 0.f ? most(least(q, 255.f), 1.f) : 0.f);
  }
}

static BAOC_INLINE void quantise8(int codec, float* x, Quotient by, const float* thresholds) {
  switch (codec) {
    case SOFTSIGN8: quantise_softsign(x, by); break;
    case ROOT8M: quantise_root8m(x, by); break;
    case SQRT8: quantise_sqrt(x, by, thresholds + PLAIN); break;
    default: quantise_root8v(x, by, thresholds + PLAIN);
  }
}

// A running average keeps its scale while its largest element is within 13 % of it.
BAOC_INLINE uint16_t kept_or_new(uint16_t scale, uint16_t held) {
  return scale <= held && from_bf16(scale) >= KEEP_SCALE * from_bf16(held) ? held : scale;
}

// Stores whole groups, of which n elements are there: m, or s = sqrt(v) where the codec is one of v. All scales come
// first, for each takes its time and does not keep the others waiting.
static void encode8(const Kept& kept, int64_t start, int n, float* __restrict x, const float* thresholds) {
  const bool of_v = kept.codec == SQRT8 || kept.codec == ROOT8V;
  uint8_t* out = static_cast<uint8_t*>(kept.payload) + start;
  uint16_t* scale = kept.scale + start / GROUP;
  for (int i = 0; i < n; i += GROUP) {
    if (of_v) scale[i / GROUP] = kept_or_new(scale_of(x + i, ROOT_MAX, ROOT_OF_MAX), scale[i / GROUP]);
    else scale[i / GROUP] = scale_of(x + i, BF16_MAX, FP32_MAX);
  }
  for (int i = 0; i < n; i += GROUP) {
    uint8_t codes[GROUP];
    quantise8(kept.codec, x + i, by_scale(x + i, scale[i / GROUP]), thresholds);
    narrow<GROUP>(x + i, codes);
    if (n - i >= GROUP) std::memcpy(out + i, codes, GROUP);
    else std::memcpy(out + i, codes, size_t(n - i));
  }
}

static void encode_v_bf16(uint16_t* __restrict out, const float* __restrict v, int n,
                          const float* __restrict threshold) {
  uint32_t add[GROUP];
  for (int i = 0; i < GROUP; ++i) add[i] = uint32_t(int32_t((1.f - threshold[i]) * 65536.f));
  for (int begin = 0; begin < n; begin += GROUP) {
    const int count = n - begin < GROUP ? n - begin : GROUP;
    for (int i = 0; i < count; ++i) {
      float x = v[begin + i];
      x = most(least(x == x ? x : 0.f, BF16_MAX), -BF16_MAX);
      out[begin + i] = uint16_t((bits_of(x) + add[i]) >> 16);
    }
  }
}
