// The arithmetic of a coded store's values, for host and device: x is rounded to fp16 when it comes
// in; past the prompt rows hold y = half(x - mean); codes are round(y / step).
#pragma once

#include <cmath>
#include <cstdint>

#include "codec/format/element.h"
#include "codec/format/fragment_codes.h"
#include "codec/format/quantize.h"
#include "tierkv/half.h"
#include "tierkv/status.h"

namespace tierkv {

// fp16 numbers are multiples of 2^-24: their sums are exact in 64 bits, in any order.
TKV_HD int64_t half_to_fixed(uint16_t x) {
  return static_cast<int64_t>(half_to_float(x) * 16777216.0f);
}
// The mean of `count` > 0 of them as a number of fp16.
TKV_HD float fixed_mean(int64_t sum, int32_t count) {
  const double mean = static_cast<double>(sum) / (16777216.0 * count);
  return half_to_float(float_to_half(static_cast<float>(mean)));
}

TKV_HD uint16_t centred(uint16_t x, float mean) {
  return float_to_half(add_rn(half_to_float(x), -mean));
}

// The range of values of fp16, 0 included.
struct ValueRange {
  float least = 0, most = 0;

  TKV_HD void add(uint16_t y) {
    const float value = half_to_float(y);
    least = value < least ? value : least;
    most = value > most ? value : most;
  }
};
// A relative step; 1 where all values are 0. Codes of values in the range have at most 16 bits,
// because `relative` is at least 2^-14.
TKV_HD float relative_step(const ValueRange& range, float relative) {
  const float width = add_rn(range.most, -range.least);
  return width > 0 ? mul_rn(relative, width) : 1.0f;
}

// Whether y can be stored raw and, one day, coded.
TKV_HD StatusCode check_centred(uint16_t y, float step) {
  const float value = half_to_float(y);
  if (!is_finite(value)) return StatusCode::kOutOfRange;
  const float code = raw_code(value, step, 0.0f);
  return code < -32768.0f || code > 32767.0f ? StatusCode::kOutOfRange : StatusCode::kOk;
}
TKV_HD int16_t step_code(uint16_t y, float step) {
  return static_cast<int16_t>(raw_code(half_to_float(y), step, 0.0f));
}

// step_code() without a division, for many values of a step: inverse = 1.0f / step. The code is
// step_code()'s, and check_centred() kOk, where *doubt < 0.5: q = y * inverse differs from y / step
// by less than 2^-22 |q|, and what that could round elsewhere, or is not finite or beyond 16 bits,
// has more doubt.
TKV_HD int32_t fast_step_code(uint16_t y, float inverse, float* doubt) {
  const float q = mul_rn(half_to_float(y), inverse);
  const float shifted = add_rn(q, kRoundingBias);
  const float rounded = add_rn(shifted, -kRoundingBias);
  *doubt = std::fabs(q - rounded) + std::fabs(q) * 0x1p-16f;
  return static_cast<int32_t>(float_bits(shifted) - float_bits(kRoundingBias));
}

// The number next to y that has a code, far from the last one.
TKV_HD uint16_t recodable(uint16_t y, float step) {
  if (check_centred(y, step) == StatusCode::kOk) return y;
  uint16_t most = float_to_half(saturate_to_half_range(mul_rn(32700.0f, step)));
  if (check_centred(most, step) != StatusCode::kOk) --most;  // rounded up, among the least numbers
  return static_cast<uint16_t>((y & 0x8000u) | most);
}

// A code as a raw value again, which has the same code while that is below 1024.
TKV_HD uint16_t coded_value(int16_t code, float step) {
  return float_to_half(saturate_to_half_range(mul_rn(static_cast<float>(code), step)));
}

}  // namespace tierkv
