// SPDX-License-Identifier: Apache-2.0
// The host's stand-in for gpu/warp.cuh.
#pragma once

#include "gpu/constants.h"
#include "gpu/math.cuh"
#include "tests/support/emulator/cuda.h"
#include "tierkv/layout.h"
#include "tierkv/status.h"

namespace tierkv {

inline int32_t lane_index() {
  return emulator::cta().lane();
}
inline int32_t warp_of_grid() {
  return static_cast<int32_t>(blockIdx.x * (blockDim.x / 32u) + threadIdx.x / 32u);
}
inline StatusCode greater(StatusCode a, StatusCode b) {
  return a > b ? a : b;
}

}  // namespace tierkv
