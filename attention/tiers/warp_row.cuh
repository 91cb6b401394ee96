// SPDX-License-Identifier: Apache-2.0
// What a warp keeps of a row that it attends to (warp_attention.cuh), and what it does once a row
// or a format: its queries at the beginning, its state and output at the end.
#pragma once

#include "attention/core/columns.h"
#include "attention/core/online_softmax.h"
#include "attention/core/query_unit.h"
#include "attention/tiers/decode.h"
#include "attention/tiers/page_tile.cuh"
#include "gpu/lanes.cuh"
#include "gpu/math.cuh"
#include "gpu/mma.cuh"

namespace tierkv {

inline constexpr float kNoTokensYet = -1.0f;  // a ceiling that every weight passes
// The reference of a column that has seen no token: a sum never has this sign of zero.
inline constexpr uint32_t kUnsetReference = 0x80000000u;

// The queries of raw keys are as they were fetched, and so are those of a row without a type yet.
__device__ __forceinline__ bool takes_fetched_query(CodeType keys) {
  return keys == kNoType || keys.is_raw();
}

// A plain one has one query.
template <int32_t kHeadDim, int32_t kColumnBlocks, DecodeMode kMode>
class WarpRow {
 public:
  static constexpr int32_t kBlocks = kHeadDim / kDimBlock;
  static constexpr bool kIsPlain = is_plain(kMode);
  static constexpr bool kIsNarrow = of_one_class(kMode) == DecodeMode::kNarrow;
  static constexpr int32_t kLaneColumns = kIsNarrow ? 1 : 2;  // of a block, whose scores it has
  static constexpr bool kIsBFloat16 = of_one_class(kMode) == DecodeMode::kBFloat16;

  __device__ __forceinline__ explicit WarpRow(const QueryColumns& columns) : columns_(columns) {}

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
  __device__ __forceinline__ void fetch_query(const uint16_t* q, int32_t row) {
    const int32_t t = lane() % 4;
#pragma unroll
    for (int32_t c = 0; c < kColumnBlocks; ++c) {
      const int64_t place = columns_.place(row, query_column(c));
#pragma unroll
      for (int32_t f = 0; f < kBlocks; ++f) {
#pragma unroll
        for (int32_t half = 0; half < 2; ++half) {
          const uint16_t* from = q + place * kHeadDim + f * kDimBlock + 8 * half + 2 * t;
          query_[c][f][half] = place >= 0 ? *reinterpret_cast<const uint32_t*>(from) : 0u;
        }
      }
    }
  }
  __device__ __forceinline__ void sum_query(float scale_log2) {
    const uint32_t one = kIsBFloat16 ? 0x3f803f80u : 0x3c003c00u;  // twice
    const uint32_t ones[4] = {one, one, one, one};
#pragma unroll
    for (int32_t c = 0; c < kColumnBlocks; ++c) {
      float sums[2][4] = {};  // two chains
#pragma unroll
      for (int32_t f = 0; f < kBlocks; ++f) {
        multiply<kRawCodes>(sums[f % 2], ones, query_[c][f][0], query_[c][f][1]);
      }
#pragma unroll
      for (int32_t j = 0; j < kLaneColumns; ++j) {
        query_sum_[c][j] = (sums[0][j] + sums[1][j]) * scale_log2;
      }
    }
  }

  // Before tiles of a format.
  __device__ __forceinline__ void use_format(CodeType k, CodeType v, float scale_log2) {
    if (k != k_type_) scale_query(k_type_, k, scale_log2);
    if (v != v_type_ && v_type_ != kNoType) convert_out(v_type_, v);
    k_type_ = k;
    v_type_ = v;
  }

