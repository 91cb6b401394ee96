// SPDX-License-Identifier: Apache-2.0
// Data-parallel loops on host threads.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

#include "tierkv/status.h"

namespace tierkv {

// Calls body(i) for every i in [0, n), once each and on at most `threads` threads, fewer where the
// system has no more; returns when all are done. Items are handed out in order, one at a time. What
// body throws (std::bad_alloc) ends the loop early and is thrown here, on the caller's thread.
template <class Body>
void parallel_for(int64_t n, int32_t threads, const Body& body) {
  std::atomic<int64_t> next{0};
  std::mutex mutex;
  std::exception_ptr failure;
  const auto work = [&] {
    try {
      for (int64_t i = next.fetch_add(1); i < n; i = next.fetch_add(1)) body(i);
    } catch (...) {
      next = n;
      const std::lock_guard<std::mutex> lock(mutex);
      if (!failure) failure = std::current_exception();
    }
  };
  const int64_t count = std::max<int64_t>(0, std::min<int64_t>(threads, n) - 1);
  std::vector<std::thread> helpers;
  helpers.reserve(count);
  try {
    for (int64_t t = 0; t < count; ++t) helpers.emplace_back(work);
  } catch (const std::exception&) {
    // The threads that there are do the work.
  }
  work();
  for (std::thread& h : helpers) h.join();
  if (failure) std::rethrow_exception(failure);
}

// The same for a body that returns a Status: the failure of the least item, where any fails.
template <class Body>
Status try_parallel_for(int64_t n, int32_t threads, const Body& body) {
  std::vector<Status> statuses(static_cast<size_t>(n));
  parallel_for(n, threads, [&](int64_t i) { (void)(statuses[i] = body(i)); });
  for (const Status& s : statuses) {
    if (!s) return s;
  }
  return Status::ok();
}

// Threads for work that passes over `bytes` of memory: one for each MiB, at most 16 and one a core.
inline int32_t threads_for(int64_t bytes) {
  const auto cores = static_cast<int64_t>(std::thread::hardware_concurrency());
  return static_cast<int32_t>(
      std::clamp<int64_t>(bytes >> 20, 1, std::clamp<int64_t>(cores, 1, 16)));
}

}  // namespace tierkv
