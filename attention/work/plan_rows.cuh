// SPDX-License-Identifier: Apache-2.0
// What the plan kernel is launched with, and the rows of one layer in it: every warp reads the
// tokens of its rows and keeps them in shared memory.
#pragma once

#include "attention/work/plan.h"
#include "gpu/lanes.cuh"

namespace tierkv {

inline constexpr int32_t kPlanThreads = 256;

// The plan, and all that is known of it before the kernel runs.
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

// Rows of a layer that stay in shared memory; the others are read again. Compute capability 8.6 has
// 99 KB for them.
inline constexpr int32_t kKeptRows = 5120;
inline constexpr int32_t kRowsAtOnce = 4;  // of a lane, whose tokens are asked for together

struct alignas(16) KeptRow {
  int32_t tokens[kAttentionTiers];
  uint32_t cost;

  __device__ uint32_t tiles() const {
    const int32_t all = tile_count(tokens[0]) + tile_count(tokens[1]) + tile_count(tokens[2]);
    return static_cast<uint32_t>(all > 0 ? all : 1);
  }
};

// With an unused row behind every eight, lanes that read rows 8 apart meet in no bank.
TKV_HD constexpr int32_t kept_place(int32_t row) {
  return row + (row >> 3);
}
constexpr size_t kept_bytes(int32_t num_rows) {
  return (kept_place(smaller(num_rows, kKeptRows)) + 1) * sizeof(KeptRow);
}

template <int32_t kClasses>
class PlanRows {
 public:
  __device__ PlanRows(const PlanLaunchOf<kClasses>& launch, int32_t layer, KeptRow* kept)
      : l_(launch), layer_(layer), kept_(kept) {}

  // Reads the rows of this thread's warp, neighbours by neighbouring lanes. The warp may read them
  // by at() afterwards, the others once the CTA has met.
  __device__ void keep() const {
    const auto t = static_cast<int32_t>(threadIdx.x);
    const int32_t warp_rows = 32 * l_.rows_per_thread, first = t / 32 * warp_rows,
                  end = smaller(first + warp_rows, l_.plan.rows.num_rows);
    for (int32_t row = first + t % 32; row < end; row += 32 * kRowsAtOnce) {
      if (row + 32 < end) {
        keep_rows<kRowsAtOnce>(row, end);
      } else {
        keep_rows<1>(row, end);
      }
    }
    __syncwarp();
  }

  __device__ KeptRow at(int32_t row) const {
    return row < kKeptRows ? kept_[kept_place(row)] : read_again(row);
  }

  // first_tier_of().
  __device__ int32_t first_tier(int32_t row) const {
    if constexpr (kClasses == 1) {
      return 0;
    } else {
      const int32_t of_batch = batch_row(row);
      const auto place =
          static_cast<int32_t>(l_.kv_heads.quotient(static_cast<uint32_t>(of_batch)));
      const int32_t kv_head = of_batch - place * l_.plan.rows.num_kv_heads;
      return l_.plan.layers[layer_].class_of(kv_head) * kAttentionTiers;
    }
  }

 private:
  // table_row_of() without branches, so that several rows are asked for together.
  struct TableRow {
    int64_t at;  // 0 where there is none
    bool is_there;
    bool is_stray;
  };

  __device__ int32_t batch_row(int32_t row) const {
    return static_cast<int32_t>(l_.passes.quotient(static_cast<uint32_t>(row)));
  }

  __device__ TableRow table_row(int32_t row) const {
    const RowsOf<kClasses>& rows = l_.plan.rows;
    const int32_t of_batch = batch_row(row);
    const auto place = static_cast<int32_t>(l_.kv_heads.quotient(static_cast<uint32_t>(of_batch)));
    const int32_t sequence = rows.sequences == nullptr ? place : rows.sequences[place];
    const bool is_there =
        static_cast<uint32_t>(sequence) < static_cast<uint32_t>(rows.num_table_sequences);
    const int64_t at =
        table_row_in(rows, layer_, is_there ? sequence : 0, of_batch - place * rows.num_kv_heads);
    return {at, is_there, !is_there && sequence != -1};
  }

  __device__ static int32_t of_side(int4 sides, int32_t side) {
    return (side & 2) == 0 ? ((side & 1) == 0 ? sides.x : sides.y)
                           : ((side & 1) == 0 ? sides.z : sides.w);
  }

  // row_tokens(), likewise.
  __device__ RowTokens tokens_of(const TableRow& row, int32_t first_tier) const {
    const int4 sides = reinterpret_cast<const int4*>(l_.tokens)[row.at];
    RowTokens n;
    n.corrupt = row.is_stray;
#pragma unroll
    for (int32_t t = 0; t < kAttentionTiers; ++t) {
      const int32_t side = l_.side[t];
      const int32_t table = of_side(sides, side);
      const int32_t tokens = row.is_there && side >= 0 ? table : 0;
      n.tier[t] = cut_tokens(l_.plan.rows.tiers[first_tier + t], tokens);
      n.corrupt |= n.tier[t] != tokens;
    }
    return n;
  }

  __device__ KeptRow kept_row(const RowTokens& n, int32_t first_tier) const {
    return {{n.tier[0], n.tier[1], n.tier[2]}, row_work(l_.plan.rows, n, first_tier).cost};
  }
  __device__ __noinline__ KeptRow read_again(int32_t row) const {
    return kept_row(tokens_of(table_row(row), first_tier(row)), first_tier(row));
  }

  // Rows row, row + 32, ... below `end`; the first is.
  template <int32_t kRows>
  __device__ void keep_rows(int32_t row, int32_t end) const {
    TableRow of_table[kRows];
    RowTokens n[kRows];
#pragma unroll
    for (int32_t k = 0; k < kRows; ++k) of_table[k] = table_row(smaller(row + 32 * k, end - 1));
#pragma unroll
    for (int32_t k = 0; k < kRows; ++k) {
      n[k] = tokens_of(of_table[k], first_tier(smaller(row + 32 * k, end - 1)));
    }
#pragma unroll
    for (int32_t k = 0; k < kRows; ++k, row += 32) {
      if (row >= end) return;
      if (row < kKeptRows) kept_[kept_place(row)] = kept_row(n[k], first_tier(row));
      if (blockIdx.y == 0) set_status(row, n[k].corrupt);
    }
  }

  __device__ void set_status(int32_t row, bool corrupt) const {
    l_.plan.row_status[static_cast<int64_t>(layer_) * l_.batch_rows + batch_row(row)] =
        static_cast<int32_t>(corrupt ? StatusCode::kCorrupt : StatusCode::kOk);
  }

  const PlanLaunchOf<kClasses>& l_;
  int32_t layer_;
  KeptRow* kept_;  // by kept_place()
};

}  // namespace tierkv
