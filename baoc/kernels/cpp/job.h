// The job of a step, its tensors, and the addresses of their states and weights.
#pragma once
#include <algorithm>

#include "rules.h"
#include "states.h"
#include "weights.h"

// A row of the table that baoc.kernels.cpp.table writes: addresses (0 for none), size and sides of the matrix as
// stored, the tensor's first chunk, the offset of its denominators, the start of its noise, bytes per gradient element.
struct Tensor {
  int64_t param, grad, finite, m, m_scale, v, v_scale, correction, numel, rows, cols, first, den, noise, grad_bytes, pad;
};

// All tensors have one rule, codecs and weights. `store` 0 only measures; `keep_update` computes the update as numbers
// of its own before it is added, and sums its squares.
struct Job {
  int32_t rule, m, v, weights, store, keep_update, fold, threads;
  int64_t num_tensors, num_chunks;
  const Tensor* tensors;
  const Settings* settings;  // [tensors]
  const float* thresholds;   // [10, 32]: see Lanes
  float* den;                // of shared v
  double* sums;              // [tensors]: sum of squares of the update over the elements that are stepped
  int64_t* counts;           // [tensors]: number of these elements
};

namespace {

constexpr int64_t CHUNK = 8192;  // elements per chunk

template <class T>
T* at(int64_t address) {
  return reinterpret_cast<T*>(address);
}

StoredState stored_m(const Job& job, const Tensor& t) {
  return {job.m, at<void>(t.m), at<uint16_t>(t.m_scale)};
}

Param param_of(const Job& job, const Tensor& t) {
  return {job.weights, at<void>(t.param), at<void>(t.correction), uint32_t(t.noise)};
}

StoredState stored_v(const Job& job, const Tensor& t) {
  return {job.v, at<void>(t.v), at<uint16_t>(t.v_scale)};
}

struct Total {
  double sum = 0;
  int64_t count = 0;
};

// Adds the squares of the update u and its number of elements to `total`; sets u to 0 where elements are not stepped.
void add(Total& total, float* u, const uint8_t* finite, int n, bool keep_update) {
  int left = n;
  if (finite) {
    left = 0;
    for (int i = 0; i < n; ++i) left += finite[i] != 0, u[i] = finite[i] ? u[i] : 0.f;
  }
  if (keep_update) total.sum += sum_of_squares(u, n);
  total.count += left;
}

}  // namespace
