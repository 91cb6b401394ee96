// SPDX-License-Identifier: Apache-2.0
// The host's stand-in for gpu/lanes.cuh.
#pragma once

#include <cstdint>

#include "gpu/constants.h"
#include "tests/support/emulator/cuda.h"

namespace tierkv {

inline int32_t kept(int32_t x) {
  return x;
}
inline uint32_t fresh_lane() {
  return static_cast<uint32_t>(emulator::cta().lane());
}
inline uint32_t add_below(uint32_t x, int32_t distance) {
  const uint32_t below = __shfl_up_sync(kFullWarp, x, static_cast<uint32_t>(distance));
  return emulator::cta().lane() >= distance ? x + below : x;
}
inline bool is_first_lane() {
  return emulator::cta().lane() == 0;
}

}  // namespace tierkv
