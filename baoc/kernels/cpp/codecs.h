// bf16 and the 8-bit codecs of baoc.optim.codecs, in which groups of 32 elements share a scale.
#pragma once
#include <cmath>

#include "numbers.h"

enum Codec { FP32, BF16, SOFTSIGN8, SQRT8, ROOT8M, ROOT8V, ROOT4, LATTICE4 };
constexpr int GROUP = 32, PACKED = 64;  // elements that share a scale, in 8 and in 4 bits
constexpr float ROOT_OF_MAX = 1.844674297419792e19f, ROOT_MAX = 1.83e19f, KEEP_SCALE = 0.87f;

// One state tensor in memory.
struct StoredState {
  int codec;
  void* payload;
  uint16_t* scale;
};

// Rows of GROUP thresholds of one step: those of baoc.optim.codecs, then lattice4's for each k. The same rows for the
// threshold one half follow, for elements whose state does not change.
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

static void decode8(const StoredState& state, int64_t start, int n, float* out) {
  const uint8_t* code = static_cast<const uint8_t*>(state.payload) + start;
  const uint16_t* scale = state.scale + start / GROUP;
  int i = 0;
  for (; i + GROUP <= n; i += GROUP) restore8(state.codec, code + i, scale[i / GROUP], out + i, GROUP);
  if (i < n) restore8(state.codec, code + i, scale[i / GROUP], out + i, n - i);
}

static void decode_bf16(const uint16_t* __restrict from, float* __restrict out, int n) {
  for (int i = 0; i < n; ++i) out[i] = from_bf16(from[i]);
}

// -- to codes: x holds a complete group, whose numbers become codes in the form of `coded` ------------------------

// Bits of the largest magnitude; above those of infinity if there is a NaN. Bits compare as the numbers do.
template <int SIZE = GROUP>
static BAOC_INLINE int32_t top_of(const float* x) {
  int32_t top = 0;
  for (int i = 0; i < SIZE; ++i) {
    const int32_t size = int32_t(bits_of(x[i]) & 0x7FFFFFFFu);
    top = size > top ? size : top;
  }
  return top;
}

// The least bf16 that is not below the largest magnitude of a group, which is limited to `largest` before rounding. In
// groups that are not all finite NaN becomes 0 and infinity `infinite`.
template <int SIZE = GROUP>
static BAOC_INLINE uint16_t scale_of(float* x, float largest, float infinite) {
  int32_t top = top_of<SIZE>(x);
  if (top >= 0x7F800000) {
    for (int i = 0; i < SIZE; ++i) x[i] = most(least(x[i] == x[i] ? x[i] : 0.f, infinite), -infinite);
    top = top_of<SIZE>(x);
  }
  return uint16_t((bits_of(least(from_bits(uint32_t(top)), largest)) + 0xFFFFu) >> 16);
}

// The divisor of a group by its scale. If the scale does not allow the fast division, divides the group here and
// returns 1.
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

// Roots are neither negative nor NaN here.
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
BAOC_INLINE uint16_t keep_or_replace(uint16_t scale, uint16_t old) {
  return scale <= old && from_bf16(scale) >= KEEP_SCALE * from_bf16(old) ? old : scale;
}

// Stores n elements, padded to complete groups: m, or s = sqrt(v) for a codec of v. All scales come first: each takes
// long to compute, and they do not wait for each other.
static void encode8(const StoredState& state, int64_t start, int n, float* __restrict x, const float* thresholds) {
  const bool of_v = state.codec == SQRT8 || state.codec == ROOT8V;
  uint8_t* out = static_cast<uint8_t*>(state.payload) + start;
  uint16_t* scale = state.scale + start / GROUP;
  for (int i = 0; i < n; i += GROUP) {
    if (of_v) scale[i / GROUP] = keep_or_replace(scale_of(x + i, ROOT_MAX, ROOT_OF_MAX), scale[i / GROUP]);
    else scale[i / GROUP] = scale_of(x + i, BF16_MAX, FP32_MAX);
  }
  for (int i = 0; i < n; i += GROUP) {
    uint8_t codes[GROUP];
    quantise8(state.codec, x + i, by_scale(x + i, scale[i / GROUP]), thresholds);
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
