// SPDX-License-Identifier: Apache-2.0
#include "tools/analysis/scheme/tiering.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <vector>

namespace tierkv::analysis {
namespace {

std::vector<Tier> tiers_of(const TierPolicy& policy, const std::vector<float>& significance) {
  std::vector<Tier> tiers(significance.size(), static_cast<Tier>(77));
  EXPECT_TRUE(assign_prompt_tiers(policy, significance.data(), static_cast<int32_t>(tiers.size()),
                                  tiers.data(), nullptr));
  return tiers;
}

constexpr Tier W = Tier::kWindow, H = Tier::kHigh, L = Tier::kLow, P = Tier::kPruned;

TEST(PromptTiers, ThresholdsAreInclusiveAndDividedByTheIndexFromOne) {
  const TierPolicy policy{1.0, 0.5, 0, 0};
  const float below = std::nextafter(0.25f, 0.0f), below_low = std::nextafter(0.125f, 0.0f);
  EXPECT_EQ(tiers_of(policy, {1.0f, 0.5f, 0.34f, 0.25f}), (std::vector{H, H, H, H}));
  EXPECT_EQ(tiers_of(policy, {0.9f, 0.25f, 0.0f, below}), (std::vector{L, L, P, L}));
  EXPECT_EQ(tiers_of(policy, {0, 0, 0, 0.125f}), (std::vector{P, P, P, L}));
  EXPECT_EQ(tiers_of(policy, {0, 0, 0, below_low}), (std::vector{P, P, P, P}));
  // 1/3 in float lies above 1/3 in double: a comparison in float would call them equal either way.
  EXPECT_EQ(tiers_of({1.0, 0.0, 0, 0}, {0, 0, 1.0f / 3.0f})[2], H);
  EXPECT_EQ(tiers_of({1.0, 0.0, 0, 0}, {0, 0, std::nextafter(1.0f / 3.0f, 0.0f)})[2], L);
}

TEST(PromptTiers, WindowAndSinksAreProtected) {
  const TierPolicy policy{1.0, 0.5, 2, 1};
  EXPECT_EQ(tiers_of(policy, std::vector<float>(5, 0.0f)), (std::vector{W, P, P, W, W}));
  EXPECT_EQ(tiers_of(policy, {0, 0}), (std::vector{W, W}));
  EXPECT_EQ(tiers_of(policy, {}), std::vector<Tier>{});
  EXPECT_EQ(tiers_of({1.0, 0.5, 64, 0}, std::vector<float>(64, 0.0f)), std::vector<Tier>(64, W));
  EXPECT_EQ(tiers_of({1.0, 0.5, 64, 0}, std::vector<float>(65, 0.0f))[0], P);
  EXPECT_EQ(tiers_of({1.0, 0.5, 0, 9}, {0, 0, 0}), (std::vector{W, W, W}));
  EXPECT_EQ(tiers_of({1.0, 0.5, 2147483647, 2147483647}, {0, 0}), (std::vector{W, W}));
}

TEST(PromptTiers, AlphaLowZeroKeepsAllAndTheCountsAddUp) {
  std::vector<float> sig(100, 0.0f);
  sig[10] = 1.0f;
  std::vector<Tier> tiers(100);
  int32_t counts[kNumTiers] = {-1, -1, -1, -1};
  ASSERT_TRUE(assign_prompt_tiers({1.0, 0.0, 10, 2}, sig.data(), 100, tiers.data(), counts));
  EXPECT_EQ(std::vector<int32_t>(counts, counts + kNumTiers), (std::vector<int32_t>{12, 1, 87, 0}));
  EXPECT_EQ(tiers_of({0.0, 0.0, 0, 0}, {0.0f, 0.0f}), (std::vector{H, H}));
  EXPECT_EQ(tiers_of({0.5, 0.5, 0, 0}, {0.4f, 0.5f}), (std::vector{P, H}));
}

TEST(PromptTiers, RefusesAndWritesNothing) {
  Tier tiers[2] = {static_cast<Tier>(77), static_cast<Tier>(77)};
  int32_t counts[kNumTiers] = {5, 5, 5, 5};
  for (const auto& [bad, code] : {std::pair{NAN, StatusCode::kNonFinite},
                                  {INFINITY, StatusCode::kNonFinite},
                                  {-0.1f, StatusCode::kInvalidArgument}}) {
    const float sig[2] = {0.5f, bad};
    EXPECT_EQ(assign_prompt_tiers({}, sig, 2, tiers, counts).code(), code);
  }
  const float sig[2] = {0, 0};
  EXPECT_EQ(assign_prompt_tiers({0.1, 0.2, 0, 0}, sig, 2, tiers, counts).code(),
            StatusCode::kInvalidArgument);
  EXPECT_EQ(assign_prompt_tiers({}, sig, -1, tiers, counts).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(assign_prompt_tiers({}, nullptr, 2, tiers, counts).code(),
            StatusCode::kInvalidArgument);
  EXPECT_EQ(tiers[0], static_cast<Tier>(77));
  EXPECT_EQ(counts[0], 5);
}

}  // namespace
}  // namespace tierkv::analysis
