// SPDX-License-Identifier: Apache-2.0
// What a warp of the codec's kernels holds and agrees on.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "gpu/constants.h"
#include "gpu/math.cuh"
#include "tierkv/layout.h"
#include "tierkv/status.h"

namespace tierkv {

// Unsigned arithmetic tells the compiler that it lies in [0, 32): divisions of it are shifts, and
// what lanes would do beyond a short head is left out.
__device__ __forceinline__ int32_t lane_index() {
  return static_cast<int32_t>(threadIdx.x % 32u);
}
// In a grid of one dimension, of CTAs of whole warps.
__device__ __forceinline__ int32_t warp_of_grid() {
  return static_cast<int32_t>(blockIdx.x * (blockDim.x / 32u) + threadIdx.x / 32u);
}

// The greatest of several failures is reported.
__device__ __forceinline__ StatusCode greater(StatusCode a, StatusCode b) {
  return a > b ? a : b;
}

}  // namespace tierkv
