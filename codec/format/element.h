// SPDX-License-Identifier: Apache-2.0
// Elements of keys and values in their stored types, shared by host and device.
#pragma once

#include <cstdint>

#include "tierkv/half.h"
#include "tierkv/layout.h"

namespace tierkv {

// The types of components with 16 bits.
TKV_HD bool is_raw_dtype(DType t) {
  return t == DType::kFloat16 || t == DType::kBFloat16;
}

TKV_HD float raw_to_float(DType t, uint16_t bits) {
  return t == DType::kFloat16 ? half_to_float(bits) : bfloat16_to_float(bits);
}
TKV_HD uint16_t float_to_raw(DType t, float x) {
  return t == DType::kFloat16 ? float_to_half(x) : float_to_bfloat16(x);
}

TKV_HD float load_element(const void* row, DType dtype, int64_t i) {
  if (dtype == DType::kFloat32) return static_cast<const float*>(row)[i];
  return raw_to_float(dtype, static_cast<const uint16_t*>(row)[i]);
}

// A decoded value as fp16: finite values saturate, because fp16 parameters may carry one past the
// input's range.
TKV_HD float saturate_to_half_range(float x) {
  if (!is_finite(x)) return x;
  return x > kMaxHalf ? kMaxHalf : x < -kMaxHalf ? -kMaxHalf : x;
}

// An attention output: rounding, or a sum that left fp32, may carry a weighted mean past the
// largest value of its type, which it then is. NaN stays NaN.
inline constexpr float kMaxBFloat16 = 0x1.fep127f;
TKV_HD uint16_t output_to_raw(DType t, float x) {
  const float most = t == DType::kFloat16 ? kMaxHalf : kMaxBFloat16;
  return float_to_raw(t, x > most ? most : x < -most ? -most : x);
}

TKV_HD void store_element(void* row, DType dtype, int64_t i, float x) {
  if (dtype == DType::kFloat32) {
    static_cast<float*>(row)[i] = x;
    return;
  }
  if (dtype == DType::kFloat16) x = saturate_to_half_range(x);
  static_cast<uint16_t*>(row)[i] = float_to_raw(dtype, x);
}

}  // namespace tierkv
