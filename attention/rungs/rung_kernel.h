// What run_rung() must know of a rung, and where its workspace's arrays lie.
#pragma once

#include <cstddef>
#include <cstdint>

#include "attention/rungs/rung_params.h"
#include "attention/rungs/rungs.h"

namespace tierkv {

inline constexpr int32_t kRungMaxSplits = 128;

struct RungKernel {
  void (*kernel)(RungParams) = nullptr;
  int32_t threads = 0;
  int32_t shared_bytes = 0;  // dynamic
  int32_t row_ctas = 1;      // that a split of a row takes
  int32_t chunk_tiles = 1;   // that it takes at once, at most
  bool merges = false;       // joins splits itself; otherwise merge_splits does
};

// The config was validated.
RungKernel rung_kernel(Rung rung, const AttentionConfig& config);
RungKernel diffkv_rung(int32_t group);
// tile_bytes: of a tile of the widest tier, with its metadata.
RungKernel query_as_a_rung(int32_t tile_bytes);

int32_t widest_tile_bytes(const AttentionConfig& config);

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
                       void* memory, int32_t chunk_tiles);

}  // namespace tierkv
