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

#include "attention/core/columns.h"
#include "attention/core/online_softmax.h"
#include "attention/tiers/chunk_feed.cuh"
#include "attention/tiers/page_tile.cuh"
#include "gpu/mma.cuh"

namespace tierkv {

inline constexpr float kHeadroom = 8.0f;
inline constexpr float kCeiling = 0x1p14f;      // times (1 + rounding) below 65504
inline constexpr float kLeastScale = 0x1p-24f;  // of fp16; also stands for a scale of 0
inline constexpr float kNoTokensYet = -1.0f;    // a ceiling that every weight passes
// The reference of a column that has seen no token: a sum never has this sign of zero.
inline constexpr uint32_t kUnsetReference = 0x80000000u;

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

// Tokens of a chunk in shared memory.
struct ChunkTokens {
  const uint8_t* bytes;
  int32_t tiles;
  int32_t tokens;           // 1 to 16 * tiles; whatever lies behind them, up to a tile, is ignored
  int32_t row;              // of the launch
  const ChunkPlace* place;  // null: a plain kernel's
};

// A plain one has one query.
template <int32_t kHeadDim, int32_t kColumnBlocks, DecodeMode kMode>
class WarpAttention {
 public:
  static constexpr int32_t kBlocks = kHeadDim / kDimBlock;
  static constexpr bool kIsPlain = is_plain(kMode);
  static constexpr bool kIsNarrow = of_one_class(kMode) == DecodeMode::kNarrow;
  static constexpr int32_t kLaneColumns = kIsNarrow ? 1 : 2;  // of a block, whose scores it has
  // For a second tile in a step: of 256 dims, or of 128 in two blocks, accumulators take most.
  static constexpr bool kHasRoom = kIsPlain || kColumnBlocks * kHeadDim <= 128;
  static constexpr bool kIsBFloat16 = of_one_class(kMode) == DecodeMode::kBFloat16;

  __device__ __forceinline__ explicit WarpAttention(const QueryColumns& columns)
      : columns_(columns) {}

  __device__ __forceinline__ void start_row() {
#pragma unroll
    for (int32_t c = 0; c < kColumnBlocks; ++c) {
#pragma unroll
      for (int32_t f = 0; f < kBlocks; ++f) {
#pragma unroll
        for (int32_t i = 0; i < 4; ++i) out_[c][f][i] = 0.0f;
      }
#pragma unroll
      for (int32_t j = 0; j < kLaneColumns; ++j) {
        reference_[c][j] = -0.0f;  // kUnsetReference
        sum_[c][j] = zero_[c][j] = 0.0f;
      }
    }
    ceiling_ = kNoTokensYet;
    k_type_ = v_type_ = kNoType;
  }

  // The queries of a row, and their sums; before use_format(). q is that of the launch. Between the
  // two the state of the row before may still be stored or written.
  __device__ __forceinline__ void fetch_query(const uint16_t* q, int32_t row);
  __device__ __forceinline__ void sum_query(float scale_log2);

  // Before tiles of a format.
  __device__ __forceinline__ void use_format(CodeType k, CodeType v, float scale_log2) {
    if (k != k_type_) scale_query(k_type_, k, scale_log2);
    if (v != v_type_ && v_type_ != kNoType) convert_out(v_type_, v);
    k_type_ = k;
    v_type_ = v;
  }

  // The tokens of a chunk, in the format used last.
  __device__ __forceinline__ void attend(const ChunkTokens& chunk) {
    if (k_type_ == kCodes4) return attend_keys<kCodes4>(chunk);
    if (k_type_ == kCodes8) return attend_keys<kCodes8>(chunk);
    if (k_type_ == kCodes2) return attend_keys<kCodes2>(chunk);
    return attend_keys<kRawCodes>(chunk);
  }

  // The states and accumulators of the row's columns, to shared memory: states[of_row],
  // part[of_row][kHeadDim], swizzled. The part of an empty state may be anything.
  __device__ __forceinline__ void store_part(SoftmaxState* states, float* part);

  // The finished row to global memory: out, lse and sinks are those of the launch, lse and sinks
  // may be null; a plain kernel has no sinks.
  __device__ __forceinline__ void write_row(uint16_t* out, float* lse, const float* sinks,
                                            int32_t row);

