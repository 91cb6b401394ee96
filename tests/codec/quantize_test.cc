#include "codec/format/quantize.h"

#include <gtest/gtest.h>

#include <cmath>
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
      EXPECT_EQ(relative_params(lo, hi, 0.1f), (QuantParams{0, 0}));
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

TEST_F(QuantizeTest, RelativeStepKeepsItsBound) {
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

TEST_F(QuantizeTest, RelativeStepReportsCodesBeyondAByte) {
  const std::vector<float> x = normal(4096, 1.0f);
  QuantParams p;
  std::vector<uint8_t> codes(x.size());
  bool fits = true;
  ASSERT_EQ(quantize_relative(x.data(), x.size(), 1, 0.001, &p, codes.data(), &fits),
            StatusCode::kOk);
  EXPECT_FALSE(fits);
}

}  // namespace
}  // namespace tierkv
