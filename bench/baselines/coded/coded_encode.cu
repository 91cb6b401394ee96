// SPDX-License-Identifier: Apache-2.0
#include <cuda_runtime.h>

#include <algorithm>

#include "bench/baselines/coded/coded_encode.h"
#include "bench/baselines/coded/coded_encode_slice.cuh"
#include "gpu/cuda_device.cuh"

namespace tierkv {
namespace {

constexpr int32_t kMaxWarps = 8;
constexpr int32_t kStaticBytes = 4 * (kMaxWarps + kMaxSymbols) + 64;

// Codes of a slice into shared memory.
__device__ CodeRange load_codes(const CodedEncode& call, const int16_t* from, const Slice& slice) {
  CodeRange range;
  int16_t* to = slice.memory.codes;
  const bool whole = slice.dims == kSliceDims && reinterpret_cast<uintptr_t>(from) % 8 == 0 &&
                     call.token_stride % 4 == 0;
  if (whole) {
#pragma unroll 8
    for (int32_t t = 0; t < slice.tokens; ++t) {
      const uint2 four =
          *reinterpret_cast<const uint2*>(from + t * call.token_stride + 4 * lane_index());
      range.add(four.x);
      range.add(four.y);
      *reinterpret_cast<uint2*>(to + t * kCodeStride + 4 * lane_index()) = four;
    }
    return range;
  }
  for (int32_t t = 0; t < slice.tokens; ++t) {
    for (int32_t d = lane_index(); d < slice.dims; d += kWarpLanes) {
      const int16_t code = from[t * call.token_stride + d];
      range.add(__byte_perm(static_cast<uint16_t>(code), 0, 0x1010));
      to[t * kCodeStride + d] = code;
    }
  }
  return range;
}

// The next `bytes` of the counter; by the whole warp.
__device__ int64_t take_place(unsigned long long* cursor, int32_t bytes) {
  unsigned long long at = 0;
  if (lane_index() == 0) at = atomicAdd(cursor, static_cast<unsigned long long>(bytes));
  return static_cast<int64_t>(__shfl_sync(kFullWarp, at, 0));
}

__device__ StatusCode encode_group(const CodedEncode& call, const uint32_t* words,
                                   CodedGroup* group, const SliceMemory& memory, int32_t* counter) {
  const CodedGroup g = *group;
  int64_t offset = g.offset, room = g.bytes;
  int32_t used = 0;
  for (int32_t first = 0; first < call.head_dim; first += kSliceDims) {
    const Slice slice{call.codebook, words, memory, g.tokens,
                      min(kSliceDims, call.head_dim - first)};
    const int16_t* from = call.codes + g.codes + first;
    const int32_t bytes = encode_slice(
        slice, [&] { return load_codes(call, from, slice); }, counter);
    if (call.cursor != nullptr) {
      offset = take_place(call.cursor, bytes);
      room = call.size - offset;
    }
    if (bytes > room - used) return StatusCode::kBufferTooSmall;
    auto* to = reinterpret_cast<uint4*>(call.bytes + offset + used);
    for (int32_t i = lane_index(); i < bytes / 16; i += kWarpLanes) {
      to[i] = reinterpret_cast<const uint4*>(memory.block)[i];
    }
    __syncwarp();
    used += bytes;
  }
  if (lane_index() == 0) {
    group->offset = offset;
    group->bytes = used;
  }
  return StatusCode::kOk;
}

// Whether a group may be encoded: where it lies, unless the counter will say, and what it holds.
__device__ bool is_valid(const CodedEncode& call, const CodedGroup& g) {
  const bool placed = g.offset >= 0 && g.offset % kBlockAlignment == 0 && g.bytes >= 0 &&
                      g.offset <= call.size && g.bytes <= call.size - g.offset;
  return (placed || call.cursor != nullptr) && g.codes >= 0 && g.tokens >= 1 &&
         g.tokens <= kBlockTokens;
}

__global__ void __launch_bounds__(kMaxWarps * 32)
    encode_kernel(const __grid_constant__ CodedEncode call) {
  extern __shared__ __align__(16) uint8_t shared[];
  __shared__ int32_t counters[kMaxWarps];
  __shared__ uint32_t words[kMaxSymbols];
  const auto warp = static_cast<int32_t>(threadIdx.x / 32);
  const auto warps = static_cast<int32_t>(blockDim.x / 32);
  const SliceMemory memory = slice_memory(shared, warp);
  const int32_t symbols = symbol_count(call.codebook);
  for (int32_t i = static_cast<int32_t>(threadIdx.x); i < symbols; i += blockDim.x) {
    words[i] = call.codebook.words[i];
  }
  __syncthreads();
  const auto stride = static_cast<int32_t>(gridDim.x) * warps;
  for (int32_t i = static_cast<int32_t>(blockIdx.x) * warps + warp; i < call.num_groups;
       i += stride) {
    auto code = StatusCode::kInvalidArgument;
    if (is_valid(call, call.groups[i])) {
      code = encode_group(call, words, call.groups + i, memory, counters + warp);
    }
    if (lane_index() == 0) call.status[i] = code;
    __syncwarp();
  }
}

}  // namespace

Status encode_coded(const CodedEncode& call, GpuStream stream) {
  if (Status s = call.validate(); !s) return s;
  if (call.num_groups == 0) return Status::ok();
  const Result<DeviceLimits> limits = device_limits();
  if (!limits) return limits.status();
  const int32_t warps = std::min(kMaxWarps, (limits->shared_bytes - kStaticBytes) / kSliceBytes);
  if (warps < 1) return Status(StatusCode::kUnsupported, "coded encode: too little shared memory");
  const int32_t bytes = warps * kSliceBytes;
  if (Status s = cuda_status(
          cudaFuncSetAttribute(encode_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
          "shared memory");
      !s) {
    return s;
  }
  const int32_t ctas = std::min(limits->sms, (call.num_groups + warps - 1) / warps);
  encode_kernel<<<static_cast<uint32_t>(ctas), static_cast<uint32_t>(warps) * 32,
                  static_cast<size_t>(bytes), stream>>>(call);
  return cuda_status(cudaGetLastError(), "encode_coded");
}

}  // namespace tierkv
