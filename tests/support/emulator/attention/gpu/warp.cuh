// The host's stand-in for gpu/warp.cuh.
#pragma once

#include "gpu/constants.h"
#include "gpu/math.cuh"
#include "tests/support/emulator/cuda.h"

namespace tierkv {

inline int32_t lane_index() {
  return emulator::cta().lane();
}

}  // namespace tierkv
