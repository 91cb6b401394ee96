// Which slots of a row an operation drops, in the canonical order: ascending slots of the row's
// line. Rows follow the batch. A page returns to the ring at the place where its last reference was
// dropped, so that the ring's content does not depend on how the work was scheduled.
#pragma once

#include <cstdint>

#include "allocator/row_plan.h"

namespace tierkv {

TKV_HD bool drops_pages(PageOpKind kind) {
  return kind == PageOpKind::kKeep || kind == PageOpKind::kTruncate || kind == PageOpKind::kRelease;
}

// One row of keep, truncate or release. `first` and `length` are per side, ascending in the line.
struct RowDrop {
  int32_t row;
  SideCounts held;            // pages before
  SideCounts tokens;          // after
  SideCounts pages;           // after
  int32_t moved[kMaxTables];  // keep: pages that go from the left to the right side of each table
  int32_t exchanged[kMaxSides];  // truncate: 1 where the last page left is exchanged; its slot is
                                 // among the dropped
  int32_t first[kMaxSides];
  int32_t length[kMaxSides];
  int32_t total;
};

// Slot `j` of the dropped ones, 0 <= j < total, as an offset in the row's line.
TKV_HD int32_t dropped_slot(const RowDrop& drop, int32_t j) {
  int32_t slot = 0;
  for (int32_t s = 0; s < kMaxSides; ++s) {
    if (j >= 0 && j < drop.length[s]) slot = drop.first[s] + j;
    j -= drop.length[s];
  }
  return slot;
}

// Slot of the page of `side` that truncate exchanges.
TKV_HD int32_t exchanged_slot(const PageAllocator& a, const RowDrop& drop, int32_t side) {
  return a.shape.table.slot_of(side, drop.pages.of[side] - 1);
}

// The counts and flags of a drop; where its slots lie is place_drop().
TKV_HD RowDrop count_drop(const PageAllocator& a, const PageOp& op, const BatchRow& r) {
  RowDrop drop = {};
  drop.row = r.row;
  drop.held = a.pages[r.row];
  if (op.kind == PageOpKind::kRelease) return drop;
  drop.tokens = op.counts[r.batch_row];
  for (int32_t s = 0; s < kMaxSides; ++s) {
    if (drop.tokens.of[s] == 0) continue;
    drop.pages.of[s] = pages_for(drop.tokens.of[s], a.shape.table.tokens_per_page[s]);
    if (op.kind == PageOpKind::kTruncate) {
      const PageCopy& copy = op.copies[static_cast<int64_t>(r.batch_row) * kMaxSides + s];
      drop.exchanged[s] = copy.source != kNoPage ? 1 : 0;
    }
  }
  if (op.kind == PageOpKind::kKeep) {
    drop.moved[0] = drop.pages.of[1] - drop.held.of[1];
    drop.moved[1] = drop.pages.of[3] - drop.held.of[3];
  }
  return drop;
}

// Reads counts and copies, not slots or records, which the stages of an operation change one after
// the other. The operation has been decided: its counts are valid.
TKV_HD RowDrop drop_row(const PageAllocator& a, const PageOp& op, const BatchRow& r) {
  RowDrop drop = count_drop(a, op, r);
  for (int32_t s = 0; s < kMaxSides; ++s) {
    const bool is_left = (s & 1) == 0;
    const int32_t begin = drop.pages.of[s] - drop.exchanged[s];
    const int32_t end = drop.held.of[s] - (is_left ? drop.moved[s >> 1] : 0);
    if (end <= begin) continue;
    drop.first[s] = a.shape.table.slot_of(s, is_left ? begin : end - 1);
    drop.length[s] = end - begin;
    drop.total += end - begin;
  }
  return drop;
}

}  // namespace tierkv
