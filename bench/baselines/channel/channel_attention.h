// SPDX-License-Identifier: Apache-2.0
// Decode attention over rows of channel blocks (channel_cache.h): one query of every
// head of a group over the blocks and the raw residual of its row.
// The kernel is that of attention/channel/channel_kernel.cuh.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "bench/baselines/channel/channel_cache.h"

namespace tierkv {

inline constexpr int32_t kMaxChannelSplits = 16;

// Memory of the cache: device for attend_channel(), host for the reference.
struct ChannelAttention {
  int32_t group = 1;  // q heads of a row
  double sm_scale = 0;
  const uint16_t* q = nullptr;   // fp16 [num_rows, group, head_dim], 16-byte aligned
  uint16_t* out = nullptr;       // likewise; 0 for rows without tokens
  float* lse = nullptr;          // [num_rows, group], natural logarithm; may be null
  StatusCode* status = nullptr;  // [num_rows] kCorrupt where a count or an id led outside the
                                 // tables or the pool: what it named was left out
  // kInvalidArgument, kUnsupported.
  Status validate(const ChannelCache& cache) const;
};

// Caller-owned device memory, 16-byte aligned; nothing is kept in it between calls.
size_t channel_workspace_bytes(const ChannelCache& cache, int32_t group);
Status attend_channel(const ChannelCache& cache, const ChannelAttention& call, void* workspace,
                      GpuStream stream);

struct ChannelOutput {
  std::vector<double> out;  // [num_rows, group, head_dim]
  std::vector<double> lse;  // [num_rows, group]
};
// In double, one value at a time; out, lse and status of the call are not used. kCorrupt for counts
// and ids that lead outside.
Result<ChannelOutput> attend_channel_reference(const ChannelCache& cache,
                                               const ChannelAttention& call);

}  // namespace tierkv
