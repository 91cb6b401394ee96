// SPDX-License-Identifier: Apache-2.0
#include "bench/baselines/kernels/tier_plan.h"

#include <algorithm>

#include "codec/policy/tiering.h"

namespace tierkv {
namespace {

Status invalid(const char* why) {
  return Status(StatusCode::kInvalidArgument, why);
}
bool is_aligned(const void* p) {
  return reinterpret_cast<uintptr_t>(p) % 16 == 0;
}

StatusCode check_row(const TierPlan& plan, const PlanRow& row) {
  if (row.scalars < 0 || row.num_tokens < 0 || row.policy < 0 || row.policy >= plan.num_policies) {
    return StatusCode::kInvalidArgument;
  }
  auto worst = StatusCode::kOk;
  for (int32_t i = 0; i < row.num_tokens; ++i) {
    const float s = plan.significance[row.scalars + i];
    if (!is_finite(s)) {
      worst = std::max(worst, StatusCode::kNonFinite);
    } else if (s < 0) {
      worst = std::max(worst, StatusCode::kInvalidArgument);
    }
  }
  return worst;
}

void plan_row(const TierPlan& plan, const PlanRow& row, TierCounts* counts) {
  const TierPolicy& policy = plan.policies[row.policy];
  int32_t* order = plan.order + row.scalars;
  for (int32_t tier = 0; tier < kNumTiers; ++tier) {
    for (int32_t i = 0; i < row.num_tokens; ++i) {
      const float s = plan.significance[row.scalars + i];
      if (prompt_tier(policy, s, i, row.num_tokens) != static_cast<Tier>(tier)) continue;
      *order++ = i;
      ++counts->of[tier];
    }
  }
}

}  // namespace

Status TierPlan::validate() const {
  if (num_rows < 0) return invalid("num_rows is negative");
  if (num_rows == 0) return Status::ok();
  if (num_policies < 1) return invalid("num_policies must be positive");
  if (!rows || !policies || !significance || !order || !counts || !status) {
    return invalid("rows, policies, significance, order, counts or status is null");
  }
  if (!is_aligned(rows) || !is_aligned(counts)) {
    return invalid("rows or counts are not aligned to 16 bytes");
  }
  return Status::ok();
}

Status plan_tiers_host(const TierPlan& plan) {
  if (Status s = plan.validate(); !s) return s;
  for (int32_t i = 0; i < plan.num_rows; ++i) {
    plan.counts[i] = {};
    plan.status[i] = check_row(plan, plan.rows[i]);
    if (plan.status[i] == StatusCode::kOk) plan_row(plan, plan.rows[i], &plan.counts[i]);
  }
  return Status::ok();
}

}  // namespace tierkv
