// SPDX-License-Identifier: Apache-2.0
#include "attention/core/merge.h"

#include "gpu/launch.cuh"
#include "gpu/math.cuh"
#include "gpu/pdl.cuh"

namespace tierkv {
namespace {

constexpr int32_t kSinkThreads = 128;

// One CTA per row and head: the lse is read by all threads before one of them writes it.
__global__ void __launch_bounds__(kSinkThreads) sink_kernel(const __grid_constant__ SinkCall call) {
  wait_for_previous_kernel();
  let_next_kernel_start();
  const int64_t i = blockIdx.x;
  const int32_t pairs = call.head_dim / 2;
  const bool is_bfloat16 = call.dtype == DType::kBFloat16;
  const MergedRow row = merge_row(call.lse[i], call.sinks[blockIdx.x % call.num_q_heads]);
  __syncthreads();
  for (int32_t p = threadIdx.x; p < pairs; p += kSinkThreads) {
    uint32_t& bits = static_cast<uint32_t*>(call.out)[i * pairs + p];
    const float2 x = is_bfloat16 ? unpack_bfloats(bits) : unpack_halves(bits);
    const float2 y = {merge_value(row, x.x, 0.0f), merge_value(row, x.y, 0.0f)};
    bits = is_bfloat16 ? pack_bfloats(y.x, y.y) : pack_halves(y.x, y.y);
  }
  if (threadIdx.x == 0) call.lse[i] = row.lse;
}

}  // namespace

Status apply_sinks(const SinkCall& call, GpuStream stream) {
  if (Status s = validate_sinks(call); !s) return s;
  if (call.rows == 0) return Status::ok();
  return launch_after_previous(sink_kernel, static_cast<unsigned>(call.rows * call.num_q_heads),
                               kSinkThreads, 0, stream, call);
}

}  // namespace tierkv
