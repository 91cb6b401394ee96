// SPDX-License-Identifier: Apache-2.0
// What a warp has summed of eight columns of queries, as mma.m16n8k16 lays it out: lane 4g + t
// holds rows g and g + 8 of each operand, for columns 2t and 2t + 1. They are dims g and g + 8 of a
// dim block where the caller loads values so.
//
// A column's reference moves only where a score passes it by more than a headroom, which fp16 must
// hold as a power of two. So lanes need to agree on a maximum only then: seldom, behind the first
// tokens.
#pragma once

#include <cfloat>

#include "attention/core/online_softmax.h"
#include "gpu/lanes.cuh"
#include "gpu/mma.cuh"

namespace tierkv {

// Adds the products of eight queries, q as the B operand of each dim block, and the keys of a tile
// of 16 tokens. keys(f, a): the A operand of dim block f.
template <int kDimBlocks, class Tile>
__device__ __forceinline__ void score_tile(const uint32_t (&q)[kDimBlocks][2], const Tile& keys,
                                           float (&s)[4]) {
#pragma unroll
  for (int f = 0; f < kDimBlocks; ++f) {
    uint32_t a[4];
    keys(f, a);
    mma_m16n8k16(s, a, q[f][0], q[f][1]);
  }
}

template <int kDimBlocks>
struct WarpColumns {
  static constexpr float kUnseen = -FLT_MAX;  // the reference of a column without tokens

  float out[kDimBlocks][4];
  float reference[2], sum[2];  // of columns 2t, 2t + 1; sums are the lane's until add_lanes()

  __device__ __forceinline__ void begin() {
#pragma unroll
    for (int f = 0; f < kDimBlocks; ++f) {
#pragma unroll
      for (int i = 0; i < 4; ++i) out[f][i] = 0.0f;
    }
#pragma unroll
    for (int c = 0; c < 2; ++c) reference[c] = kUnseen, sum[c] = 0.0f;
  }

  // top: the largest score of the lane's tokens, in log2 units; -infinity where a column sees none.
  // No score passes reference + headroom afterwards. moved(column, factor) scales what the caller
  // sums beside this.
  template <class Moved>
  __device__ __forceinline__ void raise(float (&top)[2], float headroom, const Moved& moved) {
    if (!__any_sync(kFullWarp,
                    top[0] > reference[0] + headroom || top[1] > reference[1] + headroom)) {
      return;
    }
#pragma unroll
    for (int c = 0; c < 2; ++c) {
#pragma unroll
      for (int i = 4; i < 32; i *= 2) top[c] = fmaxf(top[c], __shfl_xor_sync(kFullWarp, top[c], i));
      top[c] = fmaxf(top[c], reference[c]);
      const float factor = exp2_fast(reference[c] - top[c]);
      reference[c] = top[c];
      sum[c] *= factor;
      moved(c, factor);
#pragma unroll
      for (int f = 0; f < kDimBlocks; ++f) out[f][c] *= factor, out[f][c + 2] *= factor;
    }
  }
  __device__ __forceinline__ void raise(float (&top)[2], float headroom) {
    raise(top, headroom, [](int, float) {});
  }

  // Adds the values of a tile to dim blocks kFirst to kEnd - 1, weighted by p, the B operand of
  // P^T. values(f, a): the A operand of dim block f.
  template <int kFirst = 0, int kEnd = kDimBlocks, class Tile>
  __device__ __forceinline__ void add_tile(const Tile& values, const uint32_t (&p)[2]) {
#pragma unroll
    for (int f = kFirst; f < kEnd; ++f) {
      uint32_t a[4];
      values(f, a);
      mma_m16n8k16(out[f], a, p[0], p[1]);
    }
  }

  __device__ __forceinline__ static float over_lanes(float x) {
#pragma unroll
    for (int i = 4; i < 32; i *= 2) x += __shfl_xor_sync(kFullWarp, x, i);
    return x;
  }
  // Sums of all tokens into every lane, once.
  __device__ __forceinline__ void add_lanes() {
#pragma unroll
    for (float& x : sum) x = over_lanes(x);
  }

  // The sums must be those of all lanes: after add_lanes(), or where the caller adds such. part:
  // float [columns][stride]; states: [columns]; columns: at most 8.
  __device__ __forceinline__ void store(SoftmaxState* states, float* part, int32_t stride,
                                        int32_t columns) const {
    const int32_t lane = static_cast<int32_t>(threadIdx.x % 32), g = lane / 4, t = lane % 4;
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const int32_t column = 2 * t + c;
      if (column >= columns) continue;
      float* to = part + column * stride;
#pragma unroll
      for (int f = 0; f < kDimBlocks; ++f) {
        to[16 * f + g] = out[f][c];
        to[16 * f + g + 8] = out[f][c + 2];
      }
      if (g == 0) states[column] = {reference[c], sum[c]};
    }
  }
};

}  // namespace tierkv
