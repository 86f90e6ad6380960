// fp32 arithmetic as torch's vectorised CPU kernels do it (fused where they fuse, rounded where they round), bf16, and
// quotients by a number that many elements share. Compiled with -ffp-contract=off: what is fused is written so.
#pragma once
#include <cstdint>
#include <cstring>

#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
#define BAOC_FMA 1
#endif
#define BAOC_INLINE inline __attribute__((always_inline))

constexpr float FP32_MAX = 3.4028234663852886e38f, BF16_MAX = 3.3895313892515355e38f, TINY = 1.1754943508222875e-38f;

BAOC_INLINE uint32_t bits_of(float x) { uint32_t b; std::memcpy(&b, &x, 4); return b; }
BAOC_INLINE float from_bits(uint32_t b) { float x; std::memcpy(&x, &b, 4); return x; }

BAOC_INLINE float fma_(float a, float b, float c) {
#ifdef BAOC_FMA
  return __builtin_fmaf(a, b, c);
#else
  return a * b + c;
#endif
}

BAOC_INLINE float least(float a, float b) { return a < b ? a : b; }
BAOC_INLINE float most(float a, float b) { return a > b ? a : b; }
BAOC_INLINE float sign_of(float x) { return (x > 0.f ? 1.f : 0.f) - (x < 0.f ? 1.f : 0.f); }

// torch.lerp. The weight is the same for all elements, so the end to start from is selected by bits, not by a branch.
struct Lerp {
  float coefficient;
  uint32_t from_a;
  explicit Lerp(float weight) {
    const bool near = weight < 0.5f && weight > -0.5f;
    coefficient = near ? weight : weight - 1.f;
    from_a = near ? 0xFFFFFFFFu : 0u;
  }
  BAOC_INLINE float operator()(float a, float b) const {
    return fma_(coefficient, b - a, from_bits((bits_of(a) & from_a) | (bits_of(b) & ~from_a)));
  }
};

// x / divisor, correctly rounded, in three operations instead of a division: the remainder of x * (1 / divisor) is
// exact when fused, and one correction by it rounds right (Markstein 1990). Holds where the remainder does not
// underflow, so `usable` wants a divisor that is not tiny, and where the divisor's significand is not all ones: such
// are divided by.
struct Quotient {
  float divisor, inverse;
  bool usable;
  explicit Quotient(float d) : divisor(d), inverse(1.f / d) {
#ifdef BAOC_FMA
    usable = d > 1e-25f && d < 1e25f && (bits_of(d) & 0x7FFFFFu) != 0x7FFFFFu;
#else
    usable = false;
#endif
  }
  // Of a finite x, by a divisor that is known to be usable.
  BAOC_INLINE float fast(float x) const {
#ifndef BAOC_FMA
    return x / divisor;
#endif
    const float q = x * inverse;
    return fma_(fma_(-q, divisor, x), inverse, q);
  }
  // Also of an infinite x, whose remainder is NaN.
  BAOC_INLINE float of(float x) const {
#ifndef BAOC_FMA
    return x / divisor;
#endif
    const float q = x * inverse;
    return fma_(least(fma_(-q, divisor, x), FP32_MAX), inverse, q);
  }
};

// Rounds a number of at most 2^22 to the nearest integer, halves to even, and leaves it in the low bits.
BAOC_INLINE float coded(float x) { return x + 12582912.f; }  // 1.5 * 2^23

// The low bytes of results of `coded`. A loop of its own, because one over bytes and fp32 would use half as wide
// vectors.
template <int SIZE>
static BAOC_INLINE void narrow(const float* from, uint8_t* to) {
  for (int i = 0; i < SIZE; ++i) to[i] = uint8_t(bits_of(from[i]));
}

BAOC_INLINE float from_bf16(uint16_t b) { return from_bits(uint32_t(b) << 16); }

// To the nearest bf16, halves to even; NaN stays NaN.
BAOC_INLINE uint16_t to_bf16(float x) {
  uint32_t b = bits_of(x), rounded = b + 0x7FFFu + ((b >> 16) & 1u);
  return uint16_t((x == x ? rounded : 0x7FC00000u) >> 16);
}

// log2 of a normal positive number to about one unit in the last place, by the series of atanh around 1.
BAOC_INLINE float log2_of(float x) {
  uint32_t b = bits_of(x);
  int32_t exponent = int32_t(b - 0x3F3504F3u) >> 23;  // so that the significand is in [sqrt(1/2), sqrt(2))
  float f = from_bits(b - (uint32_t(exponent) << 23));
  float s = (f - 1.f) / (f + 1.f), z = s * s;
  float tail = fma_(fma_(fma_(fma_(0.26230818925253875f, z, 0.3205988979753252f), z, 0.41219858311113244f), z,
                         0.5770780163555855f), z, 0.9617966939259757f);
  return fma_(2.885390081777927f, s, float(exponent)) + tail * (z * s);
}
