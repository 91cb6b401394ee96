// SPDX-License-Identifier: Apache-2.0
#include "tests/support/plan_items.h"

#include <algorithm>

namespace tierkv {
namespace {

// Tokens of every row of the layer, and exclusive prefixes whose last entry is the total.
struct LayerWork {
  std::vector<RowTokens> tokens;
  std::vector<int64_t> cost, tiles;
};

template <int32_t kClasses>
LayerWork layer_work(const RowsOf<kClasses>& rows, int32_t layer) {
  LayerWork p{{}, {0}, {0}};
  for (int32_t r = 0; r < rows.num_rows; ++r) {
    const int32_t first_tier = first_tier_of(rows, r);
    p.tokens.push_back(row_tokens(rows, table_row_of(rows, layer, r), first_tier));
    const RowWork work = row_work(rows, p.tokens.back(), first_tier);
    p.cost.push_back(p.cost.back() + work.cost);
    p.tiles.push_back(p.tiles.back() + work.tiles);
  }
  return p;
}

// The last entry that is not above x.
int32_t last_not_above(const std::vector<int64_t>& sorted, int64_t x) {
  return static_cast<int32_t>(std::upper_bound(sorted.begin(), sorted.end(), x) - sorted.begin()) -
         1;
}

}  // namespace

template <int32_t kClasses>
std::vector<WorkItem> plan_items(const RowsOf<kClasses>& rows, int32_t layer, int32_t max_ctas,
                                 int32_t warps) {
  const WorkItem none{rows.num_rows, 0, 0, {0, 0, 0}};
  std::vector<WorkItem> plan(max_ctas * warps + 1, none);
  if (rows.num_rows == 0) return plan;
  const LayerWork p = layer_work(rows, layer);
  const int32_t ctas = working_ctas(rows, max_ctas, even_ctas(rows.num_rows, max_ctas),
                                    {p.cost.back(), p.cost[1]}),
                items = ctas * warps;
  const EvenCut cut(p.cost.back(), Divisor(items));
  Divisor tile_cost[kClasses * kAttentionTiers];
  for (int32_t t = 0; t < kClasses * kAttentionTiers; ++t) {
    tile_cost[t] = Divisor(rows.tiers[t].tile_cost);
  }
  std::vector<int64_t> starts;  // flat tiles
  for (int32_t i = 0; i < items; ++i) {
    const int64_t cost = cut.start(i);
    const int32_t row = last_not_above(p.cost, cost);
    const RowTokens& tokens = p.tokens[row];
    plan[i].row = row;
    plan[i].tile = tile_at_cost(tile_cost + first_tier_of(rows, row), tokens.tier,
                                static_cast<uint32_t>(cost - p.cost[row]));
    std::copy(tokens.tier, tokens.tier + kAttentionTiers, plan[i].tier);
    starts.push_back(p.tiles[row] + plan[i].tile);
  }
  starts.push_back(p.tiles.back());
  for (int32_t i = 0; i < items; ++i) {
    plan[i].tiles = static_cast<int32_t>(starts[i + 1] - starts[i]);
  }
  return plan;
}

template std::vector<WorkItem> plan_items(const RowsOf<1>&, int32_t, int32_t, int32_t);
template std::vector<WorkItem> plan_items(const RowsOf<kMaxAttentionClasses>&, int32_t, int32_t,
                                          int32_t);

}  // namespace tierkv
