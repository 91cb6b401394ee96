// SPDX-License-Identifier: Apache-2.0
// Keys and values as operand A: the product's arithmetic (attention/tiers/warp_attention.cuh) in
// its plainest form, for 8 columns of head_dim 128 and the formats of the rungs.
//
// S^T = K Q^T and O^T = V^T P^T; the q heads of the group are the 8 columns of B. Codes are used as
// the subnormal halves that page_tile.cuh makes of them: powers of two that depend on the dim go
// into q and into the output, scales and zero points of keys into scores, those of values into
// weights and a sum of their own. Lane 4g + t holds tokens (dims) g and g + 8 of columns 2t and
// 2t + 1.
//
// The reference of the softmax is that of score + log2(scale of the value), so that weights, which
// become halves, fit whatever the values are; it is raised when a weight would pass kWeightCeiling.
#pragma once

#include "attention/core/online_softmax.h"
#include "attention/tiers/page_tile.cuh"
#include "bench/baselines/rungs/rung_params.h"
#include "gpu/lanes.cuh"
#include "gpu/math.cuh"
#include "gpu/mma.cuh"

namespace tierkv {

inline constexpr int32_t kKvPartStride = kRungHeadDim + 4;  // floats; no bank conflicts
// That a warp reads, and ignores, behind a chunk with an odd number of tiles: a tile of K8V4.
inline constexpr int32_t kKvReadBehind = TileLayout{kCodes8, kRungHeadDim}.bytes() +
                                         TileLayout{kCodes4, kRungHeadDim}.bytes() +
                                         2 * kMetadataBlockBytes;
inline constexpr float kWeightHeadroom = 8.0f;  // log2, below a raised reference
inline constexpr float kWeightCeiling = 0x1p14f;
inline constexpr float kSmallestScale = 0x1p-24f;  // of fp16; stands for a scale of 0, too

class KvWarp {
 public:
  // q is fp16 [group][128] of the row, in global memory.
  __device__ __forceinline__ void start(const __half* q, int32_t group, float scale_log2) {
    const int32_t g = lane() / 4, t = lane() % 4;
    constexpr uint32_t kOnes[4] = {0x3c003c00u, 0x3c003c00u, 0x3c003c00u, 0x3c003c00u};
    float sums[4] = {};
#pragma unroll
    for (int32_t f = 0; f < kBlocks; ++f) {
#pragma unroll
      for (int32_t half = 0; half < 2; ++half) {
        const __half* from = q + g * kRungHeadDim + f * kDimBlock + 8 * half + 2 * t;
        query_[f][half] = g < group ? *reinterpret_cast<const uint32_t*>(from) : 0u;
      }
      mma_m16n8k16(sums, kOnes, query_[f][0], query_[f][1]);
    }
    scale_log2_ = scale_log2;
    query_sum_[0] = sums[0] * scale_log2;
    query_sum_[1] = sums[1] * scale_log2;
  }

  // The first `tokens` tokens of a chunk in shared memory: key codes, their metadata, value codes,
  // theirs, of `tiles` tiles each. Up to a tile behind them is read and ignored.
  __device__ __forceinline__ void attend(const uint8_t* chunk, int32_t format, int32_t tiles,
                                         int32_t tokens) {
    use_format(key_type(format), value_type(format));
    switch (format) {
      case pair_format(kRawCodes, kRawCodes):
        return attend_tiles<kRawCodes, kRawCodes>(chunk, tiles, tokens);
      case pair_format(kCodes8, kCodes4):
        return attend_tiles<kCodes8, kCodes4>(chunk, tiles, tokens);
      case pair_format(kCodes4, kCodes4):
        return attend_tiles<kCodes4, kCodes4>(chunk, tiles, tokens);
      default:
        return attend_tiles<kCodes4, kCodes2>(chunk, tiles, tokens);
    }
  }

