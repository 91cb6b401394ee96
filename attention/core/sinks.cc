// SPDX-License-Identifier: Apache-2.0
#include "attention/core/merge.h"

#include <string>

#include "codec/format/element.h"
#include "codec/format/errors.h"

namespace tierkv {

Status validate_sinks(const SinkCall& call) {
  if (call.num_q_heads < 1) return invalid("num_q_heads must be positive");
  if (call.rows < 0 || call.rows > INT32_MAX / call.num_q_heads) {
    return invalid("rows must be 0 to 2^31 - 1 over num_q_heads");
  }
  if (call.head_dim < 2 || call.head_dim > kMaxHeadDim || call.head_dim % 2 != 0) {
    return invalid("head_dim must be even, 2 to 4096");
  }
  if (!is_raw_dtype(call.dtype)) {
    return unsupported(std::string("dtype ") + dtype_name(call.dtype) +
                       "; sinks need float16 or bfloat16");
  }
  if (call.out == nullptr || call.lse == nullptr) return invalid("out or lse is null");
  if (call.sinks == nullptr) return invalid("sinks is null");
  if (reinterpret_cast<uintptr_t>(call.out) % 4 != 0) {
    return invalid("out is not aligned to 4 bytes");
  }
  return Status::ok();
}

Status apply_sinks_host(const SinkCall& call) {
  if (Status s = validate_sinks(call); !s) return s;
  auto* out = static_cast<uint16_t*>(call.out);
  for (int64_t i = 0; i < call.rows * call.num_q_heads; ++i) {
    const MergedRow row = merge_row(call.lse[i], call.sinks[i % call.num_q_heads]);
    for (int64_t d = i * call.head_dim; d < (i + 1) * call.head_dim; ++d) {
      out[d] = float_to_raw(call.dtype, merge_value(row, raw_to_float(call.dtype, out[d]), 0.0f));
    }
    call.lse[i] = row.lse;
  }
  return Status::ok();
}

}  // namespace tierkv
