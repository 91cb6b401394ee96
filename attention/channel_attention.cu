#include "attention/channel_attention.h"

#include <algorithm>

#include "attention/channel_warp.cuh"
#include "attention/head_sum.cuh"
#include "codec/cuda_device.cuh"

namespace tierkv {
namespace {

constexpr int32_t kWarps = 4;
constexpr int32_t kCtasPerSm = 3;

struct ChannelLaunch {
  ChannelCache cache;
  ChannelAttention call;
  float scale_log2;
  int32_t splits;
  SoftmaxState* states;  // [num_rows, group, splits]
  float* parts;          // [num_rows, group, splits, head_dim]
};

// What a row holds, as far as it can be; *sound is false where the counts cannot be.
struct RowCounts {
  int32_t blocks, raw_tokens;
};
__device__ RowCounts row_counts(const ChannelCache& cache, int32_t row, bool* sound) {
  const RowCounts r = {cache.block_count[row], cache.residual_tokens[row]};
  *sound = r.blocks >= 0 && r.blocks <= cache.max_blocks && r.raw_tokens >= 0 &&
           r.raw_tokens < cache.layout.tokens;
  return *sound ? r : RowCounts{0, 0};
}

__device__ void report_corrupt(const ChannelLaunch& p, int32_t row) {
  atomicMax(reinterpret_cast<int32_t*>(p.call.status) + row,
            static_cast<int32_t>(StatusCode::kCorrupt));
}

// Grid: splits of a row, rows. The units of a row, its blocks and its residual last, are dealt to
// the splits in runs and to the warps of a split in turn.
template <int32_t kHeadDim, int32_t kKeyBits, int32_t kValueBits>
__global__ void __launch_bounds__(32 * kWarps, kCtasPerSm)
    channel_attention_kernel(const __grid_constant__ ChannelLaunch p) {
  __shared__ SoftmaxState states[kWarps][kMaxChannelGroup];
  __shared__ uint32_t query[kMaxChannelGroup * kHeadDim / 2];
  __shared__ alignas(16) float parts[kWarps][kMaxChannelGroup * kHeadDim];
  const auto row = static_cast<int32_t>(blockIdx.y), split = static_cast<int32_t>(blockIdx.x);
  const int32_t warp = static_cast<int32_t>(threadIdx.x) / 32, group = p.call.group;
  const ChannelLayout& l = p.cache.layout;
  bool sound;
  const RowCounts held = row_counts(p.cache, row, &sound);
  if (!sound && split == 0 && threadIdx.x == 0) report_corrupt(p, row);
  const int32_t units = held.blocks + (held.raw_tokens > 0);
  const auto first = static_cast<int32_t>(static_cast<int64_t>(units) * split / p.splits);
  const auto end = static_cast<int32_t>(static_cast<int64_t>(units) * (split + 1) / p.splits);
  const int64_t head = static_cast<int64_t>(row) * group;
  using Warp = ChannelWarp<kHeadDim, kKeyBits, kValueBits>;
  Warp::stage_query(p.call.q + head * kHeadDim, group, query);
  __syncthreads();
  Warp attention(query, p.scale_log2);
  const int32_t blocks_end = min(end, held.blocks);
  if (attention.attend_blocks(p.cache, row, first + warp, blocks_end, kWarps) &&
      threadIdx.x % 32 == 0) {
    report_corrupt(p, row);
  }
  // The residual is the last unit, and the turn of one warp.
  const bool has_residual = end > held.blocks && (held.blocks - first) % kWarps == warp;
  if (has_residual) {
    attention.attend_residual(l, p.cache.residual_of(row), held.raw_tokens);
  } else {
    attention.finish_blocks();
  }
  attention.store_part(states[warp], parts[warp]);
  __syncthreads();
  for (int32_t h = warp; h < group; h += kWarps) {
    typename HeadSum<kHeadDim>::Part of[kWarps];
#pragma unroll
    for (int32_t w = 0; w < kWarps; ++w) of[w] = {&states[w][h], &parts[w][h * kHeadDim]};
    HeadSum<kHeadDim> sum;
    sum.template add<kWarps, false>(of);
    if (p.splits == 1) {
      sum.write(reinterpret_cast<__half*>(p.call.out) + (head + h) * kHeadDim,
                p.call.lse == nullptr ? nullptr : p.call.lse + head + h);
    } else {
      const int64_t at = (head + h) * p.splits + split;
      sum.store(p.states + at, p.parts + at * kHeadDim);
    }
  }
}

// A warp per head.
template <int32_t kHeadDim>
__global__ void __launch_bounds__(32 * kWarps)
    merge_channel_kernel(const __grid_constant__ ChannelLaunch p) {
  constexpr int32_t kAtOnce = 4;
  const int64_t head =
      static_cast<int64_t>(blockIdx.x) * kWarps + static_cast<int64_t>(threadIdx.x) / 32;
  if (head >= static_cast<int64_t>(p.cache.num_rows) * p.call.group) return;
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
  sum.write(reinterpret_cast<__half*>(p.call.out) + head * kHeadDim,
            p.call.lse == nullptr ? nullptr : p.call.lse + head);
}

// Rounds of resident CTAs times what a warp of one does, for rows of max_blocks blocks.
int32_t choose_splits(const ChannelCache& cache, int32_t sms) {
  const int64_t units = int64_t{cache.max_blocks} + 1, resident = int64_t{sms} * kCtasPerSm;
  int32_t best = 1;
  int64_t least = INT64_MAX;
  for (int32_t splits = 1; splits <= kMaxChannelSplits; ++splits) {
    const int64_t rounds = (cache.num_rows * int64_t{splits} + resident - 1) / resident;
    const int64_t of_warp = ((units + splits - 1) / splits + kWarps - 1) / kWarps;
    if (rounds * of_warp >= least) continue;
    least = rounds * of_warp;
    best = splits;
  }
  return best;
}

template <int32_t kHeadDim, int32_t kKeyBits>
void launch(const ChannelLaunch& p, GpuStream stream) {
  const dim3 grid(static_cast<uint32_t>(p.splits), static_cast<uint32_t>(p.cache.num_rows));
  if (p.cache.layout.v_tile.bits == 4) {
    channel_attention_kernel<kHeadDim, kKeyBits, 4><<<grid, 32 * kWarps, 0, stream>>>(p);
  } else {
    channel_attention_kernel<kHeadDim, kKeyBits, 2><<<grid, 32 * kWarps, 0, stream>>>(p);
  }
}

template <int32_t kHeadDim>
void launch_any(const ChannelLaunch& p, GpuStream stream) {
  if (p.cache.layout.k_tile.bits == 4) {
    launch<kHeadDim, 4>(p, stream);
  } else {
    launch<kHeadDim, 2>(p, stream);
  }
  if (p.splits == 1) return;
  const int64_t heads = static_cast<int64_t>(p.cache.num_rows) * p.call.group;
  const auto ctas = static_cast<uint32_t>((heads + kWarps - 1) / kWarps);
  merge_channel_kernel<kHeadDim><<<ctas, 32 * kWarps, 0, stream>>>(p);
}

}  // namespace

Status attend_channel(const ChannelCache& cache, const ChannelAttention& call, void* workspace,
                      GpuStream stream) {
  if (Status s = call.validate(cache); !s) return s;
  if (call.out == nullptr || reinterpret_cast<uintptr_t>(call.out) % 16 != 0 ||
      call.status == nullptr || workspace == nullptr ||
      reinterpret_cast<uintptr_t>(workspace) % 16 != 0) {
    return Status(StatusCode::kInvalidArgument, "out, status or workspace is null or misaligned");
  }
  if (cache.num_rows > 65535) return Status(StatusCode::kUnsupported, "more than 65535 rows");
  if (cache.num_rows == 0) return Status::ok();
  const Result<DeviceLimits> limits = device_limits();
  if (!limits) return limits.status();
  ChannelLaunch p;
  p.cache = cache;
  p.call = call;
  p.scale_log2 = static_cast<float>(call.sm_scale * 1.4426950408889634);
  p.splits = choose_splits(cache, limits->sms);
  const int64_t parts = static_cast<int64_t>(cache.num_rows) * call.group * p.splits;
  p.parts = static_cast<float*>(workspace);
  p.states = reinterpret_cast<SoftmaxState*>(p.parts + parts * cache.layout.head_dim());
  const cudaError_t error =
      cudaMemsetAsync(call.status, 0, cache.num_rows * sizeof(StatusCode), stream);
  if (error != cudaSuccess) return cuda_status(error, "attend");
  cache.layout.head_dim() == 64 ? launch_any<64>(p, stream) : launch_any<128>(p, stream);
  return cuda_status(cudaGetLastError(), "attend");
}

}  // namespace tierkv
