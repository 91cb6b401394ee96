#include "tools/analysis/detail.h"

namespace tierkv::analysis {

void PositionErrors::add(const PositionErrors& other) {
  for (int32_t c = 0; c < 2; ++c) {
    for (int32_t i = 0; i < kBins; ++i) {
      bins[c][i].error += other.bins[c][i].error;
      bins[c][i].norm += other.bins[c][i].norm;
    }
  }
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
  }
}

}  // namespace tierkv::analysis
