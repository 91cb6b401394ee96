// SPDX-License-Identifier: Apache-2.0
// Row actions that the host reference and the CPU manager share.
#pragma once

#include "allocator/free_ring.h"
#include "allocator/page_drop.h"
#include "allocator/row_plan.h"

namespace tierkv {

inline RowDrop drop_row(const PageAllocator& a, const PageOp& op, const BatchRow& r) {
  return drop_row(a, op, r, drop_input(a, op, r), op.kind == PageOpKind::kTruncate);
}

// Append, grow, reserve: new pages, each from take(), go to the ends of the row's sides.
template <class Take>
void grow_row(const PageAllocator& a, const BatchRow& r, const RowPlan& plan, Take take) {
  int32_t* line = a.slots + line_start(a, r.row);
  for (int32_t s = 0; s < kMaxSides; ++s) {
    for (int32_t i = plan.pages.of[s] - plan.fresh.of[s]; i < plan.pages.of[s]; ++i) {
      line[a.shape.table.slot_of(s, i)] = take();
    }
  }
  a.tokens[r.row] = plan.tokens;
  a.pages[r.row] = plan.pages;
}

// Keep: the last left pages become the next right pages, the last one first.
inline void move_pages(const PageAllocator& a, const RowDrop& drop, int32_t left) {
  int32_t* line = a.slots + line_start(a, drop.row);
  for (int32_t i = 0; i < drop.moved[left >> 1]; ++i) {
    const int32_t from = a.shape.table.slot_of(left, drop.held.of[left] - 1 - i);
    const int32_t page = line[from];
    line[from] = kNoPage;
    line[a.shape.table.slot_of(left + 1, drop.held.of[left + 1] + i)] = page;
  }
}

// What is left to do once the dropped slots are empty.
inline void finish_drop(const PageAllocator& a, const PageOp& op, const BatchRow& r,
                        const RowDrop& drop) {
  for (int32_t s = 0; s < kMaxSides; ++s) {
    if (drop.exchanged[s] == 0) continue;
    const PageCopy& copy = op.copies[int64_t{r.batch_row} * kMaxSides + s];
    a.slots[line_start(a, r.row) + exchanged_slot(a, drop, s)] = copy.target;
  }
  if (op.kind == PageOpKind::kKeep) {
    move_pages(a, drop, 0);
    move_pages(a, drop, 2);
  }
  a.tokens[r.row] = drop.tokens;
  a.pages[r.row] = drop.pages;
}

}  // namespace tierkv
