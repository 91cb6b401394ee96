// SPDX-License-Identifier: Apache-2.0
// What a kernel that writes outputs joins them with.
#pragma once

#include <cmath>
#include <cstdint>

#include "tierkv/half.h"

namespace tierkv {

// Finished attention of the same queries over other tokens, which `out` holds already. Device
// memory, apart from where the joined log-sum-exps go.
struct PriorAttention {
  const float* lse = nullptr;    // natural, one a query and head; null: there is none
  const float* sinks = nullptr;  // with lse: learned, [num_q_heads], that it lacks; or null

  TKV_HD float sink(int32_t q_head) const {
    return lse == nullptr || sinks == nullptr ? -INFINITY : sinks[q_head];
  }
};

}  // namespace tierkv
