// The prompt phase: chunks of a prompt are packed by the codec's batch kernel into window pages;
// at its end a CTA per row moves every token to its tier.

#include <cub/block/block_scan.cuh>

#include "codec/page_batch.h"
#include "store/device_rows.cuh"

namespace tierkv {
namespace {

constexpr int32_t kThreads = 256;
constexpr int32_t kWarps = kThreads / 32;

__device__ int32_t thread_item() {
  return static_cast<int32_t>(blockIdx.x) * kThreads + static_cast<int32_t>(threadIdx.x);
}

// ---- room for a chunk ----

__global__ void __launch_bounds__(kThreads)
    plan_chunk_kernel(const __grid_constant__ DeviceState d, int32_t rows, int32_t tokens) {
  const int32_t i = thread_item();
  if (i >= rows) return;
  const DeviceRow r = batch_row(d, i);
  if (r.sequence == kPaddingSequence) return;
  const SequenceInfo info = d.s.infos[r.sequence];
  const int32_t after = info.num_tokens + tokens, per_page = d.s.page_tokens(kWindowSide);
  SideCounts kept, pages;
  kept.of[kWindowSide] = after;
  d.row_counts[i] = kept;
  if (r.within != 0) return;
  pages.of[kWindowSide] = pages_for(after, per_page) - pages_for(info.num_tokens, per_page);
  d.entry_counts[r.entry] = pages;
  d.before[r.entry] = info;
}

__global__ void __launch_bounds__(kThreads)
    finish_chunk_kernel(const __grid_constant__ DeviceState d, int32_t count, int32_t tokens) {
  const int32_t entry = thread_item();
  if (entry >= count || d.batch[entry] == kPaddingSequence) return;
  if (d.report->status != StatusCode::kOk) {
    if (entry == 0) report_failure(d, {d.report->status, DeviceCall::kBeginPrompt, -1, -1});
    return;
  }
  d.s.infos[d.batch[entry]].num_tokens = d.before[entry].num_tokens + tokens;
}

// ---- append ----

// The jobs of one row: the pages that its tokens first .. end - 1 lie on.
__global__ void __launch_bounds__(kThreads)
    plan_jobs_kernel(const __grid_constant__ DeviceState d, const __grid_constant__ DeviceTokens x,
                     PageJob* jobs, StatusCode* status, int32_t jobs_per_row) {
  const int32_t i = thread_item(), heads = d.s.num_kv_heads;
  if (i >= x.count * heads * jobs_per_row) return;
  const int32_t layer_index = i / jobs_per_row, j = i % jobs_per_row;
  const DeviceRow r = layer_row(d, x.layer, layer_index);
  if (j == 0) status[layer_index] = StatusCode::kOk;
  PageJob job;
  job.row = layer_index;
  jobs[i] = job;
  if (r.sequence == kPaddingSequence || has_failed(d)) return;
  const int32_t end = d.s.infos[r.sequence].num_tokens, first = end - x.tokens;
  const int32_t per_page = d.s.page_tokens(kWindowSide), page_index = first / per_page + j;
  const int32_t begin = max(first, page_index * per_page);
  if (begin >= end) return;
  const int64_t dim = d.s.layouts[kWindowSide].head_dim();
  job.input = ((static_cast<int64_t>(r.entry) * x.tokens) * heads + layer_index % heads) * dim;
  job.scalars = first;
  job.first = begin - first;
  job.page = d.s.page_id(r.row, kWindowSide, page_index);
  job.first_slot = begin - page_index * per_page;
  job.count = min(end, (page_index + 1) * per_page) - begin;
  jobs[i] = job;
}

__global__ void __launch_bounds__(kThreads)
    finish_append_kernel(const __grid_constant__ DeviceState d,
                         const __grid_constant__ DeviceTokens x, const StatusCode* status) {
  const int32_t i = thread_item();
  if (i >= x.count * d.s.num_kv_heads) return;
  const DeviceRow r = layer_row(d, x.layer, i);
  if (r.sequence == kPaddingSequence) return;
  if (status[i] != StatusCode::kOk) {
    report_failure(d, {status[i], DeviceCall::kAppend, x.layer, r.sequence});
  } else if (!has_failed(d)) {
    d.appended[r.row] = d.s.infos[r.sequence].num_tokens;
  }
}

// Only fp16 cannot be beyond fp16.
__global__ void __launch_bounds__(kThreads)
    check_range_kernel(const __grid_constant__ DeviceState d,
                       const __grid_constant__ DeviceTokens x, int64_t values) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < values;
       i += step) {
    const float k = load_element(x.k, x.dtype, i), v = load_element(x.v, x.dtype, i);
    const bool finite = is_finite(k) && is_finite(v);
    if (finite && fabsf(k) <= kMaxHalf && fabsf(v) <= kMaxHalf) continue;
    if (d.batch[0] == kPaddingSequence) return;
    report_failure(d, {finite ? StatusCode::kOutOfRange : StatusCode::kNonFinite,
                       DeviceCall::kAppend, x.layer, -1});
    return;
  }
}

