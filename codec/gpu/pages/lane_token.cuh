// SPDX-License-Identifier: Apache-2.0
// Tokens of one head in the registers of a warp, as many side by side as it holds: their elements,
// eight to a lane. Queries and outputs are vectors of the same kind.
//
// Lane l of a token's kTokenLanes holds the dims from 8 l on: 16 bytes of elements in memory. All
// lanes of a warp call these functions together, also where a token is not there; it holds zeros
// then.
#pragma once

#include <cstdint>

#include "codec/format/element.h"
#include "gpu/math.cuh"
#include "gpu/warp.cuh"

namespace tierkv {

inline constexpr int32_t kLaneDims = 8;
template <int32_t kDim>
inline constexpr int32_t kTokenLanes = kDim > 128  ? 32
                                       : kDim > 64 ? 16
                                                   : 8;
template <int32_t kDim>
inline constexpr int32_t kWarpTokens = 32 / kTokenLanes<kDim>;

using LaneValues = float[kLaneDims];

// The place of the lane's token in its warp, and of the lane in its token.
template <int32_t kDim>
__device__ __forceinline__ int32_t token_of_lane() {
  return lane_index() / kTokenLanes<kDim>;
}
template <int32_t kDim>
__device__ __forceinline__ int32_t lane_of_token() {
  return lane_index() % kTokenLanes<kDim>;
}
template <int32_t kDim>
__device__ __forceinline__ int32_t lane_dim() {
  return kLaneDims * lane_of_token<kDim>();
}
// False in the last lanes of a token of 96 dims. They hold zeros.
template <int32_t kDim>
__device__ __forceinline__ bool has_dims() {
  return kDim == kLaneDims * kTokenLanes<kDim> || lane_dim<kDim>() < kDim;
}
// The lanes of a token of the warp, a bit each.
template <int32_t kDim>
__device__ __forceinline__ uint32_t lanes_of_token(int32_t token) {
  return kFullWarp >> (32 - kTokenLanes<kDim>) << token * kTokenLanes<kDim>;
}
template <int32_t kDim>
__device__ __forceinline__ bool any_of_token(bool mine) {
  const uint32_t votes = __ballot_sync(kFullWarp, mine);
  return (votes & lanes_of_token<kDim>(token_of_lane<kDim>())) != 0;
}
// In all lanes of the token; lanes 1, 2, 4 and so on apart, in this order.
template <int32_t kDim>
__device__ __forceinline__ float sum_of_token(float x) {
#pragma unroll
  for (int32_t lanes = 1; lanes < kTokenLanes<kDim>; lanes *= 2) {
    x += __shfl_xor_sync(kFullWarp, x, lanes);
  }
  return x;
}

// ---- elements ----

__device__ __forceinline__ bool is_vector(const void* at) {
  return reinterpret_cast<uintptr_t>(at) % sizeof(uint4) == 0;
}
// Eight elements, at any address.
__device__ __forceinline__ uint4 load_eight(const uint16_t* from) {
  if (is_vector(from)) return *reinterpret_cast<const uint4*>(from);
  uint32_t words[4];
#pragma unroll
  for (int32_t i = 0; i < 4; ++i) {
    words[i] = from[2 * i] | static_cast<uint32_t>(from[2 * i + 1]) << 16;
  }
  return {words[0], words[1], words[2], words[3]};
}
__device__ __forceinline__ void store_eight(uint16_t* to, const uint32_t (&words)[4]) {
  if (is_vector(to)) {
    *reinterpret_cast<uint4*>(to) = {words[0], words[1], words[2], words[3]};
    return;
  }
#pragma unroll
  for (int32_t i = 0; i < kLaneDims; ++i) {
    to[i] = static_cast<uint16_t>(words[i / 2] >> 16 * (i % 2));
  }
}
__device__ __forceinline__ void unpack_eight(const uint4& words, DType dtype, LaneValues& x) {
  const uint32_t pairs[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
  for (int32_t i = 0; i < 4; ++i) {
    const float2 y = dtype == DType::kFloat16 ? unpack_halves(pairs[i]) : unpack_bfloats(pairs[i]);
    x[2 * i] = y.x, x[2 * i + 1] = y.y;
  }
}

// The lane's part of a row of fp16 or bf16 elements; zeros where the token is not there.
template <int32_t kDim>
__device__ __forceinline__ void load_lane_values(const uint16_t* row, DType dtype, bool is_there,
                                                 LaneValues& x) {
  uint4 words = {0, 0, 0, 0};
  if (is_there && has_dims<kDim>()) words = load_eight(row + lane_dim<kDim>());
  unpack_eight(words, dtype, x);
}
// The same of a row of floats; null: zeros.
template <int32_t kDim>
__device__ __forceinline__ void load_lane_floats(const float* row, LaneValues& x) {
  const bool is_there = row != nullptr && has_dims<kDim>();
  const float* from = is_there ? row + lane_dim<kDim>() : nullptr;
#pragma unroll
  for (int32_t i = 0; i < kLaneDims; i += 4) {
    float4 y = {0.0f, 0.0f, 0.0f, 0.0f};
    if (is_there && is_vector(from)) {
      y = *reinterpret_cast<const float4*>(from + i);
    } else if (is_there) {
      y = {from[i], from[i + 1], from[i + 2], from[i + 3]};
    }
    x[i] = y.x, x[i + 1] = y.y, x[i + 2] = y.z, x[i + 3] = y.w;
  }
}

}  // namespace tierkv
