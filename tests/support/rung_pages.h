// SPDX-License-Identifier: Apache-2.0
// A world's pages in DiffKV's layout.
#pragma once

#include <vector>

#include "attention/core/workspace.h"
#include "bench/baselines/rungs/diffkv_layout.h"
#include "tests/support/page_world.h"

namespace tierkv::test {

// Rewrites every page that the table names, where it is.
inline void in_diffkv_layout(World& world) {
  const AttentionConfig& config = world.config;
  for (int32_t t = 0; t < config.num_tiers; ++t) {
    const PageLayout layout = *tier_layout(config, t);
    const SideView side = world.table().side(config.tiers[t].side);
    for (int32_t row = 0; row < world.table_shape.num_rows(); ++row) {
      const int32_t tokens = side.tokens[row * side.token_stride];
      for (int32_t i = 0; i < pages_for(tokens, layout.tokens); ++i) {
        const int32_t id = side.slots[row * side.row_stride + i * side.direction];
        if (id < 0 || id >= world.num_pages) continue;
        uint8_t* page = world.pages().base + id * config.page_bytes;
        const std::vector<uint8_t> before(page, page + config.page_bytes);
        transcode_page(layout, before.data(), page);
      }
    }
  }
}

}  // namespace tierkv::test
