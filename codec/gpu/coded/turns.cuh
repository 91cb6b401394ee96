// SPDX-License-Identifier: Apache-2.0
// Turns of pairs of channels, as lanes load them.
#pragma once

#include "codec/format/rope_turn.h"
#include "gpu/math.cuh"

namespace tierkv {

// From memory that no kernel writes meanwhile: stores need not hold such loads back.
__device__ __forceinline__ Turn load_turn(const Turn* p) {
  const float2 x = __ldg(reinterpret_cast<const float2*>(p));
  return {x.x, x.y};
}

// Turns of two neighbouring pairs, 16-byte aligned.
struct TwoTurns {
  Turn turn[2];
  __device__ __forceinline__ explicit TwoTurns(const Turn* p) {
    const float4 x = *reinterpret_cast<const float4*>(p);
    turn[0] = {x.x, x.y}, turn[1] = {x.z, x.w};
  }
};

}  // namespace tierkv
