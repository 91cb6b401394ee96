// SPDX-License-Identifier: Apache-2.0
// Random quantisation codes for the entropy-coding tests.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <random>
#include <vector>

#include "codec/format/codebook.h"

namespace tierkv {

class CodeSource {
 public:
  explicit CodeSource(uint32_t seed) : rng_(seed) {}

  int32_t below(int32_t n) { return std::uniform_int_distribution<int32_t>(0, n - 1)(rng_); }
  double uniform() { return std::uniform_real_distribution<double>(0, 1)(rng_); }
  std::mt19937& rng() { return rng_; }

  // Rounded Gauss or Laplace numbers of this spread around a centre, clamped to 16 bits.
  std::vector<int16_t> bell(int64_t n, double spread, double centre, bool laplace) {
    std::normal_distribution<double> normal(0, spread);
    std::exponential_distribution<double> one_side(1 / spread);
    std::vector<int16_t> codes(static_cast<size_t>(n));
    for (int16_t& c : codes) {
      const double x = laplace ? one_side(rng_) * (below(2) ? 1 : -1) : normal(rng_);
      c = static_cast<int16_t>(std::clamp(std::nearbyint(centre + x), -32768.0, 32767.0));
    }
    return codes;
  }
  std::vector<int16_t> uniform_codes(int64_t n, int32_t lowest, int32_t levels) {
    std::vector<int16_t> codes(static_cast<size_t>(n));
    for (int16_t& c : codes) c = static_cast<int16_t>(lowest + below(levels));
    return codes;
  }
  // A spread that suits the mode.
  double spread_for(BlockMode mode) {
    switch (mode) {
      case BlockMode::kQuad:
        return 0.3 + 0.5 * uniform();
      case BlockMode::kSplit:
        return 10 + 30 * uniform();
      case BlockMode::kSingle:
        return 0.5 + 20 * uniform();
      default:
        return 0.5 + 2.5 * uniform();
    }
  }

 private:
  std::mt19937 rng_;
};

}  // namespace tierkv