// ---- the end of a prompt ----

__global__ void __launch_bounds__(kThreads)
    plan_end_kernel(const __grid_constant__ DeviceState d, int32_t count) {
  const int32_t entry = thread_item();
  if (entry >= count || d.batch[entry] == kPaddingSequence) return;
  SideCounts pages;
  pages.of[kHighSide] = prompt_pages(d.s, d.s.infos[d.batch[entry]].num_tokens);
  d.entry_counts[entry] = pages;
}

// Sides 0 and 1 while both are still reserved on the left.
template <int32_t kSide>
__device__ DeviceSlot reserved_slot(const DeviceState& d, int32_t row, int32_t index,
                                    const PageLayout& layout) {
  if (kSide == kHighSide) return device_slot(d, row, kHighSide, index, layout);
  const int32_t per_page = layout.tokens, page_index = index / per_page;
  const int32_t held = d.s.allocator.pages[row].of[kHighSide];
  return {d.s.page_id(row, kHighSide, held - 1 - page_index), index - page_index * per_page};
}

// Where the tokens of a chunk of kThreads positions go.
struct Placement {
  int32_t side[kThreads];  // kWindowSide: stays, or is pruned
  int32_t index[kThreads];
};
using TierScan = cub::BlockScan<int32_t, kThreads, cub::BLOCK_SCAN_WARP_SCANS>;

// Counts of the two tiers are packed into one scan: 2 * kThreads < 2^16.
__device__ void place_chunk(const DeviceState& d, const DeviceRow& r, const SequenceInfo& after,
                            int32_t first, SideCounts* counts, Placement* placement,
                            TierScan::TempStorage* storage) {
  const int32_t position = first + static_cast<int32_t>(threadIdx.x);
  Tier tier = Tier::kPruned;
  if (position < after.num_tokens) {
    const int32_t per_page = d.s.page_tokens(kWindowSide);
    const TokenPlace at = {d.s.page_bytes(d.s.page_id(r.row, kWindowSide, position / per_page)),
                           position % per_page};
    tier = prompt_tier(d.s.policy, score_at(d.s, kWindowSide, at), position, after.num_tokens);
  }
  const int32_t mine = tier == Tier::kHigh ? 1 : tier == Tier::kLow ? 1 << 16 : 0;
  int32_t before, all;
  TierScan(*storage).ExclusiveSum(mine, before, all);
  placement->side[threadIdx.x] = mine == 0 ? kWindowSide : side_of(tier);
  placement->index[threadIdx.x] = tier == Tier::kHigh ? counts->of[kHighSide] + (before & 0xffff)
                                                      : counts->of[kLowSide] + (before >> 16);
  __syncthreads();
  counts->of[kHighSide] += all & 0xffff;
  counts->of[kLowSide] += all >> 16;
}

template <class Formats, int32_t kSide>
__device__ void place_token(const DeviceState& d, int32_t row, int32_t position, int32_t index) {
  const PageLayout window = Formats::layout(d.s, kWindowSide), layout = Formats::layout(d.s, kSide);
  const DeviceSlot from = device_slot(d, row, kWindowSide, position, window);
  const DeviceSlot to = reserved_slot<kSide>(d, row, index, layout);
  move_page_token(page_ref(d, window, from), from.slot, page_ref(d, layout, to), to.slot);
}

