// SPDX-License-Identifier: Apache-2.0
#include "attention/core/merge.h"

#include "codec/format/element.h"
#include "codec/format/errors.h"

namespace tierkv {

Status validate_merge(const MergeCall& call) {
  if (call.rows < 0 || call.rows > INT32_MAX) return invalid("rows must be 0 to 2^31 - 1");
  if (call.head_dim < 2 || call.head_dim > kMaxHeadDim || call.head_dim % 2 != 0) {
    return invalid("head_dim must be even, 2 to 4096");
  }
  if (!is_raw_dtype(call.dtype)) {
    return unsupported(std::string("dtype ") + dtype_name(call.dtype) +
                       "; merge needs float16 or bfloat16");
  }
  for (const AttentionPart& part : {call.a, call.b}) {
    if (part.out == nullptr || part.lse == nullptr) return invalid("a part is null");
  }
  if (call.out == nullptr || call.lse == nullptr) return invalid("an output is null");
  for (const void* p : {call.a.out, call.b.out, static_cast<const void*>(call.out)}) {
    if (reinterpret_cast<uintptr_t>(p) % 4 != 0) return invalid("out is not aligned to 4 bytes");
  }
  return Status::ok();
}

Status merge_attention_host(const MergeCall& call) {
  if (Status s = validate_merge(call); !s) return s;
  const auto* a = static_cast<const uint16_t*>(call.a.out);
  const auto* b = static_cast<const uint16_t*>(call.b.out);
  auto* out = static_cast<uint16_t*>(call.out);
  for (int64_t r = 0; r < call.rows; ++r) {
    const MergedRow row = merge_row(call.a.lse[r], call.b.lse[r]);
    for (int64_t i = r * call.head_dim; i < (r + 1) * call.head_dim; ++i) {
      const float x = raw_to_float(call.dtype, a[i]), y = raw_to_float(call.dtype, b[i]);
      out[i] = float_to_raw(call.dtype, merge_value(row, x, y));
    }
    call.lse[r] = row.lse;
  }
  return Status::ok();
}

}  // namespace tierkv
