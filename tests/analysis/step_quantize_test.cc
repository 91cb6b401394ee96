// SPDX-License-Identifier: Apache-2.0
#include "tools/analysis/scheme/step_quantize.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <vector>

#include "tests/support/fresh_random.h"

namespace tierkv::analysis {
namespace {

class StepQuantizeTest : public RandomTest {
 protected:
  std::vector<float> normal(int n, float scale) {
    std::normal_distribution<float> d(0.3f * scale, scale);
    std::vector<float> x(n);
    for (float& v : x) v = half_to_float(float_to_half(d(rng_)));
    return x;
  }
};

TEST_F(StepQuantizeTest, RelativeStepKeepsItsBound) {
  for (double step : {0.02, 0.05, 0.15, 0.3}) {
    const std::vector<float> x = normal(64 * 128, 2.0f);
    QuantParams p;
    std::vector<uint8_t> codes(x.size());
    bool fits = false;
    ASSERT_EQ(quantize_relative(x.data(), x.size(), 1, step, &p, codes.data(), &fits),
              StatusCode::kOk);
    ASSERT_TRUE(fits);
    const float scale = half_to_float(p.scale), zero = half_to_float(p.zero_point);
    for (size_t i = 0; i < x.size(); ++i) {
      // Inputs are fp16, so the zero point is exact; what remains is rounding of the product and
      // the sum.
      ASSERT_LE(std::fabs(x[i] - dequantize(codes[i], scale, zero)), scale * 0.5f + 1e-5f) << seed_;
    }
  }
}

TEST_F(StepQuantizeTest, RelativeStepReportsCodesBeyondAByte) {
  const std::vector<float> x = normal(4096, 1.0f);
  QuantParams p;
  std::vector<uint8_t> codes(x.size());
  bool fits = true;
  ASSERT_EQ(quantize_relative(x.data(), x.size(), 1, 0.001, &p, codes.data(), &fits),
            StatusCode::kOk);
  EXPECT_FALSE(fits);
}

TEST_F(StepQuantizeTest, ParametersDoNotDependOnTheSignOfZero) {
  for (float lo : {0.0f, -0.0f}) {
    for (float hi : {0.0f, -0.0f}) {
      EXPECT_EQ(relative_params(lo, hi, 0.1f), (QuantParams{0, 0}));
    }
  }
}

}  // namespace
}  // namespace tierkv::analysis
