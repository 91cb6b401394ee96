// SPDX-License-Identifier: Apache-2.0
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "codec/host/convert.cc"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include <cstring>

#include "codec/format/half-inl.h"
#include "codec/host/convert.h"
#include "tierkv/half.h"

HWY_BEFORE_NAMESPACE();
namespace tierkv {
namespace HWY_NAMESPACE {

// Both return how many of the n elements they did; the caller does the rest.
#if HWY_TARGET == HWY_SCALAR

int64_t halves_to_float(bool, const uint8_t*, int64_t, float*) {
  return 0;
}
int64_t float_to_halves(bool, const float*, int64_t, uint8_t*) {
  return 0;
}

#else

// At most 8 lanes, so that 16-bit elements fill at most one 128-bit vector on every target.
using DF = hn::CappedTag<float, 8>;

int64_t halves_to_float(bool bfloat, const uint8_t* in, int64_t n, float* out) {
  const DF df;
  const auto step = static_cast<int64_t>(hn::Lanes(df));
  int64_t i = 0;
  for (; i + step <= n; i += step) {
    hn::StoreU(load_halves(df, bfloat, reinterpret_cast<const uint16_t*>(in + 2 * i)), df, out + i);
  }
  return i;
}

// Stops before a vector with an element that has no finite form.
int64_t float_to_halves(bool bfloat, const float* x, int64_t n, uint8_t* out) {
  const DF df;
  const hn::Rebind<uint32_t, DF> du;
  const auto step = static_cast<int64_t>(hn::Lanes(df));
  // The least magnitudes that round to infinity: 65520 and 2^128 (1 - 2^-9). NaN is above both.
  const auto limit = hn::Set(du, bfloat ? 0x7f7f8000u : 0x477ff000u);
  int64_t i = 0;
  for (; i + step <= n; i += step) {
    const auto v = hn::LoadU(df, x + i);
    const auto magnitude = hn::And(hn::BitCast(du, v), hn::Set(du, 0x7fffffffu));
    if (!hn::AllTrue(du, hn::Lt(magnitude, limit))) break;
    store_halves(v, df, bfloat, reinterpret_cast<uint16_t*>(out + 2 * i));
  }
  return i;
}

#endif  // HWY_TARGET == HWY_SCALAR

}  // namespace HWY_NAMESPACE
}  // namespace tierkv
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace tierkv {

HWY_EXPORT(halves_to_float);
HWY_EXPORT(float_to_halves);

void elements_to_float(DType type, const void* in, int64_t n, float* out) {
  if (n == 0) return;  // either pointer may be null
  if (type == DType::kFloat32) {
    std::memcpy(out, in, 4 * n);
    return;
  }
  const bool bfloat = type == DType::kBFloat16;
  const auto* bytes = static_cast<const uint8_t*>(in);
  for (int64_t i = HWY_DYNAMIC_DISPATCH(halves_to_float)(bfloat, bytes, n, out); i < n; ++i) {
    uint16_t h;
    std::memcpy(&h, bytes + 2 * i, 2);
    out[i] = bfloat ? bfloat16_to_float(h) : half_to_float(h);
  }
}

int64_t float_to_elements(DType type, const float* x, int64_t n, void* out) {
  auto* bytes = static_cast<uint8_t*>(out);
  if (type == DType::kFloat32) {
    int64_t i = 0;
    while (i < n && is_finite(x[i])) ++i;
    std::memcpy(bytes, x, 4 * i);
    return i;
  }
  const bool bfloat = type == DType::kBFloat16;
  for (int64_t i = HWY_DYNAMIC_DISPATCH(float_to_halves)(bfloat, x, n, bytes); i < n; ++i) {
    const uint16_t h = bfloat ? float_to_bfloat16(x[i]) : float_to_half(x[i]);
    if (!is_finite(bfloat ? bfloat16_to_float(h) : half_to_float(h))) return i;
    std::memcpy(bytes + 2 * i, &h, 2);
  }
  return n;
}

}  // namespace tierkv
#endif  // HWY_ONCE
