#include "store/tiers/row_pages.h"

#include <algorithm>
#include <limits>

namespace tierkv {

HostPage page_of_id(const StoreView& s, int32_t side, int32_t page_id) {
  return {s.page_bytes(page_id), s.layouts[side], s.raw_dtype};
}

HostPage row_page(const StoreView& s, int32_t row, int32_t side, int32_t page_index) {
  return page_of_id(s, side, s.page_id(row, side, page_index));
}

HostSlot row_slot(const StoreView& s, int32_t row, int32_t side, int32_t index) {
  const int32_t per_page = s.page_tokens(side);
  return {row_page(s, row, side, index / per_page), index % per_page};
}

void open_at(const HostSlot& at) {
  (void)open_slot(at.page, at.slot);
}

void move_slot(const HostSlot& from, const HostSlot& to) {
  (void)move_token(from.page, from.slot, to.page, to.slot);
}

void clear_tail(const StoreView& s, int32_t row, int32_t side, int32_t first, int32_t end) {
  const int32_t tile_end = (first + kTileTokens - 1) / kTileTokens * kTileTokens;
  for (int32_t i = first; i < std::min(end, tile_end); ++i) {
    const HostSlot at = row_slot(s, row, side, i);
    (void)clear_token(at.page, at.slot);
  }
}

void rescan_page(const StoreView& s, int32_t row, int32_t side, int32_t page_index) {
  PageRecord& record = s.allocator.records[s.page_id(row, side, page_index)];
  const int32_t used = s.page_used(side, page_index, s.allocator.tokens[row].of[side]);
  record = *scan_page_record(row_page(s, row, side, page_index), used, 0,
                             std::numeric_limits<int32_t>::max(), record);
}

void rescan_side(const StoreView& s, int32_t row, int32_t side) {
  const int32_t pages = pages_for(s.allocator.tokens[row].of[side], s.page_tokens(side));
  for (int32_t i = 0; i < pages; ++i) rescan_page(s, row, side, i);
}

SideCounts pages_of(const StoreView& s, const SideCounts& tokens) {
  SideCounts pages;
  for (int32_t side = 0; side < kStoreSides; ++side) {
    pages.of[side] = pages_for(tokens.of[side], s.page_tokens(side));
  }
  return pages;
}

int64_t total(const SideCounts& counts) {
  int64_t sum = 0;
  for (const int32_t n : counts.of) sum += n;
  return sum;
}

}  // namespace tierkv
