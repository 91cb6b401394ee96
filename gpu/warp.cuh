// What a warp of the codec's kernels holds and agrees on.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "gpu/constants.h"
#include "gpu/math.cuh"
#include "tierkv/layout.h"
#include "tierkv/status.h"

namespace tierkv {

// Unsigned arithmetic tells the compiler that it lies in [0, 32): divisions of it are shifts, and
// what lanes would do beyond a short head is left out.
__device__ __forceinline__ int32_t lane_index() {
  return static_cast<int32_t>(threadIdx.x % 32u);
}

// Of several failures the greatest is reported.
__device__ __forceinline__ StatusCode greater(StatusCode a, StatusCode b) {
  return a > b ? a : b;
}
// In all lanes.
__device__ __forceinline__ StatusCode worst_of_warp(StatusCode code) {
  return static_cast<StatusCode>(__reduce_max_sync(kFullWarp, static_cast<int32_t>(code)));
}

// Two neighbouring elements of a type, as a lane holds them.
template <DType kDtype>
struct Pair;

template <>
struct Pair<DType::kFloat16> {
  uint32_t bits;
  __device__ __forceinline__ __half2 value() const {
    return *reinterpret_cast<const __half2*>(&bits);
  }
  __device__ __forceinline__ static Pair of(__half2 x) {
    return {*reinterpret_cast<const uint32_t*>(&x)};
  }
};
template <>
struct Pair<DType::kBFloat16> {
  uint32_t bits;
  __device__ __forceinline__ __nv_bfloat162 value() const {
    return *reinterpret_cast<const __nv_bfloat162*>(&bits);
  }
  __device__ __forceinline__ static Pair of(__nv_bfloat162 x) {
    return {*reinterpret_cast<const uint32_t*>(&x)};
  }
};
template <>
struct Pair<DType::kFloat32> {
  float2 bits;
};

template <DType kDtype>
__device__ __forceinline__ float2 pair_floats(Pair<kDtype> a) {
  if constexpr (kDtype == DType::kFloat32) {
    return a.bits;
  } else if constexpr (kDtype == DType::kFloat16) {
    return __half22float2(a.value());
  } else {
    return {__uint_as_float(a.bits << 16), __uint_as_float(a.bits & 0xffff0000u)};
  }
}

}  // namespace tierkv
