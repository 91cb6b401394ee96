// SPDX-License-Identifier: Apache-2.0
// What the host knows of the free pages of a device that it does not wait for: a lower bound.
#pragma once

#include <cstdint>
#include <deque>

namespace tierkv::store {

class FreePages {
 public:
  // published: mapped host memory, written by commit_kernel() (CommitCall::published).
  void set(const volatile uint64_t* published) { published_ = published; }

  // A page operation was enqueued, or will be replayed, that takes `at_most` pages.
  void enqueue(int64_t at_most) {
    pending_.push_back({++enqueued_, at_most});
    taken_ += at_most;
  }
  // Pages that are free for sure once everything enqueued has run.
  int64_t at_least() {
    const uint64_t word = *published_;
    const auto next = static_cast<uint32_t>(word);
    while (!pending_.empty() && static_cast<int32_t>(next - pending_.front().number) > 0) {
      taken_ -= pending_.front().at_most;
      pending_.pop_front();
    }
    return static_cast<int64_t>(word >> 32) - taken_;
  }

 private:
  // The number of an operation is OpState::op_number when it begins, from 1.
  struct Operation {
    uint32_t number;
    int64_t at_most;
  };
  const volatile uint64_t* published_ = nullptr;
  uint32_t enqueued_ = 0;
  int64_t taken_ = 0;
  std::deque<Operation> pending_;
};

}  // namespace tierkv::store
