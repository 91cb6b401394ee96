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
constexpr int32_t kCtasPerSm = 4;
constexpr int32_t kWantedCtas = 132 * kCtasPerSm;  // resident at once on an H100
constexpr int32_t kMostRowCtas = 128;              // of a row
static_assert(kThreads == kMaxQueryTokens * kMostCountedColumns, "a thread looks at one column");

// Tokens of a lane whose loads are in flight together.
constexpr int32_t in_flight(int32_t columns) {
  return columns == 8 ? 2 : 4;
}

// A row of the batch as all threads of its CTAs see it.
struct CountedRow {
  int32_t row;        // of the page table
  int32_t batch_row;  // entry * num_kv_heads + kv_head
  SideCounts tokens;
  CountedQueries queries;
};

struct CountedPage {
  int32_t side;
  int32_t page;
  int32_t used;        // tokens
  int32_t first_tile;  // of the row
};

// The means of a lane's tokens, every 32nd slot of a page from `first` on.
template <int32_t kTokens>
struct LaneMeans {
  int32_t position[kTokens];
  float score[kTokens];
};

// One query after the other; any number of columns and passes.
template <int32_t kTokens>
__device__ __forceinline__ void count_queries(const DeviceCount& x, const CountedRow& r,
                                              const CountedPage& at, int32_t first,
                                              LaneMeans<kTokens>* means) {
  for (int32_t query = 0; query < x.columns.q_len; ++query) {
    const CountedQuery& q = r.queries.of[query];
    if (q.counted == 0) continue;
    const int32_t row = r.batch_row * x.columns.passes + q.passes.first;
#pragma unroll
    for (int32_t i = 0; i < kTokens; ++i) {
      const int32_t slot = first + 32 * i;
      if (slot >= at.used) continue;
      const float exponent = largest_exponent(x.scores, q, row, at.first_tile + slot / kTileTokens,
                                              slot % kTileTokens);
      means->score[i] =
          counted_mean(r.queries, query, means->position[i], means->score[i], exponent);
    }
  }
}

// One query, whose heads are kColumns columns of the row.
template <int32_t kColumns, int32_t kTokens>
__device__ __forceinline__ void count_one_query(const CountedRow& r, const CountedPage& at,
                                                int32_t first,
                                                const TokenColumns<kColumns> (&columns)[kTokens],
                                                LaneMeans<kTokens>* means) {
#pragma unroll
  for (int32_t i = 0; i < kTokens; ++i) {
    if (first + 32 * i >= at.used) continue;
    means->score[i] = counted_mean(r.queries, 0, means->position[i], means->score[i],
                                   largest_exponent(columns[i], r.queries.of[0]));
  }
}

// By a warp. kColumns: of the row, for one query in one pass; 0: any.
template <int32_t kColumns>
__device__ __forceinline__ void count_page(const DeviceState& d, const DeviceCount& x,
                                           const CountedRow& r, const CountedPage& at) {
  constexpr int32_t kTokens = in_flight(kColumns);
  uint8_t* bytes = d.s.page_bytes(at.page);
  const bool frozen = is_frozen(d.s.allocator, at.page);
  RankedToken mine = no_token();
  for (int32_t first = lane_index(); first < at.used; first += 32 * kTokens) {
    LaneMeans<kTokens> means;
    TokenColumns<kColumns> columns[kTokens];
#pragma unroll
    for (int32_t i = 0; i < kTokens; ++i) {
      const int32_t slot = first + 32 * i;
      if (slot >= at.used) continue;
      means.position[i] = position_at(d.s, at.side, {bytes, slot});
      means.score[i] = score_at(d.s, at.side, {bytes, slot});
      if constexpr (kColumns > 0) {
        columns[i] = load_columns<kColumns>(x.scores, r.batch_row, at.first_tile, slot);
      }
    }
    if constexpr (kColumns > 0) {
      count_one_query(r, at, first, columns, &means);
    } else {
      count_queries(x, r, at, first, &means);
    }
    if (frozen) continue;
#pragma unroll
    for (int32_t i = 0; i < kTokens; ++i) {
      const int32_t slot = first + 32 * i;
      if (slot >= at.used) continue;
      *reinterpret_cast<float*>(bytes + d.s.layouts[at.side].score_byte(slot)) = means.score[i];
      mine = better_victim(mine, {means.score[i], means.position[i], slot});
    }
  }
  if (frozen || at.side == kWindowSide) return;
  write_minimum(d, at.page, best_of_warp(mine));
}

