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
      break;
  }
  return Basis::hadamard(head_dim);
}

double make_step(const ComponentFormat& format, Component c, const RowProfile& row,
                 double sm_scale) {
  if (c == Component::kKey) {
    return key_step(format.step * row.key_scale, (1 + kMetricRidge) * row.query_trace, sm_scale);
  }
  return value_step(format.step * row.value_scale, row.value_signal,
                    static_cast<int32_t>(row.value_mean.size()));
}

}  // namespace tierkv::analysis
