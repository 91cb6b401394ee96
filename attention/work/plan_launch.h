// SPDX-License-Identifier: Apache-2.0
// What the plan kernel is launched with: the plan, and all that is known of it before.
#pragma once

#include "attention/work/plan.h"

namespace tierkv {

inline constexpr int32_t kPlanThreads = 256;

template <int32_t kClasses>
struct PlanLaunchOf {
  PlanParamsOf<kClasses> plan;
  const SideCounts* tokens;       // of table row 0
  int32_t side[kAttentionTiers];  // of the tier; -1: there is no such tier
  int32_t rows_per_thread;
  int32_t batch_rows;  // num_rows / passes
  Divisor passes, kv_heads, tile_cost[kClasses * kAttentionTiers];
  Divisor max_items, even_items;  // of max_ctas and of even_ctas
};

template <int32_t kClasses>
PlanLaunchOf<kClasses> plan_launch(const PlanParamsOf<kClasses>& params) {
  const RowsOf<kClasses>& rows = params.rows;
  PlanLaunchOf<kClasses> launch{};
  launch.plan = params;
  // The tokens of a table row are an aligned SideCounts, whichever side tier 0 is.
  const auto first =
      reinterpret_cast<uintptr_t>(rows.tiers[0].tokens) & ~uintptr_t{alignof(SideCounts) - 1};
  launch.tokens = reinterpret_cast<const SideCounts*>(first);
  for (int32_t t = 0; t < kAttentionTiers; ++t) {
    const auto at = reinterpret_cast<uintptr_t>(rows.tiers[t].tokens) - first;
    launch.side[t] = t < rows.num_tiers ? static_cast<int32_t>(at / sizeof(int32_t)) : -1;
  }
  for (int32_t t = 0; t < kClasses * kAttentionTiers; ++t) {
    launch.tile_cost[t] = Divisor(rows.tiers[t].tile_cost);
  }
  launch.rows_per_thread = ceil_div(rows.num_rows, kPlanThreads);
  launch.batch_rows = rows.num_rows / rows.passes;
  launch.passes = Divisor(rows.passes);
  launch.kv_heads = Divisor(rows.num_kv_heads);
  launch.max_items = Divisor(params.max_ctas * params.warps);
  launch.even_items = Divisor(params.even_ctas * params.warps);
  return launch;
}

// At least the cost of all rows, whatever their tokens.
template <int32_t kClasses>
uint64_t most_cost(const RowsOf<kClasses>& rows) {
  uint64_t most = 0;
  for (int32_t first = 0; first < kClasses * kAttentionTiers; first += kAttentionTiers) {
    RowTokens full;
    for (int32_t t = 0; t < rows.num_tiers; ++t) full.tier[t] = rows.tiers[first + t].max_tokens;
    const uint64_t of_row = uint64_t{row_work(rows, full, first).cost} + kShortRowCost;
    if (of_row > most) most = of_row;
  }
  return most * static_cast<uint64_t>(rows.num_rows);
}

}  // namespace tierkv
