// SPDX-License-Identifier: Apache-2.0
// The power of two that queries of bfloat16 are divided by to become fp16.
#pragma once

#include <cstdint>

#include "tierkv/half.h"

namespace tierkv {

inline constexpr int32_t kMostQueryUnit = 96;  // keeps every unit, and its inverse, inside fp32

// Brings the largest magnitude to [2^least, 2^(most + 1)): what fp16 then loses of an element lies
// 2^(-25 - least) below the largest.
TKV_HD float query_unit(float largest, int32_t least, int32_t most) {
  const int32_t found = static_cast<int32_t>(float_bits(largest) >> 23) - 127;
  const int32_t by = found < least ? found - least : found > most ? found - most : 0;
  const int32_t in_range = by < -kMostQueryUnit  ? -kMostQueryUnit
                           : by > kMostQueryUnit ? kMostQueryUnit
                                                 : by;
  return bits_float(static_cast<uint32_t>(in_range + 127) << 23);
}

}  // namespace tierkv
