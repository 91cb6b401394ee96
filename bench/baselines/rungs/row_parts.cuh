// SPDX-License-Identifier: Apache-2.0
// The end of every rung: the parts of a CTA's warps joined head by head, then written as output or
// left as the part of a split row.
#pragma once

#include "attention/core/parts_join.cuh"
#include "bench/baselines/rungs/rung_params.h"
#include "gpu/arrivals.cuh"
#include "gpu/lanes.cuh"

namespace tierkv {

// By a warp. kGlobal: what other CTAs or kernels wrote, otherwise shared memory.
template <bool kGlobal>
__device__ __forceinline__ PartsJoin<kRungHeadDim, 8, kGlobal> join_parts(
    const JoinedParts& parts) {
  PartsJoin<kRungHeadDim, 8, kGlobal> sum(kRungHeadDim);
  sum.join(parts);
  return sum;
}

template <class Sum>
__device__ __forceinline__ void write_head(const RungParams& p, int32_t row, int32_t head,
                                           const Sum& sum) {
  const int64_t place = static_cast<int64_t>(row) * p.group + head;
  sum.write({static_cast<uint16_t*>(p.out) + place * kRungHeadDim,
             p.lse == nullptr ? nullptr : p.lse + place, false, -INFINITY});
}

// Joins the parts of all splits of a row, in global memory.
__device__ __forceinline__ void merge_head(const RungParams& p, int32_t row, int32_t head) {
  const int64_t first = static_cast<int64_t>(row) * p.splits * p.group + head;
  write_head(p, row, head,
             join_parts<true>(even_parts(p.part_states + first, p.parts + first * kRungHeadDim,
                                         p.group, p.group * kRungHeadDim, p.splits)));
}

// Joins the parts of one head of a split, in shared memory: to the output where the row has one
// split, otherwise as a part for the merge.
__device__ __forceinline__ void leave_head(const RungParams& p, int32_t row, int32_t split,
                                           int32_t head, const JoinedParts& parts) {
  const auto sum = join_parts<false>(parts);
  if (p.splits == 1) {
    write_head(p, row, head, sum);
    return;
  }
  const int64_t to = (static_cast<int64_t>(row) * p.splits + split) * p.group + head;
  sum.store(p.part_states + to, p.parts + to * kRungHeadDim);
}

// After leave_head(): the last split of a row to arrive joins all of them.
__device__ __forceinline__ void merge_last(const RungParams& p, int32_t row, int32_t head) {
  if (p.splits == 1) return;
  int32_t* arrivals = p.arrivals + static_cast<int64_t>(row) * p.group + head;
  __syncwarp();
  const int32_t before = is_first_lane() ? arrive_acq_rel(arrivals) : 0;
  if (__shfl_sync(kFullWarp, before, 0) != p.splits - 1) return;
  if (is_first_lane()) *arrivals = 0;
  __syncwarp();  // what lane 0 has acquired is there for all
  merge_head(p, row, head);
}

}  // namespace tierkv
