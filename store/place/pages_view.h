// SPDX-License-Identifier: Apache-2.0
// Pages and page tables of a store, as row formats see them.
#pragma once

#include <cstdint>

#include "allocator/row_plan.h"
#include "store/engine/tokens.h"
#include "tierkv/allocator.h"

namespace tierkv::store {

struct PagesView {
  PageAllocator allocator;
  uint8_t* base = nullptr;
  int64_t page_bytes = 0;
  int32_t rows_per_layer = 1;

  // Table row i of a (sequence, layer).
  TKV_HD int32_t row(int32_t slot, int32_t layer, int32_t i) const {
    return slot * allocator.shape.table.rows_per_sequence + layer * rows_per_layer + i;
  }
  const SideCounts& tokens(int32_t row) const { return allocator.tokens[row]; }
  // Id of page `index` of a side.
  TKV_HD int32_t page(int32_t row, int32_t side, int32_t index) const {
    return page_at(allocator, row, side, index);
  }
  uint8_t* bytes(int32_t page) const { return base + page * page_bytes; }
};

// What a table row costs that keeps `kept` of what it holds and then grows to `target`. A page that
// others share does not come back, and what is kept of it moves to a new one.
struct PageDemand {
  int64_t fresh = 0;       // pages taken less those given back
  int64_t exchanged = 0;   // pages taken before any is given back
  bool is_beyond = false;  // the row would outgrow its table
};
TKV_HD PageDemand page_demand(const PageAllocator& a, int32_t row, const SideCounts& kept,
                              const SideCounts& target) {
  const PageTableShape& table = a.shape.table;
  PageDemand demand;
  int32_t pages[kMaxTables] = {};
  for (int32_t side = 0; side < table.num_sides; ++side) {
    const int32_t per_page = table.tokens_per_page[side];
    const int32_t kept_pages = pages_for(kept.of[side], per_page);
    const int32_t target_pages = pages_for(target.of[side], per_page);
    pages[side / 2] += target_pages;
    demand.fresh += most(0, target_pages - kept_pages);
    for (int32_t p = kept.of[side] / per_page; p < a.pages[row].of[side]; ++p) {
      const bool shared = is_frozen(a, page_at(a, row, side, p));
      demand.fresh -= p >= kept_pages && !shared ? 1 : 0;
      demand.exchanged += p < kept_pages && shared ? 1 : 0;
    }
  }
  demand.fresh += demand.exchanged;
  demand.is_beyond = pages[0] > table.table_slots[0] || pages[1] > table.table_slots[1];
  return demand;
}

}  // namespace tierkv::store
