// SPDX-License-Identifier: Apache-2.0
#include "codec/format/same_log.h"

#include <gtest/gtest.h>

#include <cmath>

#include "tests/support/fresh_random.h"

namespace tierkv {
namespace {

class SameLog : public RandomTest {};

// Every step rounds by 2^-53 relative; the series' terms shrink so fast that ten roundings count.
TEST_F(SameLog, IsWithin2ToTheMinus50) {
  std::uniform_real_distribution<double> unit(1, 2);
  for (int32_t i = 0; i < 20000; ++i) {
    const int32_t e = static_cast<int32_t>(rng_() % 276) - 149;
    const double x = static_cast<float>(std::ldexp(unit(rng_), e));
    if (x == 0) continue;
    const double log = std::log2(x);
    ASSERT_NEAR(same_log2(x), log, 0x1p-50 * std::fmax(1.0, std::fabs(log))) << x;
    const double y = 280 * (unit(rng_) - 1.5);
    ASSERT_NEAR(same_exp2(y) / std::exp2(y), 1, 0x1p-50) << y;
  }
  EXPECT_EQ(same_log2(1), 0);
  EXPECT_EQ(same_log2(0.125), -3);
  EXPECT_EQ(same_exp2(0), 1);
  EXPECT_EQ(same_exp2(-7), 0x1p-7);
}

}  // namespace
}  // namespace tierkv
