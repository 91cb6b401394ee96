// SPDX-License-Identifier: Apache-2.0
// Checks of a block in shared memory that do not depend on its version, by a warp. All lanes get
// the same answer.
#pragma once

#include "codec/gpu/coded/coded_batch.h"
#include "gpu/warp.cuh"

namespace tierkv {

__device__ __forceinline__ uint64_t sum_of_warp(uint64_t x) {
#pragma unroll
  for (int32_t i = 16; i > 0; i /= 2) x += __shfl_xor_sync(kFullWarp, x, i);
  return x;
}

// block_checksum() of a block that is 16-byte aligned.
__device__ __forceinline__ uint32_t warp_checksum(const uint8_t* block, int32_t bytes) {
  const auto* words = reinterpret_cast<const uint4*>(block);
  const auto left = static_cast<uint32_t>(bytes / 4);
  const auto times = [](uint32_t a, uint32_t b) { return static_cast<uint64_t>(a) * b; };
  uint64_t sum = 0;  // below 2^56: at most 4116 words
  for (auto i = static_cast<uint32_t>(lane_index()); 4 * i < left; i += kWarpLanes) {
    const uint4 x = words[i];
    const uint32_t weight = left - 4 * i;
    sum += times(weight, x.x) + times(weight - 1, x.y) + times(weight - 2, x.z) +
           times(weight - 3, i == 0 ? x.w & 0xffffu : x.w);
  }
  return static_cast<uint32_t>(sum_of_warp(sum) % kChecksumPrime);
}

// Zeros between the last exception and the end, and behind the last bit of the payload.
__device__ __forceinline__ bool padding_is_zero(const BlockHeader& h, const BlockLayout& at,
                                                const uint8_t* block) {
  bool zero = true;
#pragma unroll 1
  for (int32_t i = at.end + 4 * lane_index(); i < at.bytes; i += 4 * 32) {
    zero &= *reinterpret_cast<const uint32_t*>(block + i) == 0;
  }
  if (!is_raw_mode(h.mode) && h.payload_bits % 32 != 0) {
    const uint32_t last = *reinterpret_cast<const uint32_t*>(block + at.exceptions - 4);
    zero &= last >> (h.payload_bits % 32) == 0;
  }
  return __all_sync(kFullWarp, zero);
}

// Strictly ascending, inside the block, not zero. That the sums are 16-bit integers shows when they
// are added.
__device__ __forceinline__ bool exceptions_are_valid(const BlockHeader& h, const BlockLayout& at,
                                                     const uint8_t* block) {
  const auto* exceptions = reinterpret_cast<const uint32_t*>(block + at.exceptions);
  bool valid = true;
#pragma unroll 1
  for (int32_t i = lane_index(); i < h.exceptions; i += kWarpLanes) {
    const uint32_t index = exceptions[i] & 0xffffu;
    valid &= exceptions[i] >> 16 != 0 && index / kSliceDims < h.tokens &&
             index % kSliceDims < h.dims && (i == 0 || (exceptions[i - 1] & 0xffffu) < index);
  }
  return __all_sync(kFullWarp, valid);
}

}  // namespace tierkv
