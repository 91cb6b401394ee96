// SPDX-License-Identifier: Apache-2.0
#include "attention/core/merge.h"
#include "gpu/launch.cuh"
#include "gpu/math.cuh"
#include "gpu/pdl.cuh"

namespace tierkv {
namespace {

constexpr int32_t kMergeThreads = 128;

// One CTA per row: the lse is read by all threads before one of them writes it.
template <bool kIsSink>
__global__ void __launch_bounds__(kMergeThreads)
    merge_kernel(const __grid_constant__ PartsMerge parts) {
  wait_for_previous_kernel();
  let_next_kernel_start();
  const MergeCall& call = parts.call;
  const int64_t row = blockIdx.x;
  const int32_t pairs = call.head_dim / 2;
  const bool is_bfloat16 = call.dtype == DType::kBFloat16;
  const float lse_b = call.b.lse[kIsSink ? blockIdx.x % parts.heads : row];
  const MergedRow merged = merge_row(call.a.lse[row], lse_b);
  __syncthreads();
  for (int32_t i = threadIdx.x; i < pairs; i += kMergeThreads) {
    const uint32_t bits_a = static_cast<const uint32_t*>(call.a.out)[row * pairs + i];
    const uint32_t bits_b =
        kIsSink ? 0u : static_cast<const uint32_t*>(call.b.out)[row * pairs + i];
    const float2 a = is_bfloat16 ? unpack_bfloats(bits_a) : unpack_halves(bits_a);
    const float2 b = is_bfloat16 ? unpack_bfloats(bits_b) : unpack_halves(bits_b);
    const float2 x = {merge_value(merged, a.x, b.x), merge_value(merged, a.y, b.y)};
    static_cast<uint32_t*>(call.out)[row * pairs + i] =
        is_bfloat16 ? pack_bfloats(x.x, x.y) : pack_halves(x.x, x.y);
  }
  if (threadIdx.x == 0) call.lse[row] = merged.lse;
}

template <bool kIsSink>
Status launch_merge(const Result<PartsMerge>& parts, GpuStream stream) {
  if (!parts) return parts.status();
  if (parts->call.rows == 0) return Status::ok();
  return launch_after_previous(merge_kernel<kIsSink>, static_cast<unsigned>(parts->call.rows),
                               kMergeThreads, 0, stream, *parts);
}

}  // namespace

Status merge_attention(const MergeCall& call, GpuStream stream) {
  return launch_merge<false>(parts_merge(call), stream);
}
Status apply_sinks(const SinkCall& call, GpuStream stream) {
  return launch_merge<true>(parts_merge(call), stream);
}

}  // namespace tierkv
