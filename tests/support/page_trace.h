// SPDX-License-Identifier: Apache-2.0
// Random operations that fit a given state, with mistakes among them: the food of the trace tests,
// host and device.
#pragma once

#include <algorithm>
#include <cstdint>
#include <random>
#include <vector>

#include "tierkv/allocator.h"

namespace tierkv::testing {

// An operation that owns what its pointers lead to.
struct OwnedOp {
  PageOpKind kind = PageOpKind::kOpen;
  std::vector<int32_t> sequences, sources;
  std::vector<SideCounts> counts;
  std::vector<PageCopy> copies;
  OpReport report{};

  PageOp view() {
    return {kind,
            {sequences.data(), static_cast<int32_t>(sequences.size())},
            kind == PageOpKind::kFork ? sources.data() : nullptr,
            counts.empty() ? nullptr : counts.data(),
            copies.empty() ? nullptr : copies.data(),
            &report};
  }
};

struct TraceOptions {
  double mistakes = 0.05;  // share of operations with something wrong in them
  int32_t max_append = 3;  // tokens a side and step
  int32_t max_prompt = 6;  // tokens a side
};

class TraceMaker {
 public:
  TraceMaker(uint32_t seed, const TraceOptions& options) : rng_(seed), options_(options) {}

  // `a` lies in host memory and is the state the operation will meet.
  OwnedOp next(const PageAllocator& a) {
    OwnedOp op;
    std::vector<int32_t> candidates;
    for (int32_t tries = 0; candidates.empty() && tries < 8; ++tries) {
      op.kind = pick_kind();
      for (int32_t q = 0; q < a.shape.table.num_sequences; ++q) {
        if (admits(op.kind, a.sequences[q].state)) candidates.push_back(q);
      }
    }
    const bool wants_free = op.kind == PageOpKind::kOpen || op.kind == PageOpKind::kFork;
    std::shuffle(candidates.begin(), candidates.end(), rng_);
    const int32_t most = static_cast<int32_t>(candidates.size());
    // Appends name many sequences, the others few, so that states mix.
    const int32_t count = op.kind == PageOpKind::kAppend ? most - uniform(0, most / 2)
                                                         : uniform(0, wants_free ? most : most / 2);
    for (int32_t i = 0; i < std::max(count, 1); ++i) {
      op.sequences.push_back(i < most ? candidates[i] : kPaddingSequence);
      if (chance(0.03)) op.sequences.back() = kPaddingSequence;
    }
    if (op.kind == PageOpKind::kFork) fill_sources(a, &op);
    fill_counts(a, &op);
    const size_t rows = op.sequences.size() * a.shape.table.rows_per_sequence;
    if (op.kind == PageOpKind::kFork || op.kind == PageOpKind::kTruncate) {
      op.copies.assign(rows * kMaxSides, {-77, -77});
    }
    if (chance(options_.mistakes)) spoil(a, &op);
    return op;
  }

 private:
  int32_t uniform(int32_t low, int32_t high) {
    return high <= low ? low : std::uniform_int_distribution<int32_t>(low, high)(rng_);
  }
  bool chance(double p) { return std::bernoulli_distribution(p)(rng_); }

  PageOpKind pick_kind() {
    static constexpr PageOpKind kKinds[] = {
        PageOpKind::kOpen,   PageOpKind::kReserve, PageOpKind::kKeep,     PageOpKind::kKeep,
        PageOpKind::kAppend, PageOpKind::kAppend,  PageOpKind::kAppend,   PageOpKind::kAppend,
        PageOpKind::kGrow,   PageOpKind::kFork,    PageOpKind::kTruncate, PageOpKind::kRelease};
    return kKinds[uniform(0, static_cast<int32_t>(std::size(kKinds)) - 1)];
  }

  static bool admits(PageOpKind kind, SequenceState state) {
    switch (kind) {
      case PageOpKind::kOpen:
      case PageOpKind::kFork:
        return state == SequenceState::kFree;
      case PageOpKind::kKeep:
        return state == SequenceState::kReserved;
      case PageOpKind::kRelease:
        return state != SequenceState::kFree;
      default:
        return state == SequenceState::kLive;
    }
  }

  void fill_sources(const PageAllocator& a, OwnedOp* op) {
    std::vector<int32_t> live;
    for (int32_t q = 0; q < a.shape.table.num_sequences; ++q) {
      if (a.sequences[q].state == SequenceState::kLive) live.push_back(q);
    }
    for (size_t i = 0; i < op->sequences.size(); ++i) {
      const int32_t last = static_cast<int32_t>(live.size()) - 1;
      op->sources.push_back(live.empty() ? 0 : live[uniform(0, last)]);
    }
  }

