// SPDX-License-Identifier: Apache-2.0
#include "bench/baselines/kernels/tier_plan.h"

#include <cuda_runtime.h>

#include "codec/policy/tiering.h"
#include "gpu/cuda_device.cuh"
#include "gpu/warp.cuh"

namespace tierkv {
namespace {

constexpr int32_t kThreads = 256, kWarps = kThreads / 32;
constexpr int32_t kTokensPerThread = 4;
constexpr int32_t kChunk = kThreads * kTokensPerThread;

__device__ StatusCode score_status(float s) {
  if (!is_finite(s)) return StatusCode::kNonFinite;
  return s < 0 ? StatusCode::kInvalidArgument : StatusCode::kOk;
}

// Four counters of 16 bits, one for each tier: of a chunk, so none overflows.
__device__ __forceinline__ uint64_t one_of(Tier tier) {
  return uint64_t{1} << (16 * static_cast<int32_t>(tier));
}
__device__ __forceinline__ int32_t count_of(uint64_t counters, int32_t tier) {
  return static_cast<int32_t>(counters >> (16 * tier) & 0xffffu);
}

// What the threads before this one hold; *total: what all hold.
__device__ uint64_t scan_before(uint64_t mine, uint64_t* total) {
  __shared__ uint64_t warp_totals[kWarps];
  const int32_t lane = lane_index(), warp = static_cast<int32_t>(threadIdx.x) / 32;
  uint64_t sum = mine;
  for (int32_t lanes = 1; lanes < 32; lanes *= 2) {
    const uint64_t below = __shfl_up_sync(kFullWarp, sum, lanes);
    if (lane >= lanes) sum += below;
  }
  if (lane == 31) warp_totals[warp] = sum;
  __syncthreads();
  uint64_t before = sum - mine;
  *total = 0;
  for (int32_t w = 0; w < kWarps; ++w) {
    if (w < warp) before += warp_totals[w];
    *total += warp_totals[w];
  }
  __syncthreads();
  return before;
}

// The tiers of the thread's consecutive tokens of a chunk.
struct ThreadTiers {
  int32_t first, count;
  Tier of[kTokensPerThread];

  __device__ ThreadTiers(const TierPlan& plan, const PlanRow& row, const TierPolicy& policy,
                         int32_t chunk, StatusCode* code) {
    first = chunk + static_cast<int32_t>(threadIdx.x) * kTokensPerThread;
    count = min(max(row.num_tokens - first, 0), kTokensPerThread);
#pragma unroll
    for (int32_t i = 0; i < kTokensPerThread; ++i) {
      if (i >= count) continue;
      const float s = plan.significance[row.scalars + first + i];
      *code = greater(*code, score_status(s));
      of[i] = prompt_tier(policy, s, first + i, row.num_tokens);
    }
  }
  __device__ uint64_t counters() const {
    uint64_t sum = 0;
#pragma unroll
    for (int32_t i = 0; i < kTokensPerThread; ++i) {
      if (i < count) sum += one_of(of[i]);
    }
    return sum;
  }
};

// Counts and status of a row, the same in all threads.
__device__ StatusCode count_row(const TierPlan& plan, const PlanRow& row, const TierPolicy& policy,
                                TierCounts* counts) {
  __shared__ int32_t totals[kNumTiers + 1];
  if (threadIdx.x <= kNumTiers) totals[threadIdx.x] = 0;
  __syncthreads();
  auto code = StatusCode::kOk;
  int32_t mine[kNumTiers] = {};
  for (int32_t chunk = 0; chunk < row.num_tokens; chunk += kChunk) {
    const uint64_t c = ThreadTiers(plan, row, policy, chunk, &code).counters();
#pragma unroll
    for (int32_t tier = 0; tier < kNumTiers; ++tier) mine[tier] += count_of(c, tier);
  }
#pragma unroll
  for (int32_t tier = 0; tier < kNumTiers; ++tier) {
    const int32_t sum = __reduce_add_sync(kFullWarp, mine[tier]);
    if (lane_index() == 0) atomicAdd(&totals[tier], sum);
  }
  code = worst_of_warp(code);
  if (lane_index() == 0) atomicMax(&totals[kNumTiers], static_cast<int32_t>(code));
  __syncthreads();
#pragma unroll
  for (int32_t tier = 0; tier < kNumTiers; ++tier) counts->of[tier] = totals[tier];
  return static_cast<StatusCode>(totals[kNumTiers]);
}

__device__ void order_row(const TierPlan& plan, const PlanRow& row, const TierPolicy& policy,
                          const TierCounts& counts) {
  int32_t next[kNumTiers] = {};
#pragma unroll
  for (int32_t tier = 1; tier < kNumTiers; ++tier)
    next[tier] = next[tier - 1] + counts.of[tier - 1];
  int32_t* order = plan.order + row.scalars;
  for (int32_t chunk = 0; chunk < row.num_tokens; chunk += kChunk) {
    auto code = StatusCode::kOk;
    const ThreadTiers tiers(plan, row, policy, chunk, &code);
    uint64_t total;
    uint64_t before = scan_before(tiers.counters(), &total);
#pragma unroll
    for (int32_t i = 0; i < kTokensPerThread; ++i) {
      if (i >= tiers.count) continue;
#pragma unroll
      for (int32_t tier = 0; tier < kNumTiers; ++tier) {
        if (tiers.of[i] != static_cast<Tier>(tier)) continue;
        order[next[tier] + count_of(before, tier)] = tiers.first + i;
      }
      before += one_of(tiers.of[i]);
    }
#pragma unroll
    for (int32_t tier = 0; tier < kNumTiers; ++tier) next[tier] += count_of(total, tier);
  }
}

__global__ void __launch_bounds__(kThreads) plan_kernel(const TierPlan plan) {
  const auto index = static_cast<int32_t>(blockIdx.x);
  const PlanRow row = plan.rows[index];
  TierCounts counts = {};
  auto code = StatusCode::kInvalidArgument;
  const bool is_sound =
      row.scalars >= 0 && row.num_tokens >= 0 && row.policy >= 0 && row.policy < plan.num_policies;
  if (is_sound) {
    const TierPolicy policy = plan.policies[row.policy];
    code = count_row(plan, row, policy, &counts);
    if (code == StatusCode::kOk) order_row(plan, row, policy, counts);
  }
  if (threadIdx.x != 0) return;
  if (code != StatusCode::kOk) counts = {};
  plan.counts[index] = counts;
  plan.status[index] = code;
}

}  // namespace

Status plan_tiers(const TierPlan& plan, GpuStream stream) {
  if (Status s = plan.validate(); !s) return s;
  if (plan.num_rows == 0) return Status::ok();
  plan_kernel<<<plan.num_rows, kThreads, 0, stream>>>(plan);
  return cuda_status(cudaGetLastError(), "plan_tiers");
}

}  // namespace tierkv
