// The plan: the chunks of all rows of a launch, cut into items of equal cost (bytes), one per CTA
// of a fixed grid.
//
// Made on the device from the token counts, so a captured graph stays valid while sequences grow;
// the host form is the reference and gives the same items. Every item has at least one chunk; where
// there are fewer chunks than CTAs, the items left over are empty.
//
// Source: the even split of flat work over a fixed grid is stream-K (Osama et al. 2023), with bytes
// for cost.
#pragma once

#include <cstdint>
#include <vector>

#include "attention/work.h"
#include "tierkv/attention.h"

namespace tierkv {

inline constexpr int32_t kMaxItems = 512;

struct PlanParams {
  AttentionRows rows;
  WorkItem* items = nullptr;      // [num_layers][max_items + 1]
  int32_t* arrivals = nullptr;    // [max_items], set to 0
  int32_t* row_status = nullptr;  // [num_layers][num_rows] StatusCode
  int32_t max_items = 0;          // CTAs of the kernel that follows, at most kMaxItems
  int32_t num_layers = 1;
};

// Host reference of one layer: max_items + 1 items. All pointers of `rows` are host memory.
std::vector<WorkItem> plan_items(const AttentionRows& rows, int32_t layer, int32_t max_items);

// One launch of num_layers CTAs on `stream`; all pointers are device memory. kCuda when the launch
// fails.
Status launch_plan(const PlanParams& params, GpuStream stream);

}  // namespace tierkv
