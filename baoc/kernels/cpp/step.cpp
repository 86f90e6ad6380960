// One optimizer step of all tensors of one spec on the CPU: a table of addresses, chunks of it shared out to threads.
//
// Every chunk is worked on alone and sums are added up by chunk, so the bits do not depend on the number of threads.
#include "foam.h"
#include "shared.h"
#include "threads.h"

namespace {

// Where a state can be worked on: in place if it is fp32 and may be written, else decoded into `scratch`, which gets
// zeros up to a whole group.
float* open(const Job& job, const Kept& kept, int64_t start, int n, float* scratch) {
  if (kept.codec == FP32 && job.store) return static_cast<float*>(kept.payload) + start;
  decode(kept, start, n, scratch);
  for (int i = n; i < padded(n); ++i) scratch[i] = 0.f;
  return scratch;
}

void denominators(const Job& job, const Tensor& t, int64_t start, int n, float* out) {
  const float* den = job.den + t.den;
  int64_t row = start / t.cols, col = start % t.cols;
  for (int i = 0; i < n; ++row, col = 0) {
    const int count = int(std::min<int64_t>(n - i, t.cols - col));
    if (job.rule == SHARED_IN) std::fill_n(out + i, count, den[row]);
    else std::copy_n(den + col, count, out + i);
    i += count;
  }
}

void step_block(const Job& job, const Tensor& t, const Settings& k, int64_t start, int n, Scratch& at_, Total& total) {
  const bool has_m = t.m && job.rule != FOAM;  // whose averages are there by element, and are stored by their caller
  const bool has_v = t.v && job.rule != FOAM && job.rule != SHARED_IN && job.rule != SHARED_OUT;
  const bool direct = job.weights == W_FP32 && job.store;
  const uint8_t* finite = t.finite ? at<const uint8_t>(t.finite) + start : nullptr;
  const Kept m_kept = kept_m(job, t), v_kept = kept_v(job, t);
  const float* g = load_grad(t.grad_bytes == 2, at<void>(t.grad), start, n, at_.g);
  float* p = direct ? at<float>(t.param) + start : at_.p;
  float* m = has_m ? open(job, m_kept, start, n, at_.m) : nullptr;
  float* v = has_v ? open(job, v_kept, start, n, at_.v) : nullptr;
  if (!direct && job.store) load_param(param_of(job, t), start, n, at_.p);
  if (!job.store) std::fill_n(at_.p, n, 0.f);
  if (job.rule == SHARED_IN || job.rule == SHARED_OUT) denominators(job, t, start, n, at_.den);
  if (finite || job.weights == W_SPLIT8) std::copy_n(p, n, at_.held_p);
  if (finite) {
    if (has_m) std::copy_n(m, n, at_.held_m);
    if (has_v) std::copy_n(v, n, at_.held_v);
  }
  update(job.rule, job.keep_update, k, p, g, m, v, at_, n);
  add(total, at_.u, finite, n, job.keep_update);
  if (!job.store) return;
  if (finite) {
    restore(finite, p, at_.held_p, n);
    if (has_m) restore(finite, m, at_.held_m, n);
    if (has_v) restore(finite, v, at_.held_v, n), root(v, at_.s, n);
  }
  if (has_m && m == at_.m) {
    auto encode = [&](float* x, const float* thresholds) { encode_m(m_kept, start, n, x, thresholds); };
    if (finite && m_kept.codec != FP32) encode_some(m_kept, start, n, m, finite, job.thresholds, encode);
    else encode(m, job.thresholds);
  }
  if (has_v && v == at_.v) {
    for (int i = n; i < padded(n); ++i) at_.s[i] = 0.f;
    auto encode = [&](float* s, const float* thresholds) { encode_v(v_kept, start, n, v, s, thresholds); };
    if (finite && v_kept.codec != FP32) encode_some(v_kept, start, n, at_.s, finite, job.thresholds, encode);
    else encode(at_.s, job.thresholds);
  }
  if (!direct) store_param(param_of(job, t), start, n, p, at_.held_p, job.thresholds);
}

const Tensor& tensor_of(const Job& job, int64_t chunk) {
  const Tensor* end = job.tensors + job.num_tensors;
  return *(std::upper_bound(job.tensors, end, chunk, [](int64_t c, const Tensor& t) { return c < t.first; }) - 1);
}

Total step_chunk(const Job& job, int64_t chunk) {
  const Tensor& t = tensor_of(job, chunk);
  const Settings& k = job.settings[&t - job.tensors];
  Total total;
  if (t.grad) {
    Scratch scratch;
    if (job.rule == FOAM) {
      step_folds(job, t, k, chunk - t.first, scratch, total);
    } else {
      const int64_t begin = (chunk - t.first) * CHUNK, end = std::min(t.numel, begin + CHUNK);
      for (int64_t start = begin; start < end; start += BLOCK)
        step_block(job, t, k, start, int(std::min<int64_t>(BLOCK, end - start)), scratch, total);
    }
  }
  return total;
}

}  // namespace

// Elements per chunk; of states per chunk for folded ones.
#define BAOC_EXPORT extern "C" __attribute__((visibility("default")))

BAOC_EXPORT int64_t baoc_chunk(int32_t fold) { return fold > 1 ? states_per_chunk(fold) : CHUNK; }

BAOC_EXPORT void baoc_step(const Job* given) {
  const Job& job = *given;
  if (job.rule == SHARED_IN || job.rule == SHARED_OUT) share_v(job);
  std::vector<Total> totals(static_cast<size_t>(job.num_chunks));
  share_out(job.threads, job.num_chunks, [&](int64_t chunk) { totals[size_t(chunk)] = step_chunk(job, chunk); });
  for (int64_t i = 0; i < job.num_tensors; ++i) {
    const int64_t end = i + 1 < job.num_tensors ? job.tensors[i + 1].first : job.num_chunks;
    Total all;
    for (int64_t chunk = job.tensors[i].first; chunk < end; ++chunk) {
      all.sum += totals[size_t(chunk)].sum;
      all.count += totals[size_t(chunk)].count;
    }
    job.sums[i] = all.sum;
    job.counts[i] = all.count;
  }
}
