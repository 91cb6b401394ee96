// What calls on a device left in memory for later calls, by the host's knowledge: the batch, the
// plan of attention, and whether both are settled. The three device stores share it.
#pragma once

#include <cstdint>

#include "store/sequence_table.h"

namespace tierkv {

// Whether the batch and the plan are settled: complete whenever the next kernel of the stream
// begins, even one that begins before the kernel ahead of it has ended (programmatic dependent
// launch).
//
// Law: a kernel that writes one of them unsettles both, because it may let the next kernel start
// while it still writes. They are settled as soon as a kernel follows that lets no other start
// before its own wait for all earlier kernels has ended; to kernels behind it the writers have
// ended, even to those that begin early. attend() and append() of a step launch such a kernel, and
// may start the next one at once where they were launched settled.
class SettledWrites {
 public:
  bool is_settled() const { return is_settled_; }
  // A kernel that writes the batch or the plan was enqueued.
  void note_write() { is_settled_ = false; }
  // A kernel was enqueued that waits before it lets another start, unless is_settled().
  void note_wait() { is_settled_ = true; }

 private:
  bool is_settled_ = false;
};

// There are two memories, each for a batch and a plan: of calls that run at once, and of calls that
// are captured in a graph. A graph writes its own again whenever it is replayed, of which the host
// may learn nothing, so they never share one; and what a capture uses the same capture has written.
inline constexpr int32_t kCallMemories = 2;

class CallMemory {
 public:
  // Before a call: the id of the capture under way, 0 where calls run at once.
  void enter(uint64_t capture) {
    index_ = capture == 0 ? 0 : 1;
    if (now().capture == capture) return;
    now() = {};
    now().capture = capture;
  }
  // Of the memory that the call uses.
  int32_t index() const { return index_; }

  bool has_batch(const Slots& slots) const { return now().batch == slots; }
  void wrote_batch(const Slots& slots) {
    now().batch = slots;
    now().settled.note_write();
  }
  // In both memories, where the device may have changed it.
  void forget_batches() {
    for (Content& c : memories_) c.batch.clear();
  }

  // A plan is of sequences, their counts of tokens and a number of queries.
  bool has_plan(const Slots& slots, int32_t q_len) const {
    return now().planned == slots && now().q_len == q_len;
  }
  // Before its kernels are enqueued: if one fails there is none.
  void begin_plan() {
    now().planned.clear();
    now().settled.note_write();
  }
  void wrote_plan(const Slots& slots, int32_t q_len) {
    now().planned = slots;
    now().q_len = q_len;
  }
  void forget_plans() {
    for (Content& c : memories_) c.planned.clear();
  }

  // The layout that the plan's workspace has: it differs by these two numbers, and begins with
  // zeros.
  bool has_layout(size_t sequences, int32_t q_len) const {
    return now().layout_sequences == sequences && now().layout_q_len == q_len;
  }
  void set_layout(size_t sequences, int32_t q_len) {
    now().layout_sequences = sequences;
    now().layout_q_len = q_len;
  }

  SettledWrites& settled() { return now().settled; }

 private:
  struct Content {
    uint64_t capture = 0;
    Slots batch, planned;  // empty: none
    int32_t q_len = 0;
    size_t layout_sequences = 0;
    int32_t layout_q_len = 0;
    SettledWrites settled;
  };
  Content& now() { return memories_[index_]; }
  const Content& now() const { return memories_[index_]; }

  Content memories_[kCallMemories];
  int32_t index_ = 0;
};

}  // namespace tierkv