  // The states and accumulators of the row's columns, to shared memory: states[of_row],
  // part[of_row][kHeadDim], swizzled. The part of an empty state may be anything.
  __device__ __forceinline__ void store_part(SoftmaxState* states, float* part) {
    const int32_t g = lane() / 4;
    if (v_type_ == kNoType) {  // no tokens
      if (lane() < columns_.of_row) states[lane()] = SoftmaxState{};
      return;
    }
    sum_lanes();
#pragma unroll
    for (int32_t c = 0; c < kColumnBlocks; ++c) {
#pragma unroll
      for (int32_t j = 0; j < kLaneColumns; ++j) {
        const int32_t column = own_column(c, j);
        if (column >= columns_.of_row) continue;
        const int32_t swizzle = part_swizzle(column);
        if (g == 0) states[column] = {reference_[c][j], sum_[c][j]};
#pragma unroll
        for (int32_t f = 0; f < kBlocks; ++f) {
#pragma unroll
          for (int32_t half = 0; half < 2; ++half) {
            const int32_t dim = f * kDimBlock + 8 * half;
            part[column * kHeadDim + swizzled(dim, swizzle) + g] = fmaf(
                own_out(c, f, half, j), power_of_two(unpacked_exponent(v_type_, dim)), zero_[c][j]);
          }
        }
      }
    }
  }

  // The finished row to global memory: out, lse and sinks are those of the launch, lse and sinks
  // may be null; a plain kernel has no sinks.
  __device__ __forceinline__ void write_row(uint16_t* out, float* lse, const float* sinks,
                                            int32_t row) {
    const int32_t g = lane() / 4, t = lane() % 4;
    sum_lanes();
#pragma unroll
    for (int32_t c = 0; c < kColumnBlocks; ++c) {
      float scale[kLaneColumns];
#pragma unroll
      for (int32_t j = 0; j < kLaneColumns; ++j) {
        const int32_t column = own_column(c, j);
        const bool has_sink = !kIsPlain && sinks != nullptr;
        const FinishedState finished =
            finish({reference_[c][j], sum_[c][j]},
                   has_sink ? sinks[columns_.head(row, column)] : -INFINITY);
        scale[j] = finished.scale;
        if (lse == nullptr || g != 0) continue;
        const int64_t place = columns_.place(row, column);
        if (place >= 0) lse[place] = finished.lse;
      }
      // A lane packs two columns, or of a narrow row the two halves of a block of dims.
      const int64_t place = columns_.place(row, kIsNarrow ? g / 2 : kBlockColumns * c + g);
#pragma unroll
      for (int32_t f = 0; f < kBlocks; ++f) {
        const auto value = [&](int32_t half, int32_t j) {
          const float unit = power_of_two(unpacked_exponent(v_type_, f * kDimBlock + 8 * half));
          return fmaf(own_out(c, f, half, j), unit, zero_[c][j]) * scale[j];
        };
        uint16_t* to = out + place * kHeadDim + f * kDimBlock + 2 * t;
        if constexpr (kIsNarrow) {
          const uint32_t pair = transpose_8x8(pack_outputs(value(0, 0), value(1, 0), false));
          if (place >= 0) *reinterpret_cast<uint32_t*>(to + 8 * (g % 2)) = pair;
        } else {
#pragma unroll
          for (int32_t half = 0; half < 2; ++half) {
            const float x[2] = {value(half, 0), value(half, 1)};
            const uint32_t pair = transpose_8x8(pack_outputs(x[0], x[1], kIsBFloat16));
            if (place >= 0) *reinterpret_cast<uint32_t*>(to + 8 * half) = pair;
          }
        }
      }
    }
  }