  void fill_counts(const PageAllocator& a, OwnedOp* op) {
    const PageTableShape& shape = a.shape.table;
    if (op->kind == PageOpKind::kReserve) {
      for (size_t e = 0; e < op->sequences.size(); ++e) op->counts.push_back(prompt_pages(shape));
      return;
    }
    if (op->kind != PageOpKind::kKeep && op->kind != PageOpKind::kAppend &&
        op->kind != PageOpKind::kGrow && op->kind != PageOpKind::kTruncate) {
      return;
    }
    for (const int32_t sequence : op->sequences) {
      for (int32_t w = 0; w < shape.rows_per_sequence; ++w) {
        const int32_t row = sequence * shape.rows_per_sequence + w;
        op->counts.push_back(sequence < 0 ? SideCounts{{-9, -9, -9, -9}}
                                          : row_counts(a, op->kind, row));
      }
    }
  }

  SideCounts prompt_pages(const PageTableShape& shape) {
    SideCounts pages;
    for (int32_t s = 0; s < shape.num_sides; s += 2) {
      const int32_t right = s + 1 < shape.num_sides ? shape.tokens_per_page[s + 1] : INT32_MAX;
      pages.of[s] =
          worst_case_pages(uniform(0, options_.max_prompt), shape.tokens_per_page[s], right);
    }
    return pages;
  }

  SideCounts row_counts(const PageAllocator& a, PageOpKind kind, int32_t row) {
    const PageTableShape& shape = a.shape.table;
    SideCounts n;
    for (int32_t s = 0; s < shape.num_sides; ++s) {
      const int32_t tokens = a.tokens[row].of[s], per_page = shape.tokens_per_page[s];
      if (kind == PageOpKind::kTruncate) {
        n.of[s] = chance(0.5) ? tokens : uniform(0, tokens);
      } else if (kind == PageOpKind::kGrow) {
        const bool backwards = chance(0.02) && tokens > 0;
        n.of[s] = backwards ? tokens - 1 : tokens + (chance(0.5) ? 0 : uniform(0, 3 * per_page));
      } else if (kind == PageOpKind::kAppend) {
        const bool backwards = chance(0.01) && tokens > 0;
        n.of[s] = backwards ? -1 : uniform(0, std::min(options_.max_append, per_page));
      }
    }
    if (kind == PageOpKind::kKeep) deal_kept(a, row, &n);
    return n;
  }

  // What fits in the pages held: a few for the right side, from the left side's unused ones.
  void deal_kept(const PageAllocator& a, int32_t row, SideCounts* n) {
    const PageTableShape& shape = a.shape.table;
    for (int32_t left = 0; left < shape.num_sides; left += 2) {
      const int32_t used = pages_for(a.tokens[row].of[left], shape.tokens_per_page[left]);
      int32_t free = a.pages[row].of[left] - used;
      if (left + 1 < shape.num_sides) {
        const int32_t right = left + 1, moved = uniform(0, free);
        const int32_t held = a.pages[row].of[right], per_page = shape.tokens_per_page[right];
        n->of[right] =
            (held + moved) * per_page - (held + moved > 0 ? uniform(0, per_page - 1) : 0);
        free -= moved;
      }
      n->of[left] = uniform(0, (used + free) * shape.tokens_per_page[left]);
    }
  }

  // Exactly one of the mistakes that a caller can make.
  void spoil(const PageAllocator& a, OwnedOp* op) {
    const int32_t place = uniform(0, static_cast<int32_t>(op->sequences.size()) - 1);
    switch (uniform(0, 3)) {
      case 0:
        op->sequences[place] = chance(0.5) ? a.shape.table.num_sequences : -2;
        return;
      case 1:
        op->sequences[place] = uniform(0, a.shape.table.num_sequences - 1);
        return;
      case 2:
        op->sequences[place] = op->sequences[0];
        return;
      default:
        break;
    }
    if (op->kind == PageOpKind::kFork)
      op->sources[place] = uniform(-1, a.shape.table.num_sequences);
    if (op->counts.empty()) return;
    SideCounts& n = op->counts[uniform(0, static_cast<int32_t>(op->counts.size()) - 1)];
    const int32_t wrong[] = {-1, 50, 1 << 30, INT32_MIN};
    n.of[uniform(0, kMaxSides - 1)] = wrong[uniform(0, 3)];
  }

  std::mt19937 rng_;
  TraceOptions options_;
};

}  // namespace tierkv::testing
