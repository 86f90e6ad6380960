// Runs tasks on std::threads that live for one call. A second OpenMP runtime next to torch's would leave two sets of
// threads spinning on the same cores, and threads that outlive the call would not survive a fork.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <system_error>
#include <thread>
#include <vector>
#if defined(__SSE__)
#include <xmmintrin.h>
#endif

namespace {

constexpr int64_t LEAST = 4;  // tasks per thread, at least

template <class Work>
void share_out(int threads, int64_t tasks, const Work& work) {
  std::atomic<int64_t> next{0};
  auto loop = [&] {
    for (int64_t task; (task = next.fetch_add(1, std::memory_order_relaxed)) < tasks;) work(task);
  };
#if defined(__SSE__)
  const unsigned mode = _mm_getcsr();  // the caller's treatment of subnormal numbers
  auto helper = [&] { _mm_setcsr(mode); loop(); };
#else
  auto helper = loop;
#endif
  std::vector<std::thread> others;
  try {
    for (int64_t i = 1; i < std::min<int64_t>(threads, tasks / LEAST); ++i) others.emplace_back(helper);
  } catch (const std::system_error&) {
    // The system gives no more threads: those that exist do the work.
  }
  loop();
  for (auto& other : others) other.join();
}

}  // namespace
