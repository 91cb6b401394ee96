// The softmax of WarpAttention: which tokens count, their weights, and the reference that they are
// relative to.
#pragma once

#include "attention/warp_attention.cuh"

namespace tierkv {

// Tokens from `tokens` on weigh nothing, whatever their bytes are.
template <int32_t kHeadDim, int32_t kColumnBlocks, DecodeMode kMode>
template <int32_t kTiles>
__device__ __forceinline__ void WarpAttention<kHeadDim, kColumnBlocks, kMode>::mask_scores(
    int32_t tokens, Step<kTiles>& s) const {
#pragma unroll
  for (int32_t i = 0; i < kTiles; ++i) {
#pragma unroll
    for (int32_t r = 0; r < 2; ++r) {
      if (lane() / 4 + 8 * r + i * kTileTokens < tokens) continue;
#pragma unroll
      for (int32_t c = 0; c < kColumnBlocks; ++c) {
        s.score[i][c][2 * r] = s.score[i][c][2 * r + 1] = -INFINITY;
      }
      s.scale[i][r] = 1.0f;
      s.zero_point[i][r] = 0.0f;
    }
  }
}

// Tokens of a step, which begins with the chunk's token `first`, that a query is older than.
template <int32_t kHeadDim, int32_t kColumnBlocks, DecodeMode kMode>
template <int32_t kTiles>
__device__ __forceinline__ void WarpAttention<kHeadDim, kColumnBlocks, kMode>::mask_newest(
    const ChunkTokens& chunk, int32_t first, Step<kTiles>& s) const {
  const TailOrder tail = chunk.place->tail;
#pragma unroll
  for (int32_t c = 0; c < kColumnBlocks; ++c) {
#pragma unroll
    for (int32_t j = 0; j < 2; ++j) {
      const int32_t column = kBlockColumns * c + 2 * (lane() % 4) + j;
      const int32_t hidden = columns_.hidden(chunk.row, column);
#pragma unroll
      for (int32_t i = 0; i < kTiles; ++i) {
#pragma unroll
        for (int32_t r = 0; r < 2; ++r) {
          const int32_t token = first + lane() / 4 + 8 * r + i * kTileTokens;
          if (tail.age(token) < hidden) s.score[i][c][2 * r + j] = -INFINITY;
        }
      }
    }
  }
}

// Codes are finite whatever they are, so a weight of 0 discards them; raw values may be NaN where
// there is no token.
template <int32_t kHeadDim, int32_t kColumnBlocks, DecodeMode kMode>
template <int32_t kTiles>
__device__ __forceinline__ void WarpAttention<kHeadDim, kColumnBlocks, kMode>::mask_values(
    int32_t tokens, LaneWords<16, kHeadDim> (&words)[kTiles]) const {
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

// A column that sees none of the tokens so far keeps its reference unset, and this lane its
// ceiling.
template <int32_t kHeadDim, int32_t kColumnBlocks, DecodeMode kMode>
template <int32_t kTiles>
__device__ __forceinline__ void WarpAttention<kHeadDim, kColumnBlocks, kMode>::raise_reference(
    Step<kTiles>& s) {
  const bool unset = ceiling_ == kNoTokensYet;
  ceiling_ = kCeiling;
#pragma unroll
  for (int32_t c = 0; c < kColumnBlocks; ++c) {
    float x[2] = {-INFINITY, -INFINITY};
#pragma unroll
    for (int32_t i = 0; i < kTiles; ++i) {
#pragma unroll
      for (int32_t r = 0; r < 2; ++r) {
        const float log_scale = log2_fast(s.scale[i][r]);
        x[0] = fmaxf(x[0], s.score[i][c][2 * r] + log_scale);
        x[1] = fmaxf(x[1], s.score[i][c][2 * r + 1] + log_scale);
      }
    }
#pragma unroll
    for (int32_t i = 4; i < 32; i *= 2) {
      x[0] = fmaxf(x[0], __shfl_xor_sync(kFullWarp, x[0], i));
      x[1] = fmaxf(x[1], __shfl_xor_sync(kFullWarp, x[1], i));
    }
#pragma unroll
    for (int32_t j = 0; j < 2; ++j) {
      const bool first = kIsPlain ? unset : float_bits(reference_[c][j]) == kUnsetReference;
      if (!kIsPlain && x[j] == -INFINITY) {
        if (first) ceiling_ = kNoTokensYet;
        continue;
      }
      // While a column has seen nothing its sums are 0 and need no factor.
      const float by = first ? x[j] - kHeadroom : fmaxf(x[j] - kHeadroom, 0.0f);
      const float factor = first ? 1.0f : exp2_fast(-by);
      reference_[c][j] = first ? by + 0.0f : reference_[c][j] + by;
      sum_[c][j] *= factor;
      zero_[c][j] *= factor;
#pragma unroll
      for (int32_t f = 0; f < kBlocks; ++f) {
        out_[c][f][j] *= factor;
        out_[c][f][2 + j] *= factor;
      }
#pragma unroll
      for (int32_t i = 0; i < kTiles; ++i) {
        s.score[i][c][j] -= by;
        s.score[i][c][2 + j] -= by;
      }
    }
  }
}

template <int32_t kHeadDim, int32_t kColumnBlocks, DecodeMode kMode>
template <int32_t kValueBits, int32_t kTiles>
__device__ __forceinline__ void WarpAttention<kHeadDim, kColumnBlocks, kMode>::weigh(
    Step<kTiles>& s) {
  float p[kTiles][kColumnBlocks][4], weight[kTiles][kColumnBlocks][4];
  const auto look = [&] {
    float largest = 0.0f;
#pragma unroll
    for (int32_t i = 0; i < kTiles; ++i) {
#pragma unroll
      for (int32_t c = 0; c < kColumnBlocks; ++c) {
#pragma unroll
        for (int32_t j = 0; j < 4; ++j) {
          p[i][c][j] = exp2_fast(s.score[i][c][j]);
          weight[i][c][j] = p[i][c][j] * s.scale[i][j / 2];
          largest = fmaxf(largest, weight[i][c][j]);
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
        for (int32_t j = 0; j < 2; ++j) {
          sum_[c][j] += p[i][c][2 * r + j];
          zero_[c][j] = fmaf(p[i][c][2 * r + j], s.zero_point[i][r], zero_[c][j]);
        }
        const float x[2] = {weight[i][c][2 * r], weight[i][c][2 * r + 1]};
        if (kValueBits == 16 && kIsBFloat16) {
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
}

// Of the step that begins with the chunk's token `first`.
template <int32_t kHeadDim, int32_t kColumnBlocks, DecodeMode kMode>
__device__ __forceinline__ ScorePlace WarpAttention<kHeadDim, kColumnBlocks, kMode>::place_scores(
    const ChunkTokens& chunk, int32_t first) const {
  const int32_t g = lane() / 4, t = lane() % 4, columns = scores_.columns;
  const int32_t first_tile = chunk.place->tile + first / kTileTokens;
  const int64_t tile = scores_.tile(chunk.row, first_tile);
  ScorePlace place;
  place.codes = scores_.code(tile, g, 2 * t);
  place.references = scores_.tile_references(tile + g) + 2 * t;
  place.tiles = 2 * t < columns ? min((chunk.tokens - first + kTileTokens - 1) / kTileTokens,
                                      scores_.stride_tiles - first_tile)
                                : 0;
  return place;
}

// The scores of a step to its place, which becomes that of the next one; after weigh(), whose
// reference they are relative to.
template <int32_t kHeadDim, int32_t kColumnBlocks, DecodeMode kMode>
template <int32_t kTiles>
__device__ __forceinline__ void WarpAttention<kHeadDim, kColumnBlocks, kMode>::leave_scores(
    const Step<kTiles>& s, ScorePlace& place) const {
  const int32_t g = lane() / 4, t = lane() % 4, columns = scores_.columns;
#pragma unroll
  for (int32_t c = 0; c < kColumnBlocks; ++c) {
    if (c > 0 && kBlockColumns * c + 2 * t >= columns) continue;
#pragma unroll
    for (int32_t i = 0; i < kTiles; ++i) {
      if (i >= place.tiles) continue;
      const float(&x)[4] = s.score[i][c];
      *reinterpret_cast<uint2*>(place.codes + i * kTileTokens * columns + 2 * kBlockColumns * c) =
          uint2{score_code_pair(x[0], x[1]), score_code_pair(x[2], x[3])};
    }
    if (g < kTiles && g < place.tiles) {
      *reinterpret_cast<float2*>(place.references + kBlockColumns * c) =
          float2{reference_[c][0], reference_[c][1]};
    }
  }
  place.codes += kTiles * kTileTokens * columns;
  place.references += kTiles * reference_columns(columns);
  place.tiles -= kTiles;
}

}  // namespace tierkv
