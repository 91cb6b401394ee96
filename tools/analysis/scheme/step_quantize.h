// SPDX-License-Identifier: Apache-2.0
// Quantisers of the schemes with steps that are relative to a unit's range (KVComp) or absolute.
#pragma once

#include "codec/format/quantize.h"

namespace tierkv::analysis {

// Parameters of a unit with extrema lo <= hi, both finite; as minmax_params().
inline QuantParams relative_params(float lo, float hi, float step) {
  lo = add_rn(lo, 0.0f);
  hi = add_rn(hi, 0.0f);
  return {float_to_half(mul_rn(step, add_rn(hi, -lo))), float_to_half(lo)};
}

// Relative step (KVComp). *fits is false when a code leaves [0, 255]: the caller stores the unit
// raw; codes are then unspecified.
StatusCode quantize_relative(const float* x, int64_t n, int64_t stride, double step,
                             QuantParams* params, uint8_t* codes, bool* fits);
// Absolute step: signed codes round(x / step); values are dequantised as code * step. kOutOfRange
// when a code does not fit 16 bits, kNonFinite for NaN, infinity.
StatusCode quantize_absolute(const float* x, int64_t n, float step, int16_t* codes);

}  // namespace tierkv::analysis
