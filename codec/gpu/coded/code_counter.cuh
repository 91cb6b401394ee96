// SPDX-License-Identifier: Apache-2.0
// Counts pairs of codes, by a CTA that has a table of narrow ones in shared memory, a copy for each
// lane, so that lanes never meet; others go to memory one by one.
#pragma once

#include <cstdint>

#include "codec/format/page_layout.h"
#include "gpu/warp.cuh"

namespace tierkv {

inline constexpr int32_t kCounterThreads = 1024;
inline constexpr int32_t kCountedLow = -16,
                         kCountedLevels = 32;  // what is counted in shared memory
inline constexpr int32_t kCountedBins = kCountedLevels * kCountedLevels;
inline constexpr int32_t kCounterBytes = kCountedBins * kWarpLanes * 4;

struct CodeCounter {
  uint32_t* bins;   // shared, [kCountedBins][32]
  uint32_t* pairs;  // of the current histogram: kHistogramCounts each
  uint32_t* wide;

  __device__ __forceinline__ void count_wide(int32_t code) const {
    if (code < -128 || code > 127) atomicAdd(wide + (code & 0xffff), 1u);
  }
  __device__ __forceinline__ void count(int32_t first, int32_t second) const {
    const auto a = static_cast<uint32_t>(first - kCountedLow),
               b = static_cast<uint32_t>(second - kCountedLow);
    if ((a | b) < kCountedLevels) {
      atomicAdd(bins + (a * kCountedLevels + b) * kWarpLanes + lane_index(), 1u);
      return;
    }
    atomicAdd(pairs + ((first & 255) << 8 | (second & 255)), 1u);
    count_wide(first);
    count_wide(second);
  }
  // By the whole CTA, as flush().
  __device__ __forceinline__ void clear() const {
    for (int32_t i = threadIdx.x; i < kCountedBins * kWarpLanes; i += blockDim.x) bins[i] = 0;
    __syncthreads();
  }
  // To memory, and clear.
  __device__ __forceinline__ void flush() const {
    __syncthreads();
    for (int32_t bin = threadIdx.x; bin < kCountedBins; bin += blockDim.x) {
      uint32_t sum = 0;
#pragma unroll
      for (int32_t i = 0; i < kWarpLanes; ++i) {
        // Each lane begins at another copy: different banks.
        sum += bins[bin * kWarpLanes + (i + lane_index()) % kWarpLanes];
      }
      const int32_t first = bin / kCountedLevels + kCountedLow,
                    second = bin % kCountedLevels + kCountedLow;
      if (sum > 0) atomicAdd(pairs + ((first & 255) << 8 | (second & 255)), sum);
    }
    __syncthreads();
    clear();
  }
};

}  // namespace tierkv
