// SPDX-License-Identifier: Apache-2.0
// One warp's attention over tiles of one row at a time: one or two blocks of 8 query columns
// (attention/core/columns.h), any formats.
//
// Orientation: S^T = K Q^T and O^T = V^T P^T, keys and values as the A operand, queries as the 8
// columns of B, so 8 columns cost one pass, 16 one pass with the codes unpacked once, and unpacked
// codes are used where they lie. Lane 4g + t holds, of an accumulator, rows g and g + 8 and columns
// 2t and 2t + 1 of a block. In a narrow row, which has four columns, column t is B's 2t, and
// 2t + 1 is empty: a lane then has one column's scores in place of two columns' of which half mean
// nothing, and in O^T column 2t has tokens 0 to 7 of every tile, 2t + 1 tokens 8 to 15.
//
// Quantised keys: q . k = scale * (q . code) + zero_point * (sum of q); the code factors are folded
// into q. Quantised values: sum p v = sum (p * scale) code + sum p * zero_point; p * scale goes
// through fp16 to the tensor cores. So the running reference of the softmax is the maximum of score
// + log2(scale), not of score: the largest weight p * scale lies between 2^kHeadroom and 2^kCeiling
// whatever the scale of the values, weights down to 2^-22 of it keep all 11 bits, and p itself (at
// most 2^(24 + kCeiling)) and its sums stay far inside fp32.
//
// The reference moves only when a weight would pass 2^kCeiling (FlashAttention-4's lazy rescaling),
// which is rare: the weights are computed first and looked at afterwards.
#pragma once

#include "attention/tiers/warp_softmax.cuh"

namespace tierkv {

inline constexpr float kLeastScale = 0x1p-24f;  // of fp16; also stands for a scale of 0

// Tiles of a step: two, for more independent work, where there are registers for them.
__device__ constexpr int32_t step_tiles(CodeType k, CodeType v, int32_t head_dim, bool has_room) {
  const CodeType widest = k.bits() > v.bits() ? k : v;
  return has_room && TileLayout{widest, head_dim}.words_per_lane() <= 16 ? 2 : 1;
}

// Which tile of a step, of whose chunk `tokens` are left, is read as tile i. Behind a chunk of an
// odd number of tiles a copy may be filling the next slot: its last tile is read twice, and masked.
__device__ constexpr int32_t tile_to_read(int32_t i, int32_t tokens) {
  return tokens > i * kTileTokens ? i : 0;
}

template <int32_t kHeadDim, int32_t kColumnBlocks, DecodeMode kMode>
class WarpAttention : public WarpSoftmax<kHeadDim, kColumnBlocks, kMode> {
  using Base = WarpSoftmax<kHeadDim, kColumnBlocks, kMode>;
  using Base::kBlocks, Base::kIsPlain, Base::kIsBFloat16, Base::kLaneColumns;
  using Base::lane, Base::k_type_, Base::v_type_, Base::score_unit_;
  using Base::out_, Base::query_, Base::query_sum_, Base::reference_;

 public:
  using Base::Base;

  // The tokens of a chunk, in the format used last.
  __device__ __forceinline__ void attend(const ChunkTokens& chunk) {
    if (k_type_ == kCodes4) return attend_keys<kCodes4>(chunk);
    if (k_type_ == kCodes8) return attend_keys<kCodes8>(chunk);
    if (k_type_ == kCodes2) return attend_keys<kCodes2>(chunk);
    return attend_keys<kRawCodes>(chunk);
  }

 private:
  // For a second tile in a step: of 256 dims, or of 128 in two blocks, accumulators take most.
  static constexpr bool kHasRoom = kIsPlain || kColumnBlocks * kHeadDim <= 128;
  template <int32_t kTiles>
  using Step = typename Base::template Step<kTiles>;

  // Formats of classes are few: AttentionConfig::validate().
  __device__ static constexpr bool has_pair(CodeType k, CodeType v) {
    return classes_of(kMode) == 1 || (k.is_raw() == v.is_raw() && v.bits() <= k.bits());
  }

