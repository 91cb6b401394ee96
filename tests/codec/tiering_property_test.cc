// SPDX-License-Identifier: Apache-2.0
// The state machine against Algorithm 1 written another way: one map of all tokens by position, no
// arrays, no slots, the candidate sorted among its tier's tokens as in the paper.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <set>
#include <tuple>
#include <vector>

#include "codec/policy/tiering.h"
#include "tests/support/fresh_random.h"
#include "tests/support/row_fixture.h"

namespace tierkv {
namespace {

class NaiveRow {
 public:
  explicit NaiveRow(const TierPolicy& policy) : policy_(policy) {}

  struct Entry {
    Tier tier;  // kWindow: window or sink
    float score;
    int32_t count;
  };

  void start(const std::vector<float>& significance) {
    n_ = static_cast<int32_t>(significance.size());
    for (int32_t i = 1; i <= n_; ++i) {
      const float sig = significance[i - 1];
      const bool kept = i <= policy_.sink_tokens || i > n_ - policy_.window_tokens;
      const Tier tier = kept ? Tier::kWindow : classify(sig, i);
      if (tier != Tier::kPruned) tokens_[i - 1] = {tier, sig, n_ - i};
      if (kept && i > n_ - policy_.window_tokens) window_.insert(i - 1);
    }
  }

  void step(int32_t new_tokens) {
    for (int32_t i = 0; i < new_tokens; ++i) {
      tokens_[n_] = {Tier::kWindow, 0, 0};
      window_.insert(n_++);
    }
    while (!window_.empty() && *window_.begin() < n_ - policy_.window_tokens) {
      const int32_t candidate = *window_.begin();
      window_.erase(window_.begin());
      if (candidate >= policy_.sink_tokens) compress(candidate);
    }
  }

  template <class F>
  void observe(int32_t query, F probability) {
    for (auto& [position, t] : tokens_) {
      if (position >= query) continue;
      t.score = running_mean(t.score, t.count++, probability(position));
    }
  }

  std::vector<std::tuple<int32_t, float, int32_t>> listing(Tier tier) const {
    std::vector<std::tuple<int32_t, float, int32_t>> out;
    for (const auto& [position, t] : tokens_) {
      if (t.tier == tier) out.push_back({position, t.score, t.count});
    }
    return out;
  }
  int32_t size() const { return n_; }

 private:
  Tier classify(double sig, int32_t n) const {
    return sig < policy_.alpha_low / n    ? Tier::kPruned
           : sig < policy_.alpha_high / n ? Tier::kLow
                                          : Tier::kHigh;
  }

  void compress(int32_t candidate) {
    Entry& c = tokens_[candidate];
    c.tier = classify(c.score, n_);
    if (c.tier == Tier::kPruned) {
      tokens_.erase(candidate);
      return;
    }
    std::vector<std::pair<float, int32_t>> order;  // the candidate among them, as in the paper
    for (const auto& [position, t] : tokens_) {
      if (t.tier == c.tier) order.push_back({t.score, position});
    }
    std::sort(order.begin(), order.end());
    Entry& victim = tokens_[order.front().second];
    const Tier to = classify(victim.score, n_);
    if (to == Tier::kPruned) {
      tokens_.erase(order.front().second);
    } else if (victim.tier == Tier::kHigh && to == Tier::kLow) {
      victim.tier = Tier::kLow;
    }
  }

