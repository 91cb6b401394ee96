// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cmath>

namespace tierkv::model {

// Logarithms to base 2 as means of importances take them: in units of 2^-24. Sums of fewer than
// 2^20 are exact in doubles.
inline double rounded_log(double x) {
  return std::round(std::ldexp(std::log2(x), 24)) / 16777216;
}

}  // namespace tierkv::model
