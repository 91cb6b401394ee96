// SPDX-License-Identifier: Apache-2.0
// What a report shows of a preset besides its totals: tiers and classes of heads, errors by place,
// codes and exponents.
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
  CodeCounts codes[2][2];        // [component][high, low], of tokens outside window and sinks
  CodeCounts exponents[2];       // [component], of the same tokens under weighted steps
  std::vector<int32_t> classes;  // [layers][kv_heads]; empty: heads have no classes

  PresetDetail() = default;
  PresetDetail(int32_t layers, int32_t heads)
      : num_layers(layers),
        num_kv_heads(heads),
        tiers(static_cast<size_t>(layers) * heads, std::array<int64_t, kNumTiers>{}) {}
  // The classes of a layer's heads; empty: they have none.
  void set_classes(int32_t layer, const std::vector<int32_t>& of_heads);
  // Both are of the same shape.
  void add(const PresetDetail& other);
};

}  // namespace tierkv::analysis
