// Tokens of one row on its pages, in host memory: the vocabulary of the host back end.
//
// Token `index` of a side lies in slot index % T of the side's page index / T. Rows, sides and
// indices are trusted: they come from the store's own state.
#pragma once

#include <cstdint>

#include "codec/host/page_codec.h"
#include "store/tiers/store_shape.h"

namespace tierkv {

struct HostSlot {
  HostPage page;
  int32_t slot;
};

HostPage page_of_id(const StoreView& s, int32_t side, int32_t page_id);
HostPage row_page(const StoreView& s, int32_t row, int32_t side, int32_t page_index);
HostSlot row_slot(const StoreView& s, int32_t row, int32_t side, int32_t index);

// Before an index is used for the first time: its tile is cleared when it is the tile's first.
void open_at(const HostSlot& at);
// In the format of the target's side. Values on pages can be moved down the formats without
// failure: append() and import checked them.
void move_slot(const HostSlot& from, const HostSlot& to);
// Indices first .. end - 1, as far as their tile is one that holds a token before `first`: the
// bytes behind are not defined.
void clear_tail(const StoreView& s, int32_t row, int32_t side, int32_t first, int32_t end);

// The victim of a page, or of all pages of a side, by looking at every token.
void rescan_page(const StoreView& s, int32_t row, int32_t side, int32_t page_index);
void rescan_side(const StoreView& s, int32_t row, int32_t side);

// Pages that hold a row's `tokens`.
SideCounts pages_of(const StoreView& s, const SideCounts& tokens);
int64_t total(const SideCounts& counts);

}  // namespace tierkv
