// SPDX-License-Identifier: Apache-2.0
// Logarithms and powers to base 2 that host and device compute to the same bits: additions,
// multiplications and divisions of doubles, each rounded, none fused. Within 2^-50 of the true
// value, relative or absolute, whichever is larger.
#pragma once

#include <cstdint>
#include <cstring>

#include "tierkv/half.h"

namespace tierkv {

TKV_HD double double_add(double a, double b) {
#if defined(__CUDA_ARCH__)
  return __dadd_rn(a, b);
#else
  return a + b;
#endif
}
TKV_HD double double_mul(double a, double b) {
#if defined(__CUDA_ARCH__)
  return __dmul_rn(a, b);
#else
  return a * b;
#endif
}
TKV_HD double double_div(double a, double b) {
#if defined(__CUDA_ARCH__)
  return __ddiv_rn(a, b);
#else
  return a / b;
#endif
}
// 2^exponent, of -1022 to 1023.
TKV_HD double double_power(int32_t exponent) {
  const auto bits = static_cast<uint64_t>(exponent + 1023) << 52;
  double x;
  memcpy(&x, &bits, sizeof(x));
  return x;
}

// 1 / 3 + x / 5 + x^2 / 7 and so on, as far as it counts for x < 0.03; from the term kFirst on.
template <int32_t kFirst = 0>
TKV_HD double odd_series(double x) {
  constexpr double kTerm = 1.0 / (2 * kFirst + 3);
  if constexpr (kFirst == 11) {
    return kTerm;
  } else {
    return double_add(double_mul(odd_series<kFirst + 1>(x), x), kTerm);
  }
}
// log2(x) of a normal x > 0: of x = m 2^e with m near 1 it is e + 2 / ln 2 atanh((m - 1) / (m +
// 1)).
TKV_HD double same_log2(double x) {
  uint64_t bits;
  memcpy(&bits, &x, sizeof(bits));
  auto exponent = static_cast<int32_t>(bits >> 52) - 1023;
  double m = double_mul(x, double_power(-exponent));  // [1, 2)
  if (m > 1.4142135623730951) m = double_mul(m, 0.5), ++exponent;
  const double t = double_div(double_add(m, -1), double_add(m, 1)), square = double_mul(t, t);
  constexpr double kFactor = 2.8853900817779268;  // 2 / ln 2
  const double sum = double_add(1, double_mul(odd_series(square), square));
  return double_add(exponent, double_mul(double_mul(kFactor, t), sum));
}

template <int32_t i>
inline constexpr double kInverseFactorial = kInverseFactorial<i - 1> / i;
template <>
inline constexpr double kInverseFactorial<0> = 1;
// 1 + x + x^2 / 2! and so on, as far as it counts for |x| < 0.35; from the term kFirst on.
template <int32_t kFirst = 0>
TKV_HD double exponential_series(double x) {
  if constexpr (kFirst == 16) {
    return kInverseFactorial<kFirst>;
  } else {
    return double_add(double_mul(exponential_series<kFirst + 1>(x), x), kInverseFactorial<kFirst>);
  }
}
// 2^x; x is brought to -1000 to 1000.
TKV_HD double same_exp2(double x) {
  if (!(x > -1000)) x = -1000;
  if (x > 1000) x = 1000;
  const auto whole = static_cast<int32_t>(x < 0 ? x - 0.5 : x + 0.5);
  const double y = double_mul(double_add(x, -whole), 0.6931471805599453);
  return double_mul(exponential_series(y), double_power(whole));
}

}  // namespace tierkv
