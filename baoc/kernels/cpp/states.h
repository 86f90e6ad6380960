// How states are kept: the codecs of baoc.optim.codecs, by name. Payloads and scales are theirs, bit for bit where sqrt and log2
// agree, so that either may take the next step. All work on n elements from a multiple of 64.
#pragma once
#include "packed.h"

// Elements [start, start + n) as fp32.
static void decode(const Kept& kept, int64_t start, int n, float* out) {
  switch (kept.codec) {
    case FP32: std::memcpy(out, static_cast<const float*>(kept.payload) + start, size_t(n) * 4); break;
    case BF16: decode_bf16(static_cast<const uint16_t*>(kept.payload) + start, out, n); break;
    case ROOT4: decode_root4(kept, start, n, out); break;
    case LATTICE4: decode_lattice4(kept, start, n, out); break;
    default: decode8(kept, start, n, out);
  }
}

// Stores m, to nearest but for root4. `m` has whole groups, zero behind the n-th element, and is overwritten. NaN
// becomes 0.
static void encode_m(const Kept& kept, int64_t start, int n, float* __restrict m, const float* thresholds) {
  if (kept.codec == BF16) {
    uint16_t* out = static_cast<uint16_t*>(kept.payload) + start;
    for (int i = 0; i < n; ++i) out[i] = to_bf16(most(least(m[i] == m[i] ? m[i] : 0.f, BF16_MAX), -BF16_MAX));
    return;
  }
  if (kept.codec == ROOT4) return encode_root4(kept, start, n, m, thresholds + PLAIN);
  encode8(kept, start, n, m, thresholds);
}

// Stores v, whose root is s (overwritten; whole groups, zero behind the n-th).
static void encode_v(const Kept& kept, int64_t start, int n, const float* v, float* __restrict s,
                     const float* thresholds) {
  if (kept.codec == BF16)
    return encode_v_bf16(static_cast<uint16_t*>(kept.payload) + start, v, n, thresholds + PLAIN);
  if (kept.codec == LATTICE4) return encode_lattice4(kept, start, n, s, thresholds + OF_LATTICE4);
  encode8(kept, start, n, s, thresholds);
}

// Bits per element of the payload.
static BAOC_INLINE int bits_per_code(int codec) { return codec == BF16 ? 16 : codec == ROOT4 || codec == LATTICE4 ? 4 : 8; }

// Overwrites the codes of elements with a finite gradient by those in `codes`, which begin with element `start`.
static void take_finite(const Kept& kept, int64_t start, int n, const uint8_t* codes, const uint8_t* finite) {
  const int bits = bits_per_code(kept.codec);
  uint8_t* out = static_cast<uint8_t*>(kept.payload) + start * bits / 8;
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

// Stores x by `encode(x, thresholds)` where some gradients are not finite: those elements are rounded at one half, so
// that their codes stay while the scale does. Encoding twice finds the same scale twice.
template <class Encode>
static void encode_some(const Kept& kept, int64_t start, int n, float* x, const uint8_t* finite,
                        const float* thresholds, const Encode& encode) {
  float again[BLOCK];
  uint8_t codes[2 * BLOCK];
  const int bits = bits_per_code(kept.codec);
  const uint8_t* payload = static_cast<const uint8_t*>(kept.payload) + start * bits / 8;
  std::copy_n(x, padded(n), again);
  encode(x, thresholds);
  std::memcpy(codes, payload, size_t(n * bits + 7) / 8);
  encode(again, thresholds + HALVES);
  take_finite(kept, start, n, codes, finite);
}
