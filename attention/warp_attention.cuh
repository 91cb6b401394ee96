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
// which is rare: the weights are computed first and looked at afterwards.
#pragma once

#include "attention/online_softmax.h"
#include "attention/page_tile.cuh"

namespace tierkv {

inline constexpr int32_t kColumns = 8;  // query columns of a warp
inline constexpr float kHeadroom = 8.0f;
inline constexpr float kCeiling = 0x1p14f;      // times (1 + rounding) below 65504
inline constexpr float kLeastScale = 0x1p-24f;  // of fp16; also stands for a scale of 0
inline constexpr float kNoTokensYet = -1.0f;    // a ceiling that every weight passes

__device__ __forceinline__ float power_of_two(int32_t exponent) {
  return __int_as_float((127 + exponent) << 23);
}

// Tiles of a step: two, for more independent work, where a lane's words of them are few.
__device__ constexpr int32_t step_tiles(int32_t k_bits, int32_t v_bits, int32_t head_dim) {
  const int32_t bits = k_bits > v_bits ? k_bits : v_bits;
  return TileLayout{bits, head_dim}.words_per_lane() > 16 ? 1 : 2;
}

template <int32_t kHeadDim>
class WarpAttention {
 public:
  static constexpr int32_t kBlocks = kHeadDim / kDimBlock;

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

  // The query of a row, and its sum; before use_format(). q is [group][kHeadDim] in global
  // memory. Between the two the state of the row before may still be stored or written.
  __device__ __forceinline__ void fetch_query(const __half* q, int32_t group);
  __device__ __forceinline__ void sum_query(float scale_log2);

  // Before tiles of a format.
  __device__ __forceinline__ void use_format(int32_t k_bits, int32_t v_bits, float scale_log2) {
    if (k_bits != k_bits_) scale_query(k_bits_, k_bits, scale_log2);
    if (v_bits != v_bits_ && v_bits_ != 0) convert_out(v_bits_, v_bits);
    k_bits_ = k_bits;
    v_bits_ = v_bits;
  }

  // The tiles of a chunk in shared memory, in the format used last; only the first `tokens` (1 to
  // 16 * tiles) tokens count. Whatever lies behind them, up to a tile more, is read and ignored.
  __device__ __forceinline__ void attend(const uint8_t* chunk, int32_t tiles, int32_t tokens) {
    switch (k_bits_) {
      case 4:
        return attend_keys<4>(chunk, tiles, tokens);
      case 8:
        return attend_keys<8>(chunk, tiles, tokens);
      case 2:
        return attend_keys<2>(chunk, tiles, tokens);
      default:
        return attend_keys<16>(chunk, tiles, tokens);
    }
  }

  // The state of column head and its accumulator, to shared memory: states[group],
  // part[group][part_stride(kHeadDim)]. The part of an empty state is not written.
  __device__ __forceinline__ void store_part(SoftmaxState* states, float* part, int32_t group);

  // The finished row to global memory: out is fp16 [group][kHeadDim], lse [group] or null.
  __device__ __forceinline__ void write_row(__half* out, float* lse, int32_t group);

 private:
  template <int32_t kTiles>
  struct Step {
    float score[kTiles][4];
    float scale[kTiles][2];  // of the values
    float zero_point[kTiles][2];
    uint32_t weight[kTiles][2];  // B fragments
  };

  __device__ __forceinline__ static int32_t lane() {
    return threadIdx.x % 32;
  }

