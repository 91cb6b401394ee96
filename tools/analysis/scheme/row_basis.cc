// SPDX-License-Identifier: Apache-2.0
#include "tools/analysis/scheme/row_basis.h"

#include "codec/format/global_step.h"

namespace tierkv::analysis {

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

double make_step(const ComponentFormat& format, Component c, const RowProfile& row,
                 double sm_scale) {
  const bool matrix = format.basis == BasisKind::kMatrix;
  if (c == Component::kKey) {
    return key_step(format.step * row.key_scale,
                    matrix ? row.key_matrix_trace : (1 + kMetricRidge) * row.query_trace, sm_scale);
  }
  const double trace = matrix ? row.value_matrix_trace : static_cast<double>(row.value_mean.size());
  return value_step(format.step * row.value_scale, row.value_signal, trace);
}

}  // namespace tierkv::analysis
