// What WarpAttention does once a row or a format: its query at the beginning, its state and output
// at the end.
#pragma once

#include "attention/warp_attention.cuh"

namespace tierkv {

template <int32_t kHeadDim>
__device__ __forceinline__ void WarpAttention<kHeadDim>::fetch_query(const __half* q,
                                                                     int32_t group) {
  const int32_t g = lane() / 4, t = lane() % 4;
#pragma unroll
  for (int32_t f = 0; f < kBlocks; ++f) {
#pragma unroll
    for (int32_t half = 0; half < 2; ++half) {
      const __half* from = q + g * kHeadDim + f * kDimBlock + 8 * half + 2 * t;
      query_[f][half] = g < group ? *reinterpret_cast<const uint32_t*>(from) : 0u;
    }
  }
}

template <int32_t kHeadDim>
__device__ __forceinline__ void WarpAttention<kHeadDim>::sum_query(float scale_log2) {
  constexpr uint32_t kOnes = 0x3c003c00u;
  const uint32_t ones[4] = {kOnes, kOnes, kOnes, kOnes};
  float sums[2][4] = {};  // two chains
#pragma unroll
  for (int32_t f = 0; f < kBlocks; ++f) {
    mma_m16n8k16(sums[f % 2], ones, query_[f][0], query_[f][1]);
  }
  query_sum_[0] = (sums[0][0] + sums[1][0]) * scale_log2;
  query_sum_[1] = (sums[0][1] + sums[1][1]) * scale_log2;
}

// The factors of codes are powers of two, at most 2^6: exact but for elements of q below 2^-8,
// whose last bits are lost in fp16's subnormals at 2^-25 absolute.
template <int32_t kHeadDim>
__device__ __forceinline__ void WarpAttention<kHeadDim>::scale_query(int32_t from_bits,
                                                                     int32_t to_bits,
                                                                     float scale_log2) {
#pragma unroll
  for (int32_t f = 0; f < kBlocks; ++f) {
#pragma unroll
    for (int32_t half = 0; half < 2; ++half) {
      const int32_t dim = f * kDimBlock + 8 * half;
      const int32_t shift = code_shift(from_bits, dim) - code_shift(to_bits, dim);
      query_[f][half] = multiply_halves(query_[f][half], power_of_two(shift));
    }
  }
  score_unit_ = to_bits == 16 ? scale_log2 : scale_log2 * 0x1p24f;
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

// Every lane of a column gets its sums over all lanes.
template <int32_t kHeadDim>
__device__ __forceinline__ void WarpAttention<kHeadDim>::sum_lanes() {
#pragma unroll
  for (int32_t i = 4; i < 32; i *= 2) {
#pragma unroll
    for (int32_t j = 0; j < 2; ++j) {
      sum_[j] += __shfl_xor_sync(kFullWarp, sum_[j], i);
      zero_[j] += __shfl_xor_sync(kFullWarp, zero_[j], i);
    }
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
  sum_lanes();
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
        part[column * part_stride(kHeadDim) + dim + g] =
            fmaf(out_[f][2 * half + j], power_of_two(unpacked_exponent(v_bits_, dim)), zero_[j]);
      }
    }
  }
}

template <int32_t kHeadDim>
__device__ __forceinline__ void WarpAttention<kHeadDim>::write_row(__half* out, float* lse,
                                                                   int32_t group) {
  const int32_t g = lane() / 4, t = lane() % 4;
  sum_lanes();
  const SoftmaxState states[2] = {{reference_[0], sum_[0]}, {reference_[1], sum_[1]}};
  const float scale[2] = {output_scale(states[0]), output_scale(states[1])};
#pragma unroll
  for (int32_t j = 0; j < 2; ++j) {
    if (lse != nullptr && g == 0 && 2 * t + j < group) lse[2 * t + j] = natural_lse(states[j]);
  }
#pragma unroll
  for (int32_t f = 0; f < kBlocks; ++f) {
#pragma unroll
    for (int32_t half = 0; half < 2; ++half) {
      const int32_t dim = f * kDimBlock + 8 * half;
      const float unit = power_of_two(unpacked_exponent(v_bits_, dim));
      const uint32_t column_pair =
          pack_halves(fmaf(out_[f][2 * half], unit, zero_[0]) * scale[0],
                      fmaf(out_[f][2 * half + 1], unit, zero_[1]) * scale[1]);
      const uint32_t dim_pair = transpose_8x8(column_pair);
      if (g < group) {
        *reinterpret_cast<uint32_t*>(out + g * kHeadDim + dim + 2 * t) = dim_pair;
      }
    }
  }
}

}  // namespace tierkv
