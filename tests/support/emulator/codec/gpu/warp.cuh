// SPDX-License-Identifier: Apache-2.0
// The host's stand-in for gpu/warp.cuh.
#pragma once

#include "gpu/constants.h"
#include "tests/support/emulator/cuda.h"
#include "tierkv/status.h"

namespace tierkv {

inline int32_t lane_index() {
  return emulator::cta().lane();
}

}  // namespace tierkv
