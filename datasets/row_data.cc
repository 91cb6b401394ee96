// SPDX-License-Identifier: Apache-2.0
#include "datasets/row_data.h"

#include "codec/host/convert.h"

namespace tierkv {

void row_to_float(const RowData& row, int64_t first, int64_t count, float* out) {
  elements_to_float(row.dtype, row.bytes.data() + first * row.head_dim * dtype_bytes(row.dtype),
                    count * row.head_dim, out);
}

}  // namespace tierkv
