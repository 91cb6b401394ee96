// SPDX-License-Identifier: Apache-2.0
#include <cuda_runtime.h>

#include <algorithm>

#include "bench/baselines/weighted/weighted_calls.h"
#include "codec/gpu/coded/weighted_decode.cuh"
#include "gpu/cuda_device.cuh"

namespace tierkv {
namespace {

__global__ void __launch_bounds__(kCodedDecodeWarps * 32, 1)
    decode_kernel(const __grid_constant__ WeightedDecode call) {
  extern __shared__ __align__(1024) uint8_t shared[];
  decode_weighted_items(call, shared);
}

}  // namespace

Status decode_weighted(const WeightedDecode& call, GpuStream stream) {
  if (call.num_ranges == 0 || call.most_blocks == 0) return Status::ok();
  const Result<DeviceLimits> limits = device_limits();
  if (!limits) return limits.status();
  // The region's own alignment may cost its size once more.
  const int32_t base = weighted_region_bytes(call) + weighted_decode_cta_bytes(call) + 16;
  const int32_t each = weighted_decode_warp_bytes(call);
  const int32_t warps = std::min(kCodedDecodeWarps, (limits->shared_bytes - base) / each);
  if (warps < 1) {
    return Status(StatusCode::kUnsupported, "weighted decode: too little shared memory");
  }
  const int32_t bytes = base + warps * each;
  if (Status s = cuda_status(
          cudaFuncSetAttribute(decode_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
          "shared memory");
      !s) {
    return s;
  }
  const int64_t items = int64_t{call.num_ranges} * call.most_blocks;
  const int64_t ctas = std::min<int64_t>(limits->sms, (items + warps - 1) / warps);
  decode_kernel<<<static_cast<uint32_t>(ctas), static_cast<uint32_t>(warps) * 32,
                  static_cast<size_t>(bytes), stream>>>(call);
  return cuda_status(cudaGetLastError(), "decode_weighted");
}

}  // namespace tierkv
