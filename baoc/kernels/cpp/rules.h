// The arithmetic of one step on a block of elements in fp32, in the order of operations of baoc.optim.rules.
#pragma once
#include "numbers.h"

enum Rule { ADAMW, RMSPROP, LION, SIGNUM, SIGN, SHARED_IN, SHARED_OUT, FOAM };
constexpr int BLOCK = 512;  // elements that are stepped at once: their scratch stays in the L1 cache

// One tensor's settings in one step, as baoc.kernels.cpp.table writes them. `size` is -lr / divisor times the
// matching factor, so that the step is p <- decay p + size update.
struct Settings {
  float decay, size, w1, b2, w2, bc2, eps, unused;
};

struct Scratch {
  alignas(64) float p[BLOCK], g[BLOCK], m[BLOCK], v[BLOCK], s[BLOCK], u[BLOCK], den[BLOCK], old_p[BLOCK],
      old_m[BLOCK], old_v[BLOCK];
};

static void root(const float* __restrict v, float* __restrict s, int n) {
  for (int i = 0; i < n; ++i) s[i] = __builtin_sqrtf(v[i]);
}

// The new weight: by torch's addcdiv, which never computes the update itself, or by adding the update.
template <bool KEEP_UPDATE>
static BAOC_INLINE float move(const Settings& k, float p, float numerator, float denominator, float update) {
  if constexpr (KEEP_UPDATE) return fma_(k.size, update, p * k.decay);
  return p * k.decay + k.size * numerator / denominator;
}

template <bool HAS_M, bool KEEP_UPDATE>
static void adam(const Settings k, float* __restrict p, const float* __restrict g, float* __restrict m,
                 float* __restrict v, float* __restrict s, float* __restrict u, int n) {
  const Lerp lerp(k.w1);
  const Quotient by(k.bc2);
  for (int i = 0; i < n; ++i) {
    float numerator = g[i];
    if constexpr (HAS_M) m[i] = numerator = lerp(m[i], g[i]);
    v[i] = fma_(k.w2 * g[i], g[i], v[i] * k.b2);
    s[i] = __builtin_sqrtf(v[i]);
    const float denominator = by.of(s[i]) + k.eps, update = numerator / denominator;
    if constexpr (KEEP_UPDATE) u[i] = update;
    p[i] = move<KEEP_UPDATE>(k, p[i], numerator, denominator, update);
  }
}

// adam with denominators that were computed before, by shared.h.
template <bool KEEP_UPDATE>
static void shared(const Settings k, float* __restrict p, const float* __restrict g, float* __restrict m,
                   const float* __restrict den, float* __restrict u, int n) {
  const Lerp lerp(k.w1);
  for (int i = 0; i < n; ++i) {
    m[i] = lerp(m[i], g[i]);
    const float update = m[i] / den[i];
    if constexpr (KEEP_UPDATE) u[i] = update;
    p[i] = move<KEEP_UPDATE>(k, p[i], m[i], den[i], update);
  }
}

static void lion(const Settings k, float* __restrict p, const float* __restrict g, float* __restrict m,
                 float* __restrict u, int n) {
  const Lerp ahead(k.w1), slow(k.w2);
  for (int i = 0; i < n; ++i) {
    u[i] = sign_of(ahead(m[i], g[i]));
    m[i] = slow(m[i], g[i]);
    p[i] = fma_(k.size, u[i], p[i] * k.decay);
  }
}

static void signum(const Settings k, float* __restrict p, const float* __restrict g, float* __restrict m,
                   float* __restrict u, int n) {
  const Lerp lerp(k.w1);
  for (int i = 0; i < n; ++i) {
    m[i] = lerp(m[i], g[i]);
    u[i] = sign_of(m[i]);
    p[i] = fma_(k.size, u[i], p[i] * k.decay);
  }
}

static void sign(const Settings k, float* __restrict p, const float* __restrict g, float* __restrict u, int n) {
  for (int i = 0; i < n; ++i) {
    u[i] = sign_of(g[i]);
    p[i] = fma_(k.size, u[i], p[i] * k.decay);
  }
}

// FOAM; `mean`, m and v are those of each element's fold.
template <bool KEEP_UPDATE>
static void foam(const Settings k, float* __restrict p, const float* __restrict g, const float* __restrict mean,
                 const float* __restrict m, const float* __restrict v, float* __restrict u, int n) {
  for (int i = 0; i < n; ++i) {
    const float rest = g[i] - mean[i], numerator = rest + m[i];
    const float denominator = __builtin_sqrtf(rest * rest + v[i]) + k.eps, update = numerator / denominator;
    if constexpr (KEEP_UPDATE) u[i] = update;
    p[i] = move<KEEP_UPDATE>(k, p[i], numerator, denominator, update);
  }
}

static void update(int rule, bool keep_update, const Settings& k, float* p, const float* g, float* m, float* v,
                   Scratch& at, int n) {
  switch (rule) {
    case ADAMW: (keep_update ? adam<true, true> : adam<true, false>)(k, p, g, m, v, at.s, at.u, n); break;
    case RMSPROP: (keep_update ? adam<false, true> : adam<false, false>)(k, p, g, m, v, at.s, at.u, n); break;
    case LION: lion(k, p, g, m, at.u, n); break;
    case SIGNUM: signum(k, p, g, m, at.u, n); break;
    case SIGN: sign(k, p, g, at.u, n); break;
    case FOAM: (keep_update ? foam<true> : foam<false>)(k, p, g, at.den, at.m, at.v, at.u, n); break;
    default: (keep_update ? shared<true> : shared<false>)(k, p, g, m, at.den, at.u, n);
  }
}

// Sum of squares in an order that depends on n alone.
static double sum_of_squares(const float* __restrict u, int n) {
  float lanes[16] = {};
  int i = 0;
  for (; i + 16 <= n; i += 16)
    for (int j = 0; j < 16; ++j) lanes[j] += u[i + j] * u[i + j];
  double total = 0;
  for (; i < n; ++i) total += double(u[i]) * u[i];
  for (float lane : lanes) total += lane;
  return total;
}