// Page `item` of the row's, one side after the other; without its id.
__device__ __forceinline__ CountedPage page_of_row(const DeviceState& d, const CountedRow& r,
                                                   int32_t item, int32_t* index) {
  CountedPage at = {kStoreSides, kNoPage, 0, 0};
  for (int32_t side = 0; side < kStoreSides; ++side) {
    const int32_t tokens = r.tokens.of[side], per_page = d.s.page_tokens(side);
    const int32_t pages = pages_for(tokens, per_page);
    if (item < pages) {
      *index = item;
      at.side = side;
      at.used = d.s.page_used(side, item, tokens);
      at.first_tile += item * (per_page / kTileTokens);
      return at;
    }
    item -= pages;
    at.first_tile += (tokens + kTileTokens - 1) / kTileTokens;
  }
  return at;
}

// By a warp: pages first, first + step, .. of the row. Their ids are asked for at once, a lane
// each.
template <int32_t kColumns>
__device__ __forceinline__ void count_pages(const DeviceState& d, const DeviceCount& x,
                                            const CountedRow& r, int32_t first, int32_t step) {
  for (bool any = true; any; first += 32 * step) {
    int32_t index = 0;
    CountedPage mine = page_of_row(d, r, first + lane_index() * step, &index);
    if (mine.side < kStoreSides) mine.page = d.s.page_id(r.row, mine.side, index);
    const uint32_t pages = __ballot_sync(kAllLanes, mine.side < kStoreSides);
    any = pages == kAllLanes;
    for (int32_t n = 0; n < __popc(pages); ++n) {
      count_page<kColumns>(
          d, x, r,
          {__shfl_sync(kAllLanes, mine.side, n), __shfl_sync(kAllLanes, mine.page, n),
           __shfl_sync(kAllLanes, mine.used, n), __shfl_sync(kAllLanes, mine.first_tile, n)});
    }
  }
}

__device__ void load_row(const DeviceState& d, const DeviceCount& x, const DeviceRow& at,
                         CountedRow* r) {
  const SequenceInfo info = d.s.infos[at.sequence];
  r->row = at.row;
  r->batch_row = static_cast<int32_t>(blockIdx.x);
  r->tokens = d.s.allocator.tokens[at.row];
  start_queries(x.columns, info, d.s.score_interval, &r->queries);
}

template <int32_t kColumns>
__global__ void __launch_bounds__(kThreads, kCtasPerSm)
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
  count_pages<kColumns>(d, x, r, static_cast<int32_t>(blockIdx.y) * kWarps + t / 32,
                        static_cast<int32_t>(gridDim.y) * kWarps);
}

using CountKernel = void (*)(DeviceState, DeviceCount);
CountKernel kernel_of(const DeviceCount& x) {
  const bool is_one = x.columns.q_len == 1 && x.columns.passes == 1;
  if (is_one && x.scores.columns == 2) return count_query_kernel<2>;
  if (is_one && x.scores.columns == 4) return count_query_kernel<4>;
  if (is_one && x.scores.columns == 8) return count_query_kernel<8>;
  return count_query_kernel<0>;
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
  return launch_after_previous(kernel_of(x), dim3(rows, row_ctas), kThreads, 0, stream, d, x);
}

}  // namespace tierkv
