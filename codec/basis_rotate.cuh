// Means and Hadamard: a lane holds 8 neighbouring channels of a vector, the lanes of a vector are
// neighbours. The operations are those of codec/basis.cc in their order, so their bits are equal.
#pragma once

#include "codec/basis_vectors.cuh"
#include "codec/element.h"

namespace tierkv {

inline constexpr int32_t kRotateThreads = 256;

// The power of two of the descending cut of head_dim that channel `at` lies in.
__device__ __forceinline__ int32_t hadamard_part(int32_t head_dim, int32_t at) {
  int32_t done = 0;
  for (int32_t n = 256; n > 0; n /= 2) {
    if ((head_dim & n) == 0) continue;
    if (at < done + n) return n;
    done += n;
  }
  return 0;
}

// The part's lanes are aligned to its size: parts come in descending order.
__device__ __forceinline__ void hadamard_lanes(float (&x)[8], int32_t part) {
#pragma unroll
  for (int32_t half = 1; half < 8; half *= 2) {
#pragma unroll
    for (int32_t i = 0; i < 8; ++i) {
      if ((i & half) != 0) continue;
      const float a = x[i], b = x[i + half];
      x[i] = a + b;
      x[i + half] = a - b;
    }
  }
  // All lanes of the warp take part in every exchange.
  for (int32_t half = 8; half < 256; half *= 2) {
    if (!__any_sync(0xffffffffu, half < part)) break;
    const int32_t apart = half / 8;
    const bool is_second = (threadIdx.x & apart) != 0;
#pragma unroll
    for (int32_t i = 0; i < 8; ++i) {
      const float other = __shfl_xor_sync(0xffffffffu, x[i], apart);
      if (half < part) x[i] = is_second ? other - x[i] : x[i] + other;
    }
  }
  const float scale = part > 0 ? 1.0f / sqrtf(static_cast<float>(part)) : 0.0f;
#pragma unroll
  for (int32_t i = 0; i < 8; ++i) x[i] *= scale;
}

template <DType kDtype>
__device__ __forceinline__ void load_eight(const void* from, int64_t element, float (&x)[8]) {
  if constexpr (kDtype == DType::kFloat32) {
    const float4* p = reinterpret_cast<const float4*>(static_cast<const float*>(from) + element);
    const float4 a = p[0], b = p[1];
    x[0] = a.x, x[1] = a.y, x[2] = a.z, x[3] = a.w;
    x[4] = b.x, x[5] = b.y, x[6] = b.z, x[7] = b.w;
  } else {
    const uint4 w = *reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(from) + element);
    const uint32_t words[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
    for (int32_t i = 0; i < 8; ++i) {
      x[i] = raw_to_float(kDtype, static_cast<uint16_t>(words[i / 2] >> (16 * (i % 2))));
    }
  }
}

__device__ __forceinline__ void load_floats(const float* from, float (&x)[8]) {
  load_eight<DType::kFloat32>(from, 0, x);
}

// Two lanes write each other's halves, so that every store of a warp is of whole sectors.
__device__ __forceinline__ void store_floats(float* vector, int32_t channel, bool is_mine,
                                             const float (&x)[8]) {
  const bool is_odd = threadIdx.x % 2 != 0;
  float4 mine = is_odd ? make_float4(x[4], x[5], x[6], x[7]) : make_float4(x[0], x[1], x[2], x[3]);
  float other[4];
#pragma unroll
  for (int32_t i = 0; i < 4; ++i) {
    other[i] = __shfl_xor_sync(0xffffffffu, is_odd ? x[i] : x[4 + i], 1);
  }
  if (!is_mine) return;
  const float4 theirs = make_float4(other[0], other[1], other[2], other[3]);
  float4* pair = reinterpret_cast<float4*>(vector + channel / 16 * 16);
  pair[is_odd] = is_odd ? theirs : mine;
  pair[2 + is_odd] = is_odd ? mine : theirs;
}

__device__ __forceinline__ void store_eight(const BasisVectors& v, uint16_t* to,
                                            const float (&x)[8]) {
  uint32_t w[4];
#pragma unroll
  for (int32_t i = 0; i < 4; ++i) w[i] = two_values(v, x[2 * i], x[2 * i + 1]);
  *reinterpret_cast<uint4*>(to) = make_uint4(w[0], w[1], w[2], w[3]);
}

// sm_scale q . mean of every vector of the warp, from its raw channels.
__device__ __forceinline__ float mean_product(const BasisVectors& v, const float (&q)[8],
                                              const float* mean, int32_t lanes) {
  float m[8], sum = 0;
  load_floats(mean, m);
#pragma unroll
  for (int32_t i = 0; i < 8; ++i) sum += q[i] * m[i];
  for (int32_t apart = lanes / 2; apart > 0; apart /= 2) {
    sum += __shfl_xor_sync(0xffffffffu, sum, apart);
  }
  return sum * v.sm_scale;
}

// Vectors of all heads in order; the second grid dimension is the component.
template <DType kDtype>
__global__ void __launch_bounds__(kRotateThreads)
    rotate_kernel(const __grid_constant__ BasisBatch batch, int32_t lanes) {
  const BasisVectors& v = batch.part[blockIdx.y];
  const BasisOperand& o = v.operand;
  const int32_t group = v.heads / v.kv_heads;
  const int64_t vectors = v.tokens * v.heads;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kRotateThreads / lanes;
  const int64_t first = (static_cast<int64_t>(blockIdx.x) * kRotateThreads + threadIdx.x) / lanes;
  const int32_t channel = static_cast<int32_t>(threadIdx.x) % lanes * 8;
  const bool is_used = channel < o.head_dim;
  const int32_t part = is_used && o.signs != nullptr ? hadamard_part(o.head_dim, channel) : 0;
  // Warps leave the loop as a whole: the exchanges need every lane.
  const int64_t of_warp = 32 / lanes;
  for (int64_t i = first; i - i % of_warp < vectors; i += step) {
    const bool is_mine = is_used && i < vectors;
    const int64_t at = is_mine ? i : 0;
    const int64_t row = v.first_row + at % v.heads / group;
    const int32_t from = is_mine ? channel : 0;
    const int64_t params = row * o.head_dim + from;
    float x[8], mean[8] = {}, signs[8] = {};
    load_eight<kDtype>(v.x, at * o.head_dim + from, x);
    if (!is_mine) {
#pragma unroll
      for (float& value : x) value = 0;
    }
    if (o.mean != nullptr) load_floats(o.mean + params, mean);
    if (o.signs != nullptr) load_floats(o.signs + params, signs);
    if (o.use == BasisUse::kQuery && o.mean != nullptr) {
      const float product = mean_product(v, x, o.mean + params, lanes);
      if (is_mine && channel == 0) v.lse_shift[at] = product;
    }
#pragma unroll
    for (int32_t c = 0; c < 8; ++c) {
      if (o.use == BasisUse::kApply && o.mean != nullptr) x[c] -= mean[c];
      if (o.signs != nullptr && o.use != BasisUse::kUndo) x[c] *= signs[c];
    }
    if (o.signs != nullptr) hadamard_lanes(x, part);
    if (o.use == BasisUse::kApply) {
      store_floats(static_cast<float*>(v.y) + at * o.head_dim, from, is_mine, x);
      continue;
    }
    if (o.use == BasisUse::kUndo) {
      const bool is_empty = is_empty_output(v, at);
#pragma unroll
      for (int32_t c = 0; c < 8; ++c) {
        if (o.signs != nullptr) x[c] *= signs[c];
        if (o.mean != nullptr) x[c] += mean[c];
        if (is_empty) x[c] = 0;
      }
      if (is_mine && channel == 0) write_lse(v, at);
    }
    if (!is_mine) continue;
    store_eight(v, static_cast<uint16_t*>(v.y) + at * o.head_dim + from, x);
  }
}

}  // namespace tierkv
