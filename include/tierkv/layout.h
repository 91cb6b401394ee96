// SPDX-License-Identifier: Apache-2.0
// The shape of a model's KV cache.
#pragma once

#include <cstdint>

#include "tierkv/export.h"
#include "tierkv/status.h"

namespace tierkv {

enum class DType : int32_t { kFloat16 = 0, kBFloat16 = 1, kFloat32 = 2 };

inline constexpr int32_t dtype_bytes(DType t) {
  return t == DType::kFloat32 ? 4 : 2;
}
TKV_API const char* dtype_name(DType t);  // "float16", "bfloat16", "float32"

inline constexpr int32_t kMaxHeadDim = 4096;

// With |q|, |k| < 2^16 and head_dim <= 2^12, sm_scale * q.k * log2(e) stays below 2^125, so logits
// and lse are finite in fp32.
inline constexpr double kMaxSmScale = 0x1p80;

struct TKV_API CacheLayout {
  int32_t num_layers = 0;
  int32_t num_q_heads = 0;
  int32_t num_kv_heads = 0;
  int32_t head_dim = 0;
  DType dtype = DType::kFloat16;
  bool rope_applied = true;
  double rope_theta = 0;
  double sm_scale = 0;  // factor of q . k before the softmax, usually 1 / sqrt(head_dim);
                        // positive, at most kMaxSmScale

  int32_t group_size() const { return num_q_heads / num_kv_heads; }
  // kInvalidArgument naming the field: counts out of range, q heads not a multiple of kv heads,
  // rope_theta negative or not finite, sm_scale not positive or above kMaxSmScale.
  Status validate() const;
};

}  // namespace tierkv
