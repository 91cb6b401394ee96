// SPDX-License-Identifier: Apache-2.0
// Weighted steps: the laws that host and device share to the bit (docs/reference/format.md,
// "Weighted steps").
//
//   code  = round_half_even((x - mean_d) / (scale_d * f(e))),  scale_d = S / w_d, f(e) = 2^(e / 8)
//   x'    = fma(code * f(e), scale_d, mean_d)
//   e     = G of keys, clamp(R + G, -128, 127) of values
//   R     = round(4 log2(sum of x^2 / D)),  G = round(8 log2 clamp(u^-0.15, 1/2, 1.4))
//
// Every operation is rounded to fp32 but the fma, which rounds once. x is a key before RoPE
// (codec/format/rope_turn.h) or a value, which has neither mean nor weight; u is the importance of
// the token. R and G are found by thresholds, so that no logarithm is computed.
#pragma once

#include <cstdint>

#include "codec/format/quantize.h"
#include "tierkv/half.h"

namespace tierkv {

inline constexpr int32_t kLeastExponent = -128, kMostExponent = 127;
inline constexpr int32_t kLeastImportanceExponent = -8, kMostImportanceExponent = 4;
TKV_HD bool is_importance_exponent(int32_t e) {
  return e >= kLeastImportanceExponent && e <= kMostImportanceExponent;
}

// f(e), a normal number. The fractions are 2^(i / 8) rounded to fp32. (They are chosen, because a
// table would be built in a thread's memory at every use.)
TKV_HD float exponent_factor(int32_t e) {
  const bool half = (e & 4) != 0, quarter = (e & 2) != 0, eighth = (e & 1) != 0;
  const uint32_t even =
      half ? (quarter ? 0x5744fdu : 0x3504f3u) : (quarter ? 0x1837f0u : 0x000000u);
  const uint32_t odd = half ? (quarter ? 0x6ac0c7u : 0x45672au) : (quarter ? 0x25fed7u : 0x0b95c2u);
  return bits_float(static_cast<uint32_t>((e >> 3) + 127) << 23 | (eighth ? odd : even));
}

// R of a mean square that is neither negative nor NaN; kLeastExponent for 0 and subnormal numbers.
// A fraction is at or above bound j exactly if it is above 2^((2 j + 1) / 8).
TKV_HD int32_t norm_exponent(float mean_square) {
  const uint32_t bits = float_bits(mean_square);
  if (bits < 0x00800000u) return kLeastExponent;
  const uint32_t fraction = bits & 0x7fffffu;
  const int32_t octave = static_cast<int32_t>(bits >> 23) - 127;
  return 4 * octave + (fraction >= 0x0b95c2u) + (fraction >= 0x25fed7u) + (fraction >= 0x45672bu) +
         (fraction >= 0x6ac0c7u);
}

// G of u >= 0: the number of thresholds 2^((0.5 - k) / 1.2), k = -7 .. 4, that are at least u, less
// 8. No threshold is a double, so none is met by accident: each is rounded to the nearest one.
TKV_HD int32_t importance_exponent(double u) {
  constexpr double kThresholds[12] = {
      0x1.306fe0a31b715p+6, 0x1.55b8108f0ec5ep+5, 0x1.7f910d768cfb0p+4, 0x1.ae89f995ad3adp+3,
      0x1.e3437e7101344p+2, 0x1.0f38f92d97963p+2, 0x1.306fe0a31b715p+1, 0x1.55b8108f0ec5ep+0,
      0x1.7f910d768cfb0p-1, 0x1.ae89f995ad3adp-2, 0x1.e3437e7101344p-3, 0x1.0f38f92d97963p-3};
  int32_t g = kLeastImportanceExponent;
  for (const double threshold : kThresholds) g += u <= threshold;
  return g;
}
// u of the token at a position counted from 0.
TKV_HD double token_importance(int64_t position, float significance) {
  return static_cast<double>(position + 1) * static_cast<double>(significance);
}

// e of a token of values from the sum of its squares.
TKV_HD int32_t value_exponent(float sum, int32_t dims, int32_t importance) {
  if (sum == 0.0f) return kLeastExponent;
  const int32_t e = norm_exponent(div_rn(sum, static_cast<float>(dims))) + importance;
  return e < kLeastExponent ? kLeastExponent : e > kMostExponent ? kMostExponent : e;
}

TKV_HD float dim_scale(float step, float weight) {
  return div_rn(step, weight);
}

// The code before it is brought to 16 bits, as an integer in a float; beyond 2^24 it is not exact,
// and NaN or infinite where x is.
TKV_HD float weighted_code(float x, float mean, float scale, float factor) {
  return round_half_even(div_rn(add_rn(x, -mean), mul_rn(scale, factor)));
}
TKV_HD bool is_code(float c) {
  return c >= -32768.0f && c <= 32767.0f;
}
TKV_HD float weighted_value(int32_t code, float mean, float scale, float factor) {
  return fma_rn(mul_rn(static_cast<float>(code), factor), scale, mean);
}

}  // namespace tierkv
