// SPDX-License-Identifier: Apache-2.0
// The plan: the tiles of all rows of a launch, cut into items of equal cost (bytes), one per warp
// of a fixed grid.
//
// Made on the device from the token counts, so a captured graph stays valid while sequences grow.
// The reference, plan_items(), is in tests/support/. Where there is too little work for all CTAs,
// the last ones get none; of a CTA with work, some warps may get none.
//
// Source: the even split of flat work over a fixed grid is stream-K (Osama et al. 2023), with bytes
// for cost.
#pragma once

#include <cstdint>

#include "attention/work/work.h"
#include "tierkv/attention.h"

namespace tierkv {

inline constexpr int32_t kMaxCtas = 512;

// The classes of every layer, for which a plan is made at once.
template <int32_t kClasses>
struct PlanClasses {
  HeadPlanes layers[kClassLayers];
};
template <>
struct PlanClasses<1> {};

template <int32_t kClasses>
struct PlanParamsOf : PlanClasses<kClasses> {
  RowsOf<kClasses> rows;          // its LayerClasses are not read
  WorkItem* items = nullptr;      // [num_layers][max_ctas * warps + 1]
  int32_t* row_status = nullptr;  // [num_layers][num_rows / passes] StatusCode
  int32_t max_ctas = 0;           // of the kernel that follows, at most kMaxCtas
  int32_t even_ctas = 0;          // even_ctas() of the rows and max_ctas
  int32_t warps = 1;              // of a CTA
  int32_t num_layers = 1;
};

// Lets the plan kernel use the shared memory it may need. Once per device.
Status prepare_plan();
// One launch of num_layers CTAs on `stream`; all pointers are device memory. kCuda when the launch
// fails.
template <int32_t kClasses>
Status launch_plan(const PlanParamsOf<kClasses>& params, GpuStream stream);

}  // namespace tierkv
