// SPDX-License-Identifier: Apache-2.0
#include "attention/coded/raw_rows.cuh"
#include "codec/format/head_dim.h"

namespace tierkv {

CodedKernel find_raw_rows_kernel(int32_t head_dim) {
  return with_head_dim(head_dim,
                       [](auto dim) -> CodedKernel { return raw_rows_kernel<dim / kDimBlock>; });
}

}  // namespace tierkv
