// SPDX-License-Identifier: Apache-2.0
// Sums over the lanes of a warp.
#pragma once

#include <cstdint>

#include "gpu/warp.cuh"

namespace tierkv {

// The sum of the lanes before; *total: of all.
__device__ __forceinline__ int32_t sum_before(int32_t x, int32_t* total) {
  int32_t sum = x;
#pragma unroll
  for (int32_t i = 1; i < 32; i *= 2) {
    const int32_t other = __shfl_up_sync(kFullWarp, sum, i);
    if (lane_index() >= i) sum += other;
  }
  *total = __shfl_sync(kFullWarp, sum, 31);
  return sum - x;
}

}  // namespace tierkv