  // To shared memory: states[group], part[group][kKvPartStride].
  __device__ __forceinline__ void store_part(SoftmaxState* states, float* part, int32_t group);

 private:
  static constexpr int32_t kBlocks = kRungHeadDim / kDimBlock;

  // Tokens g and g + 8 of a tile.
  struct TileScores {
    float score[4];                 // log2 units, relative to the reference
    float scale[2], zero_point[2];  // of the values
    uint32_t weight[2];             // B fragment
  };

  __device__ __forceinline__ static int32_t lane() {
    return threadIdx.x % 32;
  }
  __device__ __forceinline__ void use_format(CodeType k, CodeType v);
  template <CodeType kKeys, CodeType kValues>
  __device__ __forceinline__ void attend_tiles(const uint8_t* chunk, int32_t tiles, int32_t tokens);
  template <CodeType kType>
  __device__ __forceinline__ void score_tile(const uint8_t* codes, const uint8_t* metadata,
                                             TileScores& s) const;
  __device__ __forceinline__ static void mask_tile(int32_t tokens, TileScores& s);
  __device__ __forceinline__ static void mask_raw(int32_t tokens,
                                                  LaneWords<kRawCodes, 128>& values);
  template <int32_t kTiles>
  __device__ __forceinline__ void weigh(TileScores (&s)[kTiles]);
  template <int32_t kTiles>
  __device__ __forceinline__ void raise_reference(TileScores (&s)[kTiles]);

