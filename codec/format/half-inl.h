// SPDX-License-Identifier: Apache-2.0
// fp16 and bf16 to and from fp32 in vectors, the same bits as tierkv/half.h for every value that is
// not NaN (a NaN stays one). Highway's own conversions truncate or lose infinities where the
// hardware has none, so only native ones are used.
#if defined(TIERKV_CODEC_HALF_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef TIERKV_CODEC_HALF_INL_H_
#undef TIERKV_CODEC_HALF_INL_H_
#else
#define TIERKV_CODEC_HALF_INL_H_
#endif

#include <hwy/highway.h>

#include "tierkv/half.h"

#if HWY_TARGET != HWY_SCALAR
HWY_BEFORE_NAMESPACE();
namespace tierkv {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// F16C comes with AVX2 as Highway defines it.
#undef TIERKV_NATIVE_HALF
#if HWY_TARGET == HWY_AVX2 || HWY_TARGET == HWY_AVX3 || HWY_TARGET == HWY_AVX3_DL
#define TIERKV_NATIVE_HALF 1
#else
#define TIERKV_NATIVE_HALF 0
#endif

template <class DF>
HWY_INLINE hn::Vec<DF> vec_half_to_float(DF df, hn::Vec<hn::Rebind<uint16_t, DF>> h) {
#if TIERKV_NATIVE_HALF
  return hn::PromoteTo(df, hn::BitCast(hn::Rebind<hwy::float16_t, DF>(), h));
#else
  const hn::Rebind<uint32_t, DF> du;
  const auto u = hn::PromoteTo(du, h);
  const auto sign = hn::ShiftLeft<16>(hn::And(u, hn::Set(du, 0x8000u)));
  const auto magnitude = hn::ShiftLeft<13>(hn::And(u, hn::Set(du, 0x7fffu)));
  // 2^112 moves the exponent's bias from 15 to 127 and makes subnormals normal; infinity and NaN
  // need all ones.
  const auto scaled = hn::BitCast(du, hn::Mul(hn::BitCast(df, magnitude), hn::Set(df, 0x1p112f)));
  const auto special = hn::Gt(magnitude, hn::Set(du, 0x0f7fffffu));
  const auto bits = hn::IfThenElse(special, hn::Or(magnitude, hn::Set(du, 0x7f800000u)), scaled);
  return hn::BitCast(df, hn::Or(bits, sign));
#endif
}

template <class DF>
HWY_INLINE hn::Vec<hn::Rebind<uint16_t, DF>> vec_float_to_half(DF df, hn::Vec<DF> x) {
#if TIERKV_NATIVE_HALF
  (void)df;
  return hn::BitCast(hn::Rebind<uint16_t, DF>(), hn::DemoteTo(hn::Rebind<hwy::float16_t, DF>(), x));
#else
  const hn::Rebind<uint32_t, DF> du;
  const auto u = hn::BitCast(du, x);
  const auto sign = hn::And(hn::ShiftRight<16>(u), hn::Set(du, 0x8000u));
  const auto a = hn::And(u, hn::Set(du, 0x7fffffffu));
  const auto shifted = hn::BitCast(du, hn::Add(hn::BitCast(df, a), hn::Set(df, 0.5f)));
  const auto subnormal = hn::Sub(shifted, hn::Set(du, 0x3f000000u));
  const auto odd = hn::And(hn::ShiftRight<13>(a), hn::Set(du, 1u));
  const auto rounded =
      hn::Sub(hn::Add(hn::Add(a, hn::Set(du, 0xfffu)), odd), hn::Set(du, 0x38000000u));
  auto h =
      hn::IfThenElse(hn::Lt(a, hn::Set(du, 0x38800000u)), subnormal, hn::ShiftRight<13>(rounded));
  h = hn::IfThenElse(hn::Gt(a, hn::Set(du, 0x477fefffu)), hn::Set(du, 0x7c00u), h);
  h = hn::IfThenElse(hn::Gt(a, hn::Set(du, 0x7f800000u)), hn::Set(du, 0x7fffu), h);
  return hn::DemoteTo(hn::Rebind<uint16_t, DF>(),
                      hn::BitCast(hn::Rebind<int32_t, DF>(), hn::Or(h, sign)));
#endif
}

template <class DF>
HWY_INLINE hn::Vec<DF> vec_bfloat16_to_float(DF df, hn::Vec<hn::Rebind<uint16_t, DF>> b) {
  return hn::BitCast(df, hn::ShiftLeft<16>(hn::PromoteTo(hn::Rebind<uint32_t, DF>(), b)));
}

template <class DF>
HWY_INLINE hn::Vec<hn::Rebind<uint16_t, DF>> vec_float_to_bfloat16(DF, hn::Vec<DF> x) {
  const hn::Rebind<uint32_t, DF> du;
  const auto u = hn::BitCast(du, x);
  const auto nan = hn::Gt(hn::And(u, hn::Set(du, 0x7fffffffu)), hn::Set(du, 0x7f800000u));
  const auto odd = hn::And(hn::ShiftRight<16>(u), hn::Set(du, 1u));
  const auto rounded = hn::ShiftRight<16>(hn::Add(hn::Add(u, hn::Set(du, 0x7fffu)), odd));
  const auto quiet = hn::Or(hn::ShiftRight<16>(u), hn::Set(du, 0x40u));
  const auto b = hn::IfThenElse(nan, quiet, rounded);
  return hn::DemoteTo(hn::Rebind<uint16_t, DF>(), hn::BitCast(hn::Rebind<int32_t, DF>(), b));
}

// Of fp16 or bf16 in memory.
template <class DF>
HWY_INLINE hn::Vec<DF> load_halves(DF df, bool bfloat, const uint16_t* from) {
  const auto h = hn::LoadU(hn::Rebind<uint16_t, DF>(), from);
  return bfloat ? vec_bfloat16_to_float(df, h) : vec_half_to_float(df, h);
}
template <class DF>
HWY_INLINE void store_halves(hn::Vec<DF> x, DF df, bool bfloat, uint16_t* to) {
  hn::StoreU(bfloat ? vec_float_to_bfloat16(df, x) : vec_float_to_half(df, x),
             hn::Rebind<uint16_t, DF>(), to);
}

}  // namespace HWY_NAMESPACE
}  // namespace tierkv
HWY_AFTER_NAMESPACE();
#endif  // HWY_TARGET != HWY_SCALAR

#endif  // TIERKV_CODEC_HALF_INL_H_
