// SPDX-License-Identifier: Apache-2.0
// What the host knows of a device that it does not wait for: what calls have left there for later
// ones (the batch of sequences, counts derived for it, the plan of attention), and the free pages.
// Calls that run at once and captured ones have a memory each, because a graph writes its own again
// in every replay.
#pragma once

#include <cstdint>
#include <deque>
#include <vector>

namespace tierkv::store {

inline constexpr int32_t kBatchMemories = 2;

class BatchBook {
 public:
  explicit BatchBook(int32_t num_layers) : num_layers_(num_layers) {}

  // Before a call: the id of the capture under way, 0 where calls run at once.
  void enter(uint64_t capture) {
    index_ = capture == 0 ? 0 : 1;
    if (capture != 0 && capture != capture_) ++captures_, contents_[1] = {};
    if (capture != 0) capture_ = capture;
  }
  int32_t index() const { return index_; }
  bool is_captured() const { return index_ == 1; }
  // How many there have been.
  int32_t captures() const { return captures_; }
  // In both memories, where the device may have changed what they are derived from.
  void forget() { contents_[0] = contents_[1] = {}; }

  // from and to of all layers for a step of so many tokens that begins. Replays of a captured one
  // move the counts that calls which run at once have derived theirs from.
  void wrote_step(const std::vector<int32_t>& slots, int32_t tokens) {
    if (is_captured()) contents_[0] = {};
    wrote(slots, true);
    now().step_tokens = tokens;
  }
  bool has_step(const std::vector<int32_t>& slots, int32_t tokens) const {
    return now().slots == slots && now().step_tokens == tokens;
  }
  // Whether a step of these sequences has begun and no other call since.
  bool has_step(const std::vector<int32_t>& slots) const {
    return now().slots == slots && now().step_tokens > 0;
  }
  // Whether a step of other sequences has begun and no other call since.
  bool has_other_step(const std::vector<int32_t>& slots) const {
    return now().slots != slots && now().step_tokens > 0;
  }
  // Whether the memory has a batch of another call than a step.
  bool has_batch_alone() const { return !now().slots.empty() && now().step_tokens == 0; }
  // from, to and at of one layer.
  void wrote_layer(const std::vector<int32_t>& slots, int32_t layer) {
    wrote(slots, false);
    now().has_at[layer] = 1;
  }
  // at of all layers.
  void wrote_held(const std::vector<int32_t>& slots) { wrote(slots, true); }
  bool has_at(const std::vector<int32_t>& slots, int32_t layer) const {
    return now().slots == slots && now().has_at[layer] != 0;
  }
  // Whether attention over bodies that end there has its plan; if not it has afterwards.
  bool plan(int32_t q_len, const std::vector<int32_t>& body_ends) {
    if (now().planned_q_len == q_len && now().planned_ends == body_ends) return true;
    now().planned_q_len = q_len;
    now().planned_ends = body_ends;
    return false;
  }

 private:
  struct Content {
    std::vector<int32_t> slots;  // empty: no batch
    int32_t step_tokens = 0;     // 0: no step
    std::vector<uint8_t> has_at;
    int32_t planned_q_len = 0;  // 0: no plan
    std::vector<int32_t> planned_ends;
  };
  Content& now() { return contents_[index_]; }
  const Content& now() const { return contents_[index_]; }
  // has_at_all: at of all layers; else of those that had it, where the slots are the same.
  void wrote(const std::vector<int32_t>& slots, bool has_at_all) {
    Content& c = now();
    if (has_at_all || c.slots != slots) c.has_at.assign(num_layers_, has_at_all ? 1 : 0);
    c.slots = slots;
    c.step_tokens = 0;
    c.planned_q_len = 0;
  }

  int32_t num_layers_;
  int32_t index_ = 0;
  uint64_t capture_ = 0;  // the last one
  int32_t captures_ = 0;
  Content contents_[kBatchMemories];
};

// The free pages of the device: a lower bound.
class FreePages {
 public:
  // published: mapped host memory, written by commit() (DeviceCommit::published).
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
  // The stream must be idle and its counts published. Operations that have not run by then belong
  // to captured steps that the caller gave up, so they never will.
  void settle() {
    enqueued_ = static_cast<uint32_t>(*published_) - 1;
    taken_ = 0;
    pending_.clear();
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
