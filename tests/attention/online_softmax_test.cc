// SPDX-License-Identifier: Apache-2.0
#include "attention/core/online_softmax.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <vector>

namespace tierkv {
namespace {

// A state and the accumulator beside it.
struct Part {
  SoftmaxState state;
  float sum = 0;
};

Part of_tokens(const std::vector<double>& scores, const std::vector<double>& values,
               float reference) {
  Part part{{reference, 0.0f}, 0.0f};
  for (size_t i = 0; i < scores.size(); ++i) {
    const double p = std::exp2(scores[i] - reference);
    part.state.sum += static_cast<float>(p);
    part.sum += static_cast<float>(p * values[i]);
  }
  return part;
}

Part join_parts(const Part& a, const Part& b) {
  const SoftmaxState whole = join(a.state, b.state);
  return {whole, share(a.state, whole) * a.sum + share(b.state, whole) * b.sum};
}

class OnlineSoftmaxTest : public ::testing::Test {
 protected:
  void SetUp() override {
    seed_ = std::random_device{}();
    rng_.seed(seed_);
  }
  std::vector<double> draw(size_t n, double low, double high) {
    std::vector<double> x(n);
    for (double& v : x) v = std::uniform_real_distribution<double>(low, high)(rng_);
    return x;
  }
  uint64_t seed_ = 0;
  std::mt19937_64 rng_;
};

TEST_F(OnlineSoftmaxTest, PartsWithAnyReferencesJoinToTheWhole) {
  for (int round = 0; round < 50; ++round) {
    const std::vector<double> scores = draw(96, -40, 40), values = draw(96, -3, 3);
    double sum = 0, out = 0;
    for (size_t i = 0; i < scores.size(); ++i) {
      sum += std::exp2(scores[i]);
      out += std::exp2(scores[i]) * values[i];
    }
    Part whole;
    for (size_t i = 0; i < scores.size(); i += 32) {
      const std::vector<double> s(scores.begin() + i, scores.begin() + i + 32);
      const std::vector<double> v(values.begin() + i, values.begin() + i + 32);
      const float reference = static_cast<float>(draw(1, 0, 60)[0]);
      whole = join_parts(whole, of_tokens(s, v, reference));
    }
    // 96 additions and a few roundings of each part: 100 ulp of fp32.
    EXPECT_NEAR(whole.sum * output_scale(whole.state), out / sum, 3e-5) << "seed " << seed_;
    EXPECT_NEAR(natural_lse(whole.state), std::log(sum), 3e-5) << "seed " << seed_;
  }
}

TEST_F(OnlineSoftmaxTest, JoinIsCommutativeAndAssociative) {
  for (int round = 0; round < 50; ++round) {
    Part p[3];
    for (Part& part : p) {
      part = of_tokens(draw(8, -10, 10), draw(8, -1, 1), static_cast<float>(draw(1, -5, 15)[0]));
    }
    const Part left = join_parts(join_parts(p[0], p[1]), p[2]);
    const Part right = join_parts(p[0], join_parts(p[2], p[1]));
    EXPECT_NEAR(natural_lse(left.state), natural_lse(right.state), 1e-5) << "seed " << seed_;
    EXPECT_NEAR(left.sum * output_scale(left.state), right.sum * output_scale(right.state), 1e-5)
        << "seed " << seed_;
  }
}

TEST_F(OnlineSoftmaxTest, NoTokensIsTheIdentity) {
  const SoftmaxState none;
  const SoftmaxState some{3.5f, 2.0f};
  EXPECT_TRUE(none.is_empty());
  EXPECT_EQ(join(none, some).reference, 3.5f);
  EXPECT_EQ(join(some, none).sum, 2.0f);
  EXPECT_TRUE(join(none, none).is_empty());
  EXPECT_EQ(share(none, some), 0.0f);
  EXPECT_EQ(natural_lse(none), -INFINITY);
  EXPECT_EQ(output_scale(none), 0.0f);
  EXPECT_TRUE(state_of_lse(-INFINITY).is_empty());
}

TEST_F(OnlineSoftmaxTest, ExtremeResultsStayNumbers) {
  const float most = std::numeric_limits<float>::max();
  const SoftmaxState some{3.5f, 2.0f};
  for (const float sink : {2.5e38f, most}) {
    EXPECT_EQ(finish(some, sink).scale, 0.0f);
    EXPECT_TRUE(std::isfinite(finish(some, sink).lse));
    EXPECT_EQ(finish(some, -sink).scale, 0.5f);
    EXPECT_EQ(finish(some, -sink).lse, natural_lse(some));
    EXPECT_EQ(finish({}, -sink).scale, 0.0f);
    EXPECT_TRUE(std::isfinite(finish({}, -sink).lse));
  }
  EXPECT_TRUE(std::isnan(state_of_lse(NAN).reference));
}

TEST_F(OnlineSoftmaxTest, FarApartReferencesDoNotOverflow) {
  const SoftmaxState low{-1e6f, 1.0f}, high{1e6f, 1.0f};
  const SoftmaxState whole = join(low, high);
  EXPECT_EQ(whole.reference, 1e6f);
  EXPECT_EQ(whole.sum, 1.0f);
  EXPECT_EQ(share(low, whole), 0.0f);
}

}  // namespace
}  // namespace tierkv
