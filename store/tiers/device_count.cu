// Counts the newest queries of every row, oldest first: what update_scores() does with their
// probabilities, here taken from the scores that the decode kernel has left, page by page, with the
// records of the pages. One query in one pass, the usual case, has a kernel of its own
// (count_pages.cuh).

#include "gpu/constants.h"
#include "gpu/launch.cuh"
#include "gpu/pdl.cuh"
#include "store/tiers/count_pages.cuh"

namespace tierkv {
namespace {

constexpr int32_t kThreads = 256;
constexpr int32_t kWarps = kThreads / 32;
// Of the kernel for one query: as many as leave each the registers that it needs.
constexpr int32_t kQueryThreads = 224;
static_assert(kListedPages <= kQueryThreads, "a thread lists a page");
constexpr int32_t kCtasPerSm = 4;
constexpr int32_t kWantedCtas = 132 * kCtasPerSm;  // resident at once on an H100
constexpr int32_t kMostRowCtas = 128;              // of a row
static_assert(kThreads == kMaxQueryTokens * kMostCountedColumns, "a thread looks at one column");

// The CTAs of a launch: sequences, parts of a row, kv_heads.
__device__ __forceinline__ int32_t batch_row() {
  return static_cast<int32_t>(blockIdx.x * gridDim.z + blockIdx.z);
}
__device__ __forceinline__ int32_t first_page() {
  return static_cast<int32_t>(blockIdx.y * kWarps + threadIdx.x / 32);
}
__device__ __forceinline__ int32_t page_step() {
  return static_cast<int32_t>(gridDim.y) * kWarps;
}
// The sequence, or kPaddingSequence where nothing is to be done.
__device__ __forceinline__ int32_t sequence_of_cta(const DeviceState& d) {
  const int32_t sequence = d.batch[blockIdx.x];  // asked for beside the failure
  return has_failed(d) ? kPaddingSequence : sequence;
}
// Whether attention had room for the scores of all tokens of the row.
__device__ __forceinline__ bool has_scores(const DeviceState& d, const DeviceCount& x,
                                           int32_t sequence, const RowPages& pages) {
  if (pages.tiles <= x.scores.stride_tiles) return true;
  if (threadIdx.x == 0) {
    report_failure(d, {StatusCode::kOutOfRange, DeviceCall::kAttend, x.layer, sequence});
  }
  return false;
}

// A token's mean after all queries.
__device__ float count_token(const DeviceCount& x, const CountedQueries& queries, int32_t tile,
                             int32_t in_tile, int32_t position, float mean) {
  for (int32_t query = 0; query < x.columns.q_len; ++query) {
    const CountedQuery& q = queries.of[query];
    if (q.counted == 0) continue;
    const int32_t row = batch_row() * x.columns.passes + q.passes.first;
    const float exponent = largest_exponent(x.scores, q, row, tile, in_tile);
    mean = counted_mean(queries, query, position, mean, exponent);
  }
  return mean;
}

__device__ void count_page(const DeviceState& d, const DeviceCount& x,
                           const CountedQueries& queries, const CountedPage& at) {
  const bool frozen = is_frozen(d.s.allocator, at.page);
  uint8_t* bytes = d.s.page_bytes(at.page);
  RankedToken mine = no_token();
  for (int32_t slot = lane_index(); slot < at.used; slot += 32) {
    const TokenPlace place = {bytes, slot};
    const int32_t position = position_at(d.s, at.side, place);
    const float mean = count_token(x, queries, at.first_tile + slot / kTileTokens,
                                   slot % kTileTokens, position, score_at(d.s, at.side, place));
    if (frozen) continue;
    *reinterpret_cast<float*>(bytes + d.s.layouts[at.side].score_byte(slot)) = mean;
    mine = better_victim(mine, {mean, position, slot});
  }
  if (frozen || at.side == kWindowSide) return;
  write_minimum(d, at.page, best_of_warp(mine));
}

// Any number of queries, columns and passes.
__global__ void __launch_bounds__(kThreads, kCtasPerSm)
    count_queries_kernel(const __grid_constant__ DeviceState d,
                         const __grid_constant__ DeviceCount x) {
  __shared__ CountedQueries queries;
  wait_for_previous_kernel();
  let_next_kernel_start();
  const int32_t sequence = sequence_of_cta(d);
  if (sequence == kPaddingSequence) return;
  const auto t = static_cast<int32_t>(threadIdx.x);
  if (t == 0) start_queries(x.columns, d.s.infos[sequence], d.s.score_interval, &queries);
  load_offset(x.columns, x.lse, batch_row(), t, &queries);
  __syncthreads();
  if (!queries.any(x.columns.q_len)) return;
  const int32_t row = d.s.row_of(sequence, x.layer, static_cast<int32_t>(blockIdx.z));
  const RowPages pages = pages_of_row(d, row);
  if (!has_scores(d, x, sequence, pages)) return;
  for (int32_t item = first_page();; item += page_step()) {
    const CountedPage page = page_of_row(d, row, pages, item);
    if (page.used == 0) return;
    count_page(d, x, queries, page);
  }
}

// By a CTA: its part of a row's pages, from the `first` on.
template <int32_t kColumns>
__device__ __forceinline__ void list_pages(const DeviceState& d, int32_t row, const RowPages& pages,
                                           int32_t first, int32_t end, CountedRow<kColumns>* r) {
  const auto t = static_cast<int32_t>(threadIdx.x);
  if (first + t < end) {
    const CountedPage page = page_of_row(d, row, pages, first + t);
    r->pages[t] = page;
    r->is_frozen[t] = is_frozen(d.s.allocator, page.page);
  }
  if (t >= kStoreSides) return;
  int32_t until = 0;
  for (int32_t side = 0; side <= t; ++side) until += pages.pages[side];
  r->ends[t] = larger_of(0, smaller_of(until, end) - first);
}

// One query, of kColumns or one less heads; kCountsAll: config().score_interval is 1. Attention
// lets this kernel start when all that it does not write itself is there: that is read before
// attention has ended.
template <int32_t kColumns, bool kCountsAll>
__global__ void __launch_bounds__(kQueryThreads, kColumns < 8 && kCountsAll ? kCtasPerSm : 2)
    count_query_kernel(const __grid_constant__ DeviceState d, const __grid_constant__ DeviceCount x,
                       const __grid_constant__ PageLanes lanes) {
  __shared__ CountedRow<kColumns> r;
  const int32_t sequence = sequence_of_cta(d);
  const auto t = static_cast<int32_t>(threadIdx.x);
  RowPages pages{};
  int32_t row = 0, first = 0, end = 0;
  if (sequence != kPaddingSequence) {
    const SequenceInfo info = d.s.infos[sequence];
    row = d.s.row_of(sequence, x.layer, static_cast<int32_t>(blockIdx.z));
    pages = pages_of_row(d, row);
    if (t == 0) {
      const CountSchedule schedule = {info.prompt_tokens, d.s.score_interval};
      r.row = row;
      r.batch_row = batch_row();
      r.query = {schedule, counted_through_query(schedule, info.num_tokens - 1)};
    }
    const auto parts = static_cast<int32_t>(gridDim.y), part = static_cast<int32_t>(blockIdx.y);
    const int32_t all = pages.pages[0] + pages.pages[1] + pages.pages[2];
    const int32_t each = (all + parts - 1) / parts;
    first = smaller_of(all, part * each);
    end = smaller_of(all, first + each);
    list_pages(d, row, pages, first, smaller_of(end, first + kListedPages), &r);
  }
  wait_for_previous_kernel();
  let_next_kernel_start();
  if (t < kColumns) {
    const int32_t group = x.columns.group;
    const float lse = t < group ? x.lse[int64_t{batch_row()} * group + t] : -INFINITY;
    r.offsets[t] = lse == -INFINITY ? -INFINITY : -lse * kLog2E;
  }
  __syncthreads();
  if (sequence == kPaddingSequence || r.query.counted == 0) return;
  if (!has_scores(d, x, sequence, pages)) return;
#pragma unroll 1
  while (true) {
    Quarter<kColumns> next;
    int32_t turn = t / 32;
    bool has_next = load_quarter(d, x.scores, lanes, r, turn, &next);
#pragma unroll 1
    while (has_next) {
      const Quarter<kColumns> quarter = next;
      turn += kQueryThreads / 32;
      has_next = load_quarter(d, x.scores, lanes, r, turn, &next);
      count_quarter<kColumns, kCountsAll>(d, r, quarter);
    }
    first += kListedPages;
    if (first >= end) return;
    __syncthreads();
    list_pages(d, r.row, pages_of_row(d, r.row), first, smaller_of(end, first + kListedPages), &r);
    __syncthreads();
  }
}

using CountQueryKernel = void (*)(DeviceState, DeviceCount, PageLanes);
template <int32_t kColumns>
CountQueryKernel kernel_of(int32_t interval) {
  return interval == 1 ? count_query_kernel<kColumns, true> : count_query_kernel<kColumns, false>;
}
// Null where the general kernel is to be taken.
CountQueryKernel kernel_of(const StoreView& s, const DeviceCount& x) {
  const int32_t interval = s.score_interval;
  for (int32_t side = 0; side < kStoreSides; ++side) {
    if (s.page_tokens(side) > 32 * kQuarterTokens) return nullptr;
  }
  const bool is_aligned = reinterpret_cast<uintptr_t>(x.scores.codes) % 16 == 0;
  if (x.columns.q_len > 1 || x.columns.passes > 1 || !is_aligned) return nullptr;
  if (x.scores.columns == 2) return kernel_of<2>(interval);
  if (x.scores.columns == 4) return kernel_of<4>(interval);
  if (x.scores.columns == 8) return kernel_of<8>(interval);
  return nullptr;
}

}  // namespace

Status count_query(const DeviceState& d, const DeviceCount& x, GpuStream stream) {
  for (int32_t query = 0; query < x.columns.q_len; ++query) {
    if (query_passes(x.columns, query).count * x.scores.columns > kMostCountedColumns) {
      return Status(StatusCode::kUnsupported, "count_query: too many q heads per kv_head");
    }
  }
  const int32_t wanted = kWantedCtas / (x.count * d.s.num_kv_heads);
  const int32_t row_ctas = wanted < 1 ? 1 : wanted < kMostRowCtas ? wanted : kMostRowCtas;
  const dim3 grid(x.count, row_ctas, d.s.num_kv_heads);
  const CountQueryKernel kernel = kernel_of(d.s, x);
  if (kernel == nullptr) {
    return launch_after_previous(count_queries_kernel, grid, kThreads, 0, stream, d, x);
  }
  return launch_after_previous(kernel, grid, kQueryThreads, 0, stream, d, x, page_lanes(d.s));
}

}  // namespace tierkv
