// SPDX-License-Identifier: Apache-2.0
// One component of one row as a dump holds it.
#pragma once

#include <cstdint>

#include "codec/host/large_vector.h"
#include "tierkv/format.h"
#include "tierkv/layout.h"

namespace tierkv {

// One component of one row, [tokens, head_dim], values as stored (little-endian).
struct RowData {
  DType dtype = DType::kFloat16;
  int64_t tokens = 0;
  int32_t head_dim = 0;
  LargeBytes bytes;
};

// Tokens [first, first + count) of a row as floats, exactly; out [count, head_dim].
void row_to_float(const RowData& row, int64_t first, int64_t count, float* out);

struct RowInput {
  const RowData* k = nullptr;
  const RowData* v = nullptr;
  const RowData& of(Component c) const { return c == Component::kKey ? *k : *v; }
};

}  // namespace tierkv
