// The kernels of attention over channel blocks, for either cache: a CTA for a split of a row, then
// a warp for a head whose splits it joins.
#pragma once

#include <algorithm>

#include "attention/channel_attention.h"
#include "attention/channel_pages.h"
#include "attention/channel_warp.cuh"
#include "attention/head_sum.cuh"
#include "codec/cuda_device.cuh"

namespace tierkv {

inline constexpr int32_t kChannelWarps = 4;
inline constexpr int32_t kChannelCtasPerSm = 3;

template <class Cache>
struct ChannelLaunch {
  Cache cache;
  int32_t num_rows;
  int32_t group;
  const uint16_t* q;
  uint16_t* out;
  float* lse;
  StatusCode* status;  // of row r at r * status_stride
  int32_t status_stride;
  float scale_log2;
  int32_t splits;
  SoftmaxState* states;  // [num_rows, group, splits]
  float* parts;          // [num_rows, group, splits, head_dim]
};

// What a row holds, as far as it can be; *sound is false where the counts cannot be.
struct ChannelCounts {
  int32_t blocks, raw_tokens;
};
__device__ inline ChannelCounts counts_of(const ChannelCache& cache, int32_t row, bool* sound) {
  const ChannelCounts r = {cache.block_count[row], cache.residual_tokens[row]};
  *sound = r.blocks >= 0 && r.blocks <= cache.max_blocks && r.raw_tokens >= 0 &&
           r.raw_tokens < cache.layout.tokens;
  return *sound ? r : ChannelCounts{0, 0};
}
__device__ inline ChannelCounts counts_of(const ChannelPages& pages, int32_t row, bool* sound) {
  const ChannelRow r = pages.rows[row];
  *sound = r.table_row < 0 ||
           (r.blocks >= 0 && r.blocks <= pages.block_slots << pages.block_shift &&
            r.raw_tokens >= 0 && r.raw_tokens <= pages.raw_slots * pages.raw_page_tokens);
  return *sound && r.table_row >= 0 ? ChannelCounts{r.blocks, r.raw_tokens} : ChannelCounts{0, 0};
}

template <class Cache>
__device__ void report_corrupt(const ChannelLaunch<Cache>& p, int32_t row) {
  atomicCAS(reinterpret_cast<int32_t*>(p.status) + row * p.status_stride,
            static_cast<int32_t>(StatusCode::kOk), static_cast<int32_t>(StatusCode::kCorrupt));
}

// Grid: splits of a row, rows. The units of a row, its raw tiles and its blocks behind them, are
// dealt to the splits in runs and to the warps of a split in turn.
template <class Cache, class Warp>
__global__ void __launch_bounds__(32 * kChannelWarps, kChannelCtasPerSm)
    channel_attention_kernel(const __grid_constant__ ChannelLaunch<Cache> p) {
  constexpr int32_t kHeadDim = Warp::kHeadDim, kWarps = kChannelWarps;
  __shared__ SoftmaxState states[kWarps][kMaxChannelGroup];
  __shared__ uint32_t query[kMaxChannelGroup * kHeadDim / 2];
  __shared__ alignas(16) float parts[kWarps][kMaxChannelGroup * kHeadDim];
  const auto row = static_cast<int32_t>(blockIdx.y), split = static_cast<int32_t>(blockIdx.x);
  const int32_t warp = static_cast<int32_t>(threadIdx.x) / 32, group = p.group;
  bool sound;
  const ChannelCounts held = counts_of(p.cache, row, &sound);
  const int32_t tiles = (held.raw_tokens + kTileTokens - 1) / kTileTokens;
  const int32_t units = tiles + held.blocks;
  const auto first = static_cast<int32_t>(static_cast<int64_t>(units) * split / p.splits);
  const auto end = static_cast<int32_t>(static_cast<int64_t>(units) * (split + 1) / p.splits);
  const int64_t head = static_cast<int64_t>(row) * group;
  Warp::stage_query(p.q + head * kHeadDim, group, query);
  __syncthreads();
  Warp attention(query, p.scale_log2);
  const typename Cache::Row line = p.cache.row(row);
  // Of the warp: the first unit, and the first that is a block.
  const int32_t mine = first + warp;
  const int32_t block = mine + (max(0, min(end, tiles) - mine) + kWarps - 1) / kWarps * kWarps;
  const int32_t tokens = min(held.raw_tokens, end * kTileTokens);
  const auto report = [&] {
    if (threadIdx.x % 32 == 0) report_corrupt(p, static_cast<int32_t>(blockIdx.y));
  };
  if (!sound) report();
  attention.attend_raw(p.cache, line, {mine, tokens, kWarps}, report);
  attention.attend_blocks(p.cache, line, {block - tiles, end - tiles, kWarps}, report);
  attention.store_part(states[warp], parts[warp]);
  __syncthreads();
  for (int32_t h = warp; h < group; h += kWarps) {
    typename HeadSum<kHeadDim>::Part of[kWarps];
#pragma unroll
    for (int32_t w = 0; w < kWarps; ++w) of[w] = {&states[w][h], &parts[w][h * kHeadDim]};
    HeadSum<kHeadDim> sum;
    sum.template add<kWarps, false>(of);
    if (p.splits == 1) {
      sum.write(reinterpret_cast<__half*>(p.out) + (head + h) * kHeadDim,
                p.lse == nullptr ? nullptr : p.lse + head + h);
    } else {
      const int64_t at = (head + h) * p.splits + split;
      sum.store(p.states + at, p.parts + at * kHeadDim);
    }
  }
}

template <class Cache, int32_t kHeadDim>
__global__ void __launch_bounds__(32 * kChannelWarps)
    merge_channel_kernel(const __grid_constant__ ChannelLaunch<Cache> p) {
  constexpr int32_t kAtOnce = 4;
  const int64_t head =
      static_cast<int64_t>(blockIdx.x) * kChannelWarps + static_cast<int64_t>(threadIdx.x) / 32;
  if (head >= static_cast<int64_t>(p.num_rows) * p.group) return;
  HeadSum<kHeadDim> sum;
  for (int32_t first = 0; first < p.splits; first += kAtOnce) {
    typename HeadSum<kHeadDim>::Part of[kAtOnce];
#pragma unroll
    for (int32_t i = 0; i < kAtOnce; ++i) {
      const int64_t at = head * p.splits + first + i;
      const bool is_there = first + i < p.splits;
      of[i] = {is_there ? p.states + at : nullptr, p.parts + at * kHeadDim};
    }
    sum.template add<kAtOnce, true>(of);
  }
  sum.write(reinterpret_cast<__half*>(p.out) + head * kHeadDim,
            p.lse == nullptr ? nullptr : p.lse + head);
}

// Rounds of resident CTAs times what a warp of one does, for rows of `units` units.
inline int32_t choose_channel_splits(int64_t units, int64_t num_rows, int32_t most, int32_t sms) {
  const int64_t resident = int64_t{sms} * kChannelCtasPerSm;
  int32_t best = 1;
  int64_t least = INT64_MAX;
  for (int32_t splits = 1; splits <= most; ++splits) {
    const int64_t rounds = (num_rows * splits + resident - 1) / resident;
    const int64_t of_warp = ((units + splits - 1) / splits + kChannelWarps - 1) / kChannelWarps;
    if (rounds * of_warp >= least) continue;
    least = rounds * of_warp;
    best = splits;
  }
  return best;
}

template <class Cache, class Warp>
void launch_channel_kernels(const ChannelLaunch<Cache>& p, GpuStream stream) {
  const dim3 grid(static_cast<uint32_t>(p.splits), static_cast<uint32_t>(p.num_rows));
  channel_attention_kernel<Cache, Warp><<<grid, 32 * kChannelWarps, 0, stream>>>(p);
  if (p.splits == 1) return;
  const int64_t heads = static_cast<int64_t>(p.num_rows) * p.group;
  const auto ctas = static_cast<uint32_t>((heads + kChannelWarps - 1) / kChannelWarps);
  merge_channel_kernel<Cache, Warp::kHeadDim><<<ctas, 32 * kChannelWarps, 0, stream>>>(p);
}

template <class Cache, int32_t kHeadDim>
void launch_channel_bits(const ChannelLaunch<Cache>& p, GpuStream stream) {
  const bool narrow_values = p.cache.layout.v_tile.bits == 2;
  if (p.cache.layout.k_tile.bits == 4) {
    narrow_values ? launch_channel_kernels<Cache, ChannelWarp<kHeadDim, 4, 2>>(p, stream)
                  : launch_channel_kernels<Cache, ChannelWarp<kHeadDim, 4, 4>>(p, stream);
  } else {
    narrow_values ? launch_channel_kernels<Cache, ChannelWarp<kHeadDim, 2, 2>>(p, stream)
                  : launch_channel_kernels<Cache, ChannelWarp<kHeadDim, 2, 4>>(p, stream);
  }
}

// A layout that validate_channel_pages() admits.
template <class Cache>
Status launch_channel(const ChannelLaunch<Cache>& p, GpuStream stream) {
  switch (p.cache.layout.head_dim()) {
    case 64:
      launch_channel_bits<Cache, 64>(p, stream);
      break;
    case 96:
      launch_channel_bits<Cache, 96>(p, stream);
      break;
    default:
      launch_channel_bits<Cache, 128>(p, stream);
      break;
  }
  return cuda_status(cudaGetLastError(), "attend");
}

}  // namespace tierkv
