#include "attention/channel_attention.h"

#include "attention/channel_kernel.cuh"

namespace tierkv {

Status attend_channel(const ChannelCache& cache, const ChannelAttention& call, void* workspace,
                      GpuStream stream) {
  if (Status s = call.validate(cache); !s) return s;
  if (Status s = validate_channel_pages(cache.layout, call.group); !s) return s;
  if (call.out == nullptr || reinterpret_cast<uintptr_t>(call.out) % 16 != 0 ||
      call.status == nullptr || workspace == nullptr ||
      reinterpret_cast<uintptr_t>(workspace) % 16 != 0) {
    return Status(StatusCode::kInvalidArgument, "out, status or workspace is null or misaligned");
  }
  if (cache.num_rows > 65535) return Status(StatusCode::kUnsupported, "more than 65535 rows");
  if (cache.num_rows == 0) return Status::ok();
  const Result<DeviceLimits> limits = device_limits();
  if (!limits) return limits.status();
  ChannelLaunch<ChannelCache> p{};
  p.cache = cache;
  p.num_rows = cache.num_rows;
  p.group = call.group;
  p.q = call.q;
  p.out = call.out;
  p.lse = call.lse;
  p.status = call.status;
  p.status_stride = 1;
  p.scale_log2 = static_cast<float>(call.sm_scale * 1.4426950408889634);
  p.splits = choose_channel_splits(int64_t{cache.max_blocks} + cache.layout.tiles(), p.num_rows,
                                   kMaxChannelSplits, limits->sms);
  const int64_t parts = static_cast<int64_t>(cache.num_rows) * call.group * p.splits;
  p.parts = static_cast<float*>(workspace);
  p.states = reinterpret_cast<SoftmaxState*>(p.parts + parts * cache.layout.head_dim());
  const cudaError_t error =
      cudaMemsetAsync(call.status, 0, cache.num_rows * sizeof(StatusCode), stream);
  if (error != cudaSuccess) return cuda_status(error, "attend");
  return launch_channel(p, stream);
}

}  // namespace tierkv
