// SPDX-License-Identifier: Apache-2.0
// Arrivals of CTAs in global memory.
#pragma once

#include <cstdint>

namespace tierkv {

// Everything this CTA wrote before (ordered by a barrier among its threads) is visible to whoever
// sees the new count.
__device__ __forceinline__ int32_t arrive_acq_rel(int32_t* counter) {
  int32_t before;
  asm volatile("atom.add.acq_rel.gpu.global.s32 %0, [%1], 1;"
               : "=r"(before)
               : "l"(counter)
               : "memory");
  return before;
}

}  // namespace tierkv