  template <CodeType kKeys>
  __device__ __forceinline__ void attend_keys(const ChunkTokens& chunk) {
    if constexpr (has_pair(kKeys, kCodes4)) {
      if (v_type_ == kCodes4) return attend_tiles<kKeys, kCodes4>(chunk);
    }
    if constexpr (has_pair(kKeys, kCodes2)) {
      if (v_type_ == kCodes2) return attend_tiles<kKeys, kCodes2>(chunk);
    }
    if constexpr (has_pair(kKeys, kCodes8)) {
      if (v_type_ == kCodes8) return attend_tiles<kKeys, kCodes8>(chunk);
    }
    if constexpr (has_pair(kKeys, kRawCodes)) return attend_tiles<kKeys, kRawCodes>(chunk);
  }

  template <CodeType kKeys, CodeType kValues>
  __device__ __forceinline__ void attend_tiles(const ChunkTokens& chunk) {
    constexpr int32_t kTiles = step_tiles(kKeys, kValues, kHeadDim, kHasRoom);
    constexpr int32_t kStepTokens = kTiles * kTileTokens;
    constexpr int32_t kKeyBytes = TileLayout{kKeys, kHeadDim}.bytes();
    constexpr int32_t kValueBytes = TileLayout{kValues, kHeadDim}.bytes();
    constexpr int32_t kKeyMetadata = kKeys.has_params() ? kMetadataBlockBytes : 0;
    constexpr int32_t kValueMetadata = kValues.has_params() ? kMetadataBlockBytes : 0;
    // Otherwise a tile behind the keys lies in the chunk, whatever its tiles.
    constexpr bool kKeysMayPass = kKeyBytes > kKeyMetadata + kValueBytes + kValueMetadata;
    const uint8_t* k_codes = chunk.bytes;
    const uint8_t* k_metadata = k_codes + chunk.tiles * kKeyBytes;
    const uint8_t* v_codes = k_metadata + chunk.tiles * kKeyMetadata;
    const uint8_t* v_metadata = v_codes + chunk.tiles * kValueBytes;
    const bool is_tail = !kIsPlain && chunk.place->tail.newest != kNoTail;
    const int32_t masked_below = is_tail ? kNoTail : kStepTokens;
#pragma unroll 1
    for (int32_t tokens = chunk.tokens; tokens > 0; tokens -= kStepTokens) {
      float products[kTiles][kColumnBlocks][4];
      Step<kTiles> s;
      LaneWords<kValues, kHeadDim> values[kTiles];
      multiply_keys<kKeys>(kKeysMayPass ? tokens : kStepTokens, k_codes, products);
      scale_products<kKeys>(k_metadata, products, s);
      load_values(tokens, v_codes, v_metadata, values, s);
      if (tokens < masked_below) {
        Base::mask_scores(tokens, s);
        if constexpr (kValues.is_raw()) Base::mask_values(tokens, values);
        if (is_tail) Base::mask_newest(chunk, chunk.tokens - tokens, s);
      }
      Base::template weigh<kValues>(s);
      add_values(values, s);
      k_codes += kTiles * kKeyBytes;
      k_metadata += kTiles * kKeyMetadata;
      v_codes += kTiles * kValueBytes;
      v_metadata += kTiles * kValueMetadata;
    }
  }

