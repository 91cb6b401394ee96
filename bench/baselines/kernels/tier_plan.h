// SPDX-License-Identifier: Apache-2.0
// The tiers of whole prompts, row by row: which tokens go to the window side, which to high and low
// pages, which are pruned. The first step of the prompt phase (DiffKV section 4): page demand
// follows from the counts, the jobs of encode_pages() from the order.
//
// plan_tiers_host() is the plain reference, plan_tiers() one kernel with the same output. Decisions
// are prompt_tier() in double, so a score at a threshold goes the same way on both.
//
// Bound: memory, twice the scores in and once the order out; a CTA works on a row.
#pragma once

#include <cstdint>

#include "tierkv/policy.h"
#include "tierkv/status.h"

struct CUstream_st;

namespace tierkv {

using GpuStream = CUstream_st*;  // a cudaStream_t

// A row of a prompt: tokens 0 .. num_tokens - 1.
struct alignas(16) PlanRow {
  int64_t scalars = 0;  // element of token 0 in significance and order
  int32_t num_tokens = 0;
  int32_t policy = 0;  // index: layers and heads may differ
};

// By Tier.
struct alignas(16) TierCounts {
  int32_t of[kNumTiers];
};

// All pointers in host memory or all in device memory.
struct TierPlan {
  const PlanRow* rows = nullptr;         // [num_rows], aligned to 16 bytes
  const TierPolicy* policies = nullptr;  // [num_policies], valid ones
  const float* significance = nullptr;   // finite, not negative
  int32_t* order = nullptr;  // out: tokens of kWindow, then kHigh, kLow, kPruned, each ascending
  TierCounts* counts = nullptr;  // out: [num_rows], aligned to 16 bytes
  StatusCode* status = nullptr;  // out: [num_rows]
  int32_t num_rows = 0;
  int32_t num_policies = 0;

  // kInvalidArgument naming the field. Reads no array.
  Status validate() const;
};

// Each row's status: kInvalidArgument for a negative length, offset or significance, or a policy
// that is not there; kNonFinite; the greatest that applies. Its counts are then 0 and its order is
// as it was.
Status plan_tiers_host(const TierPlan& plan);
// One kernel; kCuda when the launch fails.
Status plan_tiers(const TierPlan& plan, GpuStream stream);

}  // namespace tierkv
