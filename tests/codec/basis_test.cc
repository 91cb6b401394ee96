// SPDX-License-Identifier: Apache-2.0
#include "tierkv/basis.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>

#include "codec/format/global_step.h"
#include "tests/support/fresh_random.h"
#include "tierkv/half.h"

namespace tierkv {
namespace {

class BasisTest : public RandomTest {
 protected:
  std::vector<float> values(int64_t n) {
    std::normal_distribution<float> d(0.5f, 2);
    std::vector<float> x(n);
    for (float& v : x) v = d(rng_);
    return x;
  }
};

TEST_F(BasisTest, HadamardIsOrthonormalForEveryHeadDim) {
  for (const int32_t d : {1, 4, 64, 80, 96, 128, 256}) {
    const Basis h = Basis::hadamard(d);
    const std::vector<float> x = values(5 * d);
    std::vector<float> y = x;
    h.apply(y.data(), 5);
    double before = 0, after = 0;
    for (size_t i = 0; i < x.size(); ++i) before += x[i] * x[i], after += y[i] * y[i];
    EXPECT_NEAR(after / before, 1, 1e-5) << d << " seed " << seed_;
    if (d > 1) {
      EXPECT_NE(x, y);
    }
    h.undo(y.data(), 5);
    for (size_t i = 0; i < x.size(); ++i) ASSERT_NEAR(x[i], y[i], 1e-5 * std::sqrt(before)) << d;
  }
}

TEST_F(BasisTest, HadamardSpreadsOneChannelOverItsPart) {
  // 96 = 64 + 32: a unit vector in the first part becomes 64 values of +-1/8, in the second 32 of
  // +-1/sqrt(32).
  const Basis h = Basis::hadamard(96);
  std::vector<float> x(96, 0.0f);
  x[3] = 1;
  h.apply(x.data(), 1);
  for (int i = 0; i < 96; ++i) EXPECT_NEAR(std::fabs(x[i]), i < 64 ? 0.125 : 0, 1e-7);
}

TEST_F(BasisTest, MeansAreRoundedToHalfAndUndoneExactly) {
  const Basis b = Basis::mean_removed({0.1f, -3.0f});
  EXPECT_EQ(b.mean[0], half_to_float(float_to_half(0.1f)));
  EXPECT_EQ(b.stored_bytes(), 4);
  std::vector<float> x = {0, 0};
  b.apply(x.data(), 1);
  EXPECT_EQ(x[1], 3.0f);
  b.undo(x.data(), 1);
  EXPECT_EQ(x[0], 0.0f);
}

// The step's promise, by simulation: uniform errors of width step_K give logits an error of
// standard deviation k.
TEST_F(BasisTest, KeyStepGivesTheLogitErrorItPromises) {
  const int d = 64, trials = 4000;
  const double sm_scale = 1 / std::sqrt(64.0);
  std::vector<float> q = values(d);
  double trace = 0, sum = 0;
  for (const float v : q) trace += v * v;
  const double step = key_step(0.3, trace, sm_scale);
  std::uniform_real_distribution<double> error(-step / 2, step / 2);
  for (int t = 0; t < trials; ++t) {
    double logit = 0;
    for (const float v : q) logit += sm_scale * v * error(rng_);
    sum += logit * logit;
  }
  // The sample standard deviation of n draws has relative spread 1/sqrt(2 n) = 1.1%; five of them.
  EXPECT_NEAR(std::sqrt(sum / trials), 0.3, 0.3 * 0.056) << seed_;
  // The design's form of the same formula.
  EXPECT_NEAR(step, 0.3 * std::sqrt(12 * 64 / trace), 1e-12);
}

}  // namespace
}  // namespace tierkv
