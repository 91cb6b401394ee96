// SPDX-License-Identifier: Apache-2.0
// The lanes of a warp.
#pragma once

#include <cstdint>

#include "gpu/constants.h"
#include "gpu/features.cuh"

namespace tierkv {

// The lane, read anew at each use: seldom used code would otherwise keep what it derives from it in
// registers that loops around it need.
__device__ __forceinline__ uint32_t fresh_lane() {
  uint32_t lane;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
  return lane;
}
// x, kept in a register where the compiler would rather compute it anew at every use.
__device__ __forceinline__ int32_t kept(int32_t x) {
  asm("" : "+r"(x));
  return x;
}
__device__ __forceinline__ bool is_first_lane() {
  return threadIdx.x % 32 == 0;
}
// x and that of the lane `distance` below, where there is one: a step of sums over the lanes below.
__device__ __forceinline__ uint32_t add_below(uint32_t x, int32_t distance) {
  asm volatile(
      "{\n.reg .pred there;\n.reg .u32 below;\n"
      "shfl.sync.up.b32 below|there, %0, %1, 0, 0xffffffff;\n"
      "@there add.u32 %0, %0, below;\n}"
      : "+r"(x)
      : "r"(distance));
  return x;
}
#if TKV_BULK_COPY
// True in one lane of the warp, always the same one. The compiler knows that it is one, and passes
// it what copies take in uniform registers without a loop over lanes.
__device__ __forceinline__ bool is_elected() {
  uint32_t is_one;
  asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;\n}"
               : "=r"(is_one));
  return is_one != 0;
}
#endif

}  // namespace tierkv
