// The host's stand-in for gpu/warp.cuh.
#pragma once

#include "tests/support/emulator/cuda.h"
#include "tierkv/status.h"

namespace tierkv {

inline constexpr uint32_t kAllLanes = 0xffffffffu;

inline int32_t lane_index() {
  return emulator::cta().lane();
}

}  // namespace tierkv
