// SPDX-License-Identifier: Apache-2.0
#include "tools/analysis/detail.h"

#include <algorithm>

namespace tierkv::analysis {

void PositionErrors::add(const PositionErrors& other) {
  for (int32_t c = 0; c < 2; ++c) {
    for (int32_t i = 0; i < kBins; ++i) {
      bins[c][i].error += other.bins[c][i].error;
      bins[c][i].norm += other.bins[c][i].norm;
    }
  }
}

void PresetDetail::set_classes(int32_t layer, const std::vector<int32_t>& of_heads) {
  if (of_heads.empty()) return;
  classes.resize(tiers.size(), -1);
  std::copy(of_heads.begin(), of_heads.end(),
            classes.begin() + static_cast<ptrdiff_t>(layer) * num_kv_heads);
}

void PresetDetail::add(const PresetDetail& other) {
  for (size_t row = 0; row < tiers.size(); ++row) {
    for (int32_t t = 0; t < kNumTiers; ++t) tiers[row][t] += other.tiers[row][t];
  }
  errors.add(other.errors);
  for (int32_t c = 0; c < 2; ++c) {
    for (int32_t part = 0; part < 2; ++part) {
      for (const auto& [code, count] : other.codes[c][part]) codes[c][part][code] += count;
    }
    for (const auto& [exponent, count] : other.exponents[c]) exponents[c][exponent] += count;
  }
}

}  // namespace tierkv::analysis
