// What the kernels of a step share: its page operation, and which group of it a row is of.
#pragma once

#include "allocator/page_step.cuh"
#include "store/tiers/device_rows.cuh"

namespace tierkv {

// The allocator and the operation; nothing else of a launch has a meaning here.
OpLaunch step_launch(const DeviceState& d, const StepCall& call);

// CTAs of the plan that the rows of a sequence are dealt to.
inline constexpr int32_t kPlanRows = 16;
TKV_HD int32_t step_groups_of(const StoreView& s) {
  return (s.rows_per_sequence() + kPlanRows - 1) / kPlanRows;
}
__device__ inline int32_t step_group(const StoreView& s, int32_t entry, int32_t within) {
  return entry * step_groups_of(s) + within / kPlanRows;
}
__device__ inline StepDeal step_deal(const DeviceState& d) {
  return {d.totals, d.group_pages};
}

}  // namespace tierkv