// Empties the slots of the last tile behind the tier's tokens.
template <int32_t kSide>
__device__ void clear_tile_end(const DeviceState& d, int32_t row, int32_t count, int32_t warp) {
  const PageLayout layout = d.s.layouts[kSide];
  const int32_t end = (count + kTileTokens - 1) / kTileTokens * kTileTokens;
  for (int32_t i = count + warp; i < end; i += kWarps) {
    const DeviceSlot at = reserved_slot<kSide>(d, row, i, layout);
    clear_page_token(page_ref(d, layout, at), at.slot);
  }
}

// The window's tokens to the front of their side.
__device__ void place_window(const DeviceState& d, int32_t row, const SequenceInfo& after,
                             int32_t warp) {
  const PageLayout layout = d.s.layouts[kWindowSide];
  const int32_t first = ring_first(d.s.policy, after);
  const int32_t shift = first - d.s.policy.sink_tokens;
  // Tokens that move onto places of other window tokens must do so in order.
  const bool in_order = shift < d.s.policy.window_tokens;
  if (shift > 0 && (warp == 0 || !in_order)) {
    for (int32_t p = first + (in_order ? 0 : warp); p < after.num_tokens;
         p += in_order ? 1 : kWarps) {
      const DeviceSlot from = device_slot(d, row, kWindowSide, p, layout);
      const DeviceSlot to = device_slot(d, row, kWindowSide, p - shift, layout);
      move_page_token(page_ref(d, layout, from), from.slot, page_ref(d, layout, to), to.slot);
    }
  }
  __syncthreads();
  const int32_t count = window_side_tokens(d.s.policy, after);
  const int32_t end = min(after.num_tokens, (count + kTileTokens - 1) / kTileTokens * kTileTokens);
  for (int32_t i = count + warp; i < end; i += kWarps) {
    const DeviceSlot at = device_slot(d, row, kWindowSide, i, layout);
    clear_page_token(page_ref(d, layout, at), at.slot);
  }
}

template <class Formats>
__global__ void __launch_bounds__(kThreads)
    place_prompt_kernel(const __grid_constant__ DeviceState d) {
  __shared__ Placement placement;
  __shared__ TierScan::TempStorage storage;
  const auto i = static_cast<int32_t>(blockIdx.x);
  const DeviceRow r = batch_row(d, i);
  if (r.sequence == kPaddingSequence || d.report->status != StatusCode::kOk) return;
  const int32_t warp = static_cast<int32_t>(threadIdx.x) / 32;
  const SequenceInfo after = info_after_prompt(d.s.policy, d.s.infos[r.sequence].num_tokens);
  SideCounts counts;
  for (int32_t first = 0; first < after.num_tokens; first += kThreads) {
    place_chunk(d, r, after, first, &counts, &placement, &storage);
    const int32_t end = min(kThreads, after.num_tokens - first);
    for (int32_t t = warp; t < end; t += kWarps) {
      const int32_t side = placement.side[t], index = placement.index[t];
      if (side == kHighSide) place_token<Formats, kHighSide>(d, r.row, first + t, index);
      if (side == kLowSide) place_token<Formats, kLowSide>(d, r.row, first + t, index);
    }
    __syncthreads();
  }
  clear_tile_end<kHighSide>(d, r.row, counts.of[kHighSide], warp);
  clear_tile_end<kLowSide>(d, r.row, counts.of[kLowSide], warp);
  place_window(d, r.row, after, warp);
  counts.of[kWindowSide] = window_side_tokens(d.s.policy, after);
  if (threadIdx.x == 0) d.row_counts[i] = counts;
}

__global__ void __launch_bounds__(kThreads)
    finish_prompt_kernel(const __grid_constant__ DeviceState d) {
  const auto i = static_cast<int32_t>(blockIdx.x);
  const DeviceRow r = batch_row(d, i);
  if (r.sequence == kPaddingSequence) return;
  if (d.report->status != StatusCode::kOk) {
    if (i == 0 && threadIdx.x == 0) {
      report_failure(d, {d.report->status, DeviceCall::kEndPrompt, -1, -1});
    }
    return;
  }
  const SideCounts tokens = d.s.allocator.tokens[r.row];
  for (const int32_t side : {kHighSide, kLowSide}) {
    const int32_t pages = pages_for(tokens.of[side], d.s.page_tokens(side));
    for (int32_t p = static_cast<int32_t>(threadIdx.x) / 32; p < pages; p += kWarps) {
      rescan_device_page(d, side, d.s.page_id(r.row, side, p),
                         d.s.page_used(side, p, tokens.of[side]));
    }
  }
  if (r.within == 0 && threadIdx.x == 0) {
    SequenceInfo& info = d.s.infos[r.sequence];
    info = info_after_prompt(d.s.policy, info.num_tokens);
  }
}

}  // namespace

