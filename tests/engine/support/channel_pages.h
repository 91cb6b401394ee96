// SPDX-License-Identifier: Apache-2.0
// Random configs of channel rows, and which bytes of their pages are defined.
#pragma once

#include <algorithm>

#include "store/rows/channel/channel_rows.h"
#include "tests/engine/support/rows_twin.h"

namespace tierkv::store::test {

inline StoreConfig channel_config(int32_t head_dim, bool raw, std::mt19937* rng) {
  StoreConfig config = tiers_config(head_dim, 2000, raw, rng);
  config.profile = nullptr;
  config.sink_tokens = static_cast<int32_t>((*rng)() % 17);
  ChannelFormat format;
  format.k_bits = (*rng)() % 2 == 0 ? 4 : 2;
  format.v_bits = (*rng)() % 2 == 0 ? 4 : 2;
  format.block_tokens = head_dim < 256 && (*rng)() % 2 == 0 ? 128 : 64;
  config.format = format;
  give_pages(2000, &config);
  return config;
}

// Whole blocks.
inline int64_t channel_page_bytes(const RowFormat& format, const RowsTwin::PageAsked& page) {
  const auto& rows = static_cast<const ChannelRows&>(format);
  const ChannelBody& body = rows.body();
  const bool is_raw = rows.is_raw_layer()[page.layer] != 0;
  const int64_t used = int64_t{page.units} * ChannelBody::kUnit - page.page * body.page_bytes;
  return std::min<int64_t>(used, int64_t{body.per_page(is_raw)} * body.block_bytes(is_raw));
}

}  // namespace tierkv::store::test