  TierPolicy policy_;
  std::map<int32_t, Entry> tokens_;
  std::set<int32_t> window_;
  int32_t n_ = 0;
};

std::vector<std::tuple<int32_t, float, int32_t>> listing(const Row& row,
                                                         const std::vector<const TokenSet*>& sets) {
  std::vector<std::tuple<int32_t, float, int32_t>> out;
  for (const TokenSet* set : sets) {
    for (int32_t n = 0; n < set->size; ++n) {
      const int32_t i = set == &row.state.window ? (row.state.window_head + n) % set->capacity : n;
      out.push_back({set->positions[i], set->scores[i], set->counts[i]});
    }
  }
  std::sort(out.begin(), out.end());
  return out;
}

class TieringProperty : public RandomTest {
 protected:
  float uniform() { return std::uniform_real_distribution<float>(0, 1)(rng_); }
  int32_t integer(int32_t lo, int32_t hi) {
    return std::uniform_int_distribution<int32_t>(lo, hi)(rng_);
  }
  // Few distinct values, so that ties happen; about 1 / n, so that all tiers do.
  float score(int32_t n) {
    return static_cast<float>(integer(0, 12)) / (4.0f * static_cast<float>(n + 1));
  }
};

TEST_F(TieringProperty, StepsMatchTheNaiveRowOnRandomTraces) {
  int64_t moves[4] = {};
  for (int trial = 0; trial < 300; ++trial) {
    TierPolicy policy;
    policy.alpha_low = integer(0, 2) == 0 ? 0.0 : uniform();
    policy.alpha_high = policy.alpha_low + (integer(0, 4) == 0 ? 0.0 : 1.5 * uniform());
    policy.window_tokens = integer(0, 3) == 0 ? 0 : integer(0, 12);
    policy.sink_tokens = integer(0, 1) == 0 ? 0 : integer(0, 6);
    const int32_t prompt = integer(0, 30);
    std::vector<float> significance;
    for (int32_t i = 0; i < prompt; ++i) significance.push_back(score(i));
    NaiveRow naive(policy);
    Row row(400);
    naive.start(significance);
    ASSERT_TRUE(start_row(policy, significance.data(), prompt, &row.state));
    CountSchedule schedule{prompt, integer(1, 4)};
    for (int32_t step = 0; step < 60; ++step) {
      const int32_t n = integer(0, 9) == 0 ? integer(0, 5) : 1;
      naive.step(n);
      StepAction actions[64];
      int32_t count = -1;
      ASSERT_TRUE(generation_step(policy, n, &row.state, actions, 64, &count));
      for (int32_t a = 0; a < count; ++a) {
        ++moves[static_cast<int32_t>(actions[a].tier)];
        moves[0] += actions[a].victim_position != kNoPosition;
      }
      const RowState& s = row.state;
      SCOPED_TRACE(testing::Message()
                   << "seed " << seed_ << " trial " << trial << " step " << step);
      ASSERT_EQ(listing(row, {&s.high}), naive.listing(Tier::kHigh));
      ASSERT_EQ(listing(row, {&s.low}), naive.listing(Tier::kLow));
      ASSERT_EQ(listing(row, {&s.window, &s.sinks}), naive.listing(Tier::kWindow));
      ASSERT_EQ(s.num_tokens, naive.size());
      for (int32_t query = s.num_tokens - n; query < s.num_tokens; ++query) {
        if (!schedule.is_counted(query)) continue;
        const auto salt = static_cast<uint32_t>(rng_());
        const auto probability = [&](int32_t position) {
          return static_cast<float>((position * 2654435761u + salt) % 16) /
                 (4.0f * static_cast<float>(s.num_tokens));
        };
        naive.observe(query, probability);
        observe_query(&row.state, query, probability);
      }
      // The counts that the sets carry are the ones pages derive from positions.
      for (const auto& [position, unused, c] :
           listing(row, {&s.high, &s.low, &s.window, &s.sinks})) {
        ASSERT_EQ(c, schedule.count_of(position, s.num_tokens - 1)) << position;
      }
    }
  }
  for (const int64_t m : moves) EXPECT_GT(m, 100);  // the traces visit every kind of move
}

TEST_F(TieringProperty, ActionsDescribeTheSets) {
  for (int trial = 0; trial < 100; ++trial) {
    const TierPolicy policy{0.9, 0.3, integer(0, 4), integer(0, 3)};
    Row row(300);
    std::vector<int32_t> sets[4];  // by Tier: positions slot by slot; kWindow: sinks
    for (int32_t step = 0; step < 80; ++step) {
      StepAction actions[8];
      int32_t count = -1;
      ASSERT_TRUE(generation_step(policy, integer(1, 3), &row.state, actions, 8, &count));
      for (int32_t i = 0; i < count; ++i) {
        const StepAction& a = actions[i];
        auto& set = sets[static_cast<int32_t>(a.tier)];
        if (a.tier == Tier::kPruned) continue;
        if (a.victim_position == kNoPosition) {
          ASSERT_EQ(a.slot, static_cast<int32_t>(set.size()));
          set.push_back(a.position);
          continue;
        }
        ASSERT_EQ(set.at(a.slot), a.victim_position);
        set[a.slot] = a.position;
        if (a.victim_tier != Tier::kLow) continue;
        ASSERT_EQ(a.victim_slot, static_cast<int32_t>(sets[2].size()));
        sets[2].push_back(a.victim_position);
      }
      ASSERT_EQ(sets[0], row.positions(row.state.sinks)) << "seed " << seed_;
      ASSERT_EQ(sets[1], row.positions(row.state.high)) << "seed " << seed_;
      ASSERT_EQ(sets[2], row.positions(row.state.low)) << "seed " << seed_;
      observe_query(&row.state, row.state.num_tokens - 1,
                    [&](int32_t) { return score(row.state.num_tokens); });
    }
  }
}

TEST_F(TieringProperty, AlphaLowZeroLosesNoToken) {
  Row row(500);
  const TierPolicy policy{1.0, 0.0, 5, 2};
  for (int32_t step = 0; step < 200; ++step) {
    StepAction actions[8];
    int32_t count = -1;
    ASSERT_TRUE(generation_step(policy, integer(1, 2), &row.state, actions, 8, &count));
    const RowState& s = row.state;
    ASSERT_EQ(s.window.size + s.sinks.size + s.high.size + s.low.size, s.num_tokens)
        << "seed " << seed_;
    observe_query(&row.state, s.num_tokens - 1, [&](int32_t) { return score(s.num_tokens); });
  }
}

TEST_F(TieringProperty, StartingARowNeedsRoomAndAnEmptyRow) {
  const std::vector<float> sig(20, 0.01f);
  Row row(4);
  EXPECT_EQ(start_row({1.0, 0.0, 4, 0}, sig.data(), 20, &row.state).code(),
            StatusCode::kBufferTooSmall);
  EXPECT_EQ(row.state.low.size + row.state.window.size + row.state.num_tokens, 0);
  Row big(20);
  ASSERT_TRUE(start_row({1.0, 0.0, 4, 1}, sig.data(), 20, &big.state));
  EXPECT_EQ(big.state.window.size, 4);
  EXPECT_EQ(big.state.sinks.size, 1);
  EXPECT_EQ(big.state.low.size, 15);
  EXPECT_EQ(start_row({}, sig.data(), 20, &big.state).code(), StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace tierkv
