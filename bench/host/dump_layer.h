// SPDX-License-Identifier: Apache-2.0
// Layers of a dump as a store's calls take them.
#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

#include "datasets/dump.h"

namespace tierkv::bench {

// [tokens, num_kv_heads, head_dim] of a layer.
inline Status read_layer(const datasets::DumpReader& dump, int32_t sequence, int32_t layer,
                         Component c, std::vector<uint8_t>* out) {
  const CacheLayout& layout = dump.info().layout;
  const int64_t row_bytes = int64_t{layout.head_dim} * dtype_bytes(layout.dtype);
  for (int32_t h = 0; h < layout.num_kv_heads; ++h) {
    RowData row;
    if (Status s = dump.read_row(sequence, layer, h, c, &row); !s) return s;
    out->resize(static_cast<size_t>(row.tokens * layout.num_kv_heads * row_bytes));
    for (int64_t t = 0; t < row.tokens; ++t) {
      std::memcpy(out->data() + (t * layout.num_kv_heads + h) * row_bytes,
                  row.bytes.data() + t * row_bytes, static_cast<size_t>(row_bytes));
    }
  }
  return Status::ok();
}

}  // namespace tierkv::bench
