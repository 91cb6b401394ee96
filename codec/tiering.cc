#include "codec/tiering.h"

namespace tierkv {

StatusCode assign_tiers(const float* significance, int64_t tokens, const TierPolicy& policy,
                        Tier* tier) {
  if (tokens < 0 || (tokens > 0 && (significance == nullptr || tier == nullptr)) ||
      !policy.validate()) {
    return StatusCode::kInvalidArgument;
  }
  for (int64_t t = 0; t < tokens; ++t) {
    const double sig = significance[t], i = static_cast<double>(t + 1);
    if (t >= tokens - policy.window_tokens || t < policy.sink_tokens) {
      tier[t] = Tier::kWindow;
    } else if (sig >= policy.alpha_high / i) {
      tier[t] = Tier::kHigh;
    } else {
      tier[t] = sig >= policy.alpha_low / i ? Tier::kLow : Tier::kPruned;
    }
  }
  return StatusCode::kOk;
}

}  // namespace tierkv
