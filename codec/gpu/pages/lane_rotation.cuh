// SPDX-License-Identifier: Apache-2.0
// The fixed rotation and the reflection of tokens in the registers of a warp (lane_token.cuh), with
// the host's bits.
#pragma once

#include "codec/format/rotation.h"
#include "codec/gpu/pages/lane_token.cuh"

namespace tierkv {

// H x. Partners are 1, 2 and 4 dims apart in the lane, 8 and more in other lanes. Adding the
// product with 1 or -1 rounds once, as an addition does.
template <int32_t kDim>
__device__ __forceinline__ void hadamard_lane_values(LaneValues& x) {
#pragma unroll
  for (int32_t step = 1; step < kLaneDims; step *= 2) {
#pragma unroll
    for (int32_t i = 0; i < kLaneDims; ++i) {
      if ((i & step) == 0) hadamard_pair(x[i], x[i + step]);
    }
  }
  const int32_t size = hadamard_size(kDim, lane_dim<kDim>());
#pragma unroll
  for (int32_t lanes = 1; lanes < kTokenLanes<kDim>; lanes *= 2) {
    if (kLaneDims * lanes >= hadamard_size(kDim, 0)) continue;
    const float sign = (lane_index() & lanes) != 0 ? -1.0f : 1.0f;
    const bool takes_part = kLaneDims * lanes < size;
#pragma unroll
    for (float& mine : x) {
      const float other = __shfl_xor_sync(kFullWarp, mine, lanes);
      if (takes_part) mine = fma_rn(mine, sign, other);
    }
  }
  const float scale = hadamard_scale(size);
#pragma unroll
  for (float& value : x) value = mul_rn(value, scale);
}

// Lane l of a token has byte l % 4 of the word l / 4 of signs.
template <int32_t kDim>
__device__ __forceinline__ void flip_signs(const Rotation& r, LaneValues& x) {
  if (!has_dims<kDim>()) return;
  const uint32_t negative = r.negative[lane_dim<kDim>() / 32] >> (lane_dim<kDim>() % 32);
#pragma unroll
  for (int32_t i = 0; i < kLaneDims; ++i) {
    x[i] = bits_float(float_bits(x[i]) ^ (negative >> i & 1u) << 31);
  }
}

// All tokens of the warp are rotated, or none.
template <int32_t kDim>
__device__ __forceinline__ void rotate(const Rotation& r, LaneValues& x) {
  if (!r.is_on) return;
  flip_signs<kDim>(r, x);
  hadamard_lane_values<kDim>(x);
}
template <int32_t kDim>
__device__ __forceinline__ void rotate_back(const Rotation& r, LaneValues& x) {
  if (!r.is_on) return;
  hadamard_lane_values<kDim>(x);
  flip_signs<kDim>(r, x);
}

// reflect() of rotation.h, by a normal or by zeros, which change nothing: a lane has all r of the
// chunk lane / 4 and of j = lane % 4.
template <int32_t kDim>
__device__ __forceinline__ void reflect(const LaneValues& normal, LaneValues& x) {
  const int32_t j = lane_index() % 4;
  LaneValues sum;
#pragma unroll
  for (int32_t r = 0; r < kLaneDims; ++r) {
    sum[r] = mul_rn(normal[r], x[r]);
#pragma unroll
    for (int32_t step = 1; step < 4; ++step) {
      const float before = __shfl_up_sync(kFullWarp, sum[r], 1);
      if (j == step) sum[r] = fma_rn(normal[r], x[r], before);
    }
#pragma unroll
    for (int32_t lanes = kTokenLanes<kDim> / 2; lanes >= 4; lanes /= 2) {
      sum[r] = add_rn(sum[r], __shfl_xor_sync(kFullWarp, sum[r], lanes));
    }
  }
#pragma unroll
  for (int32_t apart = kLaneDims / 2; apart > 0; apart /= 2) {
#pragma unroll
    for (int32_t r = 0; r < apart; ++r) sum[r] = add_rn(sum[r], sum[r + apart]);
  }
  const float product = add_rn(__shfl_sync(kFullWarp, sum[0], lane_index() | 3), 0.0f);
#pragma unroll
  for (int32_t r = 0; r < kLaneDims; ++r) x[r] = reflected(x[r], normal[r], product);
}

}  // namespace tierkv
