// SPDX-License-Identifier: Apache-2.0
// What lies where in the caller's attention workspace.
#pragma once

#include <cstddef>
#include <cstdint>

#include "attention/tiers/decode.h"
#include "tierkv/attention.h"

namespace tierkv {

inline constexpr size_t kWorkspaceAlignment = 256;

// Parts of a workspace, one behind the other.
struct WorkspaceCarving {
  size_t bytes = 0;

  // Where a part of so many bytes begins.
  size_t take(size_t of_part) {
    const size_t at = bytes;
    bytes += (of_part + kWorkspaceAlignment - 1) / kWorkspaceAlignment * kWorkspaceAlignment;
    return at;
  }
};

// Byte offsets; layers run one after another and share everything but their items and statuses.
struct WorkspaceLayout {
  size_t items;        // WorkItem [num_layers][items_per_layer]
  size_t part_states;  // SoftmaxState [2 * num_ctas][columns of a row]
  size_t parts;        // float [2 * num_ctas][columns of a row][head_dim]
  size_t row_status;   // int32_t [num_layers][rows of the batch]
  size_t bytes;
};

// The format that a class of heads has in a tier.
inline const TierFormat& tier_format(const AttentionConfig& config, int32_t tier,
                                     int32_t head_class) {
  return head_class == 0 ? config.tiers[tier].format : config.classes.format[head_class - 1][tier];
}
// The layout of a tier's pages.
inline Result<PageLayout> tier_layout(const AttentionConfig& config, int32_t tier,
                                      int32_t head_class = 0) {
  return make_page_layout(tier_format(config, tier, head_class), config.head_dim, config.page_bytes,
                          config.page_records);
}
// Calls visit(layout) for every tier of every class. The formats were validated.
template <class Visit>
void visit_layouts(const AttentionConfig& config, Visit&& visit) {
  for (int32_t c = 0; c < config.classes.count; ++c) {
    for (int32_t t = 0; t < config.num_tiers; ++t) visit(*tier_layout(config, t, c));
  }
}
// 0 where there is one class.
inline int32_t head_class_of(const AttentionConfig& config, int32_t layer, int32_t kv_head) {
  if (config.classes.count == 1) return 0;
  return config.classes.of_head[static_cast<int64_t>(layer) * config.num_kv_heads + kv_head];
}

// The columns mean nothing where the config was not validated.
inline QueryColumns query_columns(const AttentionConfig& config) {
  return query_columns(config.num_q_heads, config.num_kv_heads, config.q_len, config.head_dim);
}

inline int32_t items_per_layer(const AttentionGrid& grid) {
  return grid.num_ctas * grid.warps_per_cta + 1;
}

inline WorkspaceLayout workspace_layout(const AttentionConfig& config, const AttentionGrid& grid,
                                        int32_t num_sequences) {
  WorkspaceLayout layout{};
  WorkspaceCarving carving;
  const auto ctas = static_cast<size_t>(grid.num_ctas),
             layers = static_cast<size_t>(config.num_layers);
  const size_t columns = 2 * ctas * query_columns(config).of_row;
  layout.items = carving.take(layers * items_per_layer(grid) * sizeof(WorkItem));
  layout.part_states = carving.take(columns * sizeof(SoftmaxState));
  layout.parts = carving.take(columns * config.head_dim * sizeof(float));
  layout.row_status = carving.take(layers * num_sequences * config.num_kv_heads * sizeof(int32_t));
  layout.bytes = carving.bytes;
  return layout;
}

template <class T>
T* workspace_at(const AttentionWorkspace& workspace, size_t offset) {
  return reinterpret_cast<T*>(static_cast<char*>(workspace.memory) + offset);
}
// kInvalidArgument, kBufferTooSmall.
Status check_workspace(const AttentionWorkspace& workspace, size_t needed);

// kInvalidArgument with the field's name; not read where there is one query.
Status validate_tail(const AttentionConfig& config, const AttentionTail& tail);

}  // namespace tierkv
