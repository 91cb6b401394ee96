// SPDX-License-Identifier: Apache-2.0
#include "tools/analysis/scheme/tiering.h"

#include <algorithm>
#include <string>
#include <utility>

namespace tierkv::analysis {
namespace {

Status invalid(std::string why) {
  return Status(StatusCode::kInvalidArgument, std::move(why));
}

Status check_significance(const float* significance, int32_t num_tokens) {
  if (num_tokens < 0) return invalid("num_tokens is negative");
  if (num_tokens > 0 && significance == nullptr) return invalid("significance is null");
  for (int32_t i = 0; i < num_tokens; ++i) {
    if (!is_finite(significance[i])) {
      return Status(StatusCode::kNonFinite,
                    "significance of token " + std::to_string(i) + " is not finite");
    }
    if (significance[i] < 0) {
      return invalid("significance of token " + std::to_string(i) + " is negative");
    }
  }
  return Status::ok();
}

}  // namespace

Status assign_prompt_tiers(const TierPolicy& policy, const float* significance, int32_t num_tokens,
                           Tier* tiers, int32_t* counts) {
  if (Status s = policy.validate(); !s) return s;
  if (Status s = check_significance(significance, num_tokens); !s) return s;
  if (num_tokens > 0 && tiers == nullptr) return invalid("tiers is null");
  int32_t totals[kNumTiers] = {};
  for (int32_t i = 0; i < num_tokens; ++i) {
    tiers[i] = prompt_tier(policy, significance[i], i, num_tokens);
    ++totals[static_cast<int32_t>(tiers[i])];
  }
  if (counts != nullptr) std::copy_n(totals, kNumTiers, counts);
  return Status::ok();
}

}  // namespace tierkv::analysis
