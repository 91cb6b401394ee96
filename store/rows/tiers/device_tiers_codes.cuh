// SPDX-License-Identifier: Apache-2.0
// What the kernels of tiers know of a format, and where a row's state lies.
#pragma once

#include <cstdint>

#include "codec/format/rotation.h"
#include "gpu/warp.cuh"
#include "store/rows/device_row_format.h"
#include "store/rows/tiers/tiers_rows.h"

namespace tierkv::store {

inline constexpr int32_t kTiersThreads = 128;
inline constexpr int32_t kTiersWarps = kTiersThreads / 32;
inline constexpr int32_t kMostRowClasses = 5;  // four of the format, and raw

// What kernels know of a format.
struct TiersCodes {
  TiersShape shape;
  RowClass classes[kMostRowClasses];
  const uint8_t* class_of_head = nullptr;  // device [num_layers * num_kv_heads]
  Rotation rotation[3];                    // by component; the last one is off
  // Device [num_layers * num_kv_heads, head_dim], taken off keys; null: none.
  const float* key_means = nullptr;
};

}  // namespace tierkv::store
