// SPDX-License-Identifier: Apache-2.0
// The quantiser: scale, zero point and code of one group of values, shared by the host reference
// and every kernel. docs/internals/architecture.md, "Quantisation", says when each rule is used.
//
//   minmax    scale = half((max - min) / (levels - 1)), zero_point = half(min)
//   relative  scale = half(step * (max - min)),         zero_point = half(min)
//   absolute  code = round(x / step), signed
//   norm      scale = half(0.9957 sqrt(sum of x^2 / n)), zero_point = half(-1.5 scale), 2 bits
//
// code = round_half_even((x - zero_point) / scale) with a true division; x' = scale * code +
// zero_point by the stored fp16 parameters, one multiplication and one addition (never fused: host
// and device agree).
#pragma once

#include <cmath>
#include <cstdint>

#include "tierkv/format.h"
#include "tierkv/half.h"

namespace tierkv {

// As stored: four bytes a group.
struct QuantParams {
  uint16_t scale = 0;       // fp16 bits, >= 0
  uint16_t zero_point = 0;  // fp16 bits
  friend bool operator==(const QuantParams& a, const QuantParams& b) {
    return a.scale == b.scale && a.zero_point == b.zero_point;
  }
};

// IEEE single-precision operations that no compiler may fuse or approximate.
TKV_HD float div_rn(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fdiv_rn(a, b);
#else
  return a / b;
#endif
}
TKV_HD float mul_rn(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fmul_rn(a, b);
#else
  return a * b;
#endif
}
TKV_HD float add_rn(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fadd_rn(a, b);
#else
  return a + b;
#endif
}
TKV_HD float fma_rn(float a, float b, float c) {
#if defined(__CUDA_ARCH__)
  return __fmaf_rn(a, b, c);
#else
  return std::fma(a, b, c);
#endif
}
TKV_HD float sqrt_rn(float x) {
#if defined(__CUDA_ARCH__)
  return __fsqrt_rn(x);
#else
  return std::sqrt(x);
#endif
}
TKV_HD float round_half_even(float x) {
#if defined(__CUDA_ARCH__)
  return rintf(x);
#else
  return std::nearbyint(x);  // the default rounding mode; the library never changes it
#endif
}

// Parameters of a group with extrema lo <= hi, both finite. `levels` is 2^bits. Adding 0 turns -0
// into +0: which of the two a search for the extrema finds depends on its order.
TKV_HD QuantParams minmax_params(float lo, float hi, int32_t levels) {
  lo = add_rn(lo, 0.0f);
  hi = add_rn(hi, 0.0f);
  return {float_to_half(div_rn(add_rn(hi, -lo), static_cast<float>(levels - 1))),
          float_to_half(lo)};
}

inline constexpr int32_t kNormPartials = 32;
// The sum of squares of a token, as 32 lanes make it: lane l adds the squares of channels l, 32 +
// l, 64 + l, ... to 0 in this order; then for offsets 16, 8, 4, 2, 1 every lane adds the sum of
// lane l ^ offset to its own. No operation is fused.
TKV_HD float add_partials(float* lane) {
  for (int32_t offset = kNormPartials / 2; offset > 0; offset /= 2) {
    for (int32_t l = 0; l < offset; ++l) lane[l] = add_rn(lane[l], lane[l ^ offset]);
  }
  return lane[0];
}
TKV_HD float sum_of_squares(const float* x, int32_t dims) {
  float lane[kNormPartials] = {};
  for (int32_t d = 0; d < dims; ++d) {
    lane[d % kNormPartials] = add_rn(lane[d % kNormPartials], mul_rn(x[d], x[d]));
  }
  return add_partials(lane);
}

// The least squared error that four equally spaced levels (c - 1.5) scale leave of a normal
// distribution of deviation 1 is at this scale.
inline constexpr float kNormScale = 0.9957f;
inline constexpr int32_t kNormLevels = 4;
// Parameters of a group of `dims` finite values with this sum of squares. Codes are minmax_code()
// with kNormLevels. Adding 0 turns -0 into +0.
TKV_HD QuantParams norm_params(float squares, int32_t dims) {
  const float rms = sqrt_rn(div_rn(squares, static_cast<float>(dims)));
  const uint16_t scale = float_to_half(mul_rn(kNormScale, rms));
  return {scale, float_to_half(add_rn(mul_rn(-1.5f, half_to_float(scale)), 0.0f))};
}

// False when the fp16 scale or zero point overflowed: kOutOfRange.
TKV_HD bool params_in_range(QuantParams p) {
  return (p.scale & 0x7c00u) != 0x7c00u && (p.zero_point & 0x7c00u) != 0x7c00u;
}

// The code before any clamping, as an exact small integer in a float; 0 where the scale is 0.
TKV_HD float raw_code(float x, float scale, float zero_point) {
  return scale == 0.0f ? 0.0f : round_half_even(div_rn(add_rn(x, -zero_point), scale));
}
// Min-max codes: clamped to [0, levels - 1]. (Rounding of the fp16 parameters can move the ends by
// one code.)
TKV_HD int32_t minmax_code(float x, float scale, float zero_point, int32_t levels) {
  const float c = raw_code(x, scale, zero_point);
  const float top = static_cast<float>(levels - 1);
  return static_cast<int32_t>(c < 0.0f ? 0.0f : c > top ? top : c);
}
TKV_HD float dequantize(int32_t code, float scale, float zero_point) {
  return add_rn(mul_rn(scale, static_cast<float>(code)), zero_point);
}

// Smallest and largest of n > 0 values at the given stride (in floats). Returns kNonFinite for NaN
// or infinity.
StatusCode find_extrema(const float* x, int64_t n, int64_t stride, float* lo, float* hi);

// One group of token-wise or channel-wise min-max quantisation: n values at `stride`, codes at the
// same stride. kNonFinite or kOutOfRange: nothing written.
StatusCode quantize_minmax(const float* x, int64_t n, int64_t stride, int32_t levels,
                           QuantParams* params, uint8_t* codes);
// The same of codes clipped at the norm, values side by side.
StatusCode quantize_norm(const float* x, int32_t n, QuantParams* params, uint8_t* codes);
}  // namespace tierkv
