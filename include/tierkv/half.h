// SPDX-License-Identifier: Apache-2.0
// IEEE binary16 and bfloat16 as bit patterns, converted exactly and rounded to nearest even on the
// host; device code uses the hardware's conversions, which agree bit for bit on every finite value
// and infinity.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#include <cuda_fp16.h>
#define TKV_HD __host__ __device__ inline
#else
#define TKV_HD inline
#endif

namespace tierkv {

inline constexpr float kMaxHalf = 65504.0f;

TKV_HD uint32_t float_bits(float x) {
  uint32_t u;
  memcpy(&u, &x, 4);
  return u;
}

TKV_HD float bits_float(uint32_t u) {
  float x;
  memcpy(&x, &u, 4);
  return x;
}

TKV_HD float half_to_float(uint16_t h) {
#if defined(__CUDA_ARCH__)
  return __half2float(__ushort_as_half(h));
#else
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16;
  const uint32_t magnitude = h & 0x7fffu;
  if (magnitude >= 0x7c00u) return bits_float(sign | 0x7f800000u | (magnitude & 0x3ffu) << 13);
  if (magnitude >= 0x0400u) return bits_float(sign | ((magnitude << 13) + 0x38000000u));
  const float subnormal = static_cast<float>(magnitude) * 0x1p-24f;
  return sign ? -subnormal : subnormal;
#endif
}

// Round to nearest even; values beyond 65519.996 become infinity, NaN stays NaN.
TKV_HD uint16_t float_to_half(float x) {
#if defined(__CUDA_ARCH__)
  return __half_as_ushort(__float2half_rn(x));
#else
  const uint32_t u = float_bits(x), sign = (u >> 16) & 0x8000u;
  uint32_t a = u & 0x7fffffffu;
  if (a > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7fffu);
  if (a >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);
  if (a < 0x38800000u) {
    // Subnormal result: adding 0.5 aligns the mantissa so that the hardware rounds at 2^-24.
    const float shifted = bits_float(a) + 0.5f;
    return static_cast<uint16_t>(sign | (float_bits(shifted) - 0x3f000000u));
  }
  a += 0xfffu + ((a >> 13) & 1u) - 0x38000000u;
  return static_cast<uint16_t>(sign | a >> 13);
#endif
}

TKV_HD float bfloat16_to_float(uint16_t b) {
  return bits_float(static_cast<uint32_t>(b) << 16);
}

TKV_HD uint16_t float_to_bfloat16(float x) {
  const uint32_t u = float_bits(x);
  if ((u & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>(u >> 16 | 0x40u);
  return static_cast<uint16_t>((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}

// False for NaN and infinity.
TKV_HD bool is_finite(float x) {
  return (float_bits(x) & 0x7f800000u) != 0x7f800000u;
}

}  // namespace tierkv
