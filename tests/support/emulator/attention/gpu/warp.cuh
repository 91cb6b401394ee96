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
inline StatusCode greater(StatusCode a, StatusCode b) {
  return a > b ? a : b;
}
inline StatusCode worst_of_warp(StatusCode code) {
  return static_cast<StatusCode>(__reduce_max_sync(kFullWarp, static_cast<int32_t>(code)));
}
inline void finish_first(uint32_t&) {}

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
template <DType kDtype>
Pair<kDtype> pair_min(Pair<kDtype> a, Pair<kDtype> b) {
  const float2 x = pair_floats(a), y = pair_floats(b);
  return pair_of<kDtype>(nan_min(x.x, y.x), nan_min(x.y, y.y));
}
template <DType kDtype>
Pair<kDtype> pair_max(Pair<kDtype> a, Pair<kDtype> b) {
  const float2 x = pair_floats(a), y = pair_floats(b);
  return pair_of<kDtype>(nan_max(x.x, y.x), nan_max(x.y, y.y));
}
template <DType kDtype>
Pair<kDtype> pair_shuffle_xor(Pair<kDtype> a, int32_t lanes) {
  return {__shfl_xor_sync(kFullWarp, a.bits, lanes)};
}

}  // namespace tierkv
