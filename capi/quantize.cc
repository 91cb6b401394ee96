// SPDX-License-Identifier: Apache-2.0
// Token-wise quantisation of rows.
#include "codec/format/quantize.h"
#include "capi/abi.h"
#include "tierkv/layout.h"

namespace tierkv::capi {
namespace {

Status read_codes(const tkv_codes* in, tkv_codes* out) {
  if (Status s = read_struct(in, "codes", out); !s) return s;
  if (out->head_dim < 1 || out->head_dim > kMaxHeadDim)
    return invalid("head_dim must be 1 to 4096");
  if (out->bits < 1 || out->bits > 8) return invalid("bits must be 1 to 8");
  if (out->group == 0) out->group = out->head_dim;
  if (out->group < 1 || out->head_dim % out->group != 0) {
    return invalid("group must divide head_dim");
  }
  if (out->tokens < 0 || out->tokens > INT64_MAX / kMaxHeadDim)
    return invalid("tokens is negative");
  if (out->codes == nullptr || out->scale == nullptr || out->zero_point == nullptr) {
    return invalid("codes, scale or zero_point is null");
  }
  return Status::ok();
}

Status quantize(const float* x, const tkv_codes* codes) {
  tkv_codes c;
  if (Status s = read_codes(codes, &c); !s) return s;
  if (x == nullptr) return invalid("x is null");
  const int64_t groups = c.head_dim / c.group;
  for (int64_t i = 0; i < c.tokens * groups; ++i) {
    QuantParams params;
    const StatusCode s =
        quantize_minmax(x + i * c.group, c.group, 1, 1 << c.bits, &params, c.codes + i * c.group);
    if (s != StatusCode::kOk) {
      return Status(s, "token " + std::to_string(i / groups) +
                           (s == StatusCode::kNonFinite ? " is not finite" : " exceeds fp16"));
    }
    c.scale[i] = params.scale;
    c.zero_point[i] = params.zero_point;
  }
  return Status::ok();
}

Status dequantize_rows(const tkv_codes* codes, float* x) {
  tkv_codes c;
  if (Status s = read_codes(codes, &c); !s) return s;
  if (x == nullptr) return invalid("x is null");
  const int64_t count = c.tokens * c.head_dim;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t g = i / c.group;
    x[i] = dequantize(c.codes[i], half_to_float(c.scale[g]), half_to_float(c.zero_point[g]));
  }
  return Status::ok();
}

}  // namespace
}  // namespace tierkv::capi

extern "C" {

tkv_status tkv_quantize(const float* x, const tkv_codes* codes, tkv_error* error) {
  return tierkv::capi::guarded(error, [&] { return tierkv::capi::quantize(x, codes); });
}

tkv_status tkv_dequantize(const tkv_codes* codes, float* x, tkv_error* error) {
  return tierkv::capi::guarded(error, [&] { return tierkv::capi::dequantize_rows(codes, x); });
}

}  // extern "C"
