// The 4-bit codecs of baoc.optim.codecs.packed, which has their definitions: two codes per byte, groups of 64.
#pragma once
#include "codecs.h"

constexpr float LARGEST_ROOT = 9.223372036854775808e18f;  // 2^63

static BAOC_INLINE void unpack(const uint8_t* bytes, int count, uint8_t* codes) {
  for (int i = 0; i < count; ++i) {
    codes[2 * i] = bytes[i] & 15;
    codes[2 * i + 1] = bytes[i] >> 4;
  }
}

static BAOC_INLINE void pack(const uint8_t* codes, uint8_t* bytes, int count) {
  for (int i = 0; i < count; ++i) bytes[i] = uint8_t((codes[2 * i] & 15) | codes[2 * i + 1] << 4);
}

// Decodes n elements from `start` into `out`, group by group: unpacks the codes and calls restore(codes, scale,
// values).
template <class Restore>
static BAOC_INLINE void decode_packed(const StoredState& state, int64_t start, int n, float* __restrict out,
                                      const Restore& restore) {
  const uint8_t* bytes = static_cast<const uint8_t*>(state.payload) + start / 2;
  for (int begin = 0; begin < n; begin += PACKED) {
    uint8_t codes[PACKED] = {};
    float values[PACKED];
    const int count = n - begin < PACKED ? n - begin : PACKED;
    unpack(bytes + begin / 2, (count + 1) / 2, codes);
    restore(codes, state.scale[(start + begin) / PACKED], values);
    std::memcpy(out + begin, values, size_t(count) * 4);
  }
}

static void decode_root4(const StoredState& state, int64_t start, int n, float* out) {
  decode_packed(state, start, n, out, [](const uint8_t* codes, uint16_t scale, float* values) {
    const Quotient by49(49.f);
    const float by = from_bf16(scale);
    for (int i = 0; i < PACKED; ++i) {
      int32_t code = codes[i];
      float q = float(code > 7 ? code - 16 : code);
      values[i] = by49.fast(q * std::fabs(q)) * by;
    }
  });
}

// 2^(quarters / 4), but at least the least normal number.
static BAOC_INLINE float two_to_quarters(int32_t quarters) {
  const int32_t part = quarters & 3;
  int32_t exponent = quarters >> 2;
  const float root = part == 0 ? 1.f : part == 1 ? 1.189207115002721f : part == 2 ? 1.4142135623730951f
                                                                                 : 1.681792830507429f;
  const bool tiny = exponent < -126;
  exponent = tiny ? -126 : exponent;
  return tiny ? TINY : from_bits(uint32_t(exponent + 127) << 23) * root;
}

static void decode_lattice4(const StoredState& state, int64_t start, int n, float* out) {
  decode_packed(state, start, n, out, [](const uint8_t* codes, uint16_t scale, float* values) {
    const int32_t word = int16_t(scale), top = word >> 2, unit = 8 >> (word & 3);
    for (int i = 0; i < PACKED; ++i) {
      int32_t code = codes[i];
      float value = two_to_quarters((code - 15) * unit + top);
      values[i] = code ? value : 0.f;
    }
  });
}

static void encode_root4(const StoredState& state, int64_t start, int n, float* __restrict m,
                         const float* __restrict threshold) {
  uint8_t* out = static_cast<uint8_t*>(state.payload) + start / 2;
  for (int begin = 0; begin < n; begin += PACKED) {
    float* x = m + begin;
    float size[PACKED];
    uint8_t codes[PACKED];
    for (int i = 0; i < PACKED; ++i) size[i] = std::fabs(x[i]);
    const uint16_t scale = scale_of<PACKED>(size, BF16_MAX, FP32_MAX);
    state.scale[(start + begin) / PACKED] = scale;
    const Quotient by = by_scale<PACKED>(size, scale);
    for (int i = 0; i < PACKED; ++i) {
      float y = least(by.fast(size[i]), 1.f) * 49.f;
      float low = least(__builtin_floorf(__builtin_sqrtf(y)), 6.f);
      float bound = (2.f * low + 1.f) * threshold[i % GROUP] + low * low;
      float q = y >= 0.5f ? low + (y >= bound ? 1.f : 0.f) : 0.f;
      size[i] = coded(x[i] < 0.f ? 16.f - q : q);
    }
    narrow<PACKED>(size, codes);
    pack(codes, out + begin / 2, ((n - begin < PACKED ? n - begin : PACKED) + 1) / 2);
  }
}

// The new scale word of a group, from the largest and least exponents of its positive elements and the old word.
static BAOC_INLINE int32_t lattice_of(float high, float low, int32_t old) {
  constexpr float slack = 1.f / 512;  // as baoc.optim.codecs
  for (int k = 3; k > 0; --k) {
    const float unit = float(8 >> k), top = __builtin_ceilf(high / unit - slack) * unit;
    if (top - low <= ((old & 3) < k ? 16.f + slack : 18.f + slack) * unit) return 4 * int32_t(top) + k;
  }
  return 4 * int32_t(__builtin_ceilf(high / 8.f - slack) * 8.f);
}

// `s` are the roots of v; `above` has GROUP thresholds for each k.
static void encode_lattice4(const StoredState& state, int64_t start, int n, float* __restrict s,
                            const float* __restrict above) {
  uint8_t* out = static_cast<uint8_t*>(state.payload) + start / 2;
  for (int begin = 0; begin < n; begin += PACKED) {
    float exponent[PACKED];
    uint8_t codes[PACKED];
    int32_t high_bits = 0, low_bits = 0x7F800000;  // of roots, which compare as their bits do
    for (int i = 0; i < PACKED; ++i) {
      const float root = least(s[begin + i] > 0.f ? s[begin + i] : 0.f, LARGEST_ROOT);
      const int32_t bits = int32_t(bits_of(root)), some = bits > 0 ? bits : 0x7F800000;
      high_bits = bits > high_bits ? bits : high_bits;
      low_bits = some < low_bits ? some : low_bits;
      exponent[i] = log2_of(most(root, TINY)) * 8.f;
    }
    uint16_t* scale = state.scale + (start + begin) / PACKED;
    const float high = log2_of(most(from_bits(uint32_t(high_bits)), TINY)) * 8.f;
    const float low = log2_of(most(least(from_bits(uint32_t(low_bits)), LARGEST_ROOT), TINY)) * 8.f;
    const int32_t word = high_bits > 0 ? lattice_of(high, low, int16_t(*scale)) : 0;
    *scale = uint16_t(word);
    const float top = float(word >> 2), per_unit = 1.f / float(8 >> (word & 3));  // a power of two
    const float* __restrict share = above + (word & 3) * GROUP;
    for (int i = 0; i < PACKED; ++i) {
      float place = (exponent[i] - top) * per_unit + 15.f;
      float q = most(least(__builtin_floorf(place - share[i % GROUP] + 1.f), 15.f), 1.f);
      exponent[i] = coded(s[begin + i] > 0.f ? q : 0.f);
    }
    narrow<PACKED>(exponent, codes);
    pack(codes, out + begin / 2, ((n - begin < PACKED ? n - begin : PACKED) + 1) / 2);
  }
}
