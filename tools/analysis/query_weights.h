// SPDX-License-Identifier: Apache-2.0
// Whom a few queries of a row attend to.
#pragma once

#include <vector>

#include "datasets/dump.h"
#include "tools/analysis/attention_error.h"

namespace tierkv::analysis {

class QueryWeights {
 public:
  QueryWeights(const QueryTile& tile, const RowData& keys);

  // Softmax weights of query q over the tokens 0 .. its position, as many as *seen, times a factor;
  // once for every query.
  double* weights(int64_t q, int64_t* seen);

 private:
  const QueryTile& tile_;
  int64_t stride_;              // tokens, padded
  std::vector<double> logits_;  // [queries, stride_]
};

}  // namespace tierkv::analysis
