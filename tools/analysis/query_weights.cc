// SPDX-License-Identifier: Apache-2.0
#include "tools/analysis/query_weights.h"

#include <algorithm>
#include <cmath>

#include "tools/analysis/attention_simd.h"

namespace tierkv::analysis {

QueryWeights::QueryWeights(const QueryTile& tile, const RowData& keys)
    : tile_(tile),
      stride_((keys.tokens + kDoubleTile - 1) / kDoubleTile * kDoubleTile),
      logits_(tile.count() * stride_) {
  const int32_t d = tile.head_dim;
  std::vector<double> k(kDoubleTile * d);  // [head_dim, kDoubleTile]
  std::vector<float> decoded(k.size());
  std::vector<double*> rows(tile.count());
  for (int64_t t = 0; t < keys.tokens; t += kDoubleTile) {
    const int64_t n = std::min(kDoubleTile, keys.tokens - t);
    row_to_float(keys, t, n, decoded.data());
    for (int32_t i = 0; i < d; ++i) {
      for (int64_t j = 0; j < n; ++j) k[i * kDoubleTile + j] = tile.sm_scale * decoded[j * d + i];
    }
    for (size_t q = 0; q < rows.size(); ++q) rows[q] = logits_.data() + q * stride_ + t;
    MatrixProduct product;
    product.a = tile.q.data();
    product.a_stride = d;
    product.b = k.data();
    product.c = rows.data();
    product.rows = tile.count();
    product.depth = d;
    product.n = kDoubleTile;
    multiply(product);
  }
}

double* QueryWeights::weights(int64_t q, int64_t* seen) {
  *seen = tile_.positions[q % static_cast<int64_t>(tile_.positions.size())] + 1;
  double* w = logits_.data() + q * stride_;
  const double top = *std::max_element(w, w + *seen);
  for (int64_t t = 0; t < *seen; ++t) w[t] = std::exp(w[t] - top);
  return w;
}

}  // namespace tierkv::analysis
