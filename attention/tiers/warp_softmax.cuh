// SPDX-License-Identifier: Apache-2.0
// The softmax of a warp's row: which tokens count, their weights, and the reference that they are
// relative to (warp_attention.cuh).
#pragma once

#include "attention/tiers/chunk_feed.cuh"
#include "attention/tiers/warp_row.cuh"

namespace tierkv {

inline constexpr float kHeadroom = 8.0f;
inline constexpr float kCeiling = 0x1p14f;  // times (1 + rounding) below 65504

// Tokens of a chunk in shared memory.
struct ChunkTokens {
  const uint8_t* bytes;
  int32_t tiles;
  int32_t tokens;           // 1 to 16 * tiles; whatever lies behind them, up to a tile, is ignored
  int32_t row;              // of the launch
  const ChunkPlace* place;  // null: a plain kernel's
};

template <int32_t kHeadDim, int32_t kColumnBlocks, DecodeMode kMode>
class WarpSoftmax : public WarpRow<kHeadDim, kColumnBlocks, kMode> {
  using Base = WarpRow<kHeadDim, kColumnBlocks, kMode>;

 protected:
  using Base::Base, Base::lane, Base::own_column;
  using Base::columns_, Base::out_, Base::reference_, Base::sum_, Base::zero_, Base::ceiling_;
  using Base::kBlocks, Base::kIsPlain, Base::kIsNarrow, Base::kLaneColumns, Base::kIsBFloat16;

  template <int32_t kTiles>
  struct Step {
    float score[kTiles][kColumnBlocks][2][kLaneColumns];  // of tokens g and g + 8
    float scale[kTiles][2];                               // of the values
    float zero_point[kTiles][2];
    uint32_t weight[kTiles][kColumnBlocks][2];  // B fragments
    // What bfloat16 loses of the weights: raw values of bfloat16 are multiplied by both.
    uint32_t weight_rest[kTiles][kColumnBlocks][2];
  };

  // Tokens from `tokens` on weigh nothing, whatever their bytes are.
  template <int32_t kTiles>
  __device__ __forceinline__ void mask_scores(int32_t tokens, Step<kTiles>& s) const {
#pragma unroll
    for (int32_t i = 0; i < kTiles; ++i) {
#pragma unroll
      for (int32_t r = 0; r < 2; ++r) {
        if (lane() / 4 + 8 * r + i * kTileTokens < tokens) continue;
#pragma unroll
        for (int32_t c = 0; c < kColumnBlocks; ++c) {
          for (float& score : s.score[i][c][r]) score = -INFINITY;
        }
        s.scale[i][r] = 1.0f;
        s.zero_point[i][r] = 0.0f;
      }
    }
  }

  // Tokens of a step, which begins with the chunk's token `first`, that a query is older than.
  template <int32_t kTiles>
  __device__ __forceinline__ void mask_newest(const ChunkTokens& chunk, int32_t first,
                                              Step<kTiles>& s) const {
    const TailOrder tail = chunk.place->tail;
#pragma unroll
    for (int32_t c = 0; c < kColumnBlocks; ++c) {
#pragma unroll
      for (int32_t j = 0; j < kLaneColumns; ++j) {
        const int32_t hidden = columns_.hidden(chunk.row, own_column(c, j));
#pragma unroll
        for (int32_t i = 0; i < kTiles; ++i) {
#pragma unroll
          for (int32_t r = 0; r < 2; ++r) {
            const int32_t token = first + lane() / 4 + 8 * r + i * kTileTokens;
            if (tail.age(token) < hidden) s.score[i][c][r][j] = -INFINITY;
          }
        }
      }
    }
  }

  // Codes are finite whatever they are, so a weight of 0 discards them; raw values may be NaN where
  // there is no token.
  template <int32_t kTiles>
  __device__ __forceinline__ void mask_values(
      int32_t tokens, LaneWords<kRawCodes, kHeadDim> (&words)[kTiles]) const {
#pragma unroll
    for (int32_t i = 0; i < kTiles; ++i) {
#pragma unroll
      for (int32_t half = 0; half < 2; ++half) {
        const int32_t left = tokens - i * kTileTokens - 8 * half - 2 * (lane() % 4);
        const uint32_t kept = left >= 2 ? 0xffffffffu : left == 1 ? 0xffffu : 0u;
#pragma unroll
        for (int32_t f = 0; f < kBlocks; ++f) {
          words[i].word[4 * f + 2 * half] &= kept;
          words[i].word[4 * f + 2 * half + 1] &= kept;
        }
      }
    }
  }

