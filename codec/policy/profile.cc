#include "codec/policy/profile.h"

#include "codec/format/global_step.h"

namespace tierkv {

Basis make_basis(const ComponentFormat& format, Component c, const RowProfile& row,
                 int32_t head_dim) {
  const bool key = c == Component::kKey;
  switch (format.basis) {
    case BasisKind::kNone:
      return Basis::none(head_dim);
    case BasisKind::kMean:
      return Basis::mean_removed(key ? row.key_mean : row.value_mean);
    case BasisKind::kHadamard:
      return Basis::hadamard(head_dim);
    case BasisKind::kMatrix:
      break;
  }
  return key ? Basis::matrix(row.key_mean, row.key_forward, row.key_inverse)
             : Basis::matrix(row.value_mean, row.value_forward, row.value_inverse);
}

CacheBasis make_cache_basis(const Profile& profile, BasisKind keys, BasisKind values) {
  ComponentFormat of_keys, of_values;
  of_keys.basis = keys;
  of_values.basis = values;
  CacheBasis basis;
  basis.num_layers = profile.num_layers;
  basis.num_kv_heads = profile.num_kv_heads;
  for (const RowProfile& row : profile.rows) {
    basis.keys.push_back(make_basis(of_keys, Component::kKey, row, profile.head_dim));
    basis.values.push_back(make_basis(of_values, Component::kValue, row, profile.head_dim));
  }
  return basis;
}

double make_step(const ComponentFormat& format, Component c, const RowProfile& row,
                 double sm_scale) {
  const bool matrix = format.basis == BasisKind::kMatrix;
  if (c == Component::kKey) {
    return key_step(format.step * row.key_step_scale,
                    matrix ? row.key_matrix_trace : row.query_trace, sm_scale);
  }
  const double trace = matrix ? row.value_matrix_trace : static_cast<double>(row.value_mean.size());
  return value_step(format.step * row.value_step_scale, row.value_signal, trace);
}

}  // namespace tierkv
