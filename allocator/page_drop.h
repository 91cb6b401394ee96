// SPDX-License-Identifier: Apache-2.0
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

// One row of keep, truncate or release.
struct RowDrop {
  int32_t row;
  SideCounts held;               // pages before
  SideCounts tokens;             // after
  SideCounts pages;              // after
  int32_t recorded[kMaxSides];   // of the pages held, those before the reserved ones
  int32_t moved[kMaxTables];     // keep: pages that go from the left to the right side of a table
  int32_t exchanged[kMaxSides];  // truncate: 1 where the last page left is exchanged; its slot is
                                 // among the dropped
  int32_t first[kMaxSides];      // page of the side that is dropped first
  int32_t length[kMaxSides];     // dropped pages of the side
  int32_t total;
};

struct DroppedPage {
  int32_t slot;      // offset in the row's line
  bool is_recorded;  // false: reserved, so that no other table can hold it
};

// Dropped page `j`, 0 <= j < total.
TKV_HD DroppedPage dropped_page(const PageAllocator& a, const RowDrop& drop, int32_t j) {
  DroppedPage dropped = {0, false};
  for (int32_t s = 0; s < kMaxSides; ++s) {
    if (j >= 0 && j < drop.length[s]) {
      // The right sides' pages lie in descending slots.
      const int32_t step = (s & 1) == 0 ? j : drop.length[s] - 1 - j;
      const int32_t index = drop.first[s] + step;
      dropped = {a.shape.table.slot_of(s, index), index < drop.recorded[s]};
    }
    j -= drop.length[s];
  }
  return dropped;
}

// The dropped pages of a side are a run of slots, and the runs of a row follow each other as its
// dropped pages do.
struct SlotRun {
  int32_t first;  // offset in the row's line
  int32_t length;
};
TKV_HD SlotRun dropped_run(const PageAllocator& a, const RowDrop& drop, int32_t side) {
  const int32_t length = drop.length[side];
  if (length == 0) return {0, 0};
  const int32_t index = (side & 1) == 0 ? drop.first[side] : drop.first[side] + length - 1;
  return {a.shape.table.slot_of(side, index), length};
}
// Those of them that other tables may hold: reserved pages are dropped behind them.
TKV_HD SlotRun recorded_run(const PageAllocator& a, const RowDrop& drop, int32_t side) {
  const SlotRun run = dropped_run(a, drop, side);
  const int32_t recorded = drop.recorded[side] - drop.first[side];
  const int32_t length = recorded < 0 ? 0 : recorded < run.length ? recorded : run.length;
  return {(side & 1) == 0 ? run.first : run.first + run.length - length, length};
}

// Slot of the page of `side` that truncate exchanges.
TKV_HD int32_t exchanged_slot(const PageAllocator& a, const RowDrop& drop, int32_t side) {
  return a.shape.table.slot_of(side, drop.pages.of[side] - 1);
}

// What a drop starts from, before any stage of its operation has changed it.
struct DropInput {
  SideCounts held;      // pages
  SideCounts tokens;    // after the operation
  SideCounts reserved;  // of the sequence
};

TKV_HD DropInput drop_input(const PageAllocator& a, const PageOp& op, const BatchRow& r) {
  const bool keeps_some = op.kind != PageOpKind::kRelease;
  return {a.pages[r.row], keeps_some ? op.counts[r.batch_row] : SideCounts{},
          a.sequences[r.sequence].reserved};
}

// `exchanges`: whether the row's copies are written; truncate decides on them before it drops.
TKV_HD RowDrop drop_row(const PageAllocator& a, const PageOp& op, const BatchRow& r,
                        const DropInput& input, bool exchanges) {
  RowDrop drop = {};
  drop.row = r.row;
  drop.held = input.held;
  drop.tokens = input.tokens;
  for (int32_t s = 0; s < kMaxSides; ++s) {
    drop.recorded[s] = input.held.of[s] - input.reserved.of[s];
    if (drop.tokens.of[s] == 0) continue;
    drop.pages.of[s] = pages_for(drop.tokens.of[s], a.shape.table.tokens_per_page[s]);
    if (exchanges) {
      const PageCopy& copy = op.copies[static_cast<int64_t>(r.batch_row) * kMaxSides + s];
      drop.exchanged[s] = copy.source != kNoPage ? 1 : 0;
    }
  }
  if (op.kind == PageOpKind::kKeep) {
    drop.moved[0] = drop.pages.of[1] - drop.held.of[1];
    drop.moved[1] = drop.pages.of[3] - drop.held.of[3];
  }
  for (int32_t s = 0; s < kMaxSides; ++s) {
    const int32_t moved = (s & 1) == 0 ? drop.moved[s >> 1] : 0;
    drop.first[s] = drop.pages.of[s] - drop.exchanged[s];
    const int32_t length = drop.held.of[s] - moved - drop.first[s];
    drop.length[s] = length > 0 ? length : 0;
    drop.total += drop.length[s];
  }
  return drop;
}

// Whether a page is dropped that other tables may hold.
TKV_HD bool drops_recorded(const RowDrop& drop) {
  bool recorded = false;
  for (int32_t s = 0; s < kMaxSides; ++s) {
    recorded |= drop.length[s] > 0 && drop.first[s] < drop.recorded[s];
  }
  return recorded;
}

}  // namespace tierkv
