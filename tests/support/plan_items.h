// SPDX-License-Identifier: Apache-2.0
// The reference of the plan (attention/work/plan.h).
#pragma once

#include <cstdint>
#include <vector>

#include "attention/work/plan.h"

namespace tierkv {

// One layer, whose classes `rows` has: max_ctas * warps + 1 items. All pointers of `rows` are host
// memory.
template <int32_t kClasses>
std::vector<WorkItem> plan_items(const RowsOf<kClasses>& rows, int32_t layer, int32_t max_ctas,
                                 int32_t warps);

}  // namespace tierkv
