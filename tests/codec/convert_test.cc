// SPDX-License-Identifier: Apache-2.0
// Arrays of elements convert as the scalar functions do, whatever their length and alignment.
#include "codec/host/convert.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "tierkv/half.h"

namespace tierkv {
namespace {

constexpr DType kTypes[] = {DType::kFloat16, DType::kBFloat16};

float scalar_to_float(DType t, uint16_t h) {
  return t == DType::kFloat16 ? half_to_float(h) : bfloat16_to_float(h);
}
uint16_t scalar_from_float(DType t, float x) {
  return t == DType::kFloat16 ? float_to_half(x) : float_to_bfloat16(x);
}

TEST(ConvertTest, EveryPatternToFloat) {
  for (const DType type : kTypes) {
    std::vector<uint8_t> bytes(2 * 65536 + 1);
    for (uint32_t h = 0; h < 65536; ++h) {
      const auto half = static_cast<uint16_t>(h);
      std::memcpy(bytes.data() + 1 + 2 * h, &half, 2);
    }
    std::vector<float> out(65536);
    elements_to_float(type, bytes.data() + 1, 65536, out.data());
    for (uint32_t h = 0; h < 65536; ++h) {
      const float expected = scalar_to_float(type, static_cast<uint16_t>(h));
      if (std::isnan(expected)) {
        EXPECT_TRUE(std::isnan(out[h])) << h;
      } else {
        EXPECT_EQ(std::memcmp(&expected, &out[h], 4), 0) << h;
      }
    }
  }
}

TEST(ConvertTest, FloatsRoundAsTheScalarFunctionsAndStopAtWhatDoesNotFit) {
  const uint32_t seed = std::random_device{}();
  std::mt19937 rng(seed);
  for (const DType type : kTypes) {
    for (int trial = 0; trial < 4000; ++trial) {
      const auto n = static_cast<int64_t>(rng() % 70);
      std::vector<float> x(n);
      int64_t stop = n;
      for (int64_t i = 0; i < n; ++i) {
        // Any exponent now and then, else what a cache holds.
        const uint32_t bits = rng();
        if (rng() % 40 == 0) {
          std::memcpy(&x[i], &bits, 4);
        } else {
          x[i] = std::ldexp(static_cast<float>(bits) * 0x1p-32f - 0.5f,
                            static_cast<int>(rng() % 40) - 25);
        }
        if (rng() % 60 == 0) x[i] = type == DType::kFloat16 ? 65519.99f : 3.3961776e38f;
        const bool fits =
            is_finite(x[i]) && is_finite(scalar_to_float(type, scalar_from_float(type, x[i])));
        if (!fits) stop = std::min(stop, i);
      }
      std::vector<uint8_t> out(2 * n + 2, 0xa5);
      ASSERT_EQ(float_to_elements(type, x.data(), n, out.data() + 1), stop) << "seed " << seed;
      for (int64_t i = 0; i < stop; ++i) {
        uint16_t h;
        std::memcpy(&h, out.data() + 1 + 2 * i, 2);
        ASSERT_EQ(h, scalar_from_float(type, x[i])) << x[i] << ", seed " << seed;
      }
      EXPECT_EQ(out[0], 0xa5);
      EXPECT_EQ(out[2 * n + 1], 0xa5);
    }
  }
}

TEST(ConvertTest, SinglePrecisionIsCopiedUpToWhatIsNotFinite) {
  const float x[] = {1.5f, -0.0f, std::numeric_limits<float>::infinity(), 2.0f};
  float y[4] = {7, 7, 7, 7};
  EXPECT_EQ(float_to_elements(DType::kFloat32, x, 4, y), 2);
  EXPECT_EQ(y[0], 1.5f);
  EXPECT_TRUE(std::signbit(y[1]));
  elements_to_float(DType::kFloat32, x, 4, y);
  EXPECT_EQ(std::memcmp(x, y, sizeof(x)), 0);
}

}  // namespace
}  // namespace tierkv
