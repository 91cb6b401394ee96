// SPDX-License-Identifier: Apache-2.0
// Work on layers in steps that several threads take. The steps stand in one order in which each
// comes after those it needs, and parallel_for() hands them out in that order, so that whoever
// waits for an earlier step waits for a thread that works on it.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <utility>
#include <vector>

#include "tierkv/status.h"

namespace tierkv::analysis {

// How many steps of each kind are done of every layer, and the first failure in the order of steps.
class StepLog {
 public:
  static constexpr int32_t kKinds = 4;
  explicit StepLog(int64_t layers) : done_(layers, {0, 0, 0, 0}) {}

  void finish(int32_t kind, int64_t layer) {
    const std::lock_guard<std::mutex> lock(mutex_);
    ++done_[layer][kind];
    changed_.notify_all();
  }
  void fail(int64_t step, Status status) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (step < failed_step_) {
      failed_step_ = step;
      failure_ = std::move(status);
    }
    changed_.notify_all();
  }
  // Until `count` steps of a kind are done; at once for a layer below 0. False where a step before
  // `step` failed, so that the first failure is found whatever the threads do.
  bool wait(int64_t step, int32_t kind, int64_t layer, int64_t count) {
    std::unique_lock<std::mutex> lock(mutex_);
    const auto over = [&] {
      return failed_step_ < step || layer < 0 || done_[layer][kind] >= count;
    };
    // wait() is a symbol of GCC 12's libstdc++, newer than a manylinux_2_34 wheel may need.
    while (!over()) changed_.wait_for(lock, std::chrono::hours(1));
    return failed_step_ >= step;
  }
  // Takes a step, unless one before it failed. It may throw: nobody waits for it for ever.
  template <class Step>
  void take(int64_t step, const Step& body) {
    if (failed_step_ < step) return;
    try {
      if (Status s = body(); !s) fail(step, std::move(s));
    } catch (...) {
      fail(step, Status::ok());  // parallel_for() throws it again
      throw;
    }
  }
  const Status& failure() const { return failure_; }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::array<int64_t, kKinds>> done_;
  std::atomic<int64_t> failed_step_ = INT64_MAX;
  Status failure_;
};

}  // namespace tierkv::analysis
