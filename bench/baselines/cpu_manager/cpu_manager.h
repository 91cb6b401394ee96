// SPDX-License-Identifier: Apache-2.0
// The baseline to beat: the same operations on the same state, by threads of the host (DiffKV
// Figure 13, "on-CPU multi-threaded memory management").
//
// Tuned as one would for production: rows dealt to threads in contiguous ranges, two passes per
// operation (plan, apply) with one spinning barrier between them, prefix sums over one number per
// thread, no lock and no atomic on shared data inside a pass, threads kept spinning between
// operations. The state after an operation is the reference's.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <thread>
#include <vector>

#include "tierkv/allocator.h"

namespace tierkv {

// A fixed set of threads that run one job after the other. The calling thread is one of them.
class SpinPool {
 public:
  explicit SpinPool(int32_t threads);
  ~SpinPool();
  SpinPool(const SpinPool&) = delete;
  SpinPool& operator=(const SpinPool&) = delete;

  int32_t size() const { return static_cast<int32_t>(workers_.size()) + 1; }
  // job(thread) on every thread; returns when all are done.
  void run(const std::function<void(int32_t)>& job);
  // Inside a job: waits for all threads.
  void barrier();

 private:
  void work(int32_t thread);

  std::vector<std::thread> workers_;
  const std::function<void(int32_t)>* job_ = nullptr;
  alignas(64) std::atomic<uint32_t> generation_{0};
  alignas(64) std::atomic<uint32_t> arrived_{0};
  alignas(64) std::atomic<uint32_t> phase_{0};
  std::atomic<bool> stop_{false};
};

class CpuManager {
 public:
  explicit CpuManager(int32_t threads) : pool_(threads), parts_(pool_.size()) {}

  // As run_page_op_host(). Append, reserve, keep and release run on all threads; the rest, and
  // drops that meet a shared page, run the reference on the calling thread: they are not in a
  // decoding loop.
  Status run(const PageAllocator& a, const PageOp& op);

 private:
  // What one thread found in its rows. One cache line each.
  struct alignas(64) Part {
    int64_t first_error;
    int64_t pages;  // needed, or returned
    bool shared;    // a dropped page has another owner
  };

  Part survey(const PageAllocator& a, const PageOp& op, int32_t thread) const;
  void apply(const PageAllocator& a, const PageOp& op, int32_t thread) const;
  int32_t first_row(const PageAllocator& a, const PageOp& op, int32_t thread) const;
  Part sum(int32_t threads) const;  // of threads 0 .. threads - 1
  bool repeats_a_sequence(const PageAllocator& a, const PageOp& op);

  SpinPool pool_;
  std::vector<Part> parts_;
  std::vector<int64_t> named_;  // per sequence: the last run that named it
  int64_t runs_ = 0;
};

}  // namespace tierkv
