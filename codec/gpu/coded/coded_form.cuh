// SPDX-License-Identifier: Apache-2.0
// What the form in which an encoder stores a slice, coded or raw, follows from.
#pragma once

#include "codec/gpu/coded/coded_open.cuh"
#include "gpu/warp_sums.cuh"

namespace tierkv {

// Sizes of a slice in the codebook's mode: bits of the streams before each of the lane's own, bits
// of those, and of all streams.
struct SlicePlan {
  int32_t start[2], bits[2];  // of the lane's streams
  int32_t payload_bits, exceptions;
  bool possible;
};

// Two codes in a word, each less or greater.
struct CodeRange {
  uint32_t low = 0x7fff7fffu, high = 0x80008000u;

  __device__ __forceinline__ void add(uint32_t pair) {
    low = __vmins2(low, pair);
    high = __vmaxs2(high, pair);
  }
  __device__ __forceinline__ int32_t lowest() const {
    return __reduce_min_sync(kFullWarp, min(static_cast<int32_t>(static_cast<int16_t>(low)),
                                            static_cast<int32_t>(low) >> 16));
  }
  __device__ __forceinline__ int32_t highest() const {
    return __reduce_max_sync(kFullWarp, max(static_cast<int32_t>(static_cast<int16_t>(high)),
                                            static_cast<int32_t>(high) >> 16));
  }
};

__device__ __forceinline__ void clear_block(void* block, int32_t bytes) {
  for (int32_t i = lane_index(); i < bytes / 16; i += kWarpLanes) {
    static_cast<uint4*>(block)[i] = make_uint4(0, 0, 0, 0);
  }
  __syncwarp();
}

}  // namespace tierkv
