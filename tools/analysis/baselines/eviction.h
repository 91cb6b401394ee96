// SPDX-License-Identifier: Apache-2.0
// Pruning baselines that keep the same share of tokens in every head (DiffKV section 7.2, Figure
// 9).
#pragma once

#include "tools/analysis/layer_data.h"
#include "tools/analysis/scheme/row_codec.h"

namespace tierkv::analysis {

// kOk, or why the dump cannot say whom a baseline would keep (no significance, no q of the newest
// tokens), naming the layer.
Status check_eviction(const Scheme& scheme, const datasets::DumpInfo& info, int32_t seq,
                      int32_t layer);

// With n = round(keep * tokens), at least 1, kept:
//   h2o     the newest n / 2, and of the others those that received most attention: significance
//           times the number of later queries
//   snapkv  the newest min(window, n), and of the others those that the newest `window` queries
//           look at most: softmax weights, mean over the group's heads, mean over 7 neighbours
// Ties go to the older token.
Status plan_eviction(const Scheme& scheme, const LayerData& data, int32_t kv_head,
                     const CacheLayout& layout, RowPlan* plan);

}  // namespace tierkv::analysis
