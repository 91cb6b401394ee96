// SPDX-License-Identifier: Apache-2.0
// The circular free page list: where a position lies, and the host's way of taking and giving pages
// one by one.
//
// Law: 0 <= end - start <= num_pages, and the positions start .. end - 1 hold each free page
// exactly once. Both regions are contiguous, so that a batch takes (or gives) one range of
// positions and a prefix sum over what its rows need deals every row its own part of that range
// (DiffKV section 5.2, "Circular Free Page List").
#pragma once

#include <cstdint>

#include "tierkv/allocator.h"

namespace tierkv {

TKV_HD int64_t free_pages(const RingCursors& c) {
  return c.end - c.start;
}

// Index into FreeRing::ids of the position of `cursor`. The one modulo of an operation.
TKV_HD int32_t ring_index(int64_t cursor, int32_t num_pages) {
  return static_cast<int32_t>(cursor % num_pages);
}

// Index `offset` positions after index `base`, 0 <= offset <= num_pages.
TKV_HD int32_t ring_advance(int32_t base, int32_t offset, int32_t num_pages) {
  const int64_t index = static_cast<int64_t>(base) + offset;
  return static_cast<int32_t>(index < num_pages ? index : index - num_pages);
}

// Host. The caller knows that a page is free, or that `page` is not in the ring.
int32_t take_page(const FreeRing& ring);
void give_page(const FreeRing& ring, int32_t page);
// Every page free, ascending, cursors at the start.
void fill_ring(const FreeRing& ring);

}  // namespace tierkv