  __device__ __forceinline__ void scale_query(int32_t from_bits, int32_t to_bits, float scale_log2);
  __device__ __forceinline__ void convert_out(int32_t from_bits, int32_t to_bits);
  template <int32_t kKeyBits>
  __device__ __forceinline__ void attend_keys(const uint8_t* chunk, int32_t tiles, int32_t tokens);
  template <int32_t kKeyBits, int32_t kValueBits>
  __device__ __forceinline__ void attend_tiles(const uint8_t* chunk, int32_t tiles, int32_t tokens);
  template <int32_t kBits, int32_t kTiles>
  __device__ __forceinline__ void multiply_keys(const uint8_t* codes,
                                                float (&products)[kTiles][4]) const;
  template <int32_t kBits, int32_t kTiles>
  __device__ __forceinline__ void scale_products(const uint8_t* metadata,
                                                 const float (&products)[kTiles][4],
                                                 Step<kTiles>& s) const;
  template <int32_t kBits, int32_t kTiles>
  __device__ __forceinline__ void load_values(const uint8_t* codes, const uint8_t* metadata,
                                              LaneWords<kBits, kHeadDim> (&words)[kTiles],
                                              Step<kTiles>& s) const;
  template <int32_t kTiles>
  __device__ __forceinline__ void mask_scores(int32_t tokens, Step<kTiles>& s) const;
  template <int32_t kTiles>
  __device__ __forceinline__ void mask_values(int32_t tokens,
                                              LaneWords<16, kHeadDim> (&words)[kTiles]) const;
  template <int32_t kTiles>
  __device__ __forceinline__ void weigh(Step<kTiles>& s);
  template <int32_t kTiles>
  __device__ __forceinline__ void raise_reference(Step<kTiles>& s);
  template <int32_t kBits, int32_t kTiles>
  __device__ __forceinline__ void add_values(const LaneWords<kBits, kHeadDim> (&words)[kTiles],
                                             const Step<kTiles>& s);
  __device__ __forceinline__ void sum_lanes();