Status plan_chunk(const DeviceState& d, int32_t count, int32_t tokens, GpuStream stream) {
  const int32_t rows = count * d.s.rows_per_sequence();
  plan_chunk_kernel<<<ctas_for(rows, kThreads), kThreads, 0, stream>>>(d, rows, tokens);
  return launch_status("begin_prompt");
}

Status finish_chunk(const DeviceState& d, int32_t count, int32_t tokens, GpuStream stream) {
  finish_chunk_kernel<<<ctas_for(count, kThreads), kThreads, 0, stream>>>(d, count, tokens);
  return launch_status("begin_prompt");
}

int32_t chunk_jobs(const StoreView& s, int32_t tokens) {
  return tokens / s.page_tokens(kWindowSide) + 2;
}
size_t chunk_job_bytes() {
  return sizeof(PageJob);
}

Status append_chunk(const DeviceState& d, const ChunkScratch& scratch, const DeviceTokens& x,
                    GpuStream stream) {
  const int32_t rows = x.count * d.s.num_kv_heads, jobs_per_row = chunk_jobs(d.s, x.tokens);
  const int32_t jobs = rows * jobs_per_row, head_dim = d.s.layouts[kWindowSide].head_dim();
  const int64_t stride = int64_t{d.s.num_kv_heads} * head_dim;
  PageEncode encode;
  PageBatch& batch = encode.batch;
  batch.pool = d.s.pages;
  batch.formats.layout[0] = d.s.layouts[kWindowSide];
  batch.formats.count = 1;
  batch.formats.raw_dtype = d.s.raw_dtype;
  batch.jobs = static_cast<const PageJob*>(scratch.jobs);
  batch.status = scratch.status;
  batch.token_stride = stride;
  batch.num_jobs = jobs;
  batch.num_rows = rows;
  batch.dtype = x.dtype;
  encode.k = x.k;
  encode.v = x.v;
  encode.scores = scratch.neutral;
  encode.positions = scratch.counting;
  if (Status s = encode.validate(); !s) return s;
  if (x.dtype != DType::kFloat16) {
    check_range_kernel<<<1024, kThreads, 0, stream>>>(d, x, stride * x.count * x.tokens);
  }
  plan_jobs_kernel<<<ctas_for(jobs, kThreads), kThreads, 0, stream>>>(
      d, x, static_cast<PageJob*>(scratch.jobs), scratch.status, jobs_per_row);
  if (Status s = encode_pages(encode, stream); !s) return s;
  finish_append_kernel<<<ctas_for(rows, kThreads), kThreads, 0, stream>>>(d, x, scratch.status);
  return launch_status("append");
}

Status plan_prompt_end(const DeviceState& d, int32_t count, GpuStream stream) {
  plan_end_kernel<<<ctas_for(count, kThreads), kThreads, 0, stream>>>(d, count);
  return launch_status("end_prompt");
}
Status place_prompt(const DeviceState& d, int32_t count, GpuStream stream) {
  const auto rows = static_cast<uint32_t>(count * d.s.rows_per_sequence());
  if (DefaultFormats::fit(d.s)) {
    place_prompt_kernel<DefaultFormats><<<rows, kThreads, 0, stream>>>(d);
  } else {
    place_prompt_kernel<AnyFormats><<<rows, kThreads, 0, stream>>>(d);
  }
  return launch_status("end_prompt");
}
Status finish_prompt(const DeviceState& d, int32_t count, GpuStream stream) {
  const auto rows = static_cast<uint32_t>(count * d.s.rows_per_sequence());
  finish_prompt_kernel<<<rows, kThreads, 0, stream>>>(d);
  return launch_status("end_prompt");
}

}  // namespace tierkv
