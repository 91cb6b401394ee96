// Counts the newest queries of every row, oldest first: what update_scores() does with their
// probabilities, here taken from the scores that the decode kernel has left, page by page, with the
// records of the pages.

#include "attention/launch.cuh"
#include "store/count_query.h"
#include "store/device_rows.cuh"

namespace tierkv {
namespace {

constexpr int32_t kThreads = 256;
constexpr int32_t kWarps = kThreads / 32;
constexpr int32_t kInFlight = 4;       // tokens of a lane
constexpr int32_t kWantedCtas = 1056;  // eight on each SM of an H100
constexpr int32_t kMostRowCtas = 128;  // of a row
static_assert(kThreads == kMaxQueryTokens * kMostCountedColumns, "a thread looks at one column");

// A row of the batch as all threads of its CTAs see it.
struct CountedRow {
  int32_t row;        // of the page table
  int32_t batch_row;  // entry * num_kv_heads + kv_head
  SideCounts tokens;
  CountedQueries queries;
};

// Every 32nd slot of a page from `first` on.
struct LaneSlots {
  int32_t first;
  int32_t end;
  int32_t first_tile;  // of the page, in the row
};

// One query, to the means of a lane's tokens.
__device__ __forceinline__ void count_tokens(const DeviceCount& x, const CountedRow& r,
                                             int32_t query, const LaneSlots& slots,
                                             const int32_t (&position)[kInFlight],
                                             float (&score)[kInFlight]) {
  const CountedQuery& q = r.queries.of[query];
  if (q.counted == 0) return;
  const int32_t row = r.batch_row * x.columns.passes + q.passes.first;
  float exponent[kInFlight];
#pragma unroll
  for (int32_t i = 0; i < kInFlight; ++i) {
    const int32_t slot = slots.first + 32 * i;
    if (slot >= slots.end) continue;
    exponent[i] = largest_exponent(x.scores, q, row, slots.first_tile + slot / kTileTokens,
                                   slot % kTileTokens);
  }
#pragma unroll
  for (int32_t i = 0; i < kInFlight; ++i) {
    if (slots.first + 32 * i >= slots.end) continue;
    score[i] = counted_mean(r.queries, query, position[i], score[i], exponent[i]);
  }
}

struct CountedPage {
  int32_t side;
  int32_t page;
  int32_t used;        // tokens
  int32_t first_tile;  // of the row
};

// By a warp.
__device__ void count_page(const DeviceState& d, const DeviceCount& x, const CountedRow& r,
                           const CountedPage& at) {
  uint8_t* bytes = d.s.page_bytes(at.page);
  const bool frozen = is_frozen(d.s.allocator, at.page);
  RankedToken mine = no_token();
  for (int32_t first = lane_index(); first < at.used; first += 32 * kInFlight) {
    float score[kInFlight];
    int32_t position[kInFlight];
#pragma unroll
    for (int32_t i = 0; i < kInFlight; ++i) {
      const int32_t slot = first + 32 * i;
      if (slot >= at.used) continue;
      position[i] = position_at(d.s, at.side, {bytes, slot});
      score[i] = score_at(d.s, at.side, {bytes, slot});
    }
    for (int32_t query = 0; query < x.columns.q_len; ++query) {
      count_tokens(x, r, query, {first, at.used, at.first_tile}, position, score);
    }
    if (frozen) continue;
#pragma unroll
    for (int32_t i = 0; i < kInFlight; ++i) {
      const int32_t slot = first + 32 * i;
      if (slot >= at.used) continue;
      *reinterpret_cast<float*>(bytes + d.s.layouts[at.side].score_byte(slot)) = score[i];
      mine = better_victim(mine, {score[i], position[i], slot});
    }
  }
  if (frozen || at.side == kWindowSide) return;
  write_minimum(d, at.page, best_of_warp(mine));
}

__device__ void load_row(const DeviceState& d, const DeviceCount& x, const DeviceRow& at,
                         CountedRow* r) {
  const SequenceInfo info = d.s.infos[at.sequence];
  r->row = at.row;
  r->batch_row = static_cast<int32_t>(blockIdx.x);
  r->tokens = d.s.allocator.tokens[at.row];
  start_queries(x.columns, info, d.s.score_interval, &r->queries);
}

__global__ void __launch_bounds__(kThreads)
    count_query_kernel(const __grid_constant__ DeviceState d,
                       const __grid_constant__ DeviceCount x) {
  __shared__ CountedRow r;
  wait_for_previous_kernel();
  let_next_kernel_start();
  const DeviceRow at = layer_row(d, x.layer, static_cast<int32_t>(blockIdx.x));
  if (at.sequence == kPaddingSequence || has_failed(d)) return;
  const auto t = static_cast<int32_t>(threadIdx.x);
  if (t == 0) load_row(d, x, at, &r);
  load_offset(x.columns, x.lse, static_cast<int32_t>(blockIdx.x), t, &r.queries);
  __syncthreads();
  if (!r.queries.any(x.columns.q_len)) return;
  int32_t tiles = 0;
  for (int32_t side = 0; side < kStoreSides; ++side) {
    tiles += (r.tokens.of[side] + kTileTokens - 1) / kTileTokens;
  }
  if (tiles > x.scores.stride_tiles) {
    if (t == 0)
      report_failure(d, {StatusCode::kOutOfRange, DeviceCall::kAttend, x.layer, at.sequence});
    return;
  }
  const auto warps = static_cast<int32_t>(gridDim.y) * kWarps;
  int32_t item = static_cast<int32_t>(blockIdx.y) * kWarps + t / 32, first_tile = 0;
  for (int32_t side = 0; side < kStoreSides; ++side) {
    const int32_t tokens = r.tokens.of[side], per_page = d.s.page_tokens(side);
    const int32_t pages = pages_for(tokens, per_page);
    for (; item < pages; item += warps) {
      count_page(d, x, r,
                 {side, d.s.page_id(r.row, side, item), d.s.page_used(side, item, tokens),
                  first_tile + item * (per_page / kTileTokens)});
    }
    item -= pages;
    first_tile += (tokens + kTileTokens - 1) / kTileTokens;
  }
}

}  // namespace

Status count_query(const DeviceState& d, const DeviceCount& x, GpuStream stream) {
  const int32_t rows = x.count * d.s.num_kv_heads;
  for (int32_t query = 0; query < x.columns.q_len; ++query) {
    if (query_passes(x.columns, query).count * x.scores.columns > kMostCountedColumns) {
      return Status(StatusCode::kUnsupported, "count_query: too many q heads per kv_head");
    }
  }
  const int32_t wanted = kWantedCtas / rows;
  const int32_t row_ctas = wanted < 1 ? 1 : wanted < kMostRowCtas ? wanted : kMostRowCtas;
  return launch_after_previous(count_query_kernel, dim3(rows, row_ctas), kThreads, 0, stream, d, x);
}

}  // namespace tierkv
