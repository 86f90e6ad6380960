// FOAM: states are [rows, cols / fold], rounded up. A chunk is a range of states and the elements that fold into them.
// The step uses the averages before they are rounded for storage.
#pragma once
#include "job.h"

namespace {

int64_t states_per_chunk(int64_t fold) { return std::max<int64_t>(PACKED, CHUNK / fold / PACKED * PACKED); }

constexpr int MOST_STATES = 4096;

struct Folds {
  float m[MOST_STATES], v[MOST_STATES];
};

template <int FOLD>
void sum_folds(const float* __restrict g, int count, float* __restrict sums) {
  for (int f = 0; f < count; ++f) {
    float sum = 0;
    for (int j = 0; j < FOLD; ++j) sum += g[f * FOLD + j];
    sums[f] = sum;
  }
}

// Sums over folds of n consecutive elements; the last one may be short.
void sums_of(const float* g, int n, int fold, float* sums) {
  const int whole = n / fold;
  if (fold == 2) sum_folds<2>(g, whole, sums);
  else if (fold == 4) sum_folds<4>(g, whole, sums);
  else sum_folds<8>(g, whole, sums);
  if (n % fold) {
    float sum = 0;
    for (int i = whole * fold; i < n; ++i) sum += g[i];
    sums[whole] = sum;
  }
}

template <int FOLD>
void spread_by(const float* __restrict from, float* __restrict to, int count) {
  for (int f = 0; f < count; ++f)
    for (int j = 0; j < FOLD; ++j) to[f * FOLD + j] = from[f];
}

// Repeats each number `fold` times. Writes complete folds, so up to `fold` - 1 elements beyond the last.
void spread(const float* from, float* to, int count, int fold) {
  if (fold == 2) spread_by<2>(from, to, count);
  else if (fold == 4) spread_by<4>(from, to, count);
  else spread_by<8>(from, to, count);
}

// Sums of the gradient by fold, which `average_folds` turns into means over the `left` finite elements of each fold.
struct Means {
  float mean[BLOCK];
  int left[BLOCK];
};

// Updates the averages of `count` folds.
void average_folds(const Job& job, const Settings& k, Means& of, bool masked, float* __restrict m, float* __restrict v,
                   int count) {
  const Lerp lerp_m(k.w1), lerp_v(k.w2);
  float* __restrict mean = of.mean;
  const int* __restrict left = of.left;
  if (!masked) {
    const float share = 1.f / float(job.fold);  // a power of two
    for (int f = 0; f < count; ++f) {
      mean[f] = mean[f] * share;
      m[f] = lerp_m(m[f], mean[f]);
      v[f] = lerp_v(v[f], mean[f] * mean[f]);
    }
    return;
  }
  for (int f = 0; f < count; ++f) {
    const float num = float(std::max(left[f], 1));
    mean[f] = mean[f] / num;
    m[f] = left[f] ? lerp_m(m[f], mean[f]) : m[f];
    v[f] = left[f] ? lerp_v(v[f], mean[f] * mean[f]) : v[f];
  }
}

void step_block(const Job& job, const Tensor& t, const Settings& k, int64_t start, int n, Scratch& scratch,
                Total& total);

// Folds [fold_begin, fold_end) of one row; m and v are theirs.
void step_row(const Job& job, const Tensor& t, const Settings& k, int64_t row, int64_t begin, int64_t end, float* m,
              float* v, Scratch& s, Total& total) {
  const int fold = job.fold, at_once = BLOCK / fold;
  Means of;
  for (int64_t f = begin; f < end; f += at_once) {
    const int count = int(std::min<int64_t>(at_once, end - f));
    const int64_t start = row * t.cols + f * fold;
    const int n = int(std::min<int64_t>(int64_t(count) * fold, t.cols - f * fold));
    const float* g = load_grad(t.grad_bytes == 2, at<void>(t.grad), start, n, s.g);
    sums_of(g, n, fold, of.mean);
    if (t.finite) {
      std::fill_n(of.left, count, fold);
      for (int i = 0; i < n; ++i) of.left[i / fold] -= !at<const uint8_t>(t.finite)[start + i];
    }
    float *m_here = m + (f - begin), *v_here = v + (f - begin);
    average_folds(job, k, of, t.finite, m_here, v_here, count);
    spread(of.mean, s.den, count, fold);
    spread(m_here, s.m, count, fold);
    spread(v_here, s.v, count, fold);
    step_block(job, t, k, start, n, s, total);
  }
}

void step_folds(const Job& job, const Tensor& t, const Settings& k, int64_t chunk, Scratch& s, Total& total) {
  Folds states;
  const int64_t width = (t.cols + job.fold - 1) / job.fold, num_states = width * t.rows;
  const int64_t begin = chunk * states_per_chunk(job.fold);
  const int count = int(std::min(num_states - begin, states_per_chunk(job.fold)));
  const StoredState m_state = stored_m(job, t), v_state = stored_v(job, t);
  std::fill_n(states.m, padded(count), 0.f);
  decode(m_state, begin, count, states.m);
  decode(v_state, begin, count, states.v);
  for (int i = 0; i < count;) {
    const int64_t row = (begin + i) / width, col = (begin + i) % width;
    const int n = int(std::min<int64_t>(count - i, width - col));
    step_row(job, t, k, row, col, col + n, states.m + i, states.v + i, s, total);
    i += n;
  }
  if (!job.store) return;
  for (int i = 0; i < count; i += BLOCK) {
    const int n = std::min(BLOCK, count - i);
    float *m = states.m + i, *v = states.v + i;
    if (m_state.codec == FP32) std::copy_n(m, n, static_cast<float*>(m_state.payload) + begin + i);
    else encode_m(m_state, begin + i, n, m, job.thresholds);
    if (v_state.codec == FP32) {
      std::copy_n(v, n, static_cast<float*>(v_state.payload) + begin + i);
      continue;
    }
    std::fill_n(s.s, padded(n), 0.f);
    root(v, s.s, n);
    encode_v(v_state, begin + i, n, v, s.s, job.thresholds);
  }
}

}  // namespace
