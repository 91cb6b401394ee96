// SPDX-License-Identifier: Apache-2.0
// What attention over tiers needs to know of the states of sequences: the counts of their tokens.
#pragma once

#include "gpu/pdl.cuh"
#include "store/rows/tiers/device_tiers_codes.cuh"

namespace tierkv::store {

struct TiersCounts {
  DeviceStoreView view;
  TiersShape shape;
  const int32_t* slots = nullptr;  // device [count]
  int32_t count = 0;
  SideCounts* tokens = nullptr;  // device [num_rows] of the tables
};

// A thread a row of every layer.
__global__ void __launch_bounds__(kTiersThreads)
    gather_counts_kernel(const __grid_constant__ TiersCounts c) {
  wait_for_previous_kernel();
  const int32_t rows = c.view.num_layers * c.view.num_kv_heads;
  const int32_t i = static_cast<int32_t>(blockIdx.x) * kTiersThreads + threadIdx.x;
  if (i >= c.count * rows) return;
  const int32_t slot = c.slots[i / rows], layer = i % rows / c.view.num_kv_heads,
                kv_head = i % c.view.num_kv_heads;
  const auto* row = reinterpret_cast<const TiersRow*>(c.view.slots.state(slot, layer) +
                                                      c.shape.row_byte(kv_head));
  SideCounts tokens;
  for (int32_t side = 0; side < 2; ++side) tokens.of[side] = row->tokens[side];
  c.tokens[c.view.pages.row(slot, layer, kv_head)] = tokens;
}

}  // namespace tierkv::store
