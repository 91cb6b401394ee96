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

// block_checksum() of a block whose words are aligned.
__device__ __forceinline__ uint32_t warp_checksum(const uint8_t* block, int32_t bytes) {
  const auto* words = reinterpret_cast<const uint32_t*>(block);
  const int32_t n = bytes / 4;
  uint64_t sum = 0;  // below 2^56: at most 4100 words
  for (int32_t i = lane_index(); i < n; i += 32) {
    const uint32_t word = i == 3 ? words[i] & 0xffffu : words[i];
    sum += static_cast<uint64_t>(n - i) * word;
  }
  return static_cast<uint32_t>(sum_of_warp(sum) % kChecksumPrime);
}

// Zeros between the last exception and the end, and behind the last bit of the payload.
__device__ __forceinline__ bool padding_is_zero(const CodedBlockHeader& h,
                                                const CodedBlockLayout& at, const uint8_t* block) {
  bool zero = true;
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
__device__ __forceinline__ bool exceptions_are_valid(const CodedBlockHeader& h,
                                                     const CodedBlockLayout& at,
                                                     const uint8_t* block) {
  const auto* exceptions = reinterpret_cast<const uint32_t*>(block + at.exceptions);
  bool valid = true;
  for (int32_t i = lane_index(); i < h.exceptions; i += kWarpLanes) {
    const uint32_t index = exceptions[i] & 0xffffu;
    valid &= exceptions[i] >> 16 != 0 && index / kSliceDims < h.tokens &&
             index % kSliceDims < h.dims && (i == 0 || (exceptions[i - 1] & 0xffffu) < index);
  }
  return __all_sync(kFullWarp, valid);
}

}  // namespace tierkv
