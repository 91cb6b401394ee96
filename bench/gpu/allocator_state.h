// SPDX-License-Identifier: Apache-2.0
// States and operations of the allocator benchmark, on the host.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

#include "tierkv/allocator.h"

namespace tierkv::bench {

inline constexpr int32_t kSequences = 128, kLayers = 32, kKvHeads = 8;
inline constexpr int32_t kRows = kSequences * kLayers * kKvHeads;
inline constexpr int32_t kHighTokens = 64, kLowTokens = 112;  // a page, K8V4 and K4V2 at d = 128
inline constexpr int32_t kMaxTokens = 8192;

inline AllocatorShape llama3_shape(int32_t num_pages) {
  AllocatorShape shape;
  shape.table.num_sequences = kSequences;
  shape.table.rows_per_sequence = kLayers * kKvHeads;
  shape.table.num_sides = 2;
  shape.table.table_slots[0] = worst_case_pages(kMaxTokens, kHighTokens, kLowTokens);
  shape.table.tokens_per_page[0] = kHighTokens;
  shape.table.tokens_per_page[1] = kLowTokens;
  shape.num_pages = num_pages;
  return shape;
}

// An operation on a batch of sequences in random order, with its arrays.
struct BatchOp {
  PageOpKind kind;
  std::vector<int32_t> sequences;
  std::vector<SideCounts> counts;
  OpReport report{};

  PageOp view() {
    return {kind,    {sequences.data(), static_cast<int32_t>(sequences.size())},
            nullptr, counts.empty() ? nullptr : counts.data(),
            nullptr, &report};
  }
};

struct FreeMemory {
  void operator()(void* p) const { std::free(p); }
};

struct HostMemory {
  explicit HostMemory(const AllocatorShape& shape)
      : bytes(allocator_bytes(shape).total),
        memory(std::aligned_alloc(kAllocatorAlignment, bytes)) {
    std::memset(memory.get(), 0, bytes);
    auto made = make_page_allocator(shape, memory.get(), bytes);
    if (made.is_ok()) a = *made;
  }
  void copy(const HostMemory& other) { std::memcpy(memory.get(), other.memory.get(), bytes); }
  bool operator==(const HostMemory& other) const {
    return std::memcmp(memory.get(), other.memory.get(), bytes) == 0;
  }

  size_t bytes;
  std::unique_ptr<void, FreeMemory> memory;
  PageAllocator a;
};

// Counts the first `batch` sequences.
class StateMaker {
 public:
  explicit StateMaker(uint32_t seed, int32_t batch = kSequences) : rng_(seed), batch_(batch) {}

  BatchOp op(PageOpKind kind) {
    BatchOp op{kind, std::vector<int32_t>(batch_), {}, {}};
    std::iota(op.sequences.begin(), op.sequences.end(), 0);
    std::shuffle(op.sequences.begin(), op.sequences.end(), rng_);
    return op;
  }

  // Open sequences. In a pool long in use no row's pages are neighbours: the worst case is a ring
  // in random order.
  bool open_all(HostMemory* state, bool is_shuffled) {
    if (!initialize_host(state->a).is_ok()) return false;
    if (is_shuffled)
      std::shuffle(state->a.ring.ids, state->a.ring.ids + state->a.shape.num_pages, rng_);
    return run(state, op(PageOpKind::kOpen));
  }

  // The two halves of a prompt of `tokens` tokens: a random share of each row is high, some pruned.
  BatchOp reserve(int32_t tokens) {
    BatchOp r = op(PageOpKind::kReserve);
    r.counts.assign(batch_, {{worst_case_pages(tokens, kHighTokens, kLowTokens), 0, 0, 0}});
    return r;
  }
  BatchOp keep(int32_t tokens) {
    BatchOp k = op(PageOpKind::kKeep);
    for (int32_t r = 0; r < batch_ * kLayers * kKvHeads; ++r) {
      const int32_t high = uniform(tokens / 8, tokens / 2);
      k.counts.push_back({{high, uniform(0, tokens - high), 0, 0}});
    }
    return k;
  }

  // One generation step. Typical: one token per row, 60% high, 30% low, 10% pruned. Worst: every
  // row needs a page on both sides.
  BatchOp append(bool is_worst) {
    BatchOp a = op(PageOpKind::kAppend);
    for (int32_t r = 0; r < batch_ * kLayers * kKvHeads; ++r) {
      const int32_t draw = uniform(0, 9);
      a.counts.push_back(is_worst ? SideCounts{{kHighTokens, kLowTokens, 0, 0}}
                                  : SideCounts{{draw < 6, draw >= 6 && draw < 9, 0, 0}});
    }
    return a;
  }

  static bool run(HostMemory* state, BatchOp op) {
    return run_page_op_host(state->a, op.view()).is_ok() && op.report.status == StatusCode::kOk;
  }

 private:
  int32_t uniform(int32_t low, int32_t high) {
    return std::uniform_int_distribution<int32_t>(low, high)(rng_);
  }
  std::mt19937 rng_;
  int32_t batch_;
};

}  // namespace tierkv::bench
