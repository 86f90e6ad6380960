// Loads and stores weights in the formats of baoc.optim.weights, and loads gradients as fp32.
#pragma once
#include "codecs.h"

enum Weights { W_FP32, W_BF16, W_SPLIT8, W_RANDOM };

// One parameter. `noise` starts the hash of its random bits in this step.
struct Param {
  int weights;
  void* data;
  void* correction;
  uint32_t noise;
};

constexpr float PER_UNIT = 256.f * 127.f;  // steps of the correction's code per power of two of the number

// 2^exponent of a bf16 number; zero and subnormal ones count as the least normal.
BAOC_INLINE float power_of(float near) {
  int32_t exponent = int32_t(bits_of(near) & 0x7F800000u);
  exponent = exponent < 0x00800000 ? 0x00800000 : exponent > 0x7F000000 ? 0x7F000000 : exponent;
  return from_bits(uint32_t(exponent));
}

static void merge8(const uint16_t* __restrict near, const int8_t* __restrict rest, int n, float* __restrict out) {
  for (int i = 0; i < n; ++i) {
    float x = from_bf16(near[i]);
    out[i] = float(rest[i]) * (1.f / PER_UNIT) * power_of(x) + x;
  }
}

// Splits `count` numbers p into bf16 and code. A number equal to what it `was` keeps its bits: merging has rounded it,
// and some numbers can be split in two ways. `up` is 1 - threshold by position in the group.
static BAOC_INLINE void split8_group(uint16_t* near, int8_t* rest, const float* p, const float* was, const float* up,
                                     int count) {
  uint32_t bits[GROUP];  // of the bf16 number, in the high half, and its code in the low byte
  for (int i = 0; i < count; ++i) {
    const float x = from_bf16(to_bf16(p[i])), twice = from_bits(0x7F800000u - bits_of(power_of(x)));  // 2 / power
    const float share = (p[i] - x) * twice * (PER_UNIT / 2);  // within 127, for x is the nearest
    const float code = coded(least(__builtin_floorf(share + up[i]), 127.f));
    bits[i] = bits_of(x) | (bits_of(code) & 0xFFu) | (p[i] == was[i] ? 0x100u : 0u);
  }
  for (int i = 0; i < count; ++i) near[i] = bits[i] & 0x100u ? near[i] : uint16_t(bits[i] >> 16);
  for (int i = 0; i < count; ++i) rest[i] = bits[i] & 0x100u ? rest[i] : int8_t(uint8_t(bits[i]));
}

static void split8(uint16_t* near, int8_t* rest, int64_t start, int n, const float* p, const float* was,
                   const float* threshold) {
  float up[GROUP];
  for (int i = 0; i < GROUP; ++i) up[i] = 1.f - threshold[(start + i) % GROUP];
  int i = 0;
  for (; i + GROUP <= n; i += GROUP) split8_group(near + i, rest + i, p + i, was + i, up, GROUP);
  if (i < n) split8_group(near + i, rest + i, p + i, was + i, up, n - i);
}

static void round_to_bf16(uint16_t* __restrict near, int n, const float* __restrict p) {
  for (int i = 0; i < n; ++i) near[i] = to_bf16(p[i]);
}

static void round_at_random(uint16_t* __restrict near, int64_t start, int n, const float* __restrict p,
                            uint32_t noise) {
  for (int i = 0; i < n; ++i) {
    uint32_t h = uint32_t(start + i) * 0x9E3779B1u + noise;
    h ^= h >> 16;
    h *= 0x7FEB352Du;
    h ^= h >> 15;
    h *= 0x846CA68Bu;
    h ^= h >> 16;
    const float x = p[i];
    float rounded = from_bits((bits_of(x) + (h & 0xFFFFu)) & 0xFFFF0000u);
    rounded = most(least(rounded, BF16_MAX), -BF16_MAX);
    near[i] = to_bf16(std::fabs(x) <= FP32_MAX ? rounded : x);
  }
}

// Elements [start, start + n) as fp32.
static void load_param(const Param& param, int64_t start, int n, float* out) {
  const uint16_t* near = static_cast<const uint16_t*>(param.data) + start;
  switch (param.weights) {
    case W_FP32: std::memcpy(out, static_cast<const float*>(param.data) + start, size_t(n) * 4); break;
    case W_SPLIT8: merge8(near, static_cast<const int8_t*>(param.correction) + start, n, out); break;
    default: decode_bf16(near, out, n);
  }
}

// `was` are the numbers that were loaded; only split8 reads them.
static void store_param(const Param& param, int64_t start, int n, const float* p, const float* was,
                        const float* threshold) {
  uint16_t* near = static_cast<uint16_t*>(param.data) + start;
  switch (param.weights) {
    case W_FP32: std::memcpy(static_cast<float*>(param.data) + start, p, size_t(n) * 4); break;
    case W_SPLIT8: split8(near, static_cast<int8_t*>(param.correction) + start, start, n, p, was, threshold); break;
    case W_RANDOM: round_at_random(near, start, n, p, param.noise); break;
    default: round_to_bf16(near, n, p);
  }
}

// Gradients as fp32: a pointer into the gradient if it is fp32, else decoded into `scratch`.
static const float* load_grad(bool bf16, const void* grad, int64_t start, int n, float* scratch) {
  if (!bf16) return static_cast<const float*>(grad) + start;
  decode_bf16(static_cast<const uint16_t*>(grad) + start, scratch, n);
  return scratch;
}

static void restore(const uint8_t* __restrict finite, float* __restrict now, const float* __restrict old, int n) {
  for (int i = 0; i < n; ++i) now[i] = finite[i] ? now[i] : old[i];
}
