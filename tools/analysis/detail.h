// What a report shows of a preset besides its totals: tiers by head, errors by place, codes.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <vector>

#include "tierkv/format.h"
#include "tierkv/policy.h"

namespace tierkv::analysis {

// Pooled squares by place in the sequence: token t of T counts in bin t * kBins / T.
struct PositionErrors {
  static constexpr int32_t kBins = 48;
  struct Squares {
    double error = 0, norm = 0;
  };
  std::array<Squares, kBins> bins[2];  // by component, over kept tokens

  static int32_t bin(int64_t token, int64_t tokens) {
    return static_cast<int32_t>(token * kBins / tokens);
  }
  void add(const PositionErrors& other);
};

// Occurrences of each quantisation code.
using CodeCounts = std::map<int32_t, int64_t>;

struct PresetDetail {
  int32_t num_layers = 0, num_kv_heads = 0;
  std::vector<std::array<int64_t, kNumTiers>> tiers;  // [layers][kv_heads], tokens
  PositionErrors errors;
  CodeCounts codes[2][2];  // [component][high, low], of tokens outside window and sinks

  PresetDetail() = default;
  PresetDetail(int32_t layers, int32_t heads)
      : num_layers(layers),
        num_kv_heads(heads),
        tiers(static_cast<size_t>(layers) * heads, std::array<int64_t, kNumTiers>{}) {}
  // Both are of the same shape.
  void add(const PresetDetail& other);
};

}  // namespace tierkv::analysis
