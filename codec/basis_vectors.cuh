// What the kernels of bases share: where a vector lies, and what goes with a query and an output.
#pragma once

#include <cstdint>

#include "codec/basis_batch.h"
#include "codec/element.h"

namespace tierkv {

// The vectors of one kv_head of the layer, `group` to a token.
struct HeadVectors {
  int32_t group;
  int32_t count;  // tokens * group
  int64_t first;  // index of the head's first vector
  int64_t row;    // of the operand

  __device__ HeadVectors(const BasisVectors& v, int32_t kv_head)
      : group(v.heads / v.kv_heads),
        count(static_cast<int32_t>(v.tokens) * group),
        first(static_cast<int64_t>(kv_head) * group),
        row(v.first_row + kv_head) {}
  __device__ int64_t index(const BasisVectors& v, int32_t i) const {
    return first + static_cast<int64_t>(i / group) * v.heads + i % group;
  }
};

__device__ __forceinline__ bool is_empty_output(const BasisVectors& v, int64_t vector) {
  return v.lse_in[vector] == -INFINITY;
}
__device__ __forceinline__ void write_lse(const BasisVectors& v, int64_t vector) {
  if (v.lse_out == nullptr) return;
  const float shift = v.lse_shift == nullptr ? 0.0f : v.lse_shift[vector];
  v.lse_out[vector] = v.lse_in[vector] + shift;
}

// Two values of what the kernel writes: coordinates of queries are fp16, outputs saturate.
__device__ __forceinline__ uint32_t two_values(const BasisVectors& v, float low, float high) {
  if (v.operand.use != BasisUse::kUndo) {
    return float_to_half(low) | static_cast<uint32_t>(float_to_half(high)) << 16;
  }
  const DType type = v.out_dtype == DType::kBFloat16 ? DType::kBFloat16 : DType::kFloat16;
  return output_to_raw(type, low) | static_cast<uint32_t>(output_to_raw(type, high)) << 16;
}

}  // namespace tierkv
