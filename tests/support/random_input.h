// SPDX-License-Identifier: Apache-2.0
// Fresh random numbers, keys, values and scores; the seed is printed when something fails.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include "tests/support/fresh_random.h"
#include "tierkv/half.h"
#include "tierkv/layout.h"

namespace tierkv::testing {

class RandomInput : private FreshRandom {
 public:
  int32_t uniform(int32_t low, int32_t high) {  // inclusive
    return high <= low ? low : std::uniform_int_distribution<int32_t>(low, high)(rng_);
  }
  bool chance(double p) { return std::bernoulli_distribution(p)(rng_); }
  float real(float low, float high) {
    return std::uniform_real_distribution<float>(low, high)(rng_);
  }

  // `tokens` x `values` elements of the dtype, as 16-bit patterns or floats in bytes: scale and
  // offset differ from token to token.
  std::vector<uint8_t> values(DType dtype, int64_t tokens, int32_t per_token) {
    std::vector<uint8_t> bytes(tokens * per_token * dtype_bytes(dtype));
    std::normal_distribution<float> normal;
    for (int64_t t = 0; t < tokens; ++t) {
      const float scale = std::exp2(real(-4, 4)), offset = scale * normal(rng_);
      for (int32_t i = 0; i < per_token; ++i) {
        const float x = offset + scale * normal(rng_);
        const int64_t at = t * per_token + i;
        if (dtype == DType::kFloat32) {
          std::memcpy(&bytes[at * 4], &x, 4);
        } else {
          const uint16_t bits = dtype == DType::kFloat16 ? float_to_half(x) : float_to_bfloat16(x);
          std::memcpy(&bytes[at * 2], &bits, 2);
        }
      }
    }
    return bytes;
  }
  // Scores that fall on both sides of both thresholds of a sequence of n tokens.
  std::vector<float> scores(int64_t count, int32_t n) {
    std::vector<float> x(count);
    for (float& score : x) {
      score = chance(0.02) ? 0.0f : std::exp2(real(-4, 2)) / static_cast<float>(n + 1);
      if (chance(0.1)) score = 0.5f / static_cast<float>(n + 1);  // ties
    }
    return x;
  }
};

}  // namespace tierkv::testing
