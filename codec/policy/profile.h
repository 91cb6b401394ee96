// SPDX-License-Identifier: Apache-2.0
// What calibration learns about a model's cache: per (layer, kv_head) the statistics from which
// means, weights, steps, head scales and classes of heads follow, and the tier thresholds.
// A profile is applied to other sequences of the same model, so nothing of it is billed to them.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tierkv/layout.h"
#include "tierkv/rope.h"

namespace tierkv {

// Statistics of one (layer, kv_head). The sinks, the first tokens of a sequence, are left out.
struct RowProfile {
  std::vector<float> key_mean;              // [head_dim], of keys as the cache holds them
  std::vector<float> value_mean;            // [head_dim]
  std::vector<float> key_mean_before_rope;  // [head_dim]; empty: unknown
  // [head_dim] mean squared component of the group's queries; empty: unknown. Where the rotation is
  // known, both dims of a RoPE pair hold the mean of the two.
  std::vector<float> query_energy;
  double query_trace = 0;   // E |q|^2 over the group's heads
  double value_signal = 0;  // E |x|^2 of the values
  // Head scales: steps are multiplied by these; 1 where sensitivities were not measured.
  double key_scale = 1, value_scale = 1;
};

// The vectors of a row by their names in files. Each has head_dim numbers; an optional one is there
// in all rows of a profile or in none.
struct ProfileField {
  using Member = std::vector<float> RowProfile::*;
  const char* name;
  Member field;
  bool optional;
};
inline constexpr ProfileField kProfileFields[] = {
    {"key_mean", &RowProfile::key_mean, false},
    {"value_mean", &RowProfile::value_mean, false},
    {"key_mean_before_rope", &RowProfile::key_mean_before_rope, true},
    {"query_energy", &RowProfile::query_energy, true}};

struct Profile {
  std::string model_id;
  int32_t num_layers = 0;
  int32_t num_q_heads = 0;
  int32_t num_kv_heads = 0;
  int32_t head_dim = 0;
  double sm_scale = 0;
  double alpha_high = 1;
  double alpha_low = 0;
  std::vector<Rope> rope;        // [1], the same in all layers, or [num_layers]; empty: unknown
  std::vector<RowProfile> rows;  // [num_layers, num_kv_heads]
  // [rows] KL divergence, in nats, of what follows when this component of this row alone is coarse
  // (joint: keys and values together); empty: not measured.
  std::vector<double> key_sensitivity, value_sensitivity, joint_sensitivity;

  const RowProfile& row(int32_t layer, int32_t kv_head) const {
    return rows[layer * num_kv_heads + kv_head];
  }
  // Null where the rotation is unknown.
  const Rope* rope_of(int32_t layer) const {
    return rope.empty() ? nullptr : &rope[rope.size() == 1 ? 0 : layer];
  }
  // Everything that readers of a profile rely on. kInvalidArgument or, for a value that is not
  // finite, kNonFinite, naming the field.
  Status validate() const;
  // kInvalidArgument naming both models, unless the profile is of a model of this shape and name.
  // An empty model_id agrees with any name.
  Status check_model(const CacheLayout& layout, const std::string& model_id) const;
};

// Head scales of sensitivities, all positive: sensitivity^(-1/4), normalised to a geometric mean of
// 1, then clamped to [1/8, 8].
std::vector<double> head_scales(const std::vector<double>& sensitivities);

// The class of each head, from 0: the most sensitive round(shares[0] * heads) heads are class 0,
// the next round(shares[1] * heads) class 1, the rest class shares.size(). Halves round up; the
// lower row of two equally sensitive ones comes first. Shares are not negative.
std::vector<int32_t> assign_classes(const std::vector<double>& shares,
                                    const std::vector<double>& sensitivities);

}  // namespace tierkv
