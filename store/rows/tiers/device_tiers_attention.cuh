// SPDX-License-Identifier: Apache-2.0
// Attention over the bodies of tiers: the plan and the calls of attention/tiers, for queries and
// outputs in the coordinates of the pages.
#pragma once

#include <algorithm>
#include <vector>

#include "attention/engine/engine.h"
#include "store/rows/device_memory.cuh"
#include "store/rows/tiers/device_tiers_codes.cuh"
#include "store/rows/tiers/tiers_rows.h"
#include "tierkv/attention.h"

namespace tierkv::store {

// There are two plans: of calls that run at once, and of calls that are captured in a graph, whose
// replays write theirs again.
inline constexpr int32_t kTiersPlans = 2;

// Layers whose pages have the formats of one config.
struct TiersAttention {
  AttentionConfig config;                // of one query
  AttentionGrid grids[kMaxQueryTokens];  // by queries
  AttentionWorkspace workspaces[kTiersPlans];

  AttentionConfig of_queries(int32_t q_len) const {
    AttentionConfig c = config;
    c.q_len = q_len;
    return c;
  }
};

class DeviceTiersAttention {
 public:
  DeviceTiersAttention(const StoreConfig& config, const TiersRows& rows);
  // Grids and memory.
  Status bind(const DeviceStoreView& view, DeviceMemory* memory);
  // codes: those of the kernels.
  Status attend(const DeviceAttendBody& call, const TiersCodes& codes, GpuStream stream);

 private:
  Status bind_part(TiersAttention* part, DeviceMemory* memory);
  Status plan(const DeviceAttendBody& call, const TiersCodes& codes, int32_t index,
              GpuStream stream);
  EngineQueries queries_of(const DeviceAttendBody& call, const TiersCodes& codes) const;
  PageTableView table(const TiersAttention& part, int32_t index) const;

  StoreConfig config_;
  // Raw layers have a plan of their own, so that the others need not be of several classes.
  TiersAttention coded_, raw_;
  bool has_coded_ = false, has_raw_ = false;
  std::vector<uint8_t> is_raw_layer_;   // [num_layers]
  std::vector<uint8_t> class_of_head_;  // [num_layers * num_kv_heads], 0 in raw layers
  DeviceStoreView view_;
  SideCounts* tokens_[kTiersPlans] = {};  // [table rows], by plan
  uint16_t *q_ = nullptr, *out_ = nullptr;
  float* lse_ = nullptr;
};

}  // namespace tierkv::store
