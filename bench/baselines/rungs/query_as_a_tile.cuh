// SPDX-License-Identifier: Apache-2.0
// What a warp of rung 2 computes of a tile, on tensor cores: the scores of its tokens and the
// products of its 32 dims. The q heads of the group are the rows of operand A, padded to 16; keys
// and values are operand B, dequantised to fp16 in registers (mask, exponent of 1024 or'ed in, two
// fma). A's fragment order for 16 tokens is also B's for twice 8, so our pages serve both.
#pragma once

#include "attention/tiers/page_tile.cuh"
#include "bench/baselines/rungs/query_as_a.h"
#include "gpu/math.cuh"
#include "gpu/mma.cuh"

namespace tierkv {

inline constexpr int32_t kCoopBlocks = kRungHeadDim / kDimBlock;
inline constexpr int32_t kCoopWarpTiles = kCoopWarpDims / 8;  // columns of the output, 8 a tile

// Codes of LaneWords::pair(), which are code * 2^shift in the low bits, as fp16 values scale * code
// + zero_point.
__device__ __forceinline__ uint32_t dequantise(uint32_t codes, int32_t shift, uint32_t scale,
                                               uint32_t zero_point) {
  const float unit = 1.0f / static_cast<float>(1 << shift);
  const uint32_t exact = fma_halves(codes | 0x64006400u, pack_halves(unit, unit),
                                    pack_halves(-1024.0f * unit, -1024.0f * unit));
  return fma_halves(exact, scale, zero_point);
}

// Where the segments of a chunk are in its slot.
template <CodeType kKeys, CodeType kValues>
struct CoopSegments {
  static constexpr int32_t kKeyBytes = TileLayout{kKeys, kRungHeadDim}.bytes();
  static constexpr int32_t kValueBytes = TileLayout{kValues, kRungHeadDim}.bytes();
  const uint8_t *k_codes, *k_metadata, *v_codes, *v_metadata;

  __device__ __forceinline__ CoopSegments(const uint8_t* slot, int32_t tiles)
      : k_codes(slot),
        k_metadata(slot + tiles * kKeyBytes),
        v_codes(k_metadata + (kKeys.is_raw() ? 0 : tiles * kMetadataBlockBytes)),
        v_metadata(v_codes + tiles * kValueBytes) {}
};

// The queries of a row. g = lane / 4 and t = lane % 4, as everywhere here.
struct CoopQuery {
  uint32_t a[kCoopBlocks][2];  // A fragments: rows g, the other eight are 0

  __device__ __forceinline__ void load(const RungParams& p, int32_t row, int32_t lane) {
    const int32_t g = lane / 4, t = lane % 4;
    const auto* q = static_cast<const __half*>(p.q) +
                    (static_cast<int64_t>(row) * p.group + g) * kRungHeadDim + 2 * t;
#pragma unroll
    for (int32_t f = 0; f < kCoopBlocks; ++f) {
#pragma unroll
      for (int32_t half = 0; half < 2; ++half) {
        const __half* from = q + f * kDimBlock + 8 * half;
        a[f][half] = g < p.group ? *reinterpret_cast<const uint32_t*>(from) : 0u;
      }
    }
  }

