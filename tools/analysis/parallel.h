// Data-parallel loops of the analysis.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

namespace tierkv::analysis {

// Calls body(i) once for every i in [0, n) on at most `threads` threads; returns when all are done.
// Items are handed out in order, one at a time.
template <class Body>
void parallel_for(int64_t n, int32_t threads, const Body& body) {
  std::atomic<int64_t> next{0};
  const auto work = [&] {
    for (int64_t i = next.fetch_add(1); i < n; i = next.fetch_add(1)) body(i);
  };
  std::vector<std::thread> helpers;
  const int64_t count = std::min<int64_t>(threads, n) - 1;
  for (int64_t t = 0; t < count; ++t) helpers.emplace_back(work);
  work();
  for (std::thread& h : helpers) h.join();
}

}  // namespace tierkv::analysis
