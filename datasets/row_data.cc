// Stored values as floats; apart from the reader, because decoding a container needs no HDF5.
#include <cstring>

#include "datasets/dump.h"
#include "tierkv/half.h"

namespace tierkv::datasets {

void values_to_float(DType t, const uint8_t* bytes, int64_t n, float* out) {
  if (t == DType::kFloat32) {
    std::memcpy(out, bytes, 4 * n);
    return;
  }
  for (int64_t i = 0; i < n; ++i) {
    uint16_t h;
    std::memcpy(&h, bytes + 2 * i, 2);
    out[i] = t == DType::kFloat16 ? half_to_float(h) : bfloat16_to_float(h);
  }
}

void row_to_float(const RowData& row, int64_t first, int64_t count, float* out) {
  values_to_float(row.dtype, row.bytes.data() + first * row.head_dim * dtype_bytes(row.dtype),
                  count * row.head_dim, out);
}

}  // namespace tierkv::datasets