 private:
  template <int32_t kTiles>
  struct Step {
    float score[kTiles][kColumnBlocks][2][kLaneColumns];  // of tokens g and g + 8
    float scale[kTiles][2];                               // of the values
    float zero_point[kTiles][2];
    uint32_t weight[kTiles][kColumnBlocks][2];  // B fragments
    // What bfloat16 loses of the weights: raw values of bfloat16 are multiplied by both.
    uint32_t weight_rest[kTiles][kColumnBlocks][2];
  };

  __device__ __forceinline__ static int32_t lane() {
    return threadIdx.x % 32;
  }

  // Formats of classes are few: AttentionConfig::validate().
  __device__ static constexpr bool has_pair(CodeType k, CodeType v) {
    return !has_classes(kMode) || (k.is_raw() == v.is_raw() && v.bits() <= k.bits());
  }

  // The column of the row that is B's column lane / 4 of a block; one beyond all rows' for none.
  __device__ __forceinline__ static int32_t query_column(int32_t block) {
    const int32_t g = lane() / 4;
    if (kIsNarrow) return g % 2 == 0 ? g / 2 : kMaxColumns;
    return kBlockColumns * block + g;
  }
  // The lane's own: those whose scores it has.
  __device__ __forceinline__ static int32_t own_column(int32_t block, int32_t j) {
    return kIsNarrow ? lane() % 4 : kBlockColumns * block + 2 * (lane() % 4) + j;
  }
  __device__ __forceinline__ float own_out(int32_t block, int32_t f, int32_t half,
                                           int32_t j) const {
    const float(&x)[4] = out_[block][f];
    return kIsNarrow ? x[2 * half] + x[2 * half + 1] : x[2 * half + j];
  }

  // Codes and their operands are fp16; raw components what the launch says.
  template <CodeType kType>
  __device__ __forceinline__ void multiply(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                           uint32_t b1) const {
    if (kType.is_raw() && kIsBFloat16) {
      mma_m16n8k16_bf16(d, a, b0, b1);
    } else {
      mma_m16n8k16(d, a, b0, b1);
    }
  }

  __device__ __forceinline__ void convert_query(CodeType from, CodeType to, float scale_log2);
  __device__ __forceinline__ float query_unit() const;
  __device__ __forceinline__ void scale_query(CodeType from, CodeType to, float scale_log2);
  __device__ __forceinline__ void convert_out(CodeType from, CodeType to);
  template <CodeType kKeys>
  __device__ __forceinline__ void attend_keys(const ChunkTokens& chunk);
  template <CodeType kKeys, CodeType kValues>
  __device__ __forceinline__ void attend_tiles(const ChunkTokens& chunk);
  template <CodeType kType, int32_t kTiles>
  __device__ __forceinline__ void multiply_keys(int32_t tokens, const uint8_t* codes,
                                                float (&products)[kTiles][kColumnBlocks][4]) const;
  template <CodeType kType, int32_t kTiles>
  __device__ __forceinline__ void scale_products(const uint8_t* metadata,
                                                 const float (&products)[kTiles][kColumnBlocks][4],
                                                 Step<kTiles>& s) const;
  template <CodeType kType, int32_t kTiles>
  __device__ __forceinline__ void load_values(int32_t tokens, const uint8_t* codes,
                                              const uint8_t* metadata,
                                              LaneWords<kType, kHeadDim> (&words)[kTiles],
                                              Step<kTiles>& s) const;
  template <int32_t kTiles>
  __device__ __forceinline__ void mask_scores(int32_t tokens, Step<kTiles>& s) const;
  template <int32_t kTiles>
  __device__ __forceinline__ void mask_newest(const ChunkTokens& chunk, int32_t first,
                                              Step<kTiles>& s) const;
  template <int32_t kTiles>
  __device__ __forceinline__ void mask_values(
      int32_t tokens, LaneWords<kRawCodes, kHeadDim> (&words)[kTiles]) const;
  template <CodeType kValues, int32_t kTiles>
  __device__ __forceinline__ void weigh(Step<kTiles>& s);
  template <CodeType kValues, int32_t kTiles>
  __device__ __forceinline__ void pack_weights(const float (&weight)[2][kLaneColumns], int32_t i,
                                               int32_t c, Step<kTiles>& s) const;
  template <int32_t kTiles>
  __device__ __forceinline__ void raise_reference(Step<kTiles>& s);
  __device__ __forceinline__ void scale_column(int32_t block, int32_t j, float factor);
  template <CodeType kType, int32_t kTiles>
  __device__ __forceinline__ void add_values(const LaneWords<kType, kHeadDim> (&words)[kTiles],
                                             const Step<kTiles>& s);
  __device__ __forceinline__ void sum_lanes();

