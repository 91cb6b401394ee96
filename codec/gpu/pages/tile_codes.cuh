// SPDX-License-Identifier: Apache-2.0
// A tile of 16 tokens of one component, from rows in shared memory to the words of a page, by a
// warp: half a tile at a time, in registers (half_rows.cuh).
//
// Bound: instructions, about 25 a value: 9 for the rotation, 7 for the code, 2 for the extrema.
#pragma once

#include "codec/format/page_layout.h"
#include "codec/gpu/pages/half_rows.cuh"
#include "codec/gpu/pages/lane_encode.cuh"
#include "gpu/copies.cuh"

namespace tierkv {

// Shared memory of a warp: a channel table and a tile of rows.
template <int32_t kDim>
inline constexpr int32_t kTileWarpBytes = kTableBytes<kDim> + kTileTokens* kRowPitch<kDim>;

// ---- coordinates ----

template <int32_t kDim>
__device__ __forceinline__ void start_rows(const void* first, int64_t stride, uint8_t* rows) {
  constexpr int32_t kPieces = kDim / 8;  // of a row
#pragma unroll
  for (int32_t i = 0; i < kTileTokens * kPieces / 32; ++i) {
    const int32_t piece = 32 * i + lane_index();
    const int32_t row = piece / kPieces, column = piece % kPieces;
    copy_async_16(rows + row * kRowPitch<kDim> + 16 * column,
                  static_cast<const uint16_t*>(first) + row * stride + 8 * column, true);
  }
}

template <int32_t kDim>
__device__ __forceinline__ void load_half(const uint8_t* rows, int32_t th, DType dtype,
                                          HalfRows<kDim>& x) {
  const uint8_t* row =
      rows + (lane_index() % 8 + kHalfTokens * th) * kRowPitch<kDim> + lane_index() / 8 * 16;
#pragma unroll
  for (int32_t i = 0; i < kDim / 32; ++i) {
    uint32_t words[4];
    load_matrices(words, row + 64 * i);
#pragma unroll
    for (int32_t j = 0; j < 4; ++j) {
      const float2 y =
          dtype == DType::kFloat16 ? unpack_halves(words[j]) : unpack_bfloats(words[j]);
      x[8 * i + 2 * j] = y.x, x[8 * i + 2 * j + 1] = y.y;
    }
  }
}

template <int32_t kDim, ChannelVector kVector>
__device__ __forceinline__ void rotate_half(const Rotation& r, const ChannelPair* table,
                                            HalfRows<kDim>& x) {
#pragma unroll
  for (int32_t i = 0; i < kDim / 8; ++i) {
    const ChannelPair pair = table[4 * i + lane_index() % 4];
#pragma unroll
    for (int32_t par = 0; par < 2; ++par) {
      float& y = x[2 * i + par];
      if constexpr (kVector == ChannelVector::kAddend) y = add_rn(y, pair.vector[par]);
      y = mul_rn(y, pair.factor[par]);
    }
  }
  if (!r.is_on) return;
  hadamard_sums<kDim>(x);
  const float scale = hadamard_scale(hadamard_size(kDim, 0));
  const float last_scale = hadamard_scale(hadamard_size(kDim, kDim - 1));
#pragma unroll
  for (int32_t i = 0; i < kDim / 4; ++i) {
    const bool is_first = hadamard_size(kDim, 4 * (i & ~3)) == hadamard_size(kDim, 0);
    x[i] = mul_rn(x[i], is_first ? scale : last_scale);
  }
}

// ---- codes ----

// Both in the four lanes of a token.
template <int32_t kDim>
__device__ __forceinline__ QuantParams half_minmax(const HalfRows<kDim>& x, int32_t levels,
                                                   bool* is_sound) {
  float lo = x[0], hi = x[0];
#pragma unroll
  for (int32_t i = 1; i < kDim / 4; ++i) {
    lo = nan_min(lo, x[i]);
    hi = nan_max(hi, x[i]);
  }
#pragma unroll
  for (int32_t lanes = 1; lanes < 4; lanes *= 2) {
    lo = nan_min(lo, __shfl_xor_sync(kFullWarp, lo, lanes));
    hi = nan_max(hi, __shfl_xor_sync(kFullWarp, hi, lanes));
  }
  const QuantParams p = minmax_params(lo, hi, levels);
  *is_sound = is_finite(lo) && is_finite(hi) && params_in_range(p);
  return p;
}
// The sum of squares in the order of sum_of_squares(): partial 16 a + 8 dh + 2 (l % 4) + par is of
// the blocks with b % 2 = a. A square of what is not finite makes the scale so.
template <int32_t kDim>
__device__ __forceinline__ QuantParams half_norm(const HalfRows<kDim>& x, bool* is_sound) {
  float partial[8] = {};  // 4 a + 2 dh + par
#pragma unroll
  for (int32_t i = 0; i < kDim / 4; ++i) {
    partial[i % 8] = add_rn(partial[i % 8], mul_rn(x[i], x[i]));
  }
  float sum[2];
#pragma unroll
  for (int32_t par = 0; par < 2; ++par) {
    sum[par] =
        add_rn(add_rn(partial[par], partial[4 + par]), add_rn(partial[2 + par], partial[6 + par]));
#pragma unroll
    for (int32_t lanes = 2; lanes > 0; lanes /= 2) {
      sum[par] = add_rn(sum[par], __shfl_xor_sync(kFullWarp, sum[par], lanes));
    }
  }
  const QuantParams p = norm_params(add_rn(sum[0], sum[1]), kDim);
  *is_sound = params_in_range(p);
  return p;
}

template <CodeType kType, int32_t kDim>
__device__ __forceinline__ QuantParams half_params(const HalfRows<kDim>& x, StepRule rule,
                                                   bool* is_sound) {
  if constexpr (kType == kCodes2) {
    if (rule == StepRule::kNorm) return half_norm<kDim>(x, is_sound);
  }
  return half_minmax<kDim>(x, kType.levels(), is_sound);
}

// The codes of a token half to the words, in the order of keys, as the upper half; what was there
// becomes the lower one. (So both halves have the same code: two copies of the kernel, of keys and
// of values in different formats, fit into the instruction cache.)
template <CodeType kType, int32_t kDim>
__device__ __forceinline__ void add_codes(const HalfRows<kDim>& x, QuantParams p,
                                          uint32_t (&words)[kTileWords<kType, kDim>]) {
  constexpr int32_t kBits = kType.bits();
  constexpr int32_t kBlocks = kBits == 2 ? 2 : 1;  // that share a word
  constexpr float kTop = static_cast<float>((1 << kBits) - 1);
  const CodeMaker maker = make_code_maker(p);
#pragma unroll
  for (int32_t b = 0; b < kDim / kDimBlock; b += kBlocks) {
    uint32_t codes[4 * kBlocks];
#pragma unroll
    for (int32_t i = 0; i < 4 * kBlocks; ++i) codes[i] = biased_code(x[4 * b + i], maker, kTop);
    if constexpr (kBits == 8) {
      words[2 * b] = words[2 * b + 1];
      words[2 * b + 1] = join_bytes(codes[0], codes[2], codes[1], codes[3]);
    } else {
      uint32_t bytes[2];
#pragma unroll
      for (int32_t par = 0; par < 2; ++par) {
        bytes[par] = codes[par];
#pragma unroll
        for (int32_t i = 1; i < 2 * kBlocks; ++i) bytes[par] += codes[2 * i + par] << kBits * i;
      }
      const uint32_t both = __byte_perm(bytes[0], bytes[1], 0x0040);  // the low bytes
      uint32_t& word = words[fragment_code_word(kBits, b, 0)];
      word = __byte_perm(word, both, 0x5341);
    }
  }
}
template <int32_t kDim>
__device__ __forceinline__ bool add_raw(const HalfRows<kDim>& x, DType dtype,
                                        uint32_t (&words)[kDim / 4]) {
  float most = 0;
#pragma unroll
  for (const float y : x) most = nan_max(most, fabsf(y));
#pragma unroll
  for (int32_t i = 0; i < kDim / 8; ++i) {
    const int32_t at = 4 * (i / 2) + 2 * (i % 2);
    words[at] = words[at + 1];
    words[at + 1] = dtype == DType::kFloat16 ? pack_halves(x[2 * i], x[2 * i + 1])
                                             : pack_bfloats(x[2 * i], x[2 * i + 1]);
  }
  return is_finite(raw_to_float(dtype, float_to_raw(dtype, most)));
}

// ---- a tile ----

// One component of a tile: rows in shared memory (start_rows()), and where its codes go.
struct StagedRows {
  const uint8_t* rows;
  const ChannelPair* table;
  DType dtype;
  const Rotation* rotation;
  // Bit t: token t is there. The others get zeros; their rows are finite.
  uint32_t tokens = 0xffff;
  bool is_reflected = false;  // by the normals of the table
};
struct TileTarget {
  uint8_t* codes;
  uint8_t* metadata;
  StepRule rule;
  bool is_value;
  DType raw_dtype;
};

// False in all lanes where a token of the tile has no codes; what is written is then not defined.
template <CodeType kType, int32_t kDim, ChannelVector kVector>
__device__ __forceinline__ bool encode_tile(const StagedRows& from, const TileTarget& to) {
  uint32_t words[kTileWords<kType, kDim>] = {}, params[2] = {};
  bool is_sound = true;
#pragma unroll 1
  for (int32_t th = 0; th < 2; ++th) {
    HalfRows<kDim> x;
    load_half<kDim>(from.rows, th, from.dtype, x);
    rotate_half<kDim, kVector>(*from.rotation, from.table, x);
    if constexpr (kVector == ChannelVector::kNormal) {
      if (from.is_reflected) reflect_half<kDim>(from.table, x);
    }
    bool half_is_sound;
    if constexpr (kType.is_raw()) {
      half_is_sound = add_raw<kDim>(x, to.raw_dtype, words);
    } else {
      QuantParams p = half_params<kType, kDim>(x, to.rule, &half_is_sound);
      if ((from.tokens >> (lane_index() / 4 + kHalfTokens * th) & 1u) == 0) {
        p = {};
        half_is_sound = true;
      }
      add_codes<kType, kDim>(x, p, words);
      params[0] = params[1];
      params[1] = p.scale | static_cast<uint32_t>(p.zero_point) << 16;
    }
    is_sound &= half_is_sound;
  }
  if (to.is_value) exchange_words<kType>(words);
  store_tile_words(words, to.codes);
  if constexpr (!kType.is_raw()) {
    if (lane_index() % 4 == 0) {
      *reinterpret_cast<uint2*>(to.metadata + token_metadata_byte(0, lane_index() / 4)) = {
          params[0], params[1]};
    }
  }
  return __all_sync(kFullWarp, is_sound);
}

template <int32_t kDim, ChannelVector kVector>
__device__ __forceinline__ bool encode_tile_of(CodeType type, const StagedRows& from,
                                               const TileTarget& to) {
  if (type == kRawCodes) return encode_tile<kRawCodes, kDim, kVector>(from, to);
  if (type == kCodes8) return encode_tile<kCodes8, kDim, kVector>(from, to);
  if (type == kCodes4) return encode_tile<kCodes4, kDim, kVector>(from, to);
  return encode_tile<kCodes2, kDim, kVector>(from, to);
}

}  // namespace tierkv
