// SPDX-License-Identifier: Apache-2.0
// Whether numbers of fp16 that come from outside are such as an encoder writes. Bytes have any
// alignment; no branch a number.
#pragma once

#include <cstdint>
#include <cstring>

#include "tierkv/half.h"

namespace tierkv {

TKV_HD bool is_finite_half(uint16_t x) {
  return (x & 0x7c00u) != 0x7c00u;
}

// Bit 15 is set unless x, fp16, is finite.
inline uint32_t not_finite(uint32_t x) {
  return (x & 0x7c00u) + 0x0400u;
}

// `bytes` bytes of fp16.
inline bool are_finite(const void* from, int64_t bytes) {
  const auto* at = static_cast<const uint8_t*>(from);
  uint32_t wrong = 0;
  for (int64_t i = 0; i < bytes; i += 2) {
    uint16_t x;
    std::memcpy(&x, at + i, 2);
    wrong |= not_finite(x);
  }
  return (wrong & 0x8000u) == 0;
}

// `bytes` bytes of fp16 pairs: scales, which are not negative, and zero points.
inline bool are_params(const uint8_t* from, int64_t bytes) {
  uint32_t wrong = 0;
  for (int64_t i = 0; i < bytes; i += 4) {
    uint16_t scale, zero_point;
    std::memcpy(&scale, from + i, 2);
    std::memcpy(&zero_point, from + i + 2, 2);
    wrong |= not_finite(scale) | scale | not_finite(zero_point);
  }
  return (wrong & 0x8000u) == 0;
}

}  // namespace tierkv