  float out_[kBlocks][4];       // in units of the current value format
  uint32_t query_[kBlocks][2];  // B fragments, divided by the factors of the current key format
  float query_sum_[2];          // of columns 2t, 2t + 1, times scale_log2
  float score_unit_;            // scale_log2 times the factor of the key codes
  float reference_[2], sum_[2], zero_[2];
  float ceiling_;  // kNoTokensYet or kCeiling
  int32_t k_bits_, v_bits_;
};

template <int32_t kHeadDim>
template <int32_t kKeyBits>
__device__ __forceinline__ void WarpAttention<kHeadDim>::attend_keys(const uint8_t* chunk,
                                                                     int32_t tiles,
                                                                     int32_t tokens) {
  switch (v_bits_) {
    case 4:
      return attend_tiles<kKeyBits, 4>(chunk, tiles, tokens);
    case 2:
      return attend_tiles<kKeyBits, 2>(chunk, tiles, tokens);
    case 8:
      return attend_tiles<kKeyBits, 8>(chunk, tiles, tokens);
    default:
      return attend_tiles<kKeyBits, 16>(chunk, tiles, tokens);
  }
}

template <int32_t kHeadDim>
template <int32_t kKeyBits, int32_t kValueBits>
__device__ __forceinline__ void WarpAttention<kHeadDim>::attend_tiles(const uint8_t* chunk,
                                                                      int32_t tiles,
                                                                      int32_t tokens) {
  constexpr int32_t kTiles = step_tiles(kKeyBits, kValueBits, kHeadDim);
  constexpr int32_t kStepTokens = kTiles * kTileTokens;
  constexpr int32_t kKeyBytes = TileLayout{kKeyBits, kHeadDim}.bytes();
  constexpr int32_t kValueBytes = TileLayout{kValueBits, kHeadDim}.bytes();
  constexpr int32_t kKeyMetadata = kKeyBits == 16 ? 0 : kMetadataBlockBytes;
  constexpr int32_t kValueMetadata = kValueBits == 16 ? 0 : kMetadataBlockBytes;
  const uint8_t* k_codes = chunk;
  const uint8_t* k_metadata = k_codes + tiles * kKeyBytes;
  const uint8_t* v_codes = k_metadata + tiles * kKeyMetadata;
  const uint8_t* v_metadata = v_codes + tiles * kValueBytes;
#pragma unroll 1
  for (; tokens > 0; tokens -= kStepTokens) {
    float products[kTiles][4];
    Step<kTiles> s;
    LaneWords<kValueBits, kHeadDim> values[kTiles];
    multiply_keys<kKeyBits>(k_codes, products);
    scale_products<kKeyBits>(k_metadata, products, s);
    load_values(v_codes, v_metadata, values, s);
    if (tokens < kStepTokens) {
      mask_scores(tokens, s);
      if constexpr (kValueBits == 16) mask_values(tokens, values);
    }
    weigh(s);
    add_values(values, s);
    k_codes += kTiles * kKeyBytes;
    k_metadata += kTiles * kKeyMetadata;
    v_codes += kTiles * kValueBytes;
    v_metadata += kTiles * kValueMetadata;
  }
}

// Two chains of mma a tile: their latency is most of a step's.
template <int32_t kHeadDim>
template <int32_t kBits, int32_t kTiles>
__device__ __forceinline__ void WarpAttention<kHeadDim>::multiply_keys(
    const uint8_t* codes, float (&products)[kTiles][4]) const {
  LaneWords<kBits, kHeadDim> words[kTiles];
  float odd[kTiles][4];
#pragma unroll
  for (int32_t i = 0; i < kTiles; ++i) {
    words[i].load(codes + i * TileLayout{kBits, kHeadDim}.bytes(), lane());
#pragma unroll
    for (int32_t j = 0; j < 4; ++j) products[i][j] = odd[i][j] = 0.0f;
  }
#pragma unroll
  for (int32_t f = 0; f < kBlocks; ++f) {
#pragma unroll
    for (int32_t i = 0; i < kTiles; ++i) {
      uint32_t a[4];
      words[i].template fragment<Component::kKey>(f, a);
      mma_m16n8k16(f % 2 == 0 ? products[i] : odd[i], a, query_[f][0], query_[f][1]);
    }
  }
#pragma unroll
  for (int32_t i = 0; i < kTiles; ++i) {
#pragma unroll
    for (int32_t j = 0; j < 4; ++j) products[i][j] += odd[i][j];
  }
}

// Scores in log2 units less the reference.
template <int32_t kHeadDim>
template <int32_t kBits, int32_t kTiles>
__device__ __forceinline__ void WarpAttention<kHeadDim>::scale_products(
    const uint8_t* metadata, const float (&products)[kTiles][4], Step<kTiles>& s) const {
#pragma unroll
  for (int32_t i = 0; i < kTiles; ++i) {
    TileMetadata k;
    k.set(1.0f, 0.0f);
    if constexpr (kBits != 16) k.load(metadata + i * kMetadataBlockBytes, lane());
#pragma unroll
    for (int32_t r = 0; r < 2; ++r) {
      const float scale = k.scale[r] * score_unit_;
#pragma unroll
      for (int32_t j = 0; j < 2; ++j) {
        const float offset = fmaf(k.zero_point[r], query_sum_[j], -reference_[j]);
        s.score[i][2 * r + j] = fmaf(products[i][2 * r + j], scale, offset);
      }
    }
  }
}

template <int32_t kHeadDim>
template <int32_t kBits, int32_t kTiles>
__device__ __forceinline__ void WarpAttention<kHeadDim>::load_values(
    const uint8_t* codes, const uint8_t* metadata, LaneWords<kBits, kHeadDim> (&words)[kTiles],
    Step<kTiles>& s) const {
#pragma unroll
  for (int32_t i = 0; i < kTiles; ++i) {
    TileMetadata v;
    v.set(1.0f, 0.0f);
    if constexpr (kBits != 16) v.load(metadata + i * kMetadataBlockBytes, lane());
#pragma unroll
    for (int32_t r = 0; r < 2; ++r) {
      s.scale[i][r] = kBits == 16 ? 1.0f : fmaxf(v.scale[r], kLeastScale);
      s.zero_point[i][r] = v.zero_point[r];
    }
    words[i].load(codes + i * TileLayout{kBits, kHeadDim}.bytes(), lane());
  }
}

// Tokens from `tokens` on weigh nothing, whatever their bytes are.
template <int32_t kHeadDim>
template <int32_t kTiles>
__device__ __forceinline__ void WarpAttention<kHeadDim>::mask_scores(int32_t tokens,
                                                                     Step<kTiles>& s) const {
#pragma unroll
  for (int32_t i = 0; i < kTiles; ++i) {
#pragma unroll
    for (int32_t r = 0; r < 2; ++r) {
      if (lane() / 4 + 8 * r + i * kTileTokens < tokens) continue;
      s.score[i][2 * r] = s.score[i][2 * r + 1] = -INFINITY;
      s.scale[i][r] = 1.0f;
      s.zero_point[i][r] = 0.0f;
    }
  }
}

// Codes are finite whatever they are, so a weight of 0 discards them; raw values may be NaN where
// there is no token.
template <int32_t kHeadDim>
template <int32_t kTiles>
__device__ __forceinline__ void WarpAttention<kHeadDim>::mask_values(
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

template <int32_t kHeadDim>
template <int32_t kTiles>
__device__ __forceinline__ void WarpAttention<kHeadDim>::raise_reference(Step<kTiles>& s) {
  float x[2] = {-INFINITY, -INFINITY};
#pragma unroll
  for (int32_t i = 0; i < kTiles; ++i) {
#pragma unroll
    for (int32_t r = 0; r < 2; ++r) {
      const float log_scale = log2_fast(s.scale[i][r]);
      x[0] = fmaxf(x[0], s.score[i][2 * r] + log_scale);
      x[1] = fmaxf(x[1], s.score[i][2 * r + 1] + log_scale);
    }
  }
#pragma unroll
  for (int32_t i = 4; i < 32; i *= 2) {
    x[0] = fmaxf(x[0], __shfl_xor_sync(kFullWarp, x[0], i));
    x[1] = fmaxf(x[1], __shfl_xor_sync(kFullWarp, x[1], i));
  }
  const bool first = ceiling_ == kNoTokensYet;  // then all sums are 0 and need no factor
  ceiling_ = kCeiling;
#pragma unroll
  for (int32_t j = 0; j < 2; ++j) {
    const float by = first ? x[j] - kHeadroom : fmaxf(x[j] - kHeadroom, 0.0f);
    const float factor = first ? 1.0f : exp2_fast(-by);
    reference_[j] += by;
    sum_[j] *= factor;
    zero_[j] *= factor;
#pragma unroll
    for (int32_t f = 0; f < kBlocks; ++f) {
      out_[f][j] *= factor;
      out_[f][2 + j] *= factor;
    }
#pragma unroll
    for (int32_t i = 0; i < kTiles; ++i) {
      s.score[i][j] -= by;
      s.score[i][2 + j] -= by;
    }
  }
}

template <int32_t kHeadDim>
template <int32_t kTiles>
__device__ __forceinline__ void WarpAttention<kHeadDim>::weigh(Step<kTiles>& s) {
  float p[kTiles][4], weight[kTiles][4];
  const auto look = [&] {
    float largest = 0.0f;
#pragma unroll
    for (int32_t i = 0; i < kTiles; ++i) {
#pragma unroll
      for (int32_t j = 0; j < 4; ++j) {
        p[i][j] = exp2_fast(s.score[i][j]);
        weight[i][j] = p[i][j] * s.scale[i][j / 2];
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
        zero_[j] = fmaf(p[i][2 * r + j], s.zero_point[i][r], zero_[j]);
      }
      s.weight[i][r] = transpose_8x8(pack_halves(weight[i][2 * r], weight[i][2 * r + 1]));
    }
  }
}

template <int32_t kHeadDim>
template <int32_t kBits, int32_t kTiles>
__device__ __forceinline__ void WarpAttention<kHeadDim>::add_values(
    const LaneWords<kBits, kHeadDim> (&words)[kTiles], const Step<kTiles>& s) {
#pragma unroll
  for (int32_t i = 0; i < kTiles; ++i) {
#pragma unroll
    for (int32_t f = 0; f < kBlocks; ++f) {
      uint32_t a[4];
      words[i].template fragment<Component::kValue>(f, a);
      mma_m16n8k16(out_[f], a, s.weight[i][0], s.weight[i][1]);
    }
  }
}

}  // namespace tierkv
