// SPDX-License-Identifier: Apache-2.0
// How the keys of a call turn to their positions, which chooses the kernel.
#pragma once

#include <cstdint>

#include "attention/coded/coded_attention.h"

namespace tierkv {

enum class KeyTurning : int32_t {
  kNone,
  kHalves,      // dims d and d + head_dim / 2
  kNeighbours,  // dims 2 i and 2 i + 1, some or all
  kPartHalves,  // dims d and d + pairs; those from 2 pairs on do not turn
};

// Which parts of a head may turn in halves.
inline constexpr const char* kHalvesThatFit =
    "must be all, a multiple of 32, or a multiple of 16 up to half of the head";
inline bool halves_fit(int32_t pairs, int32_t head_dim) {
  return 2 * pairs == head_dim || pairs % (4 * pairs <= head_dim ? 8 : 16) == 0;
}
inline KeyTurning key_turning(const WeightedRows& rows, int32_t head_dim) {
  switch (rows.pairing) {
    case RopePairing::kHalves:
      return 2 * rows.pairs == head_dim ? KeyTurning::kHalves : KeyTurning::kPartHalves;
    case RopePairing::kNeighbours:
      return KeyTurning::kNeighbours;
    default:
      return KeyTurning::kNone;
  }
}

}  // namespace tierkv
