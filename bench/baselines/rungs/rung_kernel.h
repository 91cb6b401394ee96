// SPDX-License-Identifier: Apache-2.0
// What run_rung() must know of a rung, and where its workspace's arrays lie.
#pragma once

#include <cstddef>
#include <cstdint>

#include "bench/baselines/rungs/rung_params.h"
#include "bench/baselines/rungs/rungs.h"

namespace tierkv {

inline constexpr int32_t kRungMaxSplits = 128;

inline constexpr int32_t kAnyTiles = kMaxPageBytes;

struct RungKernel {
  void (*kernel)(RungParams) = nullptr;
  int32_t threads = 0;
  int32_t shared_bytes = 0;  // dynamic
  int32_t row_ctas = 1;      // that a split of a row takes
  int32_t slot_bytes = 0;    // a chunk has as many tiles as fit here,
  int32_t chunk_tiles = 0;   // but no more than these
  bool merges = false;       // joins splits itself; otherwise merge_splits does
};

// What a kernel is chosen by.
struct RungShape {
  int32_t group = 1;       // at most kRungMaxGroup
  int32_t tile_bytes = 0;  // of the widest tier, with metadata
  int32_t page_bytes = 0;  // that attention reads of the largest page
  int32_t device_shared_bytes = 0;
};
// The config was validated.
RungShape rung_shape(const AttentionConfig& config, int32_t device_shared_bytes);

RungKernel rung_kernel(Rung rung, const RungShape& shape);
RungKernel diffkv_rung(const RungShape& shape);
RungKernel query_as_a_rung(const RungShape& shape);
RungKernel kv_as_a_rung(Rung rung, const RungShape& shape);

// Byte offsets; arrivals (int32_t [heads]) come first.
struct RungWorkspace {
  size_t states = 0;  // SoftmaxState [rows][splits][group]
  size_t parts = 0;   // float [rows][splits][group][128]
  size_t bytes = 0;
};
RungWorkspace rung_workspace(const AttentionConfig& config, const RungGrid& grid, int32_t count);

Status validate_rung_config(Rung rung, const AttentionConfig& config, int32_t count);
Status validate_rung_call(const AttentionConfig& config, const RungGrid& grid,
                          const AttendCall& call, const AttentionWorkspace& workspace);
// Both were validated. memory is the workspace's.
RungParams rung_params(const AttentionConfig& config, const RungGrid& grid, const AttendCall& call,
                       void* memory, const RungKernel& kernel);

}  // namespace tierkv
