// SPDX-License-Identifier: Apache-2.0
// Memory of a thread of its own: what it needs seldom and has no registers for.
#pragma once

#include <cstdint>

namespace tierkv {

template <int kCount>
struct LocalMemory {
  uint4 words[kCount];

  __device__ __forceinline__ void store(int i, const uint4& x) {
    asm volatile(
        "st.local.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_local(words + i)),
        "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w)
        : "memory");
  }
  __device__ __forceinline__ uint4 load(int i) const {
    uint4 x;
    asm volatile("ld.local.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "l"(__cvta_generic_to_local(words + i))
                 : "memory");
    return x;
  }
  // The 32-bit word i: each uint4 has four.
  __device__ __forceinline__ uint32_t word(int i) const {
    uint32_t x;
    asm volatile("ld.local.u32 %0, [%1];"
                 : "=r"(x)
                 : "l"(__cvta_generic_to_local(&words->x + i))
                 : "memory");
    return x;
  }
};

}  // namespace tierkv