  // Two chains of mma a tile: their latency is most of a step's.
  template <CodeType kType, int32_t kTiles>
  __device__ __forceinline__ void multiply_keys(int32_t tokens, const uint8_t* codes,
                                                float (&products)[kTiles][kColumnBlocks][4]) const {
    LaneWords<kType, kHeadDim> words[kTiles];
    float odd[kTiles][kColumnBlocks][4];
#pragma unroll
    for (int32_t i = 0; i < kTiles; ++i) {
      words[i].load(codes + tile_to_read(i, tokens) * TileLayout{kType, kHeadDim}.bytes(), lane());
#pragma unroll
      for (int32_t c = 0; c < kColumnBlocks; ++c) {
#pragma unroll
        for (int32_t j = 0; j < 4; ++j) products[i][c][j] = odd[i][c][j] = 0.0f;
      }
    }
#pragma unroll
    for (int32_t f = 0; f < kBlocks; ++f) {
#pragma unroll
      for (int32_t i = 0; i < kTiles; ++i) {
        uint32_t a[4];
        words[i].template fragment<Component::kKey>(f, a);
#pragma unroll
        for (int32_t c = 0; c < kColumnBlocks; ++c) {
          float(&sums)[4] = f % 2 == 0 ? products[i][c] : odd[i][c];
          Base::template multiply<kType>(sums, a, query_[c][f][0], query_[c][f][1]);
        }
      }
    }
#pragma unroll
    for (int32_t i = 0; i < kTiles; ++i) {
#pragma unroll
      for (int32_t c = 0; c < kColumnBlocks; ++c) {
#pragma unroll
        for (int32_t j = 0; j < 4; ++j) products[i][c][j] += odd[i][c][j];
      }
    }
  }

  // Scores in log2 units less the reference.
  template <CodeType kType, int32_t kTiles>
  __device__ __forceinline__ void scale_products(const uint8_t* metadata,
                                                 const float (&products)[kTiles][kColumnBlocks][4],
                                                 Step<kTiles>& s) const {
#pragma unroll
    for (int32_t i = 0; i < kTiles; ++i) {
      TileMetadata k;
      k.set(1.0f, 0.0f);
      if constexpr (kType.has_params()) k.load(metadata + i * kMetadataBlockBytes, lane());
#pragma unroll
      for (int32_t r = 0; r < 2; ++r) {
        const float scale = k.scale[r] * score_unit_;
#pragma unroll
        for (int32_t c = 0; c < kColumnBlocks; ++c) {
#pragma unroll
          for (int32_t j = 0; j < kLaneColumns; ++j) {
            const float offset = fmaf(k.zero_point[r], query_sum_[c][j], -reference_[c][j]);
            s.score[i][c][r][j] = fmaf(products[i][c][2 * r + j], scale, offset);
          }
        }
      }
    }
  }

  template <CodeType kType, int32_t kTiles>
  __device__ __forceinline__ void load_values(int32_t tokens, const uint8_t* codes,
                                              const uint8_t* metadata,
                                              LaneWords<kType, kHeadDim> (&words)[kTiles],
                                              Step<kTiles>& s) const {
#pragma unroll
    for (int32_t i = 0; i < kTiles; ++i) {
      const int32_t tile = tile_to_read(i, tokens);
      TileMetadata v;
      v.set(1.0f, 0.0f);
      if constexpr (kType.has_params()) v.load(metadata + tile * kMetadataBlockBytes, lane());
#pragma unroll
      for (int32_t r = 0; r < 2; ++r) {
        s.scale[i][r] = kType.is_raw() ? 1.0f : fmaxf(v.scale[r], kLeastScale);
        s.zero_point[i][r] = v.zero_point[r];
      }
      words[i].load(codes + tile * TileLayout{kType, kHeadDim}.bytes(), lane());
    }
  }

  template <CodeType kType, int32_t kTiles>
  __device__ __forceinline__ void add_values(const LaneWords<kType, kHeadDim> (&words)[kTiles],
                                             const Step<kTiles>& s) {
#pragma unroll
    for (int32_t i = 0; i < kTiles; ++i) {
#pragma unroll
      for (int32_t f = 0; f < kBlocks; ++f) {
        uint32_t a[4];
        words[i].template fragment<Component::kValue>(f, a);
#pragma unroll
        for (int32_t c = 0; c < kColumnBlocks; ++c) {
          Base::template multiply<kType>(out_[c][f], a, s.weight[i][c][0], s.weight[i][c][1]);
          if (kType.is_raw() && kIsBFloat16) {
            Base::template multiply<kType>(out_[c][f], a, s.weight_rest[i][c][0],
                                           s.weight_rest[i][c][1]);
          }
        }
      }
    }
  }
};

}  // namespace tierkv
