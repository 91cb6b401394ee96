// SPDX-License-Identifier: Apache-2.0
#include "allocator/free_ring.h"

namespace tierkv {

int32_t take_page(const FreeRing& ring) {
  return ring.ids[ring_index(ring.cursors->start++, ring.num_pages)];
}

void give_page(const FreeRing& ring, int32_t page) {
  ring.ids[ring_index(ring.cursors->end++, ring.num_pages)] = page;
}

void fill_ring(const FreeRing& ring) {
  for (int32_t i = 0; i < ring.num_pages; ++i) ring.ids[i] = i;
  *ring.cursors = {0, ring.num_pages};
}

}  // namespace tierkv
