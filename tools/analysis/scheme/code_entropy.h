// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cmath>
#include <cstdint>

#include "codec/host/coded/histogram.h"

namespace tierkv {

// Order-0 entropy of the codes in bits per code; 0 without codes.
inline double code_entropy(const CodeHistogram& histogram) {
  double bits = 0;
  for (int32_t code = 0; code < 65536; ++code) {
    if (histogram.count(code) == 0) continue;
    const double p =
        static_cast<double>(histogram.count(code)) / static_cast<double>(histogram.total());
    bits -= p * std::log2(p);
  }
  return bits;
}

}  // namespace tierkv
