#include "attention/plan.h"

#include <algorithm>

namespace tierkv {
namespace {

// Tokens of every row of the layer, and exclusive prefixes whose last entry is the total.
struct LayerWork {
  std::vector<RowTokens> tokens;
  std::vector<int64_t> cost, chunks;
};

LayerWork layer_work(const AttentionRows& rows, int32_t layer) {
  LayerWork p{{}, {0}, {0}};
  for (int32_t r = 0; r < rows.num_rows; ++r) {
    p.tokens.push_back(row_tokens(rows, table_row_of(rows, layer, r)));
    const RowWork work = row_work(rows, p.tokens.back());
    p.cost.push_back(p.cost.back() + work.cost);
    p.chunks.push_back(p.chunks.back() + work.chunks);
  }
  return p;
}

// The last entry that is not above x.
template <class T>
int32_t last_not_above(const std::vector<T>& sorted, int64_t x) {
  return static_cast<int32_t>(std::upper_bound(sorted.begin(), sorted.end(), x) - sorted.begin()) -
         1;
}

// The flat chunk at which each item starts, then the number of chunks.
std::vector<int32_t> item_starts(const AttentionRows& rows, const LayerWork& p, int32_t items) {
  const int64_t total = p.chunks.back();
  std::vector<int32_t> starts;
  int64_t ahead = 0;  // largest start so far, less its index: no item may be empty
  for (int32_t c = 0; c < items; ++c) {
    const int64_t cost = p.cost.back() * c / items;
    const int32_t row = last_not_above(p.cost, cost);
    const int64_t chunk = p.chunks[row] + chunk_at_cost(rows, p.tokens[row], cost - p.cost[row]);
    ahead = std::max(ahead, chunk - c);
    starts.push_back(static_cast<int32_t>(std::min(ahead, total - items) + c));
  }
  starts.push_back(static_cast<int32_t>(total));
  return starts;
}

}  // namespace

std::vector<WorkItem> plan_items(const AttentionRows& rows, int32_t layer, int32_t max_items) {
  const WorkItem none{rows.num_rows, 0, 0, 0, 0, {0, 0, 0}};
  std::vector<WorkItem> plan(max_items + 1, none);
  if (rows.num_rows == 0) return plan;
  const LayerWork p = layer_work(rows, layer);
  const auto items = static_cast<int32_t>(std::min<int64_t>(max_items, p.chunks.back()));
  const std::vector<int32_t> starts = item_starts(rows, p, items);
  for (int32_t c = 0; c < items; ++c) {
    const int32_t row = last_not_above(p.chunks, starts[c]);
    plan[c].row = row;
    plan[c].chunk = static_cast<int32_t>(starts[c] - p.chunks[row]);
    plan[c].num_chunks = starts[c + 1] - starts[c];
    plan[c].span_first = last_not_above(starts, p.chunks[row]);
    plan[c].span_last = last_not_above(starts, p.chunks[row + 1] - 1);
  }
  return plan;
}

}  // namespace tierkv
