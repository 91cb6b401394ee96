// SPDX-License-Identifier: Apache-2.0
// A warp's part of the attention of a row, in registers, and what it leaves of it in memory.
#pragma once

#include "attention/coded/coded_tile.cuh"
#include "attention/core/warp_columns.cuh"
#include "gpu/lanes.cuh"
#include "gpu/math.cuh"
#include "gpu/mma.cuh"

namespace tierkv {

// What a warp leaves of a row: `columns` outputs of head_dim floats, then their states, and what
// keeps the next partial aligned to 16 bytes. A sum that is not a number says that the row is
// corrupt. Warp w and row r share partial w + r: one of the two grows from each partial to the
// next.
TKV_HD int64_t coded_partial_floats(const CodedAttention& call) {
  return (call.columns * (call.head_dim + 2) + 3) & ~3;
}

template <int kDimBlocks>
struct CodedState : WarpColumns<kDimBlocks> {
  using Base = WarpColumns<kDimBlocks>;
  using Base::out, Base::reference, Base::sum;
  uint32_t q[kDimBlocks][2];  // B operand: dims 2t, 2t + 1 (+ 8) of column t
  uint32_t bad;               // not 0: a block of the row breaks a rule

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

  static constexpr float kHeadroom = 8.0f;  // of references: probabilities reach 2^8
  __device__ __forceinline__ void raise_reference(const float (&s)[kItemTiles][4], float scale) {
    float top[2];
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      float x = fmaxf(s[0][c], s[0][c + 2]);
#pragma unroll
      for (int o = 1; o < kItemTiles; ++o) x = fmaxf(x, fmaxf(s[o][c], s[o][c + 2]));
      top[c] = x * scale;
    }
    Base::raise(top, kHeadroom);
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

  // Scores into probabilities times 2^-reference, in place of the B operand of P^T. scale brings a
  // score to log2 units.
  __device__ __forceinline__ void weigh(float (&s)[kItemTiles][4], int32_t tokens, float scale,
                                        uint32_t (&p)[kItemTiles][2]) {
    hide_behind(tokens, s);
    raise_reference(s, scale);
#pragma unroll
    for (int o = 0; o < kItemTiles; ++o) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        p[o][h] =
            transpose_8x8(pack_halves(exp2_fast(fmaf(s[o][2 * h], scale, -reference[0])),
                                      exp2_fast(fmaf(s[o][2 * h + 1], scale, -reference[1]))));
      }
    }
    // The sum is that of the rounded ones, and of all lanes: add_lanes() must not follow.
    constexpr uint32_t ones[4] = {kOneHalves, kOneHalves, kOneHalves, kOneHalves};
    float total[4] = {};
#pragma unroll
    for (int o = 0; o < kItemTiles; ++o) mma_m16n8k16(total, ones, p[o][0], p[o][1]);
    sum[0] += total[0], sum[1] += total[1];
  }

  // From sums of codes over kDigitScale to sums of values.
  __device__ __forceinline__ void finish_blocks(float step) {
#pragma unroll
    for (int f = 0; f < kDimBlocks; ++f) {
#pragma unroll
      for (int i = 0; i < 4; ++i) out[f][i] = step * (kDigitScale * out[f][i]);
    }
  }

  __device__ __forceinline__ void leave(const CodedAttention& call, float* partial) {
    // Where scores are not numbers, neither is their sum: as if there were none.
    const bool all_valid = __all_sync(kFullWarp, bad == 0);
#pragma unroll
    for (float& x : sum) x = all_valid ? fmaxf(x, 0.0f) : NAN;
    Base::store(reinterpret_cast<SoftmaxState*>(partial + call.columns * call.head_dim), partial,
                call.head_dim, call.columns);
  }
};

}  // namespace tierkv