  float out_[kBlocks][4] = {};  // in units of the current format
  uint32_t query_[kBlocks][2];  // B fragments, divided by the factors of the current format
  float query_sum_[2];          // of columns 2t and 2t + 1, times scale_log2_
  float reference_[2] = {}, sum_[2] = {}, zero_[2] = {};
  float ceiling_ = -1.0f;  // below every weight until there is a reference
  float scale_log2_, score_unit_ = 0.0f;
  CodeType k_type_ = kRawCodes, v_type_ = kNoType;
};

__device__ __forceinline__ void KvWarp::use_format(CodeType k, CodeType v) {
#pragma unroll
  for (int32_t f = 0; f < kBlocks; ++f) {
#pragma unroll
    for (int32_t half = 0; half < 2; ++half) {
      const int32_t dim = f * kDimBlock + 8 * half;
      if (k != k_type_) {
        const int32_t shift = code_shift(k_type_.bits(), dim) - code_shift(k.bits(), dim);
        query_[f][half] = multiply_halves(query_[f][half], power_of_two(shift));
      }
      if (v != v_type_ && v_type_ != kNoType) {
        const float factor =
            power_of_two(unpacked_exponent(v_type_, dim) - unpacked_exponent(v, dim));
        out_[f][2 * half] *= factor;
        out_[f][2 * half + 1] *= factor;
      }
    }
  }
  score_unit_ = k.is_raw() ? scale_log2_ : scale_log2_ * 0x1p24f;
  k_type_ = k;
  v_type_ = v;
}

template <CodeType kKeys, CodeType kValues>
__device__ __forceinline__ void KvWarp::attend_tiles(const uint8_t* chunk, int32_t tiles,
                                                     int32_t tokens) {
  constexpr int32_t kTiles = kKeys.is_raw() ? 1 : 2;  // of a step
  constexpr int32_t kKeyBytes = TileLayout{kKeys, kRungHeadDim}.bytes();
  constexpr int32_t kValueBytes = TileLayout{kValues, kRungHeadDim}.bytes();
  constexpr int32_t kMetadata = kKeys.is_raw() ? 0 : kMetadataBlockBytes;
  const uint8_t* k_codes = chunk;
  const uint8_t* k_metadata = k_codes + tiles * kKeyBytes;
  const uint8_t* v_codes = k_metadata + tiles * kMetadata;
  const uint8_t* v_metadata = v_codes + tiles * kValueBytes;
#pragma unroll 1
  for (; tokens > 0; tokens -= kTiles * kTileTokens) {
    TileScores s[kTiles];
    LaneWords<kValues, kRungHeadDim> values[kTiles];
#pragma unroll
    for (int32_t i = 0; i < kTiles; ++i) {
      score_tile<kKeys>(k_codes + i * kKeyBytes, k_metadata + i * kMetadata, s[i]);
    }
#pragma unroll
    for (int32_t i = 0; i < kTiles; ++i) {
      TileMetadata m;
      m.set(1.0f, 0.0f);
      if constexpr (!kValues.is_raw()) m.load(v_metadata + i * kMetadata, lane());
      values[i].load(v_codes + i * kValueBytes, lane());
#pragma unroll
      for (int32_t r = 0; r < 2; ++r) {
        s[i].scale[r] = fmaxf(m.scale[r], kSmallestScale);
        s[i].zero_point[r] = m.zero_point[r];
      }
      const int32_t left = tokens - i * kTileTokens;
      if (left < kTileTokens) {
        mask_tile(left, s[i]);
        if constexpr (kValues.is_raw()) mask_raw(left, values[i]);
      }
    }
    weigh(s);
#pragma unroll
    for (int32_t i = 0; i < kTiles; ++i) {
#pragma unroll
      for (int32_t f = 0; f < kBlocks; ++f) {
        uint32_t a[4];
        values[i].template fragment<Component::kValue>(f, a);
        mma_m16n8k16(out_[f], a, s[i].weight[0], s[i].weight[1]);
      }
    }
    k_codes += kTiles * kKeyBytes;
    k_metadata += kTiles * kMetadata;
    v_codes += kTiles * kValueBytes;
    v_metadata += kTiles * kMetadata;
  }
}

// Two chains of mma: their latency is most of a tile's.
template <CodeType kType>
__device__ __forceinline__ void KvWarp::score_tile(const uint8_t* codes, const uint8_t* metadata,
                                                   TileScores& s) const {
  LaneWords<kType, kRungHeadDim> words;
  words.load(codes, lane());
  TileMetadata m;
  m.set(1.0f, 0.0f);
  if constexpr (kType.has_params()) m.load(metadata, lane());
  float products[2][4] = {};
#pragma unroll
  for (int32_t f = 0; f < kBlocks; ++f) {
    uint32_t a[4];
    words.template fragment<Component::kKey>(f, a);
    mma_m16n8k16(products[f % 2], a, query_[f][0], query_[f][1]);
  }
#pragma unroll
  for (int32_t i = 0; i < 4; ++i) {
    const float offset = fmaf(m.zero_point[i / 2], query_sum_[i % 2], -reference_[i % 2]);
    s.score[i] = fmaf(products[0][i] + products[1][i], m.scale[i / 2] * score_unit_, offset);
  }
}

// Tokens from `tokens` on weigh nothing, whatever their bytes are.
__device__ __forceinline__ void KvWarp::mask_tile(int32_t tokens, TileScores& s) {
#pragma unroll
  for (int32_t r = 0; r < 2; ++r) {
    if (lane() / 4 + 8 * r < tokens) continue;
    s.score[2 * r] = s.score[2 * r + 1] = -INFINITY;
    s.scale[r] = 1.0f;
    s.zero_point[r] = 0.0f;
  }
}

// Codes are finite whatever they are; raw values may be NaN, which a weight of 0 keeps.
__device__ __forceinline__ void KvWarp::mask_raw(int32_t tokens,
                                                 LaneWords<kRawCodes, 128>& values) {
#pragma unroll
  for (int32_t half = 0; half < 2; ++half) {
    const int32_t left = tokens - 8 * half - 2 * (lane() % 4);
    const uint32_t kept = left >= 2 ? 0xffffffffu : left == 1 ? 0xffffu : 0u;
#pragma unroll
    for (int32_t f = 0; f < kBlocks; ++f) {
      values.word[4 * f + 2 * half] &= kept;
      values.word[4 * f + 2 * half + 1] &= kept;
    }
  }
}

template <int32_t kTiles>
__device__ __forceinline__ void KvWarp::weigh(TileScores (&s)[kTiles]) {
  float p[kTiles][4], weight[kTiles][4];
  const auto look = [&] {
    float largest = 0.0f;
#pragma unroll
    for (int32_t i = 0; i < kTiles; ++i) {
#pragma unroll
      for (int32_t j = 0; j < 4; ++j) {
        p[i][j] = exp2_fast(s[i].score[j]);
        weight[i][j] = p[i][j] * s[i].scale[j / 2];
        largest = fmaxf(largest, weight[i][j]);
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
    for (int32_t r = 0; r < 2; ++r) {
#pragma unroll
      for (int32_t j = 0; j < 2; ++j) {
        sum_[j] += p[i][2 * r + j];
        zero_[j] = fmaf(p[i][2 * r + j], s[i].zero_point[r], zero_[j]);
      }
      s[i].weight[r] = transpose_8x8(pack_halves(weight[i][2 * r], weight[i][2 * r + 1]));
    }
  }
}

// Every column has a token in the step, so its largest score is finite.
template <int32_t kTiles>
__device__ __forceinline__ void KvWarp::raise_reference(TileScores (&s)[kTiles]) {
  const bool is_first = ceiling_ < 0.0f;  // then all sums are 0
  ceiling_ = kWeightCeiling;
#pragma unroll
  for (int32_t j = 0; j < 2; ++j) {
    float largest = -INFINITY;
#pragma unroll
    for (int32_t i = 0; i < kTiles; ++i) {
      largest = fmaxf(largest, s[i].score[j] + log2_fast(s[i].scale[0]));
      largest = fmaxf(largest, s[i].score[2 + j] + log2_fast(s[i].scale[1]));
    }
#pragma unroll
    for (int32_t k = 4; k < 32; k *= 2) {
      largest = fmaxf(largest, __shfl_xor_sync(kFullWarp, largest, k));
    }
    const float by = is_first ? largest - kWeightHeadroom : fmaxf(largest - kWeightHeadroom, 0.0f);
    const float kept = is_first ? 1.0f : exp2_fast(-by);
    reference_[j] += by;
    sum_[j] *= kept;
    zero_[j] *= kept;
#pragma unroll
    for (int32_t f = 0; f < kBlocks; ++f) {
      out_[f][j] *= kept;
      out_[f][2 + j] *= kept;
    }
#pragma unroll
    for (int32_t i = 0; i < kTiles; ++i) {
      s[i].score[j] -= by;
      s[i].score[2 + j] -= by;
    }
  }
}

__device__ __forceinline__ void KvWarp::store_part(SoftmaxState* states, float* part,
                                                   int32_t group) {
  const int32_t g = lane() / 4, t = lane() % 4;
  if (v_type_ == kNoType) {
    if (lane() < group) states[lane()] = SoftmaxState{};
    return;
  }
#pragma unroll
  for (int32_t j = 0; j < 2; ++j) {
    float sum = sum_[j], zero = zero_[j];
#pragma unroll
    for (int32_t k = 4; k < 32; k *= 2) {
      sum += __shfl_xor_sync(kFullWarp, sum, k);
      zero += __shfl_xor_sync(kFullWarp, zero, k);
    }
    const int32_t column = 2 * t + j;
    if (column >= group) continue;
    if (g == 0) states[column] = {reference_[j], sum};
#pragma unroll
    for (int32_t f = 0; f < kBlocks; ++f) {
#pragma unroll
      for (int32_t half = 0; half < 2; ++half) {
        const int32_t dim = f * kDimBlock + 8 * half;
        const float unit = power_of_two(unpacked_exponent(v_type_, dim));
        part[column * kKvPartStride + dim + g] = fmaf(out_[f][2 * half + j], unit, zero);
      }
    }
  }
}

}  // namespace tierkv
