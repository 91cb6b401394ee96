// SPDX-License-Identifier: Apache-2.0
// The end of every rung: the parts of a CTA's warps joined head by head, then written as output or
// left as the part of a split row.
#pragma once

#include "attention/core/head_sum.cuh"
#include "bench/baselines/rungs/rung_params.h"
#include "gpu/barrier.cuh"
#include "gpu/lanes.cuh"

namespace tierkv {

using RungHeadSum = HeadSum<kRungHeadDim>;

// Where the parts of one head are: part i at i * state_stride and i * accumulator_stride.
struct HeadParts {
  const SoftmaxState* states;
  const float* accumulators;
  int32_t state_stride, accumulator_stride;
  int32_t count;
};

// By a warp. kGlobal: what other CTAs or kernels wrote, otherwise shared memory.
template <bool kGlobal>
__device__ __forceinline__ RungHeadSum join_parts(const HeadParts& parts) {
  constexpr int32_t kInFlight = 8;
  RungHeadSum sum;
  for (int32_t first = 0; first < parts.count; first += kInFlight) {
    RungHeadSum::Part batch[kInFlight];
#pragma unroll
    for (int32_t k = 0; k < kInFlight; ++k) {
      const int32_t i = first + k;
      batch[k].state = nullptr;
      if (i >= parts.count) continue;
      batch[k] = {parts.states + i * parts.state_stride,
                  parts.accumulators + static_cast<int64_t>(i) * parts.accumulator_stride};
    }
    sum.template add<kInFlight, kGlobal>(batch);
  }
  return sum;
}

__device__ __forceinline__ void write_head(const RungParams& p, int32_t row, int32_t head,
                                           const RungHeadSum& sum) {
  const int64_t place = static_cast<int64_t>(row) * p.group + head;
  sum.write(static_cast<__half*>(p.out) + place * kRungHeadDim,
            p.lse == nullptr ? nullptr : p.lse + place);
}

// The parts of all splits of a row, in global memory.
__device__ __forceinline__ HeadParts split_parts(const RungParams& p, int32_t row, int32_t head) {
  const int64_t first = static_cast<int64_t>(row) * p.splits * p.group + head;
  return {p.part_states + first, p.parts + first * kRungHeadDim, p.group, p.group * kRungHeadDim,
          p.splits};
}

// One head of a split is done: written where the row has one split, otherwise left for the merge.
__device__ __forceinline__ void leave_head(const RungParams& p, int32_t row, int32_t split,
                                           int32_t head, const RungHeadSum& sum) {
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
  write_head(p, row, head, join_parts<true>(split_parts(p, row, head)));
}

}  // namespace tierkv
