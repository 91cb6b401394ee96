// SPDX-License-Identifier: Apache-2.0
// Which tier a token of a prompt goes to. The rules and their edge cases are written out in
// docs/internals/policies.md. Source: DiffKV section 4.
#pragma once

#include <cstdint>

#include "codec/policy/significance.h"
#include "tierkv/half.h"
#include "tierkv/page.h"
#include "tierkv/policy.h"
#include "tierkv/status.h"

namespace tierkv::analysis {

struct TierThresholds {
  double high, low;
};
TKV_HD TierThresholds thresholds_at(const TierPolicy& policy, int32_t n) {
  return {policy.alpha_high / static_cast<double>(n), policy.alpha_low / static_cast<double>(n)};
}
TKV_HD Tier significance_tier(const TierThresholds& thresholds, float significance) {
  const double s = significance;
  return s >= thresholds.high ? Tier::kHigh : s >= thresholds.low ? Tier::kLow : Tier::kPruned;
}

// sig >= alpha_high / n: high; sig >= alpha_low / n: low; else pruned. n: tokens the significance
// is compared over, the token's own index, from 1.
TKV_HD Tier significance_tier(const TierPolicy& policy, float significance, int32_t n) {
  return significance_tier(thresholds_at(policy, n), significance);
}

// The newest window_tokens of num_tokens, at positions counted from 0.
TKV_HD bool in_window(const TierPolicy& policy, int32_t position, int32_t num_tokens) {
  return position >= num_tokens - policy.window_tokens;
}

// Window and sinks are Tier::kWindow, the others go by their significance.
TKV_HD Tier prompt_tier(const TierPolicy& policy, float significance, int32_t position,
                        int32_t num_tokens) {
  if (position < policy.sink_tokens || in_window(policy, position, num_tokens))
    return Tier::kWindow;
  return significance_tier(policy, significance, position + 1);
}

// tiers: [num_tokens]; counts: [kNumTiers], tokens per Tier, or null. kNonFinite, kInvalidArgument
// (nothing written) for significances that are not finite or are negative, or a bad policy.
Status assign_prompt_tiers(const TierPolicy& policy, const float* significance, int32_t num_tokens,
                           Tier* tiers, int32_t* counts);

}  // namespace tierkv::analysis
