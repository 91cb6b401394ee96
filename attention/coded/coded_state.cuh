// SPDX-License-Identifier: Apache-2.0
// A warp's part of the attention of a row, in registers, and what it leaves of it in memory.
#pragma once

#include "attention/coded/coded_tile.cuh"
#include "attention/core/online_softmax.h"
#include "gpu/lanes.cuh"
#include "gpu/math.cuh"
#include "gpu/mma.cuh"

namespace tierkv {

// What a warp leaves of a row: `columns` outputs of head_dim floats, then the references and sums.
// A negative sum says that the row is corrupt. Warp w and row r share partial w + r: one of the two
// grows from each partial to the next.
__device__ __forceinline__ int64_t coded_partial_floats(const CodedAttention& call) {
  return int64_t{call.columns} * (call.head_dim + 2);
}

template <int kDimBlocks>
struct CodedState {
  uint32_t q[kDimBlocks][2];  // B operand: dims 2t, 2t + 1 (+ 8) of column t
  float offset[2];            // of columns 2t, 2t + 1: what brings sums of digits to scores
  float out[kDimBlocks][4];
  float reference[2], sum[2];  // of columns 2t, 2t + 1
  uint32_t bad;                // not 0: a block of the row breaks a rule

  __device__ __forceinline__ void load_queries(const CodedAttention& call, const uint16_t* query) {
    const int32_t lane = static_cast<int32_t>(threadIdx.x % 32), g = lane / 4, t = lane % 4;
#pragma unroll
    for (int f = 0; f < kDimBlocks; ++f) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        q[f][h] = 0;
        if (g < call.columns) {
          q[f][h] = *reinterpret_cast<const uint32_t*>(query + g * call.head_dim + 16 * f + 8 * h +
                                                       2 * t);
        }
      }
    }
  }

  // Begins a row whose scores need no offset: they are not sums of digits that lack a base.
  __device__ __forceinline__ void begin_plain() {
#pragma unroll
    for (int f = 0; f < kDimBlocks; ++f) {
#pragma unroll
      for (int i = 0; i < 4; ++i) out[f][i] = 0.0f;
    }
#pragma unroll
    for (int c = 0; c < 2; ++c) offset[c] = 0.0f, reference[c] = kNoReference, sum[c] = 0.0f;
  }
  // base: of a digit, in the unit of a score times q.
  __device__ __forceinline__ void begin(float base) {
    const int32_t t = static_cast<int32_t>(threadIdx.x % 4);
    float total = 0;
    begin_plain();
#pragma unroll
    for (int f = 0; f < kDimBlocks; ++f) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float2 x = unpack_halves(q[f][h]);
        total += x.x + x.y;
      }
    }
    total += __shfl_xor_sync(kFullWarp, total, 1);
    total += __shfl_xor_sync(kFullWarp, total, 2);
#pragma unroll
    for (int c = 0; c < 2; ++c) offset[c] = base * __shfl_sync(kFullWarp, total, 4 * (2 * t + c));
  }

  // Keeps every score below reference + kHeadroom: fp16 holds 2^kHeadroom, so that the reference
  // seldom moves after a row's first item, and its lanes need to agree on a maximum only then.
  static constexpr float kHeadroom = 8.0f;
  // Of a column that sees none of the tokens so far, where that can be: 2^(-infinity - kLeast) is
  // 0.
  static constexpr float kLeastReference = -0x1p100f;
  template <bool kHides>
  __device__ __forceinline__ void raise_reference(const float (&s)[kItemTiles][4], float scale) {
    float top[2];
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      float x = fmaxf(s[0][c], s[0][c + 2]);
#pragma unroll
      for (int o = 1; o < kItemTiles; ++o) x = fmaxf(x, fmaxf(s[o][c], s[o][c + 2]));
      top[c] = fmaf(x, scale, offset[c]);
      if constexpr (kHides) top[c] = fmaxf(top[c], kLeastReference);
    }
    if (!__any_sync(kFullWarp,
                    top[0] > reference[0] + kHeadroom || top[1] > reference[1] + kHeadroom)) {
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
#pragma unroll
      for (int f = 0; f < kDimBlocks; ++f) out[f][c] *= factor, out[f][c + 2] *= factor;
    }
  }

  // Hides the scores of places at and behind `tokens`, the tokens of the item.
  __device__ __forceinline__ static void hide_behind(int32_t tokens, float (&s)[kItemTiles][4]) {
    if (tokens >= kBlockTokens) return;
    const int32_t g = static_cast<int32_t>(threadIdx.x % 32 / 4);
#pragma unroll
    for (int o = 0; o < kItemTiles; ++o) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (16 * o + g + 8 * (i / 2) >= tokens) s[o][i] = -INFINITY;
      }
    }
  }

  // Scores into probabilities times 2^-reference, in place of the B operand of P^T. scale and
  // offset bring a score to log2 units. kHides: scores of a whole column may be -infinity.
  template <bool kHides = false>
  __device__ __forceinline__ void weigh(float (&s)[kItemTiles][4], int32_t tokens, float scale,
                                        uint32_t (&p)[kItemTiles][2]) {
    hide_behind(tokens, s);
    raise_reference<kHides>(s, scale);
    const float shift[2] = {offset[0] - reference[0], offset[1] - reference[1]};
#pragma unroll
    for (int o = 0; o < kItemTiles; ++o) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        p[o][h] = transpose_8x8(pack_halves(exp2_fast(fmaf(s[o][2 * h], scale, shift[0])),
                                            exp2_fast(fmaf(s[o][2 * h + 1], scale, shift[1]))));
      }
    }
    // The sum is that of the rounded ones, so that the base drops out exactly.
    constexpr uint32_t ones[4] = {kOneHalves, kOneHalves, kOneHalves, kOneHalves};
    float total[4] = {};
#pragma unroll
    for (int o = 0; o < kItemTiles; ++o) mma_m16n8k16(total, ones, p[o][0], p[o][1]);
    sum[0] += total[0], sum[1] += total[1];
  }

  // From sums of digits to sums of values: out and the base times sum of p, both in steps.
  __device__ __forceinline__ void finish_blocks(float step, float base) {
#pragma unroll
    for (int f = 0; f < kDimBlocks; ++f) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        out[f][i] = step * fmaf(kDigitScale, out[f][i], base * sum[i % 2]);
      }
    }
    offset[0] = offset[1] = 0.0f;
  }

  __device__ __forceinline__ void leave(const CodedAttention& call, float* partial) {
    const int32_t lane = static_cast<int32_t>(threadIdx.x % 32), g = lane / 4, t = lane % 4;
    const bool all_valid = __all_sync(kFullWarp, bad == 0);
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const int32_t column = 2 * t + c;
      if (column >= call.columns) continue;
      float* to = partial + column * call.head_dim;
#pragma unroll
      for (int f = 0; f < kDimBlocks; ++f) {
        to[16 * f + g] = out[f][c];
        to[16 * f + g + 8] = out[f][c + 2];
      }
      if (g != 0) continue;
      float* states = partial + call.columns * call.head_dim;
      states[2 * column] = reference[c];
      states[2 * column + 1] = all_valid ? sum[c] : -1.0f;
    }
  }
};

}  // namespace tierkv