  // S = Q K^T of a tile, in log2 units; -infinity from `tokens` on. scores[half]: of row g, tokens
  // 8 half + 2t and 2t + 1.
  template <CodeType kType>
  __device__ __forceinline__ void score(const uint8_t* codes, const uint8_t* metadata,
                                        int32_t tokens, float scale_log2, int32_t lane,
                                        float (&scores)[2][2]) const {
    LaneWords<kType, kRungHeadDim> words;
    words.load(codes, lane);
    uint2 tokens_metadata{};  // scale and zero point of tokens g and g + 8
    if constexpr (kType.has_params()) {
      tokens_metadata =
          *reinterpret_cast<const uint2*>(metadata + token_metadata_byte(0, lane / 4));
    }
#pragma unroll
    for (int32_t half = 0; half < 2; ++half) {
      const uint32_t x = half == 0 ? tokens_metadata.x : tokens_metadata.y;
      const uint32_t scale = low_halves(x, x), zero_point = high_halves(x, x);
      float product[4] = {};
#pragma unroll
      for (int32_t f = 0; f < kCoopBlocks; ++f) {
        uint32_t b[2];
#pragma unroll
        for (int32_t dims = 0; dims < 2; ++dims) {
          if constexpr (kType.is_raw()) {
            b[dims] = words.word[4 * f + half + 2 * dims];
          } else {
            b[dims] = dequantise(words.pair(f, half, dims),
                                 code_shift(kType.bits(), 16 * f + 8 * dims), scale, zero_point);
          }
        }
        const uint32_t rows[4] = {a[f][0], 0u, a[f][1], 0u};
        mma_m16n8k16(product, rows, b[0], b[1]);
      }
#pragma unroll
      for (int32_t j = 0; j < 2; ++j) {
        const bool counts = 8 * half + 2 * (lane % 4) + j < tokens;
        scores[half][j] = counts ? product[j] * scale_log2 : -INFINITY;
      }
    }
  }
};

// The words of a tile that hold the dims of a warp.
template <CodeType kType>
__device__ __forceinline__ void load_warp_words(const uint8_t* tile, int32_t warp, int32_t lane,
                                                LaneWords<kType, kCoopWarpDims>& words) {
  constexpr int32_t kTileWords = TileLayout{kType, kRungHeadDim}.words_per_lane();
  constexpr int32_t kWords = LaneWords<kType, kCoopWarpDims>::kCount;
#pragma unroll
  for (int32_t w = 0; w < kWords; w += 4) {
    const uint8_t* from = tile + lane_word_byte(kTileWords, warp * kWords + w, lane);
    if constexpr (kWords >= 4) {
      const auto x = *reinterpret_cast<const uint4*>(from);
      words.word[w] = x.x, words.word[w + 1] = x.y;
      words.word[w + 2] = x.z, words.word[w + 3] = x.w;
    } else if constexpr (kWords == 2) {
      const auto x = *reinterpret_cast<const uint2*>(from);
      words.word[0] = x.x, words.word[1] = x.y;
    } else {
      words.word[0] = *reinterpret_cast<const uint32_t*>(from);
    }
  }
}

// O of a row's heads in the dims of one warp.
struct CoopOutput {
  float tile[kCoopWarpTiles][4] = {};  // C fragments: row g, dims 2t and 2t + 1 of 8

  __device__ __forceinline__ void rescale(float factor) {
#pragma unroll
    for (int32_t n = 0; n < kCoopWarpTiles; ++n) {
      tile[n][0] *= factor;
      tile[n][1] *= factor;
    }
  }

  // O += P V of one tile, the 32 dims of warp `warp`. Tokens from `tokens` on may be NaN: they
  // count as 0.
  template <CodeType kType>
  __device__ __forceinline__ void add(const uint8_t* codes, const uint8_t* metadata, int32_t tokens,
                                      const uint32_t (&weights)[2], int32_t warp, int32_t lane) {
    LaneWords<kType, kCoopWarpDims> words;  // those of the warp's dims
    load_warp_words(codes, warp, lane, words);
    uint4 x{};  // scale and zero point of tokens 2t, 2t + 8, 2t + 1, 2t + 9
    if constexpr (kType.has_params()) {
      x = *reinterpret_cast<const uint4*>(metadata + token_metadata_byte(0, 2 * (lane % 4)));
    }
    uint32_t scale[2] = {low_halves(x.x, x.z), low_halves(x.y, x.w)};
    uint32_t zero_point[2] = {high_halves(x.x, x.z), high_halves(x.y, x.w)};
    uint32_t kept[2] = {0xffffffffu, 0xffffffffu};
    if (tokens < kTileTokens) {
#pragma unroll
      for (int32_t half = 0; half < 2; ++half) {
        const int32_t left = tokens - 8 * half - 2 * (lane % 4);
        kept[half] = left >= 2 ? 0xffffffffu : left == 1 ? 0xffffu : 0u;
        scale[half] &= kept[half];
        zero_point[half] &= kept[half];
      }
    }
    const uint32_t a[4] = {weights[0], 0u, weights[1], 0u};
#pragma unroll
    for (int32_t n = 0; n < kCoopWarpTiles; ++n) {
      uint32_t b[2];
#pragma unroll
      for (int32_t half = 0; half < 2; ++half) {
        if constexpr (kType.is_raw()) {
          b[half] = words.word[4 * (n / 2) + n % 2 + 2 * half] & kept[half];
        } else {
          b[half] = dequantise(words.pair(n / 2, half, n % 2), code_shift(kType.bits(), 8 * n),
                               scale[half], zero_point[half]);
        }
      }
      mma_m16n8k16(tile[n], a, b[0], b[1]);
    }
  }
};

}  // namespace tierkv
