// SPDX-License-Identifier: Apache-2.0
#include "bench/baselines/channel/channel_attention.h"

#include "attention/channel/channel_kernel.cuh"

namespace tierkv {

// A row as far as it can be.
__device__ inline ChannelItem item_of(const ChannelLaunch<ChannelCache>& p, int32_t index) {
  ChannelItem item;
  item.row = index / p.splits;
  int32_t blocks = p.cache.block_count[item.row], raw_tokens = p.cache.residual_tokens[item.row];
  if (blocks < 0 || blocks > p.cache.max_blocks || raw_tokens < 0 ||
      raw_tokens >= p.cache.layout.tokens) {
    if (threadIdx.x == 0) report_corrupt(p, item.row);
    blocks = raw_tokens = 0;
  }
  const int32_t units = blocks + (raw_tokens + kTileTokens - 1) / kTileTokens;
  const int32_t split = index - item.row * p.splits;
  item.first = channel_unit(units, p.splits, split);
  item.end = channel_unit(units, p.splits, split + 1);
  item.raw_tokens = raw_tokens;
  item.part = p.splits == 1 ? -1 : index;
  return item;
}

Status attend_channel(const ChannelCache& cache, const ChannelAttention& call, void* workspace,
                      GpuStream stream) {
  if (Status s = call.validate(cache); !s) return s;
  if (call.out == nullptr || reinterpret_cast<uintptr_t>(call.out) % 16 != 0 ||
      call.status == nullptr || workspace == nullptr ||
      reinterpret_cast<uintptr_t>(workspace) % 16 != 0) {
    return Status(StatusCode::kInvalidArgument, "out, status or workspace is null or misaligned");
  }
  if (cache.num_rows == 0) return Status::ok();
  const Result<DeviceLimits> limits = device_limits();
  if (!limits) return limits.status();
  const int32_t head_dim = cache.layout.head_dim();
  ChannelLaunch<ChannelCache> p{};
  p.cache = cache;
  p.ctas = channel_ctas(call.group, 1, 1, head_dim);
  p.num_rows = cache.num_rows;
  p.q = call.q;
  p.out = call.out;
  p.lse = call.lse;
  p.status = call.status;
  p.status_stride = 1;
  p.scale_log2 = static_cast<float>(call.sm_scale * 1.4426950408889634);
  const ChannelRows rows = {p.num_rows, cache.max_blocks + cache.layout.tiles(), kMaxChannelSplits};
  p.splits = choose_channel_splits(p.ctas, rows, limits->sms * channel_ctas_per_sm(head_dim));
  p.parts = static_cast<float*>(workspace);
  p.states = reinterpret_cast<SoftmaxState*>(p.parts + int64_t{p.num_rows} * p.splits *
                                                           p.ctas.all_columns() * head_dim);
  const cudaError_t error =
      cudaMemsetAsync(call.status, 0, cache.num_rows * sizeof(StatusCode), stream);
  if (error != cudaSuccess) return cuda_status(error, "attend");
  return launch_channel(p, p.num_rows * p.splits, p.splits > 1, stream);
}

}  // namespace tierkv
