// SPDX-License-Identifier: Apache-2.0
// The plain plan of many rows against the plan of one (codec/policy/tiering.h).
#include "bench/baselines/kernels/tier_plan.h"

#include <gtest/gtest.h>

#include <random>
#include <string>
#include <vector>

#include "codec/policy/tiering.h"

namespace tierkv {
namespace {

TEST(TierPlanTest, OrdersTheTokensOfEachTier) {
  const uint32_t seed = std::random_device{}();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937 rng(seed);
  const TierPolicy policy = {1.0, 0.3, 8, 3};
  std::vector<PlanRow> rows;
  std::vector<float> significance;
  for (const int32_t n : {0, 1, 9, 200}) {
    rows.push_back({static_cast<int64_t>(significance.size()), n, 0});
    for (int32_t i = 0; i < n; ++i) {
      significance.push_back(static_cast<float>(rng() % 1000) / 500.0f / static_cast<float>(i + 1));
    }
  }
  std::vector<int32_t> order(significance.size(), -1);
  std::vector<TierCounts> counts(rows.size(), {{-1, -1, -1, -1}});
  std::vector<StatusCode> status(rows.size(), StatusCode::kCorrupt);
  TierPlan plan;
  plan.rows = rows.data(), plan.policies = &policy, plan.significance = significance.data();
  plan.order = order.data(), plan.counts = counts.data(), plan.status = status.data();
  plan.num_rows = static_cast<int32_t>(rows.size());
  plan.num_policies = 1;
  ASSERT_TRUE(plan_tiers_host(plan));
  for (size_t r = 0; r < rows.size(); ++r) {
    const int32_t n = rows[r].num_tokens;
    std::vector<Tier> tiers(n + 1);
    int32_t expected[kNumTiers];
    ASSERT_TRUE(assign_prompt_tiers(policy, significance.data() + rows[r].scalars, n, tiers.data(),
                                    expected));
    ASSERT_EQ(status[r], StatusCode::kOk);
    const int32_t* next = order.data() + rows[r].scalars;
    for (int32_t tier = 0; tier < kNumTiers; ++tier) {
      ASSERT_EQ(counts[r].of[tier], expected[tier]);
      for (int32_t i = 0; i < n; ++i) {
        if (tiers[i] != static_cast<Tier>(tier)) continue;
        ASSERT_EQ(*next++, i);
      }
    }
  }
}

}  // namespace
}  // namespace tierkv
