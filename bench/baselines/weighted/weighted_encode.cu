// SPDX-License-Identifier: Apache-2.0
#include <cuda_runtime.h>

#include <algorithm>

#include "bench/baselines/weighted/weighted_calls.h"
#include "codec/gpu/coded/weighted_encode.cuh"
#include "gpu/cuda_device.cuh"

namespace tierkv {
namespace {

template <int32_t kPer>
__global__ void __launch_bounds__(kWeightedWarps * 32, 2)
    encode_kernel(const __grid_constant__ WeightedEncode call) {
  extern __shared__ __align__(16) uint8_t shared[];
  encode_weighted_items<kPer>(call, shared);
}

template <int32_t kPer>
Status launch_encode(const WeightedEncode& call, const DeviceLimits& limits, GpuStream stream) {
  // Two CTAs on an SM, where that leaves warps to both.
  const int32_t base = kEncodeCtaBytes;
  const int32_t each = encode_warp_bytes(kPer * kWarpLanes, longest_word(call));
  const int32_t half = (limits.shared_bytes - limits.reserved_bytes) / 2;
  const int32_t room = half >= base + each ? half : limits.shared_bytes;
  const int32_t warps = std::min(kWeightedWarps, (room - base) / each);
  if (warps < 1) {
    return Status(StatusCode::kUnsupported, "weighted encode: too little shared memory");
  }
  const int32_t bytes = base + warps * each;
  if (Status s =
          cuda_status(cudaFuncSetAttribute(encode_kernel<kPer>,
                                           cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
                      "shared memory");
      !s) {
    return s;
  }
  const int64_t items = int64_t{2} * call.num_ranges * call.most_blocks;
  const int64_t ctas = std::min<int64_t>(2 * limits.sms, (items + warps - 1) / warps);
  encode_kernel<kPer><<<static_cast<uint32_t>(ctas), static_cast<uint32_t>(warps) * 32,
                        static_cast<size_t>(bytes), stream>>>(call);
  return cuda_status(cudaGetLastError(), "encode_weighted");
}

}  // namespace

Status encode_weighted(const WeightedEncode& call, GpuStream stream) {
  if (call.num_ranges == 0 || call.most_blocks == 0) return Status::ok();
  const Result<DeviceLimits> limits = device_limits();
  if (!limits) return limits.status();
  switch (call.rows.head_dim) {
    case 64:
      return launch_encode<2>(call, *limits, stream);
    case 96:
      return launch_encode<3>(call, *limits, stream);
    case 128:
      return launch_encode<4>(call, *limits, stream);
    default:
      return launch_encode<8>(call, *limits, stream);
  }
}

}  // namespace tierkv