  const QueryColumns& columns_;
  float out_[kColumnBlocks][kBlocks][4];  // in units of the current value format
  // B fragments, divided by the factors of the current key format.
  uint32_t query_[kColumnBlocks][kBlocks][2];
  float query_sum_[kColumnBlocks][kLaneColumns];  // of the lane's columns, times scale_log2
  // scale_log2 times the factor of the key codes, and of bfloat16 queries their power of two.
  float score_unit_;
  float reference_[kColumnBlocks][kLaneColumns], sum_[kColumnBlocks][kLaneColumns],
      zero_[kColumnBlocks][kLaneColumns];
  float ceiling_;  // kNoTokensYet where a column of this lane has none, or kCeiling
  CodeType k_type_, v_type_;
};

template <int32_t kHeadDim, int32_t kColumnBlocks, DecodeMode kMode>
template <CodeType kKeys>
__device__ __forceinline__ void WarpAttention<kHeadDim, kColumnBlocks, kMode>::attend_keys(
    const ChunkTokens& chunk) {
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

template <int32_t kHeadDim, int32_t kColumnBlocks, DecodeMode kMode>
template <CodeType kKeys, CodeType kValues>
__device__ __forceinline__ void WarpAttention<kHeadDim, kColumnBlocks, kMode>::attend_tiles(
    const ChunkTokens& chunk) {
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
      mask_scores(tokens, s);
      if constexpr (kValues.is_raw()) mask_values(tokens, values);
      if (is_tail) mask_newest(chunk, chunk.tokens - tokens, s);
    }
    weigh<kValues>(s);
    add_values(values, s);
    k_codes += kTiles * kKeyBytes;
    k_metadata += kTiles * kKeyMetadata;
    v_codes += kTiles * kValueBytes;
    v_metadata += kTiles * kValueMetadata;
  }
}

// Two chains of mma a tile: their latency is most of a step's.
template <int32_t kHeadDim, int32_t kColumnBlocks, DecodeMode kMode>
template <CodeType kType, int32_t kTiles>
__device__ __forceinline__ void WarpAttention<kHeadDim, kColumnBlocks, kMode>::multiply_keys(
    int32_t tokens, const uint8_t* codes, float (&products)[kTiles][kColumnBlocks][4]) const {
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
        multiply<kType>(sums, a, query_[c][f][0], query_[c][f][1]);
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
template <int32_t kHeadDim, int32_t kColumnBlocks, DecodeMode kMode>
template <CodeType kType, int32_t kTiles>
__device__ __forceinline__ void WarpAttention<kHeadDim, kColumnBlocks, kMode>::scale_products(
    const uint8_t* metadata, const float (&products)[kTiles][kColumnBlocks][4],
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

template <int32_t kHeadDim, int32_t kColumnBlocks, DecodeMode kMode>
template <CodeType kType, int32_t kTiles>
__device__ __forceinline__ void WarpAttention<kHeadDim, kColumnBlocks, kMode>::load_values(
    int32_t tokens, const uint8_t* codes, const uint8_t* metadata,
    LaneWords<kType, kHeadDim> (&words)[kTiles], Step<kTiles>& s) const {
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

template <int32_t kHeadDim, int32_t kColumnBlocks, DecodeMode kMode>
template <CodeType kType, int32_t kTiles>
__device__ __forceinline__ void WarpAttention<kHeadDim, kColumnBlocks, kMode>::add_values(
    const LaneWords<kType, kHeadDim> (&words)[kTiles], const Step<kTiles>& s) {
#pragma unroll
  for (int32_t i = 0; i < kTiles; ++i) {
#pragma unroll
    for (int32_t f = 0; f < kBlocks; ++f) {
      uint32_t a[4];
      words[i].template fragment<Component::kValue>(f, a);
#pragma unroll
      for (int32_t c = 0; c < kColumnBlocks; ++c) {
        multiply<kType>(out_[c][f], a, s.weight[i][c][0], s.weight[i][c][1]);
        if (kType.is_raw() && kIsBFloat16) {
          multiply<kType>(out_[c][f], a, s.weight_rest[i][c][0], s.weight_rest[i][c][1]);
        }
      }
    }
  }
}

}  // namespace tierkv
