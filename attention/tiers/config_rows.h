// SPDX-License-Identifier: Apache-2.0
// The rows of a launch from a config, a table and a batch.
#pragma once

#include "attention/core/workspace.h"
#include "attention/work/work.h"

namespace tierkv {

// The classes of a layer's kv_heads.
inline HeadPlanes head_planes(const AttentionConfig& config, int32_t layer) {
  HeadPlanes heads;
  for (int32_t h = 0; h < config.num_kv_heads; ++h) heads.set(h, head_class_of(config, layer, h));
  return heads;
}

// Config and call were validated; kClasses is 1 where the config has one class. Classes that the
// config does not have are as its first.
template <int32_t kClasses>
RowsOf<kClasses> config_rows(const AttentionConfig& config, const AttentionGrid& grid,
                             const PageTableView& table, const AttentionBatch& batch,
                             int32_t layer) {
  RowsOf<kClasses> rows;
  for (int32_t c = 0; c < kClasses; ++c) {
    for (int32_t t = 0; t < config.num_tiers; ++t) {
      const SideView side = table.side(config.tiers[t].side);
      rows.tiers[c * kAttentionTiers + t] =
          tier_source(*tier_layout(config, t, c < config.classes.count ? c : 0), side,
                      grid.slot_bytes, grid.tile_cost);
      rows.row_stride = static_cast<int32_t>(side.row_stride);
      rows.token_stride = static_cast<int32_t>(side.token_stride);
    }
  }
  if constexpr (kClasses > 1) rows.heads = head_planes(config, layer);
  rows.sequences = batch.sequences;
  rows.passes = query_columns(config).passes;
  rows.num_rows = batch.count * config.num_kv_heads * rows.passes;
  rows.num_kv_heads = config.num_kv_heads;
  rows.num_tiers = config.num_tiers;
  rows.num_table_sequences = table.shape.num_sequences;
  rows.rows_per_sequence = table.shape.rows_per_sequence;
  return rows;
}

}  // namespace tierkv
