// What calibration learns about a model's cache: per (layer, kv_head) the statistics from which
// means, global steps and bases follow, and the tier thresholds. A profile is applied to other
// sequences of the same model, so its means, steps and bases are not billed to them.
#pragma once

#include <cstdint>
#include <vector>

#include "codec/format/basis.h"

namespace tierkv {

// Statistics of one (layer, kv_head).
struct RowProfile {
  double query_trace = 0;   // tr M_K, ridge included: mean |q|^2 over the group's heads, times 1.01
  double value_signal = 0;  // E |x|^2 of the values
  std::vector<float> key_mean;    // [head_dim]
  std::vector<float> value_mean;  // [head_dim]
  // Calibrated bases (BasisKind::kMatrix), empty where not calibrated; [head_dim, head_dim], see
  // Basis::matrix.
  std::vector<float> key_forward, key_inverse, value_forward, value_inverse;
  double key_matrix_trace = 0;    // tr(T^-1 M_K T^-T): what query_trace becomes in that basis
  double value_matrix_trace = 0;  // tr(T^-1 T^-T): what head_dim becomes in that basis
  // Global steps are multiplied by these; 1 where steps are not balanced.
  double key_step_scale = 1, value_step_scale = 1;
};

// Steps balanced between rows, keys and values (tools/analysis/step_balance.h): at k and v the
// calibration dumps have this attention error. Their scales have a geometric mean of 1.
struct StepBalance {
  double error = 0;  // 0: not balanced, all scales are 1
  double k = 0, v = 0;
};

struct Profile {
  int32_t num_layers = 0;
  int32_t num_kv_heads = 0;
  int32_t head_dim = 0;
  double alpha_high = 1;
  double alpha_low = 0;
  StepBalance balance;
  std::vector<RowProfile> rows;  // [num_layers, num_kv_heads]

  const RowProfile& row(int32_t layer, int32_t kv_head) const {
    return rows[layer * num_kv_heads + kv_head];
  }
};

// Basis and global step of one component of a row in a format (docs/DESIGN.md, "Global step").
Basis make_basis(const ComponentFormat& format, Component c, const RowProfile& row,
                 int32_t head_dim);
// The bases of a profile's cache. Components whose kind is kMatrix want a profile that was
// calibrated with it: CacheBasis::validate() tells.
CacheBasis make_cache_basis(const Profile& profile, BasisKind keys, BasisKind values);
double make_step(const ComponentFormat& format, Component c, const RowProfile& row,
                 double sm_scale);

}  // namespace tierkv