  template <CodeType kValues, int32_t kTiles>
  __device__ __forceinline__ void weigh(Step<kTiles>& s) {
    float p[kTiles][kColumnBlocks][2][kLaneColumns], weight[kTiles][kColumnBlocks][2][kLaneColumns];
    const auto look = [&] {
      float largest = 0.0f;
#pragma unroll
      for (int32_t i = 0; i < kTiles; ++i) {
#pragma unroll
        for (int32_t c = 0; c < kColumnBlocks; ++c) {
#pragma unroll
          for (int32_t r = 0; r < 2; ++r) {
#pragma unroll
            for (int32_t j = 0; j < kLaneColumns; ++j) {
              p[i][c][r][j] = exp2_fast(s.score[i][c][r][j]);
              weight[i][c][r][j] = p[i][c][r][j] * s.scale[i][r];
              largest = fmaxf(largest, weight[i][c][r][j]);
            }
          }
        }
      }
      return largest;
    };
    if (__any_sync(kFullWarp, look() > ceiling_)) {
      raise_reference(s);
      look();
    }
#pragma unroll
    for (int32_t i = 0; i < kTiles; ++i) {
#pragma unroll
      for (int32_t c = 0; c < kColumnBlocks; ++c) {
#pragma unroll
        for (int32_t r = 0; r < 2; ++r) {
#pragma unroll
          for (int32_t j = 0; j < kLaneColumns; ++j) {
            sum_[c][j] += p[i][c][r][j];
            zero_[c][j] = fmaf(p[i][c][r][j], s.zero_point[i][r], zero_[c][j]);
          }
        }
        pack_weights<kValues>(weight[i][c], i, c, s);
      }
    }
  }

 private:
  // A column that sees none of the tokens so far keeps its reference unset, and this lane its
  // ceiling.
  template <int32_t kTiles>
  __device__ __forceinline__ void raise_reference(Step<kTiles>& s) {
    const bool unset = ceiling_ == kNoTokensYet;
    ceiling_ = kCeiling;
#pragma unroll
    for (int32_t c = 0; c < kColumnBlocks; ++c) {
      float x[kLaneColumns];
      for (float& y : x) y = -INFINITY;
#pragma unroll
      for (int32_t i = 0; i < kTiles; ++i) {
#pragma unroll
        for (int32_t r = 0; r < 2; ++r) {
          const float log_scale = log2_fast(s.scale[i][r]);
#pragma unroll
          for (int32_t j = 0; j < kLaneColumns; ++j) {
            x[j] = fmaxf(x[j], s.score[i][c][r][j] + log_scale);
          }
        }
      }
#pragma unroll
      for (int32_t i = 4; i < 32; i *= 2) {
        for (float& y : x) y = fmaxf(y, __shfl_xor_sync(kFullWarp, y, i));
      }
#pragma unroll
      for (int32_t j = 0; j < kLaneColumns; ++j) {
        const bool first = kIsPlain ? unset : float_bits(reference_[c][j]) == kUnsetReference;
        if (!kIsPlain && x[j] == -INFINITY) {
          if (first) ceiling_ = kNoTokensYet;
          continue;
        }
        const float by = first ? x[j] - kHeadroom : fmaxf(x[j] - kHeadroom, 0.0f);
        reference_[c][j] = first ? by + 0.0f : reference_[c][j] + by;
        if (!first) scale_column(c, j, exp2_fast(-by));  // otherwise its sums are 0
#pragma unroll
        for (int32_t i = 0; i < kTiles; ++i) {
          s.score[i][c][0][j] -= by;
          s.score[i][c][1][j] -= by;
        }
      }
    }
  }

  __device__ __forceinline__ void scale_column(int32_t block, int32_t j, float factor) {
    sum_[block][j] *= factor;
    zero_[block][j] *= factor;
#pragma unroll
    for (int32_t f = 0; f < kBlocks; ++f) {
#pragma unroll
      for (int32_t i = 0; i < 4; ++i) {
        if (kIsNarrow || i % 2 == j) out_[block][f][i] *= factor;
      }
    }
  }

  // A tile's weights as B fragments: the tokens of a lane's accumulators become rows of B.
  template <CodeType kValues, int32_t kTiles>
  __device__ __forceinline__ void pack_weights(const float (&weight)[2][kLaneColumns], int32_t i,
                                               int32_t c, Step<kTiles>& s) const {
    if constexpr (kIsNarrow) {
      // B's column 2t of tokens 0 to 7, its column 2t + 1 of tokens 8 to 15.
      const uint32_t both = transpose_8x8(pack_halves(weight[0][0], weight[1][0]));
      const uint32_t upper = lane() / 4 % 2 == 0 ? 0u : ~0u;
      s.weight[i][c][0] = both & ~upper;
      s.weight[i][c][1] = both & upper;
    } else {
#pragma unroll
      for (int32_t r = 0; r < 2; ++r) {
        const float(&x)[2] = weight[r];
        if (kValues.is_raw() && kIsBFloat16) {
          const uint32_t pair = pack_bfloats(x[0], x[1]);
          const float2 kept = unpack_bfloats(pair);
          s.weight[i][c][r] = transpose_8x8(pair);
          s.weight_rest[i][c][r] = transpose_8x8(pack_bfloats(x[0] - kept.x, x[1] - kept.y));
        } else {
          s.weight[i][c][r] = transpose_8x8(pack_halves(x[0], x[1]));
        }
      }
    }
  }
};

}  // namespace tierkv
