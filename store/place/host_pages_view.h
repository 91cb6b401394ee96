// SPDX-License-Identifier: Apache-2.0
// Pages and page tables of a store in host memory, as row formats see them.
#pragma once

#include <cstdint>

#include "allocator/row_plan.h"
#include "tierkv/allocator.h"

namespace tierkv::store {

struct HostPagesView {
  PageAllocator allocator;
  uint8_t* base = nullptr;
  const int32_t* places = nullptr;  // [num_pages]: where a page lies behind base; null: at its id
  int64_t page_bytes = 0;
  int32_t rows_per_layer = 1;

  // Table row i of a (sequence, layer).
  int32_t row(int32_t slot, int32_t layer, int32_t i) const {
    return slot * allocator.shape.table.rows_per_sequence + layer * rows_per_layer + i;
  }
  const SideCounts& tokens(int32_t row) const { return allocator.tokens[row]; }
  // Id of page `index` of a side.
  int32_t page(int32_t row, int32_t side, int32_t index) const {
    return page_at(allocator, row, side, index);
  }
  uint8_t* bytes(int32_t page) const {
    return base + (places == nullptr ? page : places[page]) * page_bytes;
  }
};

}  // namespace tierkv::store
