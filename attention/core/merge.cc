// SPDX-License-Identifier: Apache-2.0
#include "attention/core/merge.h"

#include "codec/format/element.h"
#include "codec/format/errors.h"

namespace tierkv {
namespace {

Status check_outputs(int32_t head_dim, DType dtype, const char* who) {
  if (head_dim < 2 || head_dim > kMaxHeadDim || head_dim % 2 != 0) {
    return invalid("head_dim must be even, 2 to 4096");
  }
  if (is_raw_dtype(dtype)) return Status::ok();
  return unsupported(std::string("dtype ") + dtype_name(dtype) + "; " + who +
                     " float16 or bfloat16");
}

Status check_alignment(std::initializer_list<const void*> outputs) {
  for (const void* p : outputs) {
    if (reinterpret_cast<uintptr_t>(p) % 4 != 0) return invalid("out is not aligned to 4 bytes");
  }
  return Status::ok();
}

Status merge_host(const Result<PartsMerge>& parts) {
  if (!parts) return parts.status();
  const MergeCall& call = parts->call;
  const auto* a = static_cast<const uint16_t*>(call.a.out);
  const auto* b = static_cast<const uint16_t*>(call.b.out);
  auto* out = static_cast<uint16_t*>(call.out);
  for (int64_t r = 0; r < call.rows; ++r) {
    const int64_t of_b = parts->heads == 0 ? r : r % parts->heads;
    const MergedRow row = merge_row(call.a.lse[r], call.b.lse[of_b]);
    for (int64_t i = r * call.head_dim; i < (r + 1) * call.head_dim; ++i) {
      const float x = raw_to_float(call.dtype, a[i]);
      const float y = b == nullptr ? 0.0f : raw_to_float(call.dtype, b[i]);
      out[i] = float_to_raw(call.dtype, merge_value(row, x, y));
    }
    call.lse[r] = row.lse;
  }
  return Status::ok();
}

}  // namespace

Result<PartsMerge> parts_merge(const MergeCall& call) {
  if (call.rows < 0 || call.rows > INT32_MAX) return invalid("rows must be 0 to 2^31 - 1");
  if (Status s = check_outputs(call.head_dim, call.dtype, "merge needs"); !s) return s;
  if (call.rows == 0) return PartsMerge{call};
  for (const AttentionPart& part : {call.a, call.b}) {
    if (part.out == nullptr || part.lse == nullptr) return invalid("a part is null");
  }
  if (call.out == nullptr || call.lse == nullptr) return invalid("an output is null");
  if (Status s = check_alignment({call.a.out, call.b.out, call.out}); !s) return s;
  return PartsMerge{call};
}

Result<PartsMerge> parts_merge(const SinkCall& call) {
  if (call.num_q_heads < 1) return invalid("num_q_heads must be positive");
  if (call.rows < 0 || call.rows > INT32_MAX / call.num_q_heads) {
    return invalid("rows must be 0 to 2^31 - 1 over num_q_heads");
  }
  if (Status s = check_outputs(call.head_dim, call.dtype, "sinks need"); !s) return s;
  if (call.rows > 0 && (call.out == nullptr || call.lse == nullptr)) {
    return invalid("out or lse is null");
  }
  if (call.sinks == nullptr) return invalid("sinks is null");
  if (Status s = check_alignment({call.out}); !s) return s;
  const int64_t rows = call.rows * call.num_q_heads;
  return PartsMerge{{{call.out, call.lse},
                     {nullptr, call.sinks},
                     call.out,
                     call.lse,
                     rows,
                     call.head_dim,
                     call.dtype},
                    call.num_q_heads};
}

Status merge_attention_host(const MergeCall& call) {
  return merge_host(parts_merge(call));
}
Status apply_sinks_host(const SinkCall& call) {
  return merge_host(parts_merge(call));
}

}  // namespace tierkv
