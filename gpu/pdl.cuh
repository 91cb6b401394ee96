// SPDX-License-Identifier: Apache-2.0
// The beginning of a kernel: its parameters, and the kernels before and behind it.
#pragma once

#include <cstdint>

#include "gpu/features.cuh"

namespace tierkv {

// Has the lines of a kernel's parameters fetched side by side, one by every warp, where their uses
// would fetch them one after the other.
template <class Params>
__device__ __forceinline__ void touch_parameters(const Params& params, int32_t warp) {
  constexpr int32_t kLineBytes = 64, kLines = (sizeof(Params) + kLineBytes - 1) / kLineBytes;
  if (warp >= kLines) return;
  const int32_t word =
      *reinterpret_cast<const int32_t*>(reinterpret_cast<const char*>(&params) + warp * kLineBytes);
  asm volatile("" ::"r"(word));
}

// Until the kernel before this one has finished and its writes are visible; and, as each kernel
// waits in some CTA before it ends, all before that one.
__device__ __forceinline__ void wait_for_previous_kernel() {
#if TKV_BULK_COPY
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// The next kernel may take the room this one leaves. It waits for its end before it reads what this
// one writes.
__device__ __forceinline__ void let_next_kernel_start() {
#if TKV_BULK_COPY
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

}  // namespace tierkv
