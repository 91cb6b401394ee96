// Significance of the tokens of a row: how much later queries attend to them (DiffKV section 4,
// docs/DESIGN.md "Terms").
#pragma once

#include <cstdint>

#include "tierkv/status.h"

namespace tierkv {

struct SignificanceInput {
  const float* q =
      nullptr;  // [heads, tokens, head_dim]: queries of all positions, the heads of one GQA group
  const float* k = nullptr;  // [tokens, head_dim]
  int32_t heads = 0;
  int64_t tokens = 0;
  int32_t head_dim = 0;
  double sm_scale = 0;
};

// sig_i = 1/(N - i) * sum_{j=i+1..N} max_h softmax_h,j(i), i from 1, sig_N = 0; in double, causal.
// Writes significance [tokens]; memory O(tokens), time O(heads * tokens^2 * head_dim).
StatusCode compute_significance(const SignificanceInput& in, float* significance);

}  // namespace tierkv
