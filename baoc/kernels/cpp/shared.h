// v shared along an axis of the matrix [rows, cols] as stored: SHARED_IN along cols, one per row; SHARED_OUT along
// rows, one per column. `share_v` updates it before the step, and computes the denominators of the step from it.
#pragma once
#include "job.h"
#include "threads.h"

namespace {

constexpr int SLABS = 16;  // a sum over rows is the sum of so many partial sums, each over a slab of rows

void average(const Job& job, const Tensor& t, const Settings& k, int64_t index, double sum, int64_t count) {
  float* stored = at<float>(t.v) + index;
  float v = *stored;
  if (count) v = Lerp(k.w2)(v, float(sum / double(count)));
  if (job.store) *stored = v;
  job.den[t.den + index] = __builtin_sqrtf(v) / k.bc2 + k.eps;
}

int64_t count_finite(const uint8_t* finite, int64_t n) {
  int64_t count = 0;
  for (int64_t i = 0; i < n; ++i) count += finite[i] != 0;
  return count;
}

int64_t rows_per_task(const Tensor& t) {
  return std::max<int64_t>(1, CHUNK / std::max<int64_t>(t.cols, 1));
}

void share_along_cols(const Job& job, const Tensor& t, const Settings& k, int64_t begin, int64_t end) {
  float scratch[BLOCK];
  for (int64_t row = begin; row < end; ++row) {
    const int64_t first = row * t.cols;
    double sum = 0;
    for (int64_t i = 0; i < t.cols; i += BLOCK) {
      const int n = int(std::min<int64_t>(BLOCK, t.cols - i));
      sum += sum_of_squares(load_grad(t.grad_bytes == 2, at<void>(t.grad), first + i, n, scratch), n);
    }
    average(job, t, k, row, sum, t.finite ? count_finite(at<const uint8_t>(t.finite) + first, t.cols) : t.cols);
  }
}

int64_t rows_per_slab(const Tensor& t) { return (t.rows + SLABS - 1) / SLABS; }

// Sums of g^2 over a slab of rows, by column.
void sum_slab(const Tensor& t, int64_t slab, float* __restrict sums) {
  float scratch[BLOCK];
  const int64_t end = std::min(t.rows, (slab + 1) * rows_per_slab(t));
  std::fill_n(sums, t.cols, 0.f);
  for (int64_t row = slab * rows_per_slab(t); row < end; ++row)
    for (int64_t i = 0; i < t.cols; i += BLOCK) {
      const int n = int(std::min<int64_t>(BLOCK, t.cols - i));
      const float* __restrict g = load_grad(t.grad_bytes == 2, at<void>(t.grad), row * t.cols + i, n, scratch);
      for (int j = 0; j < n; ++j) sums[i + j] += g[j] * g[j];
    }
}

void share_along_rows(const Job& job, const Tensor& t, const Settings& k, const float* sums) {
  std::vector<int64_t> counts(size_t(t.cols), t.finite ? 0 : t.rows);
  if (t.finite)
    for (int64_t i = 0; i < t.numel; ++i) counts[size_t(i % t.cols)] += at<const uint8_t>(t.finite)[i] != 0;
  for (int64_t col = 0; col < t.cols; ++col) {
    double sum = 0;
    for (int slab = 0; slab < SLABS; ++slab) sum += sums[slab * t.cols + col];
    average(job, t, k, col, sum, counts[size_t(col)]);
  }
}

struct Part {
  const Tensor* tensor;
  int64_t begin, end;
};

void share_v(const Job& job) {
  std::vector<Part> parts;
  std::vector<int64_t> sums_at(size_t(job.num_tensors), 0);
  int64_t num_sums = 0;
  for (int64_t i = 0; i < job.num_tensors; ++i) {
    const Tensor& t = job.tensors[i];
    if (!t.grad) continue;
    sums_at[size_t(i)] = num_sums;
    const int64_t step = job.rule == SHARED_IN ? rows_per_task(t) : 1;
    const int64_t tasks = job.rule == SHARED_IN ? (t.rows + step - 1) / step : SLABS;
    if (job.rule == SHARED_OUT) num_sums += SLABS * t.cols;
    for (int64_t task = 0; task < tasks; ++task) parts.push_back({&t, task * step, std::min(t.rows, (task + 1) * step)});
  }
  std::vector<float> sums(static_cast<size_t>(num_sums));
  share_out(job.threads, int64_t(parts.size()), [&](int64_t i) {
    const Part& part = parts[size_t(i)];
    const int64_t index = part.tensor - job.tensors;
    if (job.rule == SHARED_IN) share_along_cols(job, *part.tensor, job.settings[index], part.begin, part.end);
    else sum_slab(*part.tensor, part.begin, sums.data() + sums_at[size_t(index)] + part.begin * part.tensor->cols);
  });
  if (job.rule == SHARED_OUT)
    share_out(job.threads, job.num_tensors, [&](int64_t i) {
      const Tensor& t = job.tensors[i];
      if (t.grad) share_along_rows(job, t, job.settings[i], sums.data() + sums_at[size_t(i)]);
    });
}

}  // namespace