 protected:
  __device__ __forceinline__ static int32_t lane() {
    return threadIdx.x % 32;
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

 private:
  // The factors of codes are powers of two, at most 2^6: exact but for elements of q below 2^-8,
  // whose last bits are lost in fp16's subnormals at 2^-25 absolute.
  __device__ __forceinline__ void scale_query(CodeType from, CodeType to, float scale_log2) {
    if (kIsBFloat16 && (takes_fetched_query(from) || takes_fetched_query(to))) {
      return convert_query(from, to, scale_log2);
    }
#pragma unroll
    for (int32_t f = 0; f < kBlocks; ++f) {
#pragma unroll
      for (int32_t half = 0; half < 2; ++half) {
        const int32_t dim = f * kDimBlock + 8 * half;
        const int32_t shift = code_shift(from.bits(), dim) - code_shift(to.bits(), dim);
#pragma unroll
        for (int32_t c = 0; c < kColumnBlocks; ++c) {
          query_[c][f][half] = multiply_halves(query_[c][f][half], power_of_two(shift));
        }
      }
    }
    if (kIsBFloat16) return;  // the unit keeps the power of two of the queries
    score_unit_ = to.is_raw() ? scale_log2 : scale_log2 * 0x1p24f;
  }

  // The power of two that brings the row's largest element of q to [2^14, 2^15). One for all
  // columns: what fp16 then loses of an element lies 2^-34 below the largest of the row.
  __device__ __forceinline__ float query_unit() const {
    float largest = 0.0f;
#pragma unroll
    for (int32_t c = 0; c < kColumnBlocks; ++c) {
#pragma unroll
      for (int32_t f = 0; f < kBlocks; ++f) {
#pragma unroll
        for (int32_t half = 0; half < 2; ++half) {
          const float2 x = unpack_bfloats(query_[c][f][half]);
          largest = fmaxf(largest, fmaxf(fabsf(x.x), fabsf(x.y)));
        }
      }
    }
#pragma unroll
    for (int32_t i = 1; i < 32; i *= 2) {
      largest = fmaxf(largest, __shfl_xor_sync(kFullWarp, largest, i));
    }
    return tierkv::query_unit(largest, 14, 14);
  }

  // bfloat16 queries as they are, for raw keys, or as fp16 times a power of two, for codes. Before
  // the first format of a row they are as they were fetched.
  __device__ __forceinline__ void convert_query(CodeType from, CodeType to, float scale_log2) {
    const bool to_raw = takes_fetched_query(to);
    if (takes_fetched_query(from) && to_raw) {
      score_unit_ = scale_log2;
      return;
    }
    const float code_unit = scale_log2 * 0x1p24f;
    const float unit = to_raw ? score_unit_ / code_unit : query_unit();
    score_unit_ = to_raw ? scale_log2 : code_unit * unit;
#pragma unroll
    for (int32_t f = 0; f < kBlocks; ++f) {
#pragma unroll
      for (int32_t half = 0; half < 2; ++half) {
        const int32_t dim = f * kDimBlock + 8 * half;
        const float factor = to_raw ? unit * power_of_two(code_shift(from.bits(), dim))
                                    : power_of_two(-code_shift(to.bits(), dim)) / unit;
#pragma unroll
        for (int32_t c = 0; c < kColumnBlocks; ++c) {
          uint32_t& pair = query_[c][f][half];
          const float2 x = to_raw ? unpack_halves(pair) : unpack_bfloats(pair);
          pair = to_raw ? pack_bfloats(x.x * factor, x.y * factor)
                        : pack_halves(x.x * factor, x.y * factor);
        }
      }
    }
  }

  __device__ __forceinline__ void convert_out(CodeType from, CodeType to) {
#pragma unroll
    for (int32_t f = 0; f < kBlocks; ++f) {
#pragma unroll
      for (int32_t i = 0; i < 4; ++i) {
        const int32_t dim = f * kDimBlock + 8 * (i / 2);
        const float factor =
            power_of_two(unpacked_exponent(from, dim) - unpacked_exponent(to, dim));
#pragma unroll
        for (int32_t c = 0; c < kColumnBlocks; ++c) out_[c][f][i] *= factor;
      }
    }
  }

  // Every lane of a column gets its sums over all lanes.
  __device__ __forceinline__ void sum_lanes() {
#pragma unroll
    for (int32_t i = 4; i < 32; i *= 2) {
#pragma unroll
      for (int32_t c = 0; c < kColumnBlocks; ++c) {
#pragma unroll
        for (int32_t j = 0; j < kLaneColumns; ++j) {
          sum_[c][j] += __shfl_xor_sync(kFullWarp, sum_[c][j], i);
          zero_[c][j] += __shfl_xor_sync(kFullWarp, zero_[c][j], i);
        }
      }
    }
  }
};

}  // namespace tierkv
