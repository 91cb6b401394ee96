// One head's accumulator spread over a warp, and the joining of softmax states by a warp.
#pragma once

#include "attention/online_softmax.h"
#include "attention/ptx.cuh"

namespace tierkv {

// [kHeadDim] floats: lane l holds dims 4l .. 4l + 3 of every 128.
template <int32_t kHeadDim>
class HeadSum {
 public:
  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int32_t i = 0; i < kQuads; ++i) x_[i] = {0.0f, 0.0f, 0.0f, 0.0f};
  }

  // From global memory that other CTAs wrote.
  __device__ __forceinline__ void load(const float* from) {
#pragma unroll
    for (int32_t i = 0; i < kQuads; ++i) {
      if (has(i)) x_[i] = __ldcg(reinterpret_cast<const float4*>(from + dim(i)));
    }
  }
  __device__ __forceinline__ void store(float* to) const {
#pragma unroll
    for (int32_t i = 0; i < kQuads; ++i) {
      if (has(i)) *reinterpret_cast<float4*>(to + dim(i)) = x_[i];
    }
  }

  __device__ __forceinline__ void scale(float factor) {
#pragma unroll
    for (int32_t i = 0; i < kQuads; ++i) {
      x_[i].x *= factor, x_[i].y *= factor, x_[i].z *= factor, x_[i].w *= factor;
    }
  }
  __device__ __forceinline__ void add(const HeadSum& part, float factor) {
#pragma unroll
    for (int32_t i = 0; i < kQuads; ++i) add_quad(i, part.x_[i], factor);
  }
  // From shared memory.
  __device__ __forceinline__ void add(const float* part, float factor) {
#pragma unroll
    for (int32_t i = 0; i < kQuads; ++i) {
      if (has(i)) add_quad(i, *reinterpret_cast<const float4*>(part + dim(i)), factor);
    }
  }

  __device__ __forceinline__ void write(__half* out, float factor) const {
#pragma unroll
    for (int32_t i = 0; i < kQuads; ++i) {
      if (!has(i)) continue;
      const uint2 halves = {pack_halves(x_[i].x * factor, x_[i].y * factor),
                            pack_halves(x_[i].z * factor, x_[i].w * factor)};
      *reinterpret_cast<uint2*>(out + dim(i)) = halves;
    }
  }

 private:
  static constexpr int32_t kQuads = (kHeadDim + 127) / 128;

  __device__ __forceinline__ static int32_t dim(int32_t i) {
    return 128 * i + 4 * static_cast<int32_t>(threadIdx.x % 32);
  }
  __device__ __forceinline__ static bool has(int32_t i) {
    return kHeadDim % 128 == 0 || dim(i) < kHeadDim;
  }
  __device__ __forceinline__ void add_quad(int32_t i, float4 y, float factor) {
    x_[i].x = fmaf(factor, y.x, x_[i].x);
    x_[i].y = fmaf(factor, y.y, x_[i].y);
    x_[i].z = fmaf(factor, y.z, x_[i].z);
    x_[i].w = fmaf(factor, y.w, x_[i].w);
  }

  float4 x_[kQuads];
};

// Joins the states of all lanes, in one order; returns the factor that brings this lane's
// accumulator to the reference of the whole.
__device__ __forceinline__ float share_of_warp(SoftmaxState mine, SoftmaxState& whole) {
  float reference = mine.is_empty() ? kNoReference : mine.reference;
#pragma unroll
  for (int32_t i = 1; i < 32; i *= 2) {
    reference = fmaxf(reference, __shfl_xor_sync(kFullWarp, reference, i));
  }
  whole.reference = reference;
  const float factor = share(mine, whole);
  whole.sum = factor * mine.sum;
#pragma unroll
  for (int32_t i = 1; i < 32; i *= 2) whole.sum += __shfl_xor_sync(kFullWarp, whole.sum, i);
  return factor;
}

}  // namespace tierkv
