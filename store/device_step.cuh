// What the kernels of a step share: its page operation, and which warps its rows are dealt to.
#pragma once

#include "allocator/page_op.cuh"
#include "store/device_rows.cuh"

namespace tierkv {

// Its counts are null: only stages read them that a step does not have.
OpLaunch step_launch(const DeviceState& d, const StepCall& call);

// The CTA of the plan that a row is of.
inline constexpr int32_t kPlanRows = 16;
__device__ inline int32_t step_group(const StoreView& s, const BatchRow& r) {
  return r.entry * ((s.rows_per_sequence() + kPlanRows - 1) / kPlanRows) + r.within / kPlanRows;
}

// Rows of an entry are dealt to the warps of its CTAs: grid (rows / kRowWarps, entries).
__device__ inline int32_t warp_row() {
  return static_cast<int32_t>(blockIdx.x) * kRowWarps + static_cast<int32_t>(threadIdx.x) / 32;
}
inline dim3 row_grid(int32_t rows, int32_t entries) {
  return dim3(ctas_for(rows, kRowWarps), static_cast<uint32_t>(entries));
}

}  // namespace tierkv
