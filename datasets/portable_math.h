// SPDX-License-Identifier: Apache-2.0
// log, exp and cos from additions, multiplications and divisions alone, which IEEE 754 rounds the
// same everywhere: the C library's differ in the last bit between versions and processors, and a
// synthetic dump must not. Accurate to a few units in the last place, which random values need no
// better. Requires -ffp-contract=off.
#pragma once

#include <cmath>

namespace tierkv::datasets {

inline constexpr double kLn2 = 0.693147180559945309417232;
inline constexpr double kHalfPi = 1.57079632679489661923132;

// x > 0. log m = 2 artanh((m - 1) / (m + 1)) with m in [sqrt(1/2), sqrt(2)).
inline double portable_log(double x) {
  int exponent = 0;
  double m = std::frexp(x, &exponent);
  if (m < 0.70710678118654752) {
    m *= 2;
    --exponent;
  }
  const double s = (m - 1) / (m + 1), s2 = s * s;
  double sum = 0;
  for (int k = 23; k >= 1; k -= 2) sum = sum * s2 + 1.0 / k;
  return 2 * s * sum + exponent * kLn2;
}

// |x| < 700.
inline double portable_exp(double x) {
  const double k = std::floor(x / kLn2 + 0.5), r = x - k * kLn2;
  double sum = 1;
  for (int n = 16; n >= 1; --n) sum = 1 + sum * r / n;
  return std::ldexp(sum, static_cast<int>(k));
}

// cos(2 pi turns) for turns in [0, 1].
inline double portable_cos_turns(double turns) {
  const double quarter = std::floor(4 * turns + 0.5);
  const double x = (4 * turns - quarter) * kHalfPi, x2 = x * x;
  double cosine = 1, sine = 1;
  for (int n = 18; n >= 2; n -= 2) {
    cosine = 1 - cosine * x2 / (n * (n - 1));
    sine = 1 - sine * x2 / (n * (n + 1));
  }
  sine *= x;
  switch (static_cast<int>(quarter) % 4) {
    case 0:
      return cosine;
    case 1:
      return -sine;
    case 2:
      return -cosine;
    default:
      return sine;
  }
}

}  // namespace tierkv::datasets
