// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cmath>
#include <cstdint>
#include <string>

#include "codec/format/weighted_step.h"
#include "tierkv/status.h"

namespace tierkv {

// G of each token, from -8 to 4, of u = (position + 1) * significance, counted from position
// 0. kNonFinite for a significance that is not finite, kInvalidArgument for a negative one; nothing
// is written then. significance, exponents: [tokens].
inline Status importance_exponents(const float* significance, int32_t tokens,
                                   int64_t first_position, int8_t* exponents) {
  if (tokens < 0 || first_position < 0)
    return Status(StatusCode::kInvalidArgument,
                  "weighted steps: tokens or first_position is negative");
  for (int32_t t = 0; t < tokens; ++t) {
    const double u = token_importance(first_position + t, significance[t]);
    if (!std::isfinite(u)) {
      return Status(StatusCode::kNonFinite, "weighted steps: significance of token " +
                                                std::to_string(t) + " is not finite");
    }
    if (u < 0)
      return Status(StatusCode::kInvalidArgument,
                    "weighted steps: significance of token " + std::to_string(t) + " is negative");
  }
  for (int32_t t = 0; t < tokens; ++t) {
    const double u = token_importance(first_position + t, significance[t]);
    exponents[t] = static_cast<int8_t>(importance_exponent(u));
  }
  return Status::ok();
}

}  // namespace tierkv
