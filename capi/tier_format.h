// SPDX-License-Identifier: Apache-2.0
// What the store's and attention's structs have in common.
#pragma once

#include <cmath>

#include "capi/abi.h"
#include "tierkv/format.h"
#include "tierkv/layout.h"
#include "tierkv/tierkv_attention_c.h"

namespace tierkv::capi {

// null leaves `out`, the default, as it is.
inline Status read_tier_format(const tkv_tier_format* in, const char* name, TierFormat* out) {
  if (in == nullptr) return Status::ok();
  tkv_tier_format f;
  if (Status s = read_struct(in, name, &f); !s) return s;
  out->k = token_wise(f.k_bits, f.k_group);
  out->v = token_wise(f.v_bits, f.v_group);
  return Status::ok();
}

inline Status read_dtype(tkv_dtype in, DType* out) {
  if (in < TKV_FLOAT16 || in > TKV_FLOAT32) return invalid("dtype is unknown");
  *out = static_cast<DType>(in);
  return Status::ok();
}

// 0 stands for 1 / sqrt(head_dim).
inline double read_sm_scale(double given, int32_t head_dim) {
  return given == 0 && head_dim > 0 ? 1 / std::sqrt(static_cast<double>(head_dim)) : given;
}

}  // namespace tierkv::capi
