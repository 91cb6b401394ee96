// The arithmetic of a coded store's values: the fast way to a code against the plain one.
#include "store/coded/coded_values.h"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "tests/support/random_input.h"

namespace tierkv::testing {
namespace {

// Every fp16 number over the step.
void expect_equal_codes(float step) {
  int32_t sure = 0;
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const auto y = static_cast<uint16_t>(bits);
    float doubt = 0;
    const int32_t code = fast_step_code(y, 1.0f / step, &doubt);
    if (!(float_bits(doubt) < float_bits(0.5f))) continue;
    ++sure;
    ASSERT_EQ(check_centred(y, step), StatusCode::kOk) << "step " << step << " of " << bits;
    ASSERT_EQ(code, step_code(y, step)) << "step " << step << " of " << bits;
  }
  // What a cache holds is seldom in doubt.
  if (step > 0.05f && step < 20.0f) {
    EXPECT_GT(sure, 0xc000) << "step " << step;
  }
}

TEST(CodedValues, FastCodesAreTheCodes) {
  RandomInput input;
  for (int32_t i = 0; i < 60; ++i) expect_equal_codes(std::exp2(input.real(-12, 8)));
}

// Steps of few bits have quotients half way between two codes; the others are at the ends of fp32.
TEST(CodedValues, TiesAndExtremeSteps) {
  RandomInput input;
  for (int32_t e = -20; e <= 16; ++e) {
    expect_equal_codes(std::exp2(static_cast<float>(e)));
    expect_equal_codes(std::exp2(static_cast<float>(e)) *
                       static_cast<float>(input.uniform(3, 255)));
  }
  for (const float step : {1e-45f, 1e-39f, 2e-38f, 1e37f, 3e38f}) expect_equal_codes(step);
}

}  // namespace
}  // namespace tierkv::testing
