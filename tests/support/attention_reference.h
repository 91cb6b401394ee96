// SPDX-License-Identifier: Apache-2.0
// Attention in double over pages in host memory, one value at a time: what every kernel is tested
// against.
#pragma once

#include <cstdint>
#include <vector>

#include "codec/format/page_layout.h"
#include "tierkv/attention.h"

namespace tierkv {

// The value of (slot, dim) as stored: scale * code + zero_point, or the raw value of `raw`, fp16 or
// bfloat16. `page` is any memory of layout.used_bytes; slot and dim are in range.
double page_value(const PageLayout& layout, const uint8_t* page, Component component, int32_t slot,
                  int32_t dim, DType raw = DType::kFloat16);

struct ReferenceOutput {
  std::vector<double>
      out;  // [count, q_len, num_q_heads, head_dim]; 0 for queries that see no token
  // [count, q_len, num_q_heads]; -infinity, or their sink, for queries that see no token
  std::vector<double> lse;
};

// The same call as attend(), with all pointers in host memory; out and lse are not used. Pages
// or counts outside the pool or the tables are kCorrupt.
Result<ReferenceOutput> attend_reference(const AttentionConfig& config, const AttendCall& call);

}  // namespace tierkv
