// SPDX-License-Identifier: Apache-2.0
// What the kernels of tiers know of a format, and where a row's state lies.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

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

// Those of a format, but for what lies in memory of its own.
inline TiersCodes tiers_codes(const TiersRows& rows) {
  TiersCodes codes;
  codes.shape = rows.shape();
  std::copy(rows.classes().begin(), rows.classes().end(), codes.classes);
  for (const Component c : {Component::kKey, Component::kValue}) {
    if (rows.bases(c).empty()) continue;
    codes.rotation[static_cast<int32_t>(c)] = hadamard_rotation(rows.config().layout.head_dim);
  }
  return codes;
}
inline std::vector<float> tiers_key_means(const TiersRows& rows) {
  std::vector<float> means;
  for (const Basis& basis : rows.bases(Component::kKey)) {
    means.insert(means.end(), basis.mean.begin(), basis.mean.end());
  }
  return means;
}

__device__ __forceinline__ int32_t warp_of_grid() {
  return static_cast<int32_t>(blockIdx.x) * kTiersWarps + static_cast<int32_t>(threadIdx.x) / 32;
}

}  // namespace tierkv::store
