// SPDX-License-Identifier: Apache-2.0
#include "codec/format/quantize.h"

namespace tierkv {

StatusCode find_extrema(const float* x, int64_t n, int64_t stride, float* lo, float* hi) {
  float low = x[0], high = x[0];
  bool finite = true;
  for (int64_t i = 0; i < n; ++i) {
    const float v = x[i * stride];
    finite &= is_finite(v);
    low = v < low ? v : low;
    high = v > high ? v : high;
  }
  if (!finite) return StatusCode::kNonFinite;
  *lo = low;
  *hi = high;
  return StatusCode::kOk;
}

StatusCode quantize_minmax(const float* x, int64_t n, int64_t stride, int32_t levels,
                           QuantParams* params, uint8_t* codes) {
  float lo, hi;
  if (StatusCode s = find_extrema(x, n, stride, &lo, &hi); s != StatusCode::kOk) return s;
  const QuantParams p = minmax_params(lo, hi, levels);
  if (!params_in_range(p)) return StatusCode::kOutOfRange;
  const float scale = half_to_float(p.scale), zero = half_to_float(p.zero_point);
  for (int64_t i = 0; i < n; ++i) {
    codes[i * stride] = static_cast<uint8_t>(minmax_code(x[i * stride], scale, zero, levels));
  }
  *params = p;
  return StatusCode::kOk;
}

StatusCode quantize_norm(const float* x, int32_t n, QuantParams* params, uint8_t* codes) {
  for (int32_t i = 0; i < n; ++i) {
    if (!is_finite(x[i])) return StatusCode::kNonFinite;
  }
  const QuantParams p = norm_params(sum_of_squares(x, n), n);
  if (!params_in_range(p)) return StatusCode::kOutOfRange;
  const float scale = half_to_float(p.scale), zero = half_to_float(p.zero_point);
  for (int32_t i = 0; i < n; ++i) {
    codes[i] = static_cast<uint8_t>(minmax_code(x[i], scale, zero, kNormLevels));
  }
  *params = p;
  return StatusCode::kOk;
}

}  // namespace tierkv
