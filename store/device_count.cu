// Counts the newest queries of every row, oldest first: what update_scores() does with their
// probabilities, here taken from the scores that the decode kernel has left, page by page, with the
// records of the pages.

#include "attention/launch.cuh"
#include "store/device_rows.cuh"

namespace tierkv {
namespace {

constexpr int32_t kThreads = 256;
constexpr int32_t kWarps = kThreads / 32;
constexpr int32_t kInFlight = 4;       // tokens of a lane
constexpr int32_t kWantedCtas = 1056;  // eight on each SM of an H100
constexpr int32_t kMostRowCtas = 128;  // of a row
constexpr int32_t kMostColumns = 32;   // of the passes that have heads of a query
static_assert(kThreads == kMaxQueryTokens * kMostColumns, "a thread looks at one column");

// The passes that have heads of a query.
struct QueryPasses {
  int32_t first, count;
};
TKV_HD QueryPasses query_passes(const QueryColumns& columns, int32_t query) {
  const int32_t begin = query * columns.group, end = begin + columns.group;
  const int32_t first = begin / columns.of_row;
  return {first, (end + columns.of_row - 1) / columns.of_row - first};
}

struct CountedQuery {
  int32_t counted;  // queries counted through it; 0: it is not counted
  QueryPasses passes;
  float offsets[kMostColumns];  // by pass and column: -lse in log2 units, -infinity: not its column
};

// A row of the batch as all threads of its CTAs see it.
struct CountedRow {
  int32_t row;          // of the page table
  int32_t batch_row;    // entry * num_kv_heads + kv_head
  int32_t first_query;  // position
  CountSchedule schedule;
  SideCounts tokens;
  CountedQuery queries[kMaxQueryTokens];
};

// CountSchedule::counted_through(), which divides, for the tokens of a prompt without division.
__device__ int32_t counted_through(const CountSchedule& schedule, int32_t position) {
  if (position < schedule.prompt_tokens || schedule.interval == 1) return position + 1;
  return schedule.counted_through(position);
}

// Of a row and a query of it.
struct CountedScores {
  const TokenScores& scores;
  int32_t first_row;  // of the launch, that has heads of the query
  const CountedQuery& query;
};

// The exponent of two of the largest probability that a query gave a token.
__device__ float largest_exponent(const CountedScores& x, int32_t row_tile, int32_t in_tile) {
  const TokenScores& scores = x.scores;
  float largest = -INFINITY;
  for (int32_t pass = 0; pass < x.query.passes.count; ++pass) {
    const int64_t tile = scores.tile(x.first_row + pass, row_tile);
    const auto* codes = reinterpret_cast<const uint32_t*>(scores.token_codes(tile, in_tile));
    const auto* references = reinterpret_cast<const float2*>(scores.tile_references(tile));
    const float* offsets = x.query.offsets + pass * scores.columns;
    for (int32_t pair = 0; pair < scores.columns / 2; ++pair) {
      const uint32_t code = codes[pair], low = code & 0xffffu, high = code >> 16;
      const float2 reference = references[pair];
      const float a = score_of_code(low) + reference.x + offsets[2 * pair];
      const float b = score_of_code(high) + reference.y + offsets[2 * pair + 1];
      if (low != kNoProbability) largest = fmaxf(largest, a);
      if (high != kNoProbability) largest = fmaxf(largest, b);
    }
  }
  return largest;
}

// Every 32nd slot of a page from `first` on.
struct LaneSlots {
  int32_t first;
  int32_t end;
  int32_t first_tile;  // of the page, in the row
};

// One query, to the means of a lane's tokens.
__device__ void count_tokens(const DeviceCount& x, const CountedRow& r, int32_t query,
                             const LaneSlots& slots, const int32_t (&position)[kInFlight],
                             float (&score)[kInFlight]) {
  const CountedQuery& q = r.queries[query];
  if (q.counted == 0) return;
  const CountedScores scores = {x.scores, r.batch_row * x.columns.passes + q.passes.first, q};
  float exponent[kInFlight];
#pragma unroll
  for (int32_t i = 0; i < kInFlight; ++i) {
    const int32_t slot = slots.first + 32 * i;
    if (slot >= slots.end) continue;
    exponent[i] =
        largest_exponent(scores, slots.first_tile + slot / kTileTokens, slot % kTileTokens);
  }
#pragma unroll
  for (int32_t i = 0; i < kInFlight; ++i) {
    if (slots.first + 32 * i >= slots.end || position[i] >= r.first_query + query) continue;
    const int32_t before = q.counted - counted_through(r.schedule, position[i]) - 1;
    score[i] = running_mean(score[i], before, fminf(exp2_fast(exponent[i]), 1.0f));
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
  r->first_query = info.num_tokens - x.columns.q_len;
  r->schedule = {info.prompt_tokens, d.s.score_interval};
  r->tokens = d.s.allocator.tokens[at.row];
  for (int32_t query = 0; query < x.columns.q_len; ++query) {
    const int32_t position = r->first_query + query;
    const bool counts = position >= 0 && r->schedule.is_counted(position);
    r->queries[query].counted = counts ? r->schedule.counted_through(position) : 0;
    r->queries[query].passes = query_passes(x.columns, query);
  }
}

// Column t % kMostColumns of query t / kMostColumns.
__device__ void load_offset(const DeviceCount& x, int32_t t, CountedRow* r) {
  const int32_t query = t / kMostColumns, at = t % kMostColumns;
  if (query >= x.columns.q_len) return;
  const QueryPasses passes = query_passes(x.columns, query);
  const int32_t pass = passes.first + at / x.scores.columns, column = at % x.scores.columns;
  if (pass >= passes.first + passes.count) return;
  const int32_t row = static_cast<int32_t>(blockIdx.x) * x.columns.passes + pass;
  const int64_t place = x.columns.place(row, column);
  const bool mine = place >= 0 && (x.columns.first(row) + column) / x.columns.group == query;
  const float lse = mine ? x.lse[place] : -INFINITY;
  r->queries[query].offsets[at] = lse == -INFINITY ? -INFINITY : -lse * kLog2E;
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
  load_offset(x, t, &r);
  __syncthreads();
  bool any = false;
  for (int32_t query = 0; query < x.columns.q_len; ++query) any |= r.queries[query].counted > 0;
  if (!any) return;
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
    if (query_passes(x.columns, query).count * x.scores.columns > kMostColumns) {
      return Status(StatusCode::kUnsupported, "count_query: too many q heads per kv_head");
    }
  }
  const int32_t wanted = kWantedCtas / rows;
  const int32_t row_ctas = wanted < 1 ? 1 : wanted < kMostRowCtas ? wanted : kMostRowCtas;
  return launch_after_previous(count_query_kernel, dim3(rows, row_ctas), kThreads, 0, stream, d, x);
}

}  // namespace tierkv
