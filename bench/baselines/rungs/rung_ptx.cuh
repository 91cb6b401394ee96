// The instructions that only rungs use, beside gpu/ptx.cuh.
#pragma once

#include "gpu/ptx.cuh"

namespace tierkv {

// Asynchronous copies of 16 bytes by every thread for itself, in groups: wait_copies<n>() returns
// when all but the newest n groups of this thread have arrived.
__device__ __forceinline__ void start_copy_16(void* to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from)
               : "memory");
}
__device__ __forceinline__ void close_copy_group() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
template <int32_t kLeft>
__device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kLeft) : "memory");
}

// Four 8 x 8 matrices of halves: lane l names row l % 8 of matrix l / 8; word i of lane 4g + t is
// elements (g, 2t) and (g, 2t + 1) of matrix i.
__device__ __forceinline__ void load_matrices(uint32_t (&x)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(shared_address(row))
               : "memory");
}

}  // namespace tierkv
