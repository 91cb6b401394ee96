// SPDX-License-Identifier: Apache-2.0
// Arithmetic by instructions: halves and bfloat16 in pairs, bits and bytes of words.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

#include "gpu/constants.h"

namespace tierkv {

__device__ __forceinline__ uint32_t pack_halves(float low, float high) {
  uint32_t y;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
  return y;
}
__device__ __forceinline__ float2 unpack_halves(uint32_t x) {
  return __half22float2(*reinterpret_cast<__half2*>(&x));
}

__device__ __forceinline__ uint32_t pack_bfloats(float low, float high) {
  uint32_t y;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
  return y;
}
__device__ __forceinline__ float2 unpack_bfloats(uint32_t x) {
  return {__uint_as_float(x << 16), __uint_as_float(x & 0xffff0000u)};
}

__device__ __forceinline__ uint32_t multiply_halves(uint32_t x, float factor) {
  const __half2 y = __hmul2(*reinterpret_cast<__half2*>(&x), __float2half2_rn(factor));
  return *reinterpret_cast<const uint32_t*>(&y);
}

__device__ __forceinline__ uint32_t multiply_halves(uint32_t a, uint32_t b) {
  uint32_t d;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}
__device__ __forceinline__ uint32_t negate_halves(uint32_t x) {
  uint32_t y;
  asm("neg.f16x2 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}

inline constexpr uint32_t kOneHalves = 0x3c003c00u;
// Two values of an output: what rounding, or a sum that left fp32, has carried past the largest
// value of the type saturates, as output_to_raw() does.
__device__ __forceinline__ uint32_t pack_outputs(float low, float high, bool is_bfloat16) {
  uint32_t y;
  if (is_bfloat16) {
    asm("cvt.rn.satfinite.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.satfinite.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
  }
  return y;
}

// Per half all ones where they are equal.
__device__ __forceinline__ uint32_t equal_halves(uint32_t x, uint32_t y) {
  uint32_t z;
  asm("set.eq.u32.f16x2 %0, %1, %2;" : "=r"(z) : "r"(x), "r"(y));
  return z;
}

// a * b + c, rounded once, of both halves.
__device__ __forceinline__ uint32_t fma_halves(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t d;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}

// Halves of two words: the low ones, the high ones.
__device__ __forceinline__ uint32_t low_halves(uint32_t a, uint32_t b) {
  return __byte_perm(a, b, 0x5410);
}
__device__ __forceinline__ uint32_t high_halves(uint32_t a, uint32_t b) {
  return __byte_perm(a, b, 0x7632);
}

// Infinities become the largest numbers.
__device__ __forceinline__ uint32_t saturate_halves(uint32_t x) {
  asm("min.f16x2 %0, %0, %1;" : "+r"(x) : "r"(0x7bff7bffu));
  asm("max.f16x2 %0, %0, %1;" : "+r"(x) : "r"(0xfbfffbffu));
  return x;
}

// The index of the lowest set bit, -1 of 0.
__device__ __forceinline__ int32_t lowest_bit(uint32_t x) {
  return __ffs(static_cast<int32_t>(x)) - 1;
}

// The index of the highest set bit, -1 of 0.
__device__ __forceinline__ int32_t highest_bit(uint32_t x) {
  return 31 - __clz(static_cast<int32_t>(x));
}

// The bytes 1 and 3 of a word, each as the low byte of a half.
__device__ __forceinline__ uint32_t odd_bytes(uint32_t x) {
  return __byte_perm(x, 0, 0x4341);
}

__device__ __forceinline__ float nan_min(float a, float b) {
  float y;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}
__device__ __forceinline__ float nan_max(float a, float b) {
  float y;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}

__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 2^exponent, a normal number.
__device__ __forceinline__ float power_of_two(int32_t exponent) {
  return __int_as_float((127 + exponent) << 23);
}

}  // namespace tierkv
