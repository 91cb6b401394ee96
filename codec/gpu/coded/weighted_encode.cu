// SPDX-License-Identifier: Apache-2.0
#include <cuda_runtime.h>

#include <algorithm>

#include "codec/gpu/coded/weighted_count.cuh"
#include "gpu/cuda_device.cuh"

namespace tierkv {
namespace {

constexpr int32_t kCountWarps = 16;  // the counter's shared memory leaves room for one CTA

template <int32_t kPer>
__global__ void __launch_bounds__(kWeightedWarps * 32, 2)
    encode_kernel(const __grid_constant__ WeightedEncode call) {
  extern __shared__ __align__(16) uint8_t shared[];
  encode_weighted_items<kPer>(call, shared);
}

template <int32_t kPer>
__global__ void __launch_bounds__(kCountWarps * 32, 1)
    count_kernel(const __grid_constant__ WeightedEncode call,
                 const __grid_constant__ WeightedCounts counts) {
  extern __shared__ __align__(16) uint8_t shared[];
  count_weighted_items<kPer>(call, counts, shared);
}

template <class Kernel>
Status allow_shared(Kernel* kernel, int32_t bytes) {
  return cuda_status(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
      "shared memory");
}

template <int32_t kPer>
Status launch_encode(const WeightedEncode& call, const DeviceLimits& limits, GpuStream stream) {
  // Two CTAs on an SM, where that leaves warps to both.
  const int32_t base = encode_cta_bytes(call), each = encode_warp_bytes(kPer * kWarpLanes);
  const int32_t half = (limits.shared_bytes - limits.reserved_bytes) / 2;
  const int32_t room = half >= base + each ? half : limits.shared_bytes;
  const int32_t warps = std::min(kWeightedWarps, (room - base) / each);
  if (warps < 1) {
    return Status(StatusCode::kUnsupported, "weighted encode: too little shared memory");
  }
  const int32_t bytes = base + warps * each;
  if (Status s = allow_shared(encode_kernel<kPer>, bytes); !s) return s;
  const int64_t items = int64_t{2} * call.num_ranges * call.most_blocks;
  const int64_t ctas = std::min<int64_t>(2 * limits.sms, (items + warps - 1) / warps);
  encode_kernel<kPer><<<static_cast<uint32_t>(ctas), static_cast<uint32_t>(warps) * 32,
                        static_cast<size_t>(bytes), stream>>>(call);
  return cuda_status(cudaGetLastError(), "encode_weighted");
}

template <int32_t kPer>
Status launch_count(const WeightedEncode& call, const WeightedCounts& counts,
                    const DeviceLimits& limits, GpuStream stream) {
  const int32_t each = tile_warp_bytes(kPer * kWarpLanes);
  const int32_t warps = std::min(kCountWarps, (limits.shared_bytes - kCounterBytes) / each);
  if (warps < 1) {
    return Status(StatusCode::kUnsupported, "weighted counts: too little shared memory");
  }
  const int32_t bytes = kCounterBytes + warps * each;
  if (Status s = allow_shared(count_kernel<kPer>, bytes); !s) return s;
  const int64_t groups = int64_t{call.num_ranges} * call.most_blocks;
  const int64_t wanted = std::min<int64_t>((limits.sms + 1) / 2, (groups + warps - 1) / warps);
  const dim3 ctas(static_cast<uint32_t>(wanted), 2);
  count_kernel<kPer>
      <<<ctas, static_cast<uint32_t>(warps) * 32, static_cast<size_t>(bytes), stream>>>(call,
                                                                                        counts);
  return cuda_status(cudaGetLastError(), "count_weighted");
}

// launch(channels of a lane) of a head_dim that validate() has passed.
template <class Launch>
Status launch_for(int32_t head_dim, const Launch& launch) {
  const Result<DeviceLimits> limits = device_limits();
  if (!limits) return limits.status();
  switch (head_dim) {
    case 64:
      return launch(std::integral_constant<int32_t, 2>(), *limits);
    case 96:
      return launch(std::integral_constant<int32_t, 3>(), *limits);
    case 128:
      return launch(std::integral_constant<int32_t, 4>(), *limits);
    default:
      return launch(std::integral_constant<int32_t, 8>(), *limits);
  }
}

}  // namespace

Status encode_weighted(const WeightedEncode& call, GpuStream stream) {
  if (Status s = call.validate(); !s) return s;
  for (const DeviceFamily& family : call.families) {
    if (Status s = family.validate(); !s) return s;
  }
  if (call.places[0] == nullptr || call.places[1] == nullptr) {
    return Status(StatusCode::kInvalidArgument, "weighted blocks: places are needed");
  }
  if (call.num_ranges == 0 || call.most_blocks == 0) return Status::ok();
  return launch_for(call.rows.head_dim, [&](auto per, const DeviceLimits& limits) {
    return launch_encode<decltype(per)::value>(call, limits, stream);
  });
}

Status count_weighted(const WeightedEncode& call, const WeightedCounts& counts, GpuStream stream) {
  if (Status s = call.validate(); !s) return s;
  for (int32_t c = 0; c < 2; ++c) {
    if (counts.pairs[c] == nullptr || counts.wide[c] == nullptr) {
      return Status(StatusCode::kInvalidArgument, "weighted blocks: histograms are needed");
    }
  }
  if (call.num_ranges == 0 || call.most_blocks == 0) return Status::ok();
  return launch_for(call.rows.head_dim, [&](auto per, const DeviceLimits& limits) {
    return launch_count<decltype(per)::value>(call, counts, limits, stream);
  });
}

}  // namespace tierkv
