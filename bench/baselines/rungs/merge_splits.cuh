// SPDX-License-Identifier: Apache-2.0
// The merge of split rows as a kernel of its own, after the kernel that left their parts.
#pragma once

#include "bench/baselines/rungs/row_parts.cuh"
#include "gpu/pdl.cuh"

namespace tierkv {

inline constexpr int32_t kMergeSplitsWarps = 4;

// Grid: one warp per head of every row.
__global__ void __launch_bounds__(kMergeSplitsWarps * 32)
    merge_splits_kernel(const __grid_constant__ RungParams p) {
  let_next_kernel_start();
  wait_for_previous_kernel();
  const int32_t i = blockIdx.x * kMergeSplitsWarps + threadIdx.x / 32;
  const int32_t row = i / p.group, head = i - row * p.group;
  if (row >= p.rows.num_rows) return;
  merge_head(p, row, head);
}

}  // namespace tierkv
