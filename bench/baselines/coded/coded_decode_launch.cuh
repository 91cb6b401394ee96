// SPDX-License-Identifier: Apache-2.0
// The kernel that decodes groups of coded blocks.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>

#include "bench/baselines/coded/coded_decode_groups.cuh"
#include "gpu/cuda_device.cuh"

namespace tierkv {

// Shared memory: the reader's region, at a multiple of its size, then the warps.
template <class Reader>
__global__ void __launch_bounds__(kDecodeWarps * 32, 1)
    coded_decode_kernel(const __grid_constant__ CodedDecode call,
                        const __grid_constant__ typename Reader::Params params) {
  extern __shared__ __align__(1024) uint8_t shared[];
  const auto bytes = static_cast<uint32_t>(Reader::region_bytes(call));
  const uint32_t start = shared_address(shared);
  uint8_t* region = shared + ((start + bytes - 1) / bytes * bytes - start);
  Reader::fill(call, params, region);
  __syncthreads();
  const auto warp = static_cast<int32_t>(threadIdx.x / 32);
  const auto warps = static_cast<int32_t>(blockDim.x / 32);
  uint8_t* mine = region + bytes + warp * decode_warp_bytes<Reader>(call.max_block_bytes);
  mine = shared + ((mine - shared + 15) & ~15);
  const WarpMemory memory{mine + kCodesTileBytes + Reader::kWarpBytes,
                          reinterpret_cast<int16_t*>(mine), mine + kCodesTileBytes};
  Reader reader(call, params, region, memory.reader);
  const auto stride = static_cast<int32_t>(gridDim.x) * warps;
  for (int32_t i = static_cast<int32_t>(blockIdx.x) * warps + warp; i < call.num_groups;
       i += stride) {
    const CodedGroup group = call.groups[i];
    auto code = StatusCode::kInvalidArgument;
    if (group_is_valid(call, group)) {
      code = decode_group(call, group, reader, memory);
      if (code != StatusCode::kOk) write_zeros(call, group);
    }
    if (lane_index() == 0) call.status[i] = code;
    __syncwarp();
  }
}

// A valid call with groups.
template <class Reader>
Status launch_coded_decode(const CodedDecode& call, const typename Reader::Params& params,
                           GpuStream stream) {
  const Result<DeviceLimits> limits = device_limits();
  if (!limits) return limits.status();
  // The region's own alignment may cost its size once more.
  const int32_t shared = 2 * Reader::region_bytes(call) + 16,
                each = decode_warp_bytes<Reader>(call.max_block_bytes);
  const int32_t warps = std::min(kDecodeWarps, (limits->shared_bytes - shared) / each);
  if (warps < 1) return Status(StatusCode::kUnsupported, "coded decode: too little shared memory");
  const int32_t bytes = shared + warps * each;
  if (Status s =
          cuda_status(cudaFuncSetAttribute(coded_decode_kernel<Reader>,
                                           cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
                      "shared memory");
      !s) {
    return s;
  }
  const int32_t ctas = std::min(limits->sms, (call.num_groups + warps - 1) / warps);
  coded_decode_kernel<Reader><<<static_cast<uint32_t>(ctas), static_cast<uint32_t>(warps) * 32,
                                static_cast<size_t>(bytes), stream>>>(call, params);
  return cuda_status(cudaGetLastError(), "decode_coded");
}

}  // namespace tierkv
