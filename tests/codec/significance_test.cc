// SPDX-License-Identifier: Apache-2.0
#include "codec/policy/significance.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "tests/support/fresh_random.h"

namespace tierkv {
namespace {

class SignificanceTest : public RandomTest {
 protected:
  std::vector<float> normal(size_t n) {
    std::normal_distribution<float> d;
    std::vector<float> x(n);
    for (float& v : x) v = d(rng_);
    return x;
  }
};

AttentionRow row_of(const std::vector<float>& q, const std::vector<float>& k, int32_t group,
                    int32_t num_tokens, int32_t head_dim) {
  AttentionRow row;
  row.q = q.data();
  row.k = k.data();
  row.group_size = group;
  row.num_queries = static_cast<int32_t>(q.size()) / (group * head_dim);
  row.num_tokens = num_tokens;
  row.head_dim = head_dim;
  row.sm_scale = 1.0 / std::sqrt(head_dim);
  return row;
}

// softmax(q_h,j . k)_i over tokens 0..position, one number at a time.
long double probability(const AttentionRow& row, int32_t h, int32_t j, int32_t position,
                        int32_t i) {
  const auto logit = [&](int32_t token) {
    long double s = 0;
    for (int32_t d = 0; d < row.head_dim; ++d) {
      s += static_cast<long double>(row.q[(int64_t{h} * row.num_queries + j) * row.head_dim + d]) *
           row.k[int64_t{token} * row.head_dim + d];
    }
    return s * row.sm_scale;
  };
  long double sum = 0;
  const long double own = logit(i);
  for (int32_t t = 0; t <= position; ++t) sum += std::exp(logit(t) - own);
  return 1 / sum;
}

// Logits are sums of at most 128 products below about 50, so each is within 128 * 2^-53 * 50 <
// 1e-12 of exact, and a probability is off by at most twice that, relatively.
constexpr double kTolerance = 1e-11;

TEST_F(SignificanceTest, IsTheDefinition) {
  for (const auto& [group, n, head_dim] :
       {std::array{1, 1, 64}, {1, 2, 4}, {4, 13, 16}, {7, 9, 96}, {2, 21, 128}}) {
    const auto q = normal(static_cast<size_t>(group) * n * head_dim),
               k = normal(static_cast<size_t>(n) * head_dim);
    const AttentionRow row = row_of(q, k, group, n, head_dim);
    std::vector<double> sig(n, -1);
    std::vector<int32_t> counts(n, -1);
    ASSERT_TRUE(exact_significance(row, sig.data(), counts.data()));
    for (int32_t i = 1; i <= n; ++i) {  // as in the paper, from 1
      long double sum = 0;
      for (int32_t j = i + 1; j <= n; ++j) {
        long double top = 0;
        for (int32_t h = 0; h < group; ++h)
          top = std::max(top, probability(row, h, j - 1, j - 1, i - 1));
        sum += top;
      }
      const double want = i == n ? 0 : static_cast<double>(sum / (n - i));
      EXPECT_NEAR(sig[i - 1], want, kTolerance * want) << "seed " << seed_ << " token " << i;
      EXPECT_EQ(counts[i - 1], n - i);
    }
  }
}

TEST_F(SignificanceTest, QueriesAtPositionsCountForOlderTokensOnly) {
  const int32_t n = 12, head_dim = 32;
  const std::vector<int32_t> positions = {5, 11, 5, 0, 8};
  const auto q = normal(3 * positions.size() * head_dim), k = normal(n * head_dim);
  AttentionRow row = row_of(q, k, 3, n, head_dim);
  row.q_positions = positions.data();
  std::vector<double> sig(n, -1);
  std::vector<int32_t> counts(n, -1);
  ASSERT_TRUE(exact_significance(row, sig.data(), counts.data()));
  for (int32_t i = 0; i < n; ++i) {
    long double sum = 0;
    int32_t count = 0;
    for (int32_t j = 0; j < row.num_queries; ++j) {
      if (positions[j] <= i) continue;
      long double top = 0;
      for (int32_t h = 0; h < 3; ++h) top = std::max(top, probability(row, h, j, positions[j], i));
      sum += top;
      ++count;
    }
    EXPECT_EQ(counts[i], count);
    const double want = count == 0 ? 0 : static_cast<double>(sum / count);
    EXPECT_NEAR(sig[i], want, kTolerance * want) << "seed " << seed_;
  }
}

TEST_F(SignificanceTest, LargeLogitsDoNotOverflow) {
  const std::vector<float> q = {300, 300, 300}, k = {300, -300, 299};
  AttentionRow row = row_of(q, k, 1, 3, 1);
  double sig[3];
  ASSERT_TRUE(exact_significance(row, sig, nullptr));
  EXPECT_DOUBLE_EQ(sig[0], (1.0 + 1 / (1 + std::exp(-300.0))) / 2);
  EXPECT_EQ(sig[2], 0);
}

TEST_F(SignificanceTest, RefusesBadInput) {
  const auto q = normal(4 * 8), k = normal(4 * 8);
  const AttentionRow good = row_of(q, k, 1, 4, 8);
  double sig[4] = {9, 9, 9, 9};
  const auto code = [&](const AttentionRow& row) {
    return exact_significance(row, sig, nullptr).code();
  };
  AttentionRow row = good;
  row.num_queries = 3;
  EXPECT_EQ(code(row), StatusCode::kInvalidArgument);
  row = good;
  row.sm_scale = 0;
  EXPECT_EQ(code(row), StatusCode::kInvalidArgument);
  row = good;
  row.group_size = 0;
  EXPECT_EQ(code(row), StatusCode::kInvalidArgument);
  row = good;
  row.k = nullptr;
  EXPECT_EQ(code(row), StatusCode::kInvalidArgument);
  for (const int32_t position : {-1, 4}) {
    const std::vector<int32_t> positions = {0, 1, 2, position};
    row = good;
    row.q_positions = positions.data();
    EXPECT_EQ(code(row), StatusCode::kInvalidArgument);
  }
  for (const float bad : {NAN, INFINITY, -INFINITY}) {
    auto k2 = k;
    k2[1] = bad;
    EXPECT_EQ(code(row_of(q, k2, 1, 4, 8)), StatusCode::kNonFinite);
  }
  // A logit of -infinity beside finite ones would pass for a token that nobody looks at.
  const std::vector<float> ones(4 * 8, 1.0f);
  auto below = ones;
  below[1 * 8] = -INFINITY;
  EXPECT_EQ(code(row_of(ones, below, 1, 4, 8)), StatusCode::kNonFinite);
  for (const double s : sig) EXPECT_EQ(s, 9);
  row = good;
  row.num_tokens = row.num_queries = 0;
  EXPECT_EQ(code(row), StatusCode::kOk);
}

// n updates, each with three rounded operations of at most 2^-24 relative to values of at most
// `top`: n * 3 * 2^-24 top.
}  // namespace
}  // namespace tierkv
