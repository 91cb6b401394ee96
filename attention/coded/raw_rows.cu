// SPDX-License-Identifier: Apache-2.0
#include "attention/coded/raw_rows.cuh"

namespace tierkv {

CodedKernel find_raw_rows_kernel(int32_t head_dim) {
  switch (head_dim) {
    case 64:
      return raw_rows_kernel<4>;
    case 96:
      return raw_rows_kernel<6>;
    case 128:
      return raw_rows_kernel<8>;
    default:
      return raw_rows_kernel<16>;
  }
}

}  // namespace tierkv
