// SPDX-License-Identifier: Apache-2.0
// Which tier a token belongs to: significance thresholds, a protected window and protected sinks.
//
// significance (DiffKV section 4): sig_i = 1/(N - i) * sum over later queries j > i of max over the
// query heads h of the group of softmax(q_h,j . k)_i, i counted from 1, sig_N = 0. It is compared
// with alpha / i, in double.
#pragma once

#include <cstdint>

#include "tierkv/export.h"
#include "tierkv/status.h"

namespace tierkv {

enum class Tier : int32_t { kWindow = 0, kHigh = 1, kLow = 2, kPruned = 3 };
inline constexpr int32_t kNumTiers = 4;

struct TKV_API TierPolicy {
  double alpha_high = 1.0;     // sig >= alpha_high / i: high
  double alpha_low = 0.0;      // sig >= alpha_low / i: low; below: pruned. 0 keeps every token
  int32_t window_tokens = 64;  // the newest tokens, never downgraded
  int32_t sink_tokens = 0;     // the first tokens, never downgraded

  // kInvalidArgument when alphas are not finite, negative or alpha_low > alpha_high, or a count is
  // negative.
  Status validate() const;
  friend bool operator==(const TierPolicy& a, const TierPolicy& b) {
    return a.alpha_high == b.alpha_high && a.alpha_low == b.alpha_low &&
           a.window_tokens == b.window_tokens && a.sink_tokens == b.sink_tokens;
  }
  friend bool operator!=(const TierPolicy& a, const TierPolicy& b) { return !(a == b); }
};

}  // namespace tierkv
