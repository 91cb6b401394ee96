// One warp's attention over tiles of one row at a time: up to 8 query columns (the q heads of the
// group), any formats.
//
// Orientation: S^T = K Q^T and O^T = V^T P^T, keys and values as the A operand, queries as the 8
// columns of B, so a group of up to 8 heads costs one pass and unpacked codes are used where they
// lie. Lane 4g + t holds, of an accumulator, rows g and g + 8 and columns 2t and 2t + 1.
//
// Quantised keys: q . k = scale * (q . code) + zero_point * (sum of q); the code factors are folded
// into q. Quantised values: sum p v = sum (p * scale) code + sum p * zero_point; p * scale goes
// through fp16 to the tensor cores. So the running reference of the softmax is the maximum of score
// + log2(scale), not of score: the largest weight p * scale lies between 2^kHeadroom and 2^kCeiling
// whatever the scale of the values, weights down to 2^-22 of it keep all 11 bits, and p itself (at
// most 2^(24 + kCeiling)) and its sums stay far inside fp32.
//
// The reference moves only when a weight would pass 2^kCeiling (FlashAttention-4's lazy rescaling),
// which is rare.
#pragma once

#include "attention/online_softmax.h"
#include "attention/page_tile.cuh"

namespace tierkv {

inline constexpr int32_t kColumns = 8;    // query columns of a warp
inline constexpr int32_t kStepTiles = 2;  // tiles of a step: two independent chains of mma
inline constexpr float kHeadroom = 8.0f;
inline constexpr float kCeiling = 14.0f;        // 2^14 * (1 + rounding) < 65504
inline constexpr float kLeastScale = 0x1p-24f;  // of fp16; also stands for a scale of 0
inline constexpr float kNoTokensYet = -INFINITY;

// The codes and metadata of a chunk in shared memory.
struct ChunkBytes {
  const uint8_t *k_codes, *k_metadata, *v_codes, *v_metadata;
};

__device__ __forceinline__ float power_of_two(int32_t exponent) {
  return __int_as_float((127 + exponent) << 23);
}

template <int32_t kHeadDim>
class WarpAttention {
 public:
  static constexpr int32_t kBlocks = kHeadDim / kDimBlock;
  static constexpr int32_t kPartStride =
      kHeadDim + 4;  // floats; keeps the stores of store_part() free of conflicts

  __device__ __forceinline__ void start_row() {
#pragma unroll
    for (int32_t f = 0; f < kBlocks; ++f) {
#pragma unroll
      for (int32_t i = 0; i < 4; ++i) out_[f][i] = 0.0f;
    }
#pragma unroll
    for (int32_t j = 0; j < 2; ++j) reference_[j] = sum_[j] = zero_[j] = 0.0f;
    ceiling_ = kNoTokensYet;
    k_bits_ = v_bits_ = 0;
  }

  // Before tiles of a format: q is [group][kHeadDim] of the row, global memory.
  __device__ __forceinline__ void use_format(int32_t k_bits, int32_t v_bits, const __half* q,
                                             int32_t group, float scale_log2) {
    if (k_bits != k_bits_) load_query(k_bits, q, group, scale_log2);
    if (v_bits != v_bits_ && v_bits_ != 0) convert_out(v_bits_, v_bits);
    k_bits_ = k_bits;
    v_bits_ = v_bits;
  }

  // kStepTiles tiles from `tile` on, of which the first `tokens` (1 to 32) tokens count. Whatever
  // lies in the rest, the second tile included, is read and ignored.
  __device__ __forceinline__ void attend(const ChunkBytes& chunk, int32_t tile, int32_t tokens);

  // The state of column head and its accumulator, to shared memory: states[group],
  // part[group][kPartStride].
  __device__ __forceinline__ void store_part(SoftmaxState* states, float* part, int32_t group);

 private:
  struct Step {
    float score[kStepTiles][4];
    uint32_t weight[kStepTiles][2];  // B fragments
  };

  __device__ __forceinline__ static int32_t lane() {
    return threadIdx.x % 32;
  }

