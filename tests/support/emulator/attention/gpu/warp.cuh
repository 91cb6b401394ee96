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
inline StatusCode greater(StatusCode a, StatusCode b) {
  return a > b ? a : b;
}
inline StatusCode worst_of_warp(StatusCode code) {
  return static_cast<StatusCode>(__reduce_max_sync(kFullWarp, static_cast<int32_t>(code)));
}

template <DType kDtype>
struct Pair {
  uint32_t bits;
};
template <>
struct Pair<DType::kFloat32> {
  float2 bits;
};
template <DType kDtype>
float2 pair_floats(Pair<kDtype> a) {
  if constexpr (kDtype == DType::kFloat32) {
    return a.bits;
  } else {
    return kDtype == DType::kFloat16 ? unpack_halves(a.bits) : unpack_bfloats(a.bits);
  }
}
// What fits into the type: none of these operations rounds.
template <DType kDtype>
Pair<kDtype> pair_of(float low, float high) {
  if constexpr (kDtype == DType::kFloat32) {
    return {{low, high}};
  } else {
    return {kDtype == DType::kFloat16 ? pack_halves(low, high) : pack_bfloats(low, high)};
  }
}
}  // namespace tierkv
