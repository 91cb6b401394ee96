// SPDX-License-Identifier: Apache-2.0
// Barriers in shared memory that copies end.
//
// Barriers of a warp's copies count one arrival per phase on sm_90, where the copy engine reports
// its bytes, and one per lane of the warp before, where the lanes copy.
#pragma once

#include <cstdint>

#include "gpu/features.cuh"
#include "gpu/lanes.cuh"
#include "gpu/shared_memory.cuh"

namespace tierkv {

// A barrier ends its phase when the bytes of a chunk have arrived. Phases alternate in parity,
// beginning with 0.

__device__ __forceinline__ void init_barrier(uint64_t* barrier) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)),
               "r"(TKV_BULK_COPY ? 1 : 32)
               : "memory");
}
// After the barriers of this thread are initialised, before the warp uses them.
__device__ __forceinline__ void publish_barriers() {
#if TKV_BULK_COPY
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
  __syncwarp();
}

// barrier: a shared address.
__device__ __forceinline__ void wait_barrier(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n.reg .pred done;\nagain_%=:\n"
#if TKV_BULK_COPY
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
#else
      "mbarrier.test_wait.parity.shared::cta.b64 done, [%0], %1;\n"
#endif
      "@done bra ready_%=;\nbra again_%=;\nready_%=:\n}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}
__device__ __forceinline__ void wait_barrier(const uint64_t* barrier, uint32_t parity) {
  wait_barrier(shared_address(barrier), parity);
}

// Whether the phase has ended, for the whole warp alike.
__device__ __forceinline__ bool has_arrived(const uint64_t* barrier, uint32_t parity) {
  uint32_t is_done;
  asm volatile(
      "{\n.reg .pred done;\n"
      "mbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;\n"
      "selp.u32 %0, 1, 0, done;\n}"
      : "=r"(is_done)
      : "r"(shared_address(barrier)), "r"(parity)
      : "memory");
  return __all_sync(kFullWarp, is_done != 0);
}

// ---- barriers of as many arrivals as are asked for ----

__device__ __forceinline__ void init_barrier(uint64_t* barrier, int32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)),
               "r"(arrivals)
               : "memory");
}
__device__ __forceinline__ void arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier))
               : "memory");
}
// This thread's copies so far will arrive once they are done. barrier: a shared address.
__device__ __forceinline__ void arrive_after_copies(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void arrive_after_copies(uint64_t* barrier) {
  arrive_after_copies(shared_address(barrier));
}

// Reads shared memory into which no copy is under way; the tests' emulator checks that.
template <class T>
__device__ __forceinline__ T load_arrived(const uint8_t* from) {
  return *reinterpret_cast<const T*>(from);
}

}  // namespace tierkv
