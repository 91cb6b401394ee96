// SPDX-License-Identifier: Apache-2.0
#include "tools/analysis/scheme/step_quantize.h"

namespace tierkv::analysis {

StatusCode quantize_relative(const float* x, int64_t n, int64_t stride, double step,
                             QuantParams* params, uint8_t* codes, bool* fits) {
  float lo, hi;
  if (StatusCode s = find_extrema(x, n, stride, &lo, &hi); s != StatusCode::kOk) return s;
  const QuantParams p = relative_params(lo, hi, static_cast<float>(step));
  if (!params_in_range(p)) return StatusCode::kOutOfRange;
  const float scale = half_to_float(p.scale), zero = half_to_float(p.zero_point);
  *fits = true;
  for (int64_t i = 0; i < n; ++i) {
    const float c = raw_code(x[i * stride], scale, zero);
    *fits &= c >= 0.0f && c <= 255.0f;
    codes[i * stride] = static_cast<uint8_t>(c < 0.0f ? 0.0f : c > 255.0f ? 255.0f : c);
  }
  // A range too small for an fp16 step would be reconstructed as a constant beyond the bound.
  *fits &= scale > 0.0f || lo == hi;
  *params = p;
  return StatusCode::kOk;
}

StatusCode quantize_absolute(const float* x, int64_t n, float step, int16_t* codes) {
  for (int64_t i = 0; i < n; ++i) {
    if (!is_finite(x[i])) return StatusCode::kNonFinite;
    const float c = round_half_even(div_rn(x[i], step));
    if (!(c >= -32768.0f && c <= 32767.0f)) return StatusCode::kOutOfRange;
    codes[i] = static_cast<int16_t>(c);
  }
  return StatusCode::kOk;
}

}  // namespace tierkv::analysis
