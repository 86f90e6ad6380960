// Loads and stores states in the codecs of baoc.optim.codecs. Payloads and scales are the same, bit for bit where sqrt
// and log2 agree, so that either may take the next step. All functions work on n elements from a multiple of 64.
#pragma once
#include "packed.h"

// Elements [start, start + n) as fp32.
static void decode(const StoredState& state, int64_t start, int n, float* out) {
  switch (state.codec) {
    case FP32: std::memcpy(out, static_cast<const float*>(state.payload) + start, size_t(n) * 4); break;
    case BF16: decode_bf16(static_cast<const uint16_t*>(state.payload) + start, out, n); break;
    case ROOT4: decode_root4(state, start, n, out); break;
    case LATTICE4: decode_lattice4(state, start, n, out); break;
    default: decode8(state, start, n, out);
  }
}

// Stores m, rounded to nearest, or by thresholds for root4. `m` is padded to complete groups by zeros, and overwritten.
// NaN becomes 0.
static void encode_m(const StoredState& state, int64_t start, int n, float* __restrict m, const float* thresholds) {
  if (state.codec == BF16) {
    uint16_t* out = static_cast<uint16_t*>(state.payload) + start;
    for (int i = 0; i < n; ++i) out[i] = to_bf16(most(least(m[i] == m[i] ? m[i] : 0.f, BF16_MAX), -BF16_MAX));
    return;
  }
  if (state.codec == ROOT4) return encode_root4(state, start, n, m, thresholds + PLAIN);
  encode8(state, start, n, m, thresholds);
}

// Stores v by its root s, which is padded to complete groups by zeros, and overwritten.
static void encode_v(const StoredState& state, int64_t start, int n, const float* v, float* __restrict s,
                     const float* thresholds) {
  if (state.codec == BF16)
    return encode_v_bf16(static_cast<uint16_t*>(state.payload) + start, v, n, thresholds + PLAIN);
  if (state.codec == LATTICE4) return encode_lattice4(state, start, n, s, thresholds + OF_LATTICE4);
  encode8(state, start, n, s, thresholds);
}

// Bits per element of the payload.
static BAOC_INLINE int bits_per_code(int codec) { return codec == BF16 ? 16 : codec == ROOT4 || codec == LATTICE4 ? 4 : 8; }

// Stores those of `codes`, which begin with element `start`, whose elements have a finite gradient.
static void take_finite(const StoredState& state, int64_t start, int n, const uint8_t* codes, const uint8_t* finite) {
  const int bits = bits_per_code(state.codec);
  uint8_t* out = static_cast<uint8_t*>(state.payload) + start * bits / 8;
  for (int i = 0; i < n; ++i) {
    if (!finite[i]) continue;
    if (bits == 4) {
      const uint8_t mask = i % 2 ? 0xF0 : 0x0F;
      out[i / 2] = uint8_t((out[i / 2] & ~mask) | (codes[i / 2] & mask));
    } else {
      std::memcpy(out + i * bits / 8, codes + i * bits / 8, size_t(bits / 8));
    }
  }
}

// Stores x by `encode(x, thresholds)` where some gradients are not finite. Those elements are rounded at one half,
// which reproduces their codes while the scale stays. Both encodings find the same scale.
template <class Encode>
static void encode_some(const StoredState& state, int64_t start, int n, float* x, const uint8_t* finite,
                        const float* thresholds, const Encode& encode) {
  float again[BLOCK];
  uint8_t codes[2 * BLOCK];
  const int bits = bits_per_code(state.codec);
  const uint8_t* payload = static_cast<const uint8_t*>(state.payload) + start * bits / 8;
  std::copy_n(x, padded(n), again);
  encode(x, thresholds);
  std::memcpy(codes, payload, size_t(n * bits + 7) / 8);
  encode(again, thresholds + HALVES);
  take_finite(state, start, n, codes, finite);
}
