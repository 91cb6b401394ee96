// SPDX-License-Identifier: Apache-2.0
#include "codec/policy/tiering.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "tests/support/row_fixture.h"

namespace tierkv {
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

// ---- generation phase: the edge cases of docs/internals/policies.md, with a window of one token
// so that each step has a candidate.

// N is made large by the number of tokens appended before; scores are set by hand. alpha_high / N =
// 0.4, alpha_low / N = 0.1.
TierPolicy policy_at(int32_t n) {
  return {0.4 * n, 0.1 * n, 1, 0};
}

// A row of `n` tokens, the newest with score `candidate` alone in the window.
Row row_with(int32_t n, float candidate, const std::vector<std::pair<float, int32_t>>& high,
             const std::vector<std::pair<float, int32_t>>& low) {
  Row row(32);
  row.state.num_tokens = n;
  row.add(&row.state.window, candidate, n - 1);
  for (const auto& [score, position] : high) row.add(&row.state.high, score, position);
  for (const auto& [score, position] : low) row.add(&row.state.low, score, position);
  return row;
}

StepAction one_step(Row* row) {
  StepAction action{};
  int32_t count = -1;
  EXPECT_TRUE(
      generation_step(policy_at(row->state.num_tokens + 1), 1, &row->state, &action, 1, &count));
  EXPECT_EQ(count, 1);
  return action;
}

using Positions = std::vector<int32_t>;

TEST(GenerationStep, CandidateGoesByItsScore) {
  Row high = row_with(9, 0.4f, {}, {});
  EXPECT_EQ(one_step(&high).tier, H);
  EXPECT_EQ(high.positions(high.state.high), Positions{8});
  Row low = row_with(9, 0.39f, {}, {});
  EXPECT_EQ(one_step(&low).tier, L);
  EXPECT_EQ(low.positions(low.state.low), Positions{8});
  Row pruned = row_with(9, 0.09f, {{0.01f, 1}}, {{0.01f, 2}});
  const StepAction a = one_step(&pruned);
  EXPECT_EQ(a.tier, P);
  EXPECT_EQ(a.slot, kNoSlot);
  EXPECT_EQ(a.victim_position, kNoPosition);  // no victim without an entry
  EXPECT_EQ(pruned.positions(pruned.state.high), Positions{1});
  EXPECT_EQ(pruned.positions(pruned.state.low), Positions{2});
  EXPECT_EQ(pruned.positions(pruned.state.window), Positions{9});
}

TEST(GenerationStep, EmptyTierAndOwnVictimStay) {
  Row alone = row_with(9, 0.5f, {}, {{0.01f, 2}});
  EXPECT_EQ(one_step(&alone).victim_position, kNoPosition);
  Row least = row_with(9, 0.45f, {{0.6f, 1}, {0.5f, 2}}, {});
  EXPECT_EQ(one_step(&least).victim_position, kNoPosition);
  EXPECT_EQ(least.positions(least.state.high), (Positions{1, 2, 8}));
}

TEST(GenerationStep, HighVictimGoesToLowOrIsPruned) {
  Row down = row_with(9, 0.5f, {{0.6f, 1}, {0.2f, 2}, {0.3f, 3}}, {{0.01f, 4}});
  const StepAction a = one_step(&down);
  EXPECT_EQ(a.victim_position, 2);
  EXPECT_EQ(a.victim_tier, L);
  EXPECT_EQ(a.slot, 1);         // the candidate takes the victim's slot
  EXPECT_EQ(a.victim_slot, 1);  // the victim is appended
  EXPECT_EQ(down.positions(down.state.high), (Positions{1, 8, 3}));
  EXPECT_EQ(down.positions(down.state.low), (Positions{4, 2}));  // no cascade: token 4 stays
  Row out = row_with(9, 0.5f, {{0.05f, 1}}, {});
  const StepAction b = one_step(&out);
  EXPECT_EQ(b.victim_tier, P);
  EXPECT_EQ(b.victim_slot, kNoSlot);
  EXPECT_EQ(out.positions(out.state.high), Positions{8});
  EXPECT_EQ(out.positions(out.state.low), Positions{});
}

TEST(GenerationStep, LowVictimIsPrunedAndNoTokenMovesUp) {
  Row row = row_with(9, 0.2f, {}, {{0.9f, 1}, {0.05f, 2}});
  const StepAction a = one_step(&row);
  EXPECT_EQ(a.victim_position, 2);
  EXPECT_EQ(a.victim_tier, P);
  EXPECT_EQ(row.positions(row.state.low), (Positions{1, 8}));
  Row risen = row_with(9, 0.2f, {}, {{0.9f, 1}});
  EXPECT_EQ(one_step(&risen).victim_position, kNoPosition);
  EXPECT_EQ(risen.positions(risen.state.low), (Positions{1, 8}));
}

TEST(GenerationStep, OldestOfEqualScoresGoes) {
  Row row = row_with(9, 0.5f, {{0.2f, 5}, {0.2f, 3}, {0.2f, 7}}, {});
  EXPECT_EQ(one_step(&row).victim_position, 3);
  Row threshold = row_with(9, 0.1f, {}, {{0.1f, 3}});
  EXPECT_EQ(one_step(&threshold).victim_position, kNoPosition);  // 0.1f is above 0.1: both stay
}

TEST(GenerationStep, FrozenTokensAreNoVictims) {
  Row row = row_with(9, 0.5f, {{0.01f, 1}, {0.2f, 2}}, {});
  row.state.high.frozen[0] = 1;
  EXPECT_EQ(one_step(&row).victim_position, 2);
  Row all = row_with(9, 0.5f, {{0.01f, 1}}, {});
  all.state.high.frozen[0] = 1;
  EXPECT_EQ(one_step(&all).victim_position, kNoPosition);
  EXPECT_EQ(all.positions(all.state.high), (Positions{1, 8}));
}

TEST(GenerationStep, ShorterThanTheWindowMovesNothing) {
  Row row(80);
  StepAction actions[2];
  for (int32_t n = 0; n < 64; ++n) {
    int32_t count = -1;
    ASSERT_TRUE(generation_step({1.0, 0.5, 64, 0}, 1, &row.state, actions, 0, &count));
    EXPECT_EQ(count, 0);
  }
  int32_t count = -1;
  ASSERT_TRUE(generation_step({1.0, 0.5, 64, 0}, 1, &row.state, actions, 1, &count));
  EXPECT_EQ(count, 1);
  EXPECT_EQ(actions[0].position, 0);
  EXPECT_EQ(row.state.window.size, 64);
}

TEST(GenerationStep, SinksStayAndBringNoVictim) {
  Row row(16);
  TierPolicy policy = {1.0, 0.9, 1, 2};
  row.add(&row.state.high, 0.0f, 7);
  for (int32_t n = 0; n < 4; ++n) {
    StepAction a{};
    int32_t count = -1;
    ASSERT_TRUE(generation_step(policy, 1, &row.state, &a, 1, &count));
    if (n == 1 || n == 2) {
      EXPECT_EQ(a.tier, W);
      EXPECT_EQ(a.victim_position, kNoPosition);
    }
    EXPECT_EQ(count, n == 0 ? 0 : 1);
    EXPECT_TRUE(n != 3 || a.tier == P);
  }
  EXPECT_EQ(row.positions(row.state.sinks), (Positions{0, 1}));
  EXPECT_EQ(row.positions(row.state.high), Positions{7});
}

TEST(GenerationStep, SeveralTokensAStepUseOneNAndOneVictimEach) {
  Row row(32);
  row.state.num_tokens = 8;
  row.add(&row.state.window, 0.5f, 6);
  row.add(&row.state.window, 0.5f, 7);
  for (int32_t i = 0; i < 4; ++i) row.add(&row.state.high, 0.2f + 0.01f * i, i);
  StepAction a[3];
  int32_t count = -1;
  // alpha_high / 11 = 0.4: three candidates, the last a new token of score 0.
  ASSERT_TRUE(generation_step({0.4 * 11, 0.0, 2, 0}, 3, &row.state, a, 3, &count));
  ASSERT_EQ(count, 3);
  EXPECT_EQ(a[0].position, 6);
  EXPECT_EQ(a[0].victim_position, 0);
  EXPECT_EQ(a[1].position, 7);
  EXPECT_EQ(a[1].victim_position, 1);
  EXPECT_EQ(a[2].position, 8);
  EXPECT_EQ(a[2].tier, L);
  EXPECT_EQ(row.positions(row.state.window), (Positions{9, 10}));
  EXPECT_EQ(row.state.num_tokens, 11);
}

TEST(GenerationStep, TooSmallMeansUnchanged) {
  for (int which = 0; which < 5; ++which) {
    Row row = row_with(9, 0.5f, {{0.2f, 1}}, {{0.2f, 2}});
    TierPolicy policy = policy_at(10);
    int32_t action_capacity = 1;
    if (which == 0) row.state.window.capacity = 1;
    if (which == 1) row.state.high.capacity = 1;
    if (which == 2) row.state.low.capacity = 1;
    if (which == 3) action_capacity = 0;
    if (which == 4) {
      row.state.sinks.capacity = 0;
      policy.sink_tokens = 100;
    }
    StepAction a{};
    int32_t count = -1;
    EXPECT_EQ(generation_step(policy, 1, &row.state, &a, action_capacity, &count).code(),
              StatusCode::kBufferTooSmall)
        << which;
    EXPECT_EQ(count, -1);
    EXPECT_EQ(row.state.num_tokens, 9);
    EXPECT_EQ(row.positions(row.state.high), Positions{1});
    EXPECT_EQ(row.state.window.size, 1);
  }
}

TEST(GenerationStep, RefusesBadState) {
  Row row = row_with(9, 0.5f, {}, {});
  StepAction a{};
  int32_t count = 0;
  const auto code = [&](const RowState& state, int32_t tokens) {
    RowState s = state;
    return generation_step(policy_at(10), tokens, &s, &a, 1, &count).code();
  };
  constexpr StatusCode kBad = StatusCode::kInvalidArgument;
  EXPECT_EQ(code(row.state, -1), kBad);
  EXPECT_EQ(code(row.state, 2147483647), kBad);
  RowState s = row.state;
  s.window_head = 32;
  EXPECT_EQ(code(s, 1), kBad);
  s = row.state;
  s.high.size = 33;
  EXPECT_EQ(code(s, 1), kBad);
  s = row.state;
  s.low.scores = nullptr;
  EXPECT_EQ(code(s, 1), kBad);
}

}  // namespace
}  // namespace tierkv
