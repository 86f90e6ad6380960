// One optimizer step of all tensors of one spec on the CPU: a table of addresses, chunks of it shared out to threads.
//
// Chunks are independent and sums are added up in order of chunks, so results do not depend on the number of threads.
#include "foam.h"
#include "shared.h"
#include "threads.h"

namespace {

// A state as fp32 numbers: in place if it is fp32 and may be written, else decoded into `scratch`, padded to a complete
// group by zeros.
float* open(const Job& job, const StoredState& state, int64_t start, int n, float* scratch) {
  if (state.codec == FP32 && job.store) return static_cast<float*>(state.payload) + start;
  decode(state, start, n, scratch);
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

void step_block(const Job& job, const Tensor& t, const Settings& k, int64_t start, int n, Scratch& scratch,
                Total& total) {
  const bool has_m = t.m && job.rule != FOAM;  // for FOAM the caller decodes and stores the averages
  const bool has_v = t.v && job.rule != FOAM && job.rule != SHARED_IN && job.rule != SHARED_OUT;
  const bool direct = job.weights == W_FP32 && job.store;
  const uint8_t* finite = t.finite ? at<const uint8_t>(t.finite) + start : nullptr;
  const StoredState m_state = stored_m(job, t), v_state = stored_v(job, t);
  const float* g = load_grad(t.grad_bytes == 2, at<void>(t.grad), start, n, scratch.g);
  float* p = direct ? at<float>(t.param) + start : scratch.p;
  float* m = has_m ? open(job, m_state, start, n, scratch.m) : nullptr;
  float* v = has_v ? open(job, v_state, start, n, scratch.v) : nullptr;
  if (!direct && job.store) load_param(param_of(job, t), start, n, scratch.p);
  if (!job.store) std::fill_n(scratch.p, n, 0.f);
  if (job.rule == SHARED_IN || job.rule == SHARED_OUT) denominators(job, t, start, n, scratch.den);
  if (finite || job.weights == W_SPLIT8) std::copy_n(p, n, scratch.old_p);
  if (finite) {
    if (has_m) std::copy_n(m, n, scratch.old_m);
    if (has_v) std::copy_n(v, n, scratch.old_v);
  }
  update(job.rule, job.keep_update, k, p, g, m, v, scratch, n);
  add(total, scratch.u, finite, n, job.keep_update);
  if (!job.store) return;
  if (finite) {
    restore(finite, p, scratch.old_p, n);
    if (has_m) restore(finite, m, scratch.old_m, n);
    if (has_v) restore(finite, v, scratch.old_v, n), root(v, scratch.s, n);
  }
  if (has_m && m == scratch.m) {
    auto encode = [&](float* x, const float* thresholds) { encode_m(m_state, start, n, x, thresholds); };
    if (finite && m_state.codec != FP32) encode_some(m_state, start, n, m, finite, job.thresholds, encode);
    else encode(m, job.thresholds);
  }
  if (has_v && v == scratch.v) {
    for (int i = n; i < padded(n); ++i) scratch.s[i] = 0.f;
    auto encode = [&](float* s, const float* thresholds) { encode_v(v_state, start, n, v, s, thresholds); };
    if (finite && v_state.codec != FP32) encode_some(v_state, start, n, scratch.s, finite, job.thresholds, encode);
    else encode(scratch.s, job.thresholds);
  }
  if (!direct) store_param(param_of(job, t), start, n, p, scratch.old_p, job.thresholds);
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

#define BAOC_EXPORT extern "C" __attribute__((visibility("default")))

// Elements per chunk; states per chunk of a folded rule.
BAOC_EXPORT int64_t baoc_chunk(int32_t fold) { return fold > 1 ? states_per_chunk(fold) : CHUNK; }

BAOC_EXPORT void baoc_step(const Job* job_address) {
  const Job& job = *job_address;
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
