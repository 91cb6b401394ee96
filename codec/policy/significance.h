// SPDX-License-Identifier: Apache-2.0
// How much later queries look at a token: its significance, exact over a prompt
// (docs/internals/policies.md).
//
//   sig_i = mean over the counted queries j > i of max over the query heads h of the group of
//   softmax(q_h,j . k)_i
//
// A query never counts for its own token; a token that no later query was counted for has 0.
#pragma once

#include <cstdint>

#include "tierkv/status.h"

namespace tierkv {

// One row: the queries of a GQA group and the keys they attend to. Positions count from 0; the
// query at position p attends to keys 0 .. p.
struct AttentionRow {
  const float* q = nullptr;  // [group_size, num_queries, head_dim]
  const float* k = nullptr;  // [num_tokens, head_dim]
  const int32_t* q_positions =
      nullptr;  // [num_queries], each in [0, num_tokens); null: query j is at position j
  int32_t group_size = 0;
  int32_t num_queries = 0;
  int32_t num_tokens = 0;
  int32_t head_dim = 0;
  double sm_scale = 0;

  // kInvalidArgument naming the field. Without q_positions there must be one query per token.
  Status validate() const;
};

// significance: double [num_tokens]. counts: int32 [num_tokens] or null, the queries that were
// counted for each token. In double throughout. kNonFinite (nothing written) when a score is not
// finite.
Status exact_significance(const AttentionRow& row, double* significance, int32_t* counts);

}  // namespace tierkv
