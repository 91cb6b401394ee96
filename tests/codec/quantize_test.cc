// SPDX-License-Identifier: Apache-2.0
#include "codec/format/quantize.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>
#include <random>
#include <vector>

#include "tests/support/fresh_random.h"

namespace tierkv {
namespace {

TEST(Half, RoundTripsEveryFinitePattern) {
  for (uint32_t h = 0; h < 0x10000u; ++h) {
    const auto bits = static_cast<uint16_t>(h);
    if ((h & 0x7c00u) == 0x7c00u && (h & 0x3ffu) != 0) continue;  // NaN payloads are not kept
    ASSERT_EQ(float_to_half(half_to_float(bits)), bits) << h;
  }
}

TEST(Half, RoundsToNearestEven) {
  EXPECT_EQ(float_to_half(1.0f + 0x1p-11f), 0x3c00);      // halfway, even below
  EXPECT_EQ(float_to_half(1.0f + 3 * 0x1p-11f), 0x3c02);  // halfway, even above
  EXPECT_EQ(float_to_half(65519.0f), 0x7bff);
  EXPECT_EQ(float_to_half(65520.0f), 0x7c00);
  EXPECT_EQ(float_to_half(0x1p-25f), 0x0000);  // halfway to the smallest subnormal
  EXPECT_EQ(float_to_half(0x1.8p-24f), 0x0002);
  EXPECT_EQ(float_to_half(-0x1p-24f), 0x8001);
}

class QuantizeTest : public RandomTest {
 protected:
  std::vector<float> normal(int n, float scale) {
    std::normal_distribution<float> d(0.3f * scale, scale);
    std::vector<float> x(n);
    for (float& v : x) v = half_to_float(float_to_half(d(rng_)));
    return x;
  }
};

// |x - x'| <= scale / 2 plus the fp16 rounding of both parameters: the scale's error times the
// code, the zero point's.
TEST_F(QuantizeTest, MinMaxErrorIsBoundedByHalfAStep) {
  for (int bits : {8, 4, 2, 1}) {
    for (float magnitude : {1e-3f, 1.0f, 1e3f}) {
      const std::vector<float> x = normal(128, magnitude);
      const int levels = 1 << bits;
      QuantParams p;
      std::vector<uint8_t> codes(x.size(), 0xee);
      ASSERT_EQ(quantize_minmax(x.data(), 128, 1, levels, &p, codes.data()), StatusCode::kOk);
      const float scale = half_to_float(p.scale), zero = half_to_float(p.zero_point);
      const float ulp = 0x1p-11f;
      const float bound =
          scale * 0.5f + (levels - 1) * scale * ulp + std::fabs(zero) * ulp + 0x1p-24f;
      for (size_t i = 0; i < x.size(); ++i) {
        ASSERT_LT(codes[i], levels);
        ASSERT_LE(std::fabs(x[i] - dequantize(codes[i], scale, zero)), bound)
            << "seed " << seed_ << " bits " << bits << " i " << i;
      }
    }
  }
}

TEST_F(QuantizeTest, ConstantGroupKeepsItsZeroPoint) {
  const std::vector<float> x(16, 0.75f);
  QuantParams p;
  std::vector<uint8_t> codes(16, 0xee);
  ASSERT_EQ(quantize_minmax(x.data(), 16, 1, 16, &p, codes.data()), StatusCode::kOk);
  EXPECT_EQ(p.scale, 0);
  for (uint8_t c : codes) EXPECT_EQ(c, 0);
  EXPECT_EQ(dequantize(0, half_to_float(p.scale), half_to_float(p.zero_point)), 0.75f);
}

TEST_F(QuantizeTest, ParametersDoNotDependOnTheSignOfZero) {
  for (float lo : {0.0f, -0.0f}) {
    for (float hi : {0.0f, -0.0f}) {
      EXPECT_EQ(minmax_params(lo, hi, 16), (QuantParams{0, 0}));
    }
    EXPECT_EQ(minmax_params(lo, 15.0f, 16), (QuantParams{0x3c00, 0}));
  }
}

TEST_F(QuantizeTest, BadValuesAreNamedAndWriteNothing) {
  std::vector<float> x = normal(8, 1.0f);
  QuantParams p{7, 7};
  std::vector<uint8_t> codes(8, 0xee);
  x[3] = std::numeric_limits<float>::quiet_NaN();
  EXPECT_EQ(quantize_minmax(x.data(), 8, 1, 16, &p, codes.data()), StatusCode::kNonFinite);
  x[3] = 1e6f;
  EXPECT_EQ(quantize_minmax(x.data(), 8, 1, 2, &p, codes.data()), StatusCode::kOutOfRange);
  EXPECT_EQ(p, (QuantParams{7, 7}));
  for (uint8_t c : codes) EXPECT_EQ(c, 0xee);
}

// Four levels at the best scale leave 0.1188 of a normal distribution's power; min-max's range of
// 128 values is about 5.2 deviations, its step a third of it, and (5.2 / 3)^2 / 12 = 0.25. Over
// 51200 values the mean of squares that deviate by about 0.2 is off by 0.0009: five times that.
TEST_F(QuantizeTest, ClippingAtTheNormHalvesTheSquaredErrorOfMinMax) {
  std::normal_distribution<float> d(0.0f, 3.0f);
  double clipped = 0, ranged = 0, power = 0;
  for (int token = 0; token < 400; ++token) {
    float x[128];
    for (float& v : x) v = d(rng_);
    const auto error = [&](const QuantParams& p, const uint8_t* codes) {
      double sum = 0;
      for (int i = 0; i < 128; ++i) {
        const double e =
            x[i] - dequantize(codes[i], half_to_float(p.scale), half_to_float(p.zero_point));
        sum += e * e;
      }
      return sum;
    };
    QuantParams p;
    uint8_t codes[128];
    ASSERT_EQ(quantize_norm(x, 128, &p, codes), StatusCode::kOk);
    clipped += error(p, codes);
    ASSERT_EQ(quantize_minmax(x, 128, 1, 4, &p, codes), StatusCode::kOk);
    ranged += error(p, codes);
    for (const float v : x) power += double{v} * v;
  }
  EXPECT_NEAR(clipped / power, 0.1188, 0.005) << seed_;
  EXPECT_NEAR(clipped / ranged, 0.5, 0.1) << seed_;
}

TEST_F(QuantizeTest, NormCodesAreClippedAroundZero) {
  float x[64];
  for (int i = 0; i < 64; ++i) x[i] = i % 2 == 0 ? 1.0f : -1.0f;
  QuantParams p;
  uint8_t codes[64];
  ASSERT_EQ(quantize_norm(x, 64, &p, codes), StatusCode::kOk);
  const float scale = half_to_float(float_to_half(0.9957f));
  EXPECT_EQ(p, (QuantParams{float_to_half(scale), float_to_half(-1.5f * scale)}));
  x[0] = 1000;  // the norm is 125
  x[1] = -1000;
  x[2] = 40;
  ASSERT_EQ(quantize_norm(x, 64, &p, codes), StatusCode::kOk);
  EXPECT_EQ(codes[0], 3);
  EXPECT_EQ(codes[1], 0);
  EXPECT_EQ(codes[2], 2);
  EXPECT_EQ(codes[3], 1);
}

TEST_F(QuantizeTest, NormOfZerosAndExtremesIsDefined) {
  QuantParams p{7, 7};
  uint8_t codes[32];
  for (const float zero : {0.0f, -0.0f, 1e-30f}) {
    const std::vector<float> x(32, zero);
    ASSERT_EQ(quantize_norm(x.data(), 32, &p, codes), StatusCode::kOk);
    EXPECT_EQ(p, (QuantParams{0, 0}));
    for (const uint8_t c : codes) EXPECT_EQ(c, 0);
  }
  // 1.5 * 0.9957 * 43800 = 65417 is the last that fits below 65520, within rounding.
  std::vector<float> x(32, 43800.0f);
  EXPECT_EQ(quantize_norm(x.data(), 32, &p, codes), StatusCode::kOk);
  p = {7, 7};
  std::fill(std::begin(codes), std::end(codes), uint8_t{0xee});
  for (const float large : {44000.0f, 1e6f, 1e30f}) {
    x.assign(32, large);
    EXPECT_EQ(quantize_norm(x.data(), 32, &p, codes), StatusCode::kOutOfRange) << large;
  }
  for (const float bad : {NAN, INFINITY, -INFINITY}) {
    x.assign(32, 1.0f);
    x[5] = bad;
    EXPECT_EQ(quantize_norm(x.data(), 32, &p, codes), StatusCode::kNonFinite) << bad;
  }
  EXPECT_EQ(p, (QuantParams{7, 7}));
  for (const uint8_t c : codes) EXPECT_EQ(c, 0xee);
}

TEST(Formats, TwoBitsClippedAtTheNormHaveANameOfTheirOwn) {
  const TierFormat format = *parse_tier_format("k4v2n");
  EXPECT_EQ(format.v, norm_clipped());
  EXPECT_NE(format, token_wise_tier(4, 2));
  EXPECT_EQ(to_string(format), "k4v2n");
  EXPECT_EQ(to_string(*parse_tier_format("K2NV8")), "k2nv8");
  for (const char* bad : {"k4nv2", "k8v4n", "k4v2nn", "k4v2m", "k4vn"})
    EXPECT_FALSE(parse_tier_format(bad).is_ok()) << bad;
  ComponentFormat f = norm_clipped();
  EXPECT_TRUE(f.validate(64).is_ok());
  f.type = CodeType::uniform(4);
  EXPECT_FALSE(f.validate(64).is_ok());
  f = norm_clipped();
  f.unit = Unit::kChannel;
  f.group = 32;
  EXPECT_FALSE(f.validate(64).is_ok());
}

}  // namespace
}  // namespace tierkv
