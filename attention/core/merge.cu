// SPDX-License-Identifier: Apache-2.0
#include "attention/core/merge.h"
#include "gpu/launch.cuh"
#include "gpu/math.cuh"
#include "gpu/pdl.cuh"

namespace tierkv {
namespace {

constexpr int32_t kMergeThreads = 128;

// One CTA per row: the lse is read by all threads before one of them writes it.
__global__ void __launch_bounds__(kMergeThreads)
    merge_kernel(const __grid_constant__ MergeCall call) {
  wait_for_previous_kernel();
  let_next_kernel_start();
  const int64_t row = blockIdx.x;
  const int32_t pairs = call.head_dim / 2;
  const bool is_bfloat16 = call.dtype == DType::kBFloat16;
  const MergedRow merged = merge_row(call.a.lse[row], call.b.lse[row]);
  __syncthreads();
  for (int32_t i = threadIdx.x; i < pairs; i += kMergeThreads) {
    const uint32_t bits_a = static_cast<const uint32_t*>(call.a.out)[row * pairs + i];
    const uint32_t bits_b = static_cast<const uint32_t*>(call.b.out)[row * pairs + i];
    const float2 a = is_bfloat16 ? unpack_bfloats(bits_a) : unpack_halves(bits_a);
    const float2 b = is_bfloat16 ? unpack_bfloats(bits_b) : unpack_halves(bits_b);
    const float2 x = {merge_value(merged, a.x, b.x), merge_value(merged, a.y, b.y)};
    static_cast<uint32_t*>(call.out)[row * pairs + i] =
        is_bfloat16 ? pack_bfloats(x.x, x.y) : pack_halves(x.x, x.y);
  }
  if (threadIdx.x == 0) call.lse[row] = merged.lse;
}

}  // namespace

Status merge_attention(const MergeCall& call, GpuStream stream) {
  if (Status s = validate_merge(call); !s) return s;
  if (call.rows == 0) return Status::ok();
  return launch_after_previous(merge_kernel, static_cast<unsigned>(call.rows), kMergeThreads, 0,
                               stream, call);
}

}  // namespace tierkv
