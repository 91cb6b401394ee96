// What WarpAttention does once a row or a format: its queries at the beginning, its state and
// output at the end.
#pragma once

#include "attention/warp_attention.cuh"

namespace tierkv {

template <int32_t kHeadDim, int32_t kColumnBlocks>
__device__ __forceinline__ void WarpAttention<kHeadDim, kColumnBlocks>::fetch_query(
    const uint16_t* q, int32_t row) {
  const int32_t g = lane() / 4, t = lane() % 4;
#pragma unroll
  for (int32_t c = 0; c < kColumnBlocks; ++c) {
    const int64_t place = columns_.place(row, kBlockColumns * c + g);
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

template <int32_t kHeadDim, int32_t kColumnBlocks>
__device__ __forceinline__ void WarpAttention<kHeadDim, kColumnBlocks>::sum_query(
    float scale_log2) {
  constexpr uint32_t kOnes = 0x3c003c00u;
  const uint32_t ones[4] = {kOnes, kOnes, kOnes, kOnes};
#pragma unroll
  for (int32_t c = 0; c < kColumnBlocks; ++c) {
    float sums[2][4] = {};  // two chains
#pragma unroll
    for (int32_t f = 0; f < kBlocks; ++f) {
      mma_m16n8k16(sums[f % 2], ones, query_[c][f][0], query_[c][f][1]);
    }
    query_sum_[c][0] = (sums[0][0] + sums[1][0]) * scale_log2;
    query_sum_[c][1] = (sums[0][1] + sums[1][1]) * scale_log2;
  }
}

// The factors of codes are powers of two, at most 2^6: exact but for elements of q below 2^-8,
// whose last bits are lost in fp16's subnormals at 2^-25 absolute.
template <int32_t kHeadDim, int32_t kColumnBlocks>
__device__ __forceinline__ void WarpAttention<kHeadDim, kColumnBlocks>::scale_query(
    int32_t from_bits, int32_t to_bits, float scale_log2) {
#pragma unroll
  for (int32_t f = 0; f < kBlocks; ++f) {
#pragma unroll
    for (int32_t half = 0; half < 2; ++half) {
      const int32_t dim = f * kDimBlock + 8 * half;
      const int32_t shift = code_shift(from_bits, dim) - code_shift(to_bits, dim);
#pragma unroll
      for (int32_t c = 0; c < kColumnBlocks; ++c) {
        query_[c][f][half] = multiply_halves(query_[c][f][half], power_of_two(shift));
      }
    }
  }
  score_unit_ = to_bits == 16 ? scale_log2 : scale_log2 * 0x1p24f;
}

template <int32_t kHeadDim, int32_t kColumnBlocks>
__device__ __forceinline__ void WarpAttention<kHeadDim, kColumnBlocks>::convert_out(
    int32_t from_bits, int32_t to_bits) {
#pragma unroll
  for (int32_t f = 0; f < kBlocks; ++f) {
#pragma unroll
    for (int32_t i = 0; i < 4; ++i) {
      const int32_t dim = f * kDimBlock + 8 * (i / 2);
      const float factor =
          power_of_two(unpacked_exponent(from_bits, dim) - unpacked_exponent(to_bits, dim));
#pragma unroll
      for (int32_t c = 0; c < kColumnBlocks; ++c) out_[c][f][i] *= factor;
    }
  }
}

// Every lane of a column gets its sums over all lanes.
template <int32_t kHeadDim, int32_t kColumnBlocks>
__device__ __forceinline__ void WarpAttention<kHeadDim, kColumnBlocks>::sum_lanes() {
#pragma unroll
  for (int32_t i = 4; i < 32; i *= 2) {
#pragma unroll
    for (int32_t c = 0; c < kColumnBlocks; ++c) {
#pragma unroll
      for (int32_t j = 0; j < 2; ++j) {
        sum_[c][j] += __shfl_xor_sync(kFullWarp, sum_[c][j], i);
        zero_[c][j] += __shfl_xor_sync(kFullWarp, zero_[c][j], i);
      }
    }
  }
}

template <int32_t kHeadDim, int32_t kColumnBlocks>
__device__ __forceinline__ void WarpAttention<kHeadDim, kColumnBlocks>::store_part(
    SoftmaxState* states, float* part) {
  const int32_t g = lane() / 4, t = lane() % 4;
  if (v_bits_ == 0) {  // no tokens
    if (lane() < columns_.of_row) states[lane()] = SoftmaxState{};
    return;
  }
  sum_lanes();
#pragma unroll
  for (int32_t c = 0; c < kColumnBlocks; ++c) {
#pragma unroll
    for (int32_t j = 0; j < 2; ++j) {
      const int32_t column = kBlockColumns * c + 2 * t + j;
      if (column >= columns_.of_row) continue;
      if (g == 0) states[column] = {reference_[c][j], sum_[c][j]};
#pragma unroll
      for (int32_t f = 0; f < kBlocks; ++f) {
#pragma unroll
        for (int32_t half = 0; half < 2; ++half) {
          const int32_t dim = f * kDimBlock + 8 * half;
          part[column * part_stride(kHeadDim) + dim + g] = fmaf(
              out_[c][f][2 * half + j], power_of_two(unpacked_exponent(v_bits_, dim)), zero_[c][j]);
        }
      }
    }
  }
}

template <int32_t kHeadDim, int32_t kColumnBlocks>
__device__ __forceinline__ void WarpAttention<kHeadDim, kColumnBlocks>::write_row(uint16_t* out,
                                                                                  float* lse,
                                                                                  int32_t row) {
  const int32_t g = lane() / 4, t = lane() % 4;
  sum_lanes();
#pragma unroll
  for (int32_t c = 0; c < kColumnBlocks; ++c) {
    float scale[2];
#pragma unroll
    for (int32_t j = 0; j < 2; ++j) {
      const SoftmaxState state = {reference_[c][j], sum_[c][j]};
      scale[j] = output_scale(state);
      if (lse == nullptr || g != 0) continue;
      const int64_t place = columns_.place(row, kBlockColumns * c + 2 * t + j);
      if (place >= 0) lse[place] = natural_lse(state);
    }
    const int64_t place = columns_.place(row, kBlockColumns * c + g);
#pragma unroll
    for (int32_t f = 0; f < kBlocks; ++f) {
#pragma unroll
      for (int32_t half = 0; half < 2; ++half) {
        const int32_t dim = f * kDimBlock + 8 * half;
        const float unit = power_of_two(unpacked_exponent(v_bits_, dim));
        const uint32_t column_pair =
            pack_halves(fmaf(out_[c][f][2 * half], unit, zero_[c][0]) * scale[0],
                        fmaf(out_[c][f][2 * half + 1], unit, zero_[c][1]) * scale[1]);
        const uint32_t dim_pair = transpose_8x8(column_pair);
        if (place >= 0) {
          *reinterpret_cast<uint32_t*>(out + place * kHeadDim + dim + 2 * t) = dim_pair;
        }
      }
    }
  }
}

}  // namespace tierkv
