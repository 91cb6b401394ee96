// SPDX-License-Identifier: Apache-2.0
// The fixed rotation and the reflection of a token in the registers of a warp (lane_token.cuh),
// with the host's bits.
#pragma once

#include "codec/format/rotation.h"
#include "codec/gpu/pages/lane_token.cuh"

namespace tierkv {

// One step of the transform whose partners are `lanes` lanes apart; lanes that do not take part
// keep their values.
__device__ __forceinline__ void hadamard_step(int32_t lanes, bool takes_part, float (&x)[4]) {
  const bool is_second = (lane_index() & lanes) != 0;
#pragma unroll
  for (float& mine : x) {
    const float other = __shfl_xor_sync(kFullWarp, mine, lanes);
    if (takes_part) mine = is_second ? add_rn(other, -mine) : add_rn(mine, other);
  }
}

// H x. Partners are 1, 2, 4 dims apart in other lanes, 8 and 16 in this one, 32 and 64 in others,
// and 128 in this one's two chunks.
__device__ __forceinline__ void hadamard_lane_values(int32_t head_dim, LaneValues& x) {
  const int32_t size = lane_dim(0) < head_dim ? hadamard_size(head_dim, lane_dim(0)) : 0;
#pragma unroll
  for (int32_t i = 0; i < kLaneChunks; ++i) {
    if (!has_chunk(i, head_dim)) continue;
#pragma unroll
    for (int32_t lanes = 1; lanes < 8; lanes *= 2) hadamard_step(lanes, true, x[i]);
    hadamard_pair(x[i][0], x[i][1]);
    hadamard_pair(x[i][2], x[i][3]);
    hadamard_pair(x[i][0], x[i][2]);
    hadamard_pair(x[i][1], x[i][3]);
    hadamard_step(8, size > 32, x[i]);
    if (head_dim > 96) hadamard_step(16, size > 64, x[i]);
  }
  if (head_dim > 128) {
#pragma unroll
    for (int32_t j = 0; j < 4; ++j) hadamard_pair(x[0][j], x[1][j]);
  }
  const float scale = size > 0 ? hadamard_scale(size) : 0.0f;
#pragma unroll
  for (int32_t i = 0; i < kLaneChunks; ++i) {
    if (!has_chunk(i, head_dim)) continue;
#pragma unroll
    for (float& value : x[i]) value = mul_rn(value, scale);
  }
}

// A chunk of 32 dims is a word of signs.
__device__ __forceinline__ void flip_signs(const Rotation& r, int32_t head_dim, LaneValues& x) {
#pragma unroll
  for (int32_t i = 0; i < kLaneChunks; ++i) {
    if (!has_chunk(i, head_dim)) continue;
    const uint32_t negative = r.negative[lane_chunk(i)] >> (lane_index() % 8);
#pragma unroll
    for (int32_t j = 0; j < 4; ++j) {
      x[i][j] = bits_float(float_bits(x[i][j]) ^ (negative >> (8 * j) & 1u) << 31);
    }
  }
}

__device__ __forceinline__ void rotate(const Rotation& r, int32_t head_dim, LaneValues& x) {
  if (!r.is_on) return;
  flip_signs(r, head_dim, x);
  hadamard_lane_values(head_dim, x);
}
__device__ __forceinline__ void rotate_back(const Rotation& r, int32_t head_dim, LaneValues& x) {
  if (!r.is_on) return;
  hadamard_lane_values(head_dim, x);
  flip_signs(r, head_dim, x);
}

// The normal of a reflection; zeros where there is none.
__device__ __forceinline__ void load_normal(const float* normal, int32_t head_dim, LaneValues& w) {
#pragma unroll
  for (int32_t i = 0; i < kLaneChunks; ++i) {
    const bool is_there = normal != nullptr && has_chunk(i, head_dim) && lane_dim(i) < head_dim;
#pragma unroll
    for (int32_t j = 0; j < 4; ++j) w[i][j] = is_there ? normal[lane_dim(i) + 8 * j] : 0.0f;
  }
}
// reflect() of rotation.h: a lane has one r and the chunks c and c + 4.
__device__ __forceinline__ void reflect(const LaneValues& normal, int32_t head_dim, LaneValues& x) {
  float product = 0;
#pragma unroll
  for (int32_t i = 0; i < kLaneChunks; ++i) {
    if (!has_chunk(i, head_dim)) continue;
    float sum = mul_rn(normal[i][0], x[i][0]);
#pragma unroll
    for (int32_t j = 1; j < 4; ++j) sum = fma_rn(normal[i][j], x[i][j], sum);
    product = i == 0 ? sum : add_rn(product, sum);
  }
#pragma unroll
  for (int32_t lanes = 16; lanes > 0; lanes /= 2) {
    product = add_rn(product, __shfl_xor_sync(kFullWarp, product, lanes));
  }
  product = add_rn(product, 0.0f);
#pragma unroll
  for (int32_t i = 0; i < kLaneChunks; ++i) {
    if (!has_chunk(i, head_dim)) continue;
#pragma unroll
    for (int32_t j = 0; j < 4; ++j) x[i][j] = reflected(x[i][j], normal[i][j], product);
  }
}

// x + factor * mean; a factor of -1 takes it off.
__device__ __forceinline__ void add_mean(const float* mean, float factor, int32_t head_dim,
                                         LaneValues& x) {
  if (mean == nullptr) return;
#pragma unroll
  for (int32_t i = 0; i < kLaneChunks; ++i) {
    if (!has_chunk(i, head_dim) || lane_dim(i) >= head_dim) continue;
#pragma unroll
    for (int32_t j = 0; j < 4; ++j) {
      x[i][j] = add_rn(x[i][j], factor * mean[lane_dim(i) + 8 * j]);
    }
  }
}

}  // namespace tierkv
