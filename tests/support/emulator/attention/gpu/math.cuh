// SPDX-License-Identifier: Apache-2.0
// The host's stand-in for gpu/math.cuh.
#pragma once

#include <cmath>
#include <cstdint>

#include "codec/format/element.h"
#include "gpu/constants.h"
#include "tests/support/emulator/cuda.h"
#include "tierkv/half.h"

namespace tierkv {

inline float emulated_half(uint32_t word, int32_t i) {
  return half_to_float(static_cast<uint16_t>(word >> 16 * i));
}

inline float emulated_bfloat(uint32_t word, int32_t i) {
  return bfloat16_to_float(static_cast<uint16_t>(word >> 16 * i));
}

inline uint32_t odd_bytes(uint32_t x) {
  return x >> 8 & 0x00ff00ffu;
}
inline int32_t lowest_bit(uint32_t x) {
  return __builtin_ffs(static_cast<int>(x)) - 1;
}
inline int32_t highest_bit(uint32_t x) {
  return x == 0 ? -1 : 31 - __builtin_clz(x);
}

inline uint32_t pack_halves(float low, float high) {
  return float_to_half(low) | static_cast<uint32_t>(float_to_half(high)) << 16;
}
inline float2 unpack_halves(uint32_t x) {
  return {emulated_half(x, 0), emulated_half(x, 1)};
}
inline uint32_t pack_bfloats(float low, float high) {
  return float_to_bfloat16(low) | static_cast<uint32_t>(float_to_bfloat16(high)) << 16;
}
inline float2 unpack_bfloats(uint32_t x) {
  return {emulated_bfloat(x, 0), emulated_bfloat(x, 1)};
}
inline uint32_t pack_outputs(float low, float high, bool is_bfloat16) {
  const DType type = is_bfloat16 ? DType::kBFloat16 : DType::kFloat16;
  return output_to_raw(type, low) | static_cast<uint32_t>(output_to_raw(type, high)) << 16;
}
inline uint32_t multiply_halves(uint32_t x, float factor) {
  return pack_halves(emulated_half(x, 0) * factor, emulated_half(x, 1) * factor);
}
inline uint32_t multiply_halves(uint32_t a, uint32_t b) {
  return pack_halves(emulated_half(a, 0) * emulated_half(b, 0),
                     emulated_half(a, 1) * emulated_half(b, 1));
}
inline uint32_t negate_halves(uint32_t x) {
  return x ^ 0x80008000u;
}

inline constexpr uint32_t kOneHalves = 0x3c003c00u;
inline uint32_t equal_halves(uint32_t x, uint32_t y) {
  uint32_t z = 0;
  for (int32_t i = 0; i < 2; ++i) {
    if (emulated_half(x, i) == emulated_half(y, i)) z |= 0xffffu << 16 * i;
  }
  return z;
}
inline uint32_t fma_halves(uint32_t a, uint32_t b, uint32_t c) {
  float d[2];
  for (int32_t i = 0; i < 2; ++i) {
    d[i] = std::fma(emulated_half(a, i), emulated_half(b, i), emulated_half(c, i));
  }
  return pack_halves(d[0], d[1]);
}
inline uint32_t low_halves(uint32_t a, uint32_t b) {
  return (a & 0xffffu) | b << 16;
}
inline uint32_t high_halves(uint32_t a, uint32_t b) {
  return a >> 16 | (b & 0xffff0000u);
}

inline uint32_t saturate_halves(uint32_t x) {
  const auto inside = [&](int32_t i) {
    return std::fmin(std::fmax(emulated_half(x, i), -65504.0f), 65504.0f);
  };
  return pack_halves(inside(0), inside(1));
}

inline float nan_min(float a, float b) {
  return std::isnan(a) || std::isnan(b) ? NAN : std::fmin(a, b);
}
inline float nan_max(float a, float b) {
  return std::isnan(a) || std::isnan(b) ? NAN : std::fmax(a, b);
}
inline float exp2_approx(float x) {
  return std::exp2(x);
}
inline float power_of_two(int32_t exponent) {
  return std::exp2(static_cast<float>(exponent));
}

}  // namespace tierkv