  __device__ __forceinline__ void load_query(int32_t bits, const __half* q, int32_t group,
                                             float scale_log2);
  __device__ __forceinline__ void convert_out(int32_t from_bits, int32_t to_bits);
  template <int32_t kBits>
  __device__ __forceinline__ void score_codes(const uint8_t* codes, Step& step) const;
  __device__ __forceinline__ void scale_scores(const TileMetadata (&k)[kStepTiles],
                                               Step& step) const;
  __device__ __forceinline__ void weigh(const TileMetadata (&v)[kStepTiles], Step& step);
  __device__ __forceinline__ void raise_reference(float x0, float x1, Step& step);
  template <int32_t kBits>
  __device__ __forceinline__ void add_values(const uint8_t* codes, const Step& step,
                                             int32_t tokens);

  float out_[kBlocks][4];       // in units of the current value format
  uint32_t query_[kBlocks][2];  // B fragments, divided by the factors of the current key format
  float query_sum_[2];          // of columns 2t, 2t + 1, times scale_log2
  float score_unit_;            // scale_log2 times the factor of the key codes
  float reference_[2], sum_[2], zero_[2];
  float ceiling_;  // kNoTokensYet or kCeiling
  int32_t k_bits_, v_bits_;
};

template <int32_t kHeadDim>
__device__ __forceinline__ void WarpAttention<kHeadDim>::load_query(int32_t bits, const __half* q,
                                                                    int32_t group,
                                                                    float scale_log2) {
  constexpr uint32_t kOnes = 0x3c003c00u;
  const uint32_t ones[4] = {kOnes, kOnes, kOnes, kOnes};
  const int32_t g = lane() / 4, t = lane() % 4;
  float sums[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
  for (int32_t f = 0; f < kBlocks; ++f) {
#pragma unroll
    for (int32_t half = 0; half < 2; ++half) {
      const __half* from = q + g * kHeadDim + f * kDimBlock + 8 * half + 2 * t;
      query_[f][half] = g < group ? *reinterpret_cast<const uint32_t*>(from) : 0u;
    }
  }
#pragma unroll
  for (int32_t f = 0; f < kBlocks; ++f) {
    mma_m16n8k16(sums, ones, query_[f][0], query_[f][1]);
#pragma unroll
    for (int32_t half = 0; half < 2; ++half) {
      const int32_t dim = f * kDimBlock + 8 * half;
      const int32_t shift = bits == 16 ? 0 : 24 - unpacked_exponent(bits, dim);
      query_[f][half] = multiply_halves(query_[f][half], power_of_two(-shift));
    }
  }
  query_sum_[0] = sums[0] * scale_log2;
  query_sum_[1] = sums[1] * scale_log2;
  score_unit_ = bits == 16 ? scale_log2 : scale_log2 * 0x1p24f;
}

template <int32_t kHeadDim>
__device__ __forceinline__ void WarpAttention<kHeadDim>::convert_out(int32_t from_bits,
                                                                     int32_t to_bits) {
#pragma unroll
  for (int32_t f = 0; f < kBlocks; ++f) {
#pragma unroll
    for (int32_t i = 0; i < 4; ++i) {
      const int32_t dim = f * kDimBlock + 8 * (i / 2);
      out_[f][i] *=
          power_of_two(unpacked_exponent(from_bits, dim) - unpacked_exponent(to_bits, dim));
    }
  }
}

template <int32_t kHeadDim>
template <int32_t kBits>
__device__ __forceinline__ void WarpAttention<kHeadDim>::score_codes(const uint8_t* codes,
                                                                     Step& step) const {
  LaneWords<kBits, kHeadDim> words[kStepTiles];
#pragma unroll
  for (int32_t i = 0; i < kStepTiles; ++i)
    words[i].load(codes + i * words[i].kTile.bytes(), lane());
#pragma unroll
  for (int32_t f = 0; f < kBlocks; ++f) {
#pragma unroll
    for (int32_t i = 0; i < kStepTiles; ++i) {
      uint32_t a[4];
      words[i].template fragment<Component::kKey>(f, a);
      mma_m16n8k16(step.score[i], a, query_[f][0], query_[f][1]);
    }
  }
}

// From raw products to scores less the reference.
template <int32_t kHeadDim>
__device__ __forceinline__ void WarpAttention<kHeadDim>::scale_scores(
    const TileMetadata (&k)[kStepTiles], Step& step) const {
#pragma unroll
  for (int32_t i = 0; i < kStepTiles; ++i) {
#pragma unroll
    for (int32_t r = 0; r < 2; ++r) {
      const float scale = k[i].scale[r] * score_unit_;
#pragma unroll
      for (int32_t j = 0; j < 2; ++j) {
        const float offset = fmaf(k[i].zero_point[r], query_sum_[j], -reference_[j]);
        step.score[i][2 * r + j] = fmaf(step.score[i][2 * r + j], scale, offset);
      }
    }
  }
}

template <int32_t kHeadDim>
__device__ __forceinline__ void WarpAttention<kHeadDim>::raise_reference(float x0, float x1,
                                                                         Step& step) {
#pragma unroll
  for (int32_t i = 4; i < 32; i *= 2) {
    x0 = fmaxf(x0, __shfl_xor_sync(kFullWarp, x0, i));
    x1 = fmaxf(x1, __shfl_xor_sync(kFullWarp, x1, i));
  }
  const bool first = ceiling_ == kNoTokensYet;  // then all sums are 0 and need no factor
  const float by[2] = {first ? x0 - kHeadroom : fmaxf(x0 - kHeadroom, 0.0f),
                       first ? x1 - kHeadroom : fmaxf(x1 - kHeadroom, 0.0f)};
  ceiling_ = kCeiling;
#pragma unroll
  for (int32_t j = 0; j < 2; ++j) {
    const float factor = first ? 1.0f : exp2_fast(-by[j]);
    reference_[j] += by[j];
    sum_[j] *= factor;
    zero_[j] *= factor;
#pragma unroll
    for (int32_t f = 0; f < kBlocks; ++f) {
      out_[f][j] *= factor;
      out_[f][2 + j] *= factor;
    }
#pragma unroll
    for (int32_t i = 0; i < kStepTiles; ++i) {
      step.score[i][j] -= by[j];
      step.score[i][2 + j] -= by[j];
    }
  }
}

template <int32_t kHeadDim>
__device__ __forceinline__ void WarpAttention<kHeadDim>::weigh(const TileMetadata (&v)[kStepTiles],
                                                               Step& step) {
  float x0 = -INFINITY, x1 = -INFINITY;
#pragma unroll
  for (int32_t i = 0; i < kStepTiles; ++i) {
#pragma unroll
    for (int32_t r = 0; r < 2; ++r) {
      const float log_scale = log2_fast(fmaxf(v[i].scale[r], kLeastScale));
      x0 = fmaxf(x0, step.score[i][2 * r] + log_scale);
      x1 = fmaxf(x1, step.score[i][2 * r + 1] + log_scale);
    }
  }
  if (__any_sync(kFullWarp, fmaxf(x0, x1) > ceiling_)) raise_reference(x0, x1, step);
#pragma unroll
  for (int32_t i = 0; i < kStepTiles; ++i) {
#pragma unroll
    for (int32_t r = 0; r < 2; ++r) {
      const float p0 = exp2_fast(step.score[i][2 * r]), p1 = exp2_fast(step.score[i][2 * r + 1]);
      sum_[0] += p0;
      sum_[1] += p1;
      zero_[0] = fmaf(p0, v[i].zero_point[r], zero_[0]);
      zero_[1] = fmaf(p1, v[i].zero_point[r], zero_[1]);
      const uint32_t weights = pack_halves(p0 * v[i].scale[r], p1 * v[i].scale[r]);
      step.weight[i][r] = transpose_8x8(weights);
    }
  }
}

template <int32_t kHeadDim>
template <int32_t kBits>
__device__ __forceinline__ void WarpAttention<kHeadDim>::add_values(const uint8_t* codes,
                                                                    const Step& step,
                                                                    int32_t tokens) {
  LaneWords<kBits, kHeadDim> words[kStepTiles];
#pragma unroll
  for (int32_t i = 0; i < kStepTiles; ++i)
    words[i].load(codes + i * words[i].kTile.bytes(), lane());
  // Codes are finite whatever they are, so a weight of 0 discards them; raw values may be NaN where
  // there is no token.
  uint32_t mask[kStepTiles][2];
  if constexpr (kBits == 16) {
#pragma unroll
    for (int32_t i = 0; i < kStepTiles; ++i) {
#pragma unroll
      for (int32_t half = 0; half < 2; ++half) {
        const int32_t left = tokens - i * kTileTokens - 8 * half - 2 * (lane() % 4);
        mask[i][half] = left >= 2 ? 0xffffffffu : left == 1 ? 0xffffu : 0u;
      }
    }
  }
#pragma unroll
  for (int32_t i = 0; i < kStepTiles; ++i) {
#pragma unroll
    for (int32_t f = 0; f < kBlocks; ++f) {
      uint32_t a[4];
      words[i].template fragment<Component::kValue>(f, a);
      if constexpr (kBits == 16) {
#pragma unroll
        for (int32_t r = 0; r < 4; ++r) a[r] &= mask[i][r / 2];
      }
      mma_m16n8k16(out_[f], a, step.weight[i][0], step.weight[i][1]);
    }
  }
}

template <int32_t kHeadDim>
__device__ __forceinline__ void WarpAttention<kHeadDim>::attend(const ChunkBytes& chunk,
                                                                int32_t tile, int32_t tokens) {
  Step step;
#pragma unroll
  for (int32_t i = 0; i < kStepTiles; ++i) {
#pragma unroll
    for (int32_t j = 0; j < 4; ++j) step.score[i][j] = 0.0f;
  }
  const uint8_t* k_codes = chunk.k_codes + tile * TileLayout{k_bits_, kHeadDim}.bytes();
  switch (k_bits_) {
    case 4:
      score_codes<4>(k_codes, step);
      break;
    case 8:
      score_codes<8>(k_codes, step);
      break;
    case 2:
      score_codes<2>(k_codes, step);
      break;
    default:
      score_codes<16>(k_codes, step);
      break;
  }
  TileMetadata k[kStepTiles], v[kStepTiles];
#pragma unroll
  for (int32_t i = 0; i < kStepTiles; ++i) {
    k[i].set(1.0f, 0.0f);
    v[i].set(1.0f, 0.0f);
    if (k_bits_ != 16) k[i].load(chunk.k_metadata + (tile + i) * kMetadataBlockBytes, lane());
    if (v_bits_ != 16) v[i].load(chunk.v_metadata + (tile + i) * kMetadataBlockBytes, lane());
  }
  const bool partial = tokens < kStepTiles * kTileTokens;
  if (!partial) {
    scale_scores(k, step);
  } else {
#pragma unroll
    for (int32_t i = 0; i < kStepTiles; ++i) {
#pragma unroll
      for (int32_t r = 0; r < 2; ++r) {
        if (lane() / 4 + 8 * r + i * kTileTokens < tokens) continue;
        v[i].scale[r] = v[i].zero_point[r] = 0.0f;
      }
    }
    scale_scores(k, step);
#pragma unroll
    for (int32_t i = 0; i < kStepTiles; ++i) {
#pragma unroll
      for (int32_t j = 0; j < 4; ++j) {
        if (lane() / 4 + 8 * (j / 2) + i * kTileTokens >= tokens) step.score[i][j] = -INFINITY;
      }
    }
  }
  weigh(v, step);
  const uint8_t* v_codes = chunk.v_codes + tile * TileLayout{v_bits_, kHeadDim}.bytes();
  switch (v_bits_) {
    case 2:
      add_values<2>(v_codes, step, tokens);
      break;
    case 4:
      add_values<4>(v_codes, step, tokens);
      break;
    case 8:
      add_values<8>(v_codes, step, tokens);
      break;
    default:
      add_values<16>(v_codes, step, tokens);
      break;
  }
}

template <int32_t kHeadDim>
__device__ __forceinline__ void WarpAttention<kHeadDim>::store_part(SoftmaxState* states,
                                                                    float* part, int32_t group) {
  const int32_t g = lane() / 4, t = lane() % 4;
  if (ceiling_ == kNoTokensYet) {
    if (lane() < group) states[lane()] = SoftmaxState{};
    return;
  }
#pragma unroll
  for (int32_t i = 4; i < 32; i *= 2) {
#pragma unroll
    for (int32_t j = 0; j < 2; ++j) {
      sum_[j] += __shfl_xor_sync(kFullWarp, sum_[j], i);
      zero_[j] += __shfl_xor_sync(kFullWarp, zero_[j], i);
    }
  }
#pragma unroll
  for (int32_t j = 0; j < 2; ++j) {
    const int32_t column = 2 * t + j;
    if (column >= group) continue;
    if (g == 0) states[column] = {reference_[j], sum_[j]};
#pragma unroll
    for (int32_t f = 0; f < kBlocks; ++f) {
#pragma unroll
      for (int32_t half = 0; half < 2; ++half) {
        const int32_t dim = f * kDimBlock + 8 * half;
        part[column * kPartStride + dim + g] =
            fmaf(out_[f][2 * half + j], power_of_two(unpacked_exponent(v_bits_, dim)), zero_[j]);
      }
    }
  }
}

}  // namespace tierkv
