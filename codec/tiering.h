// Which tier a token belongs to (DiffKV section 4, docs/POLICY.md).
#pragma once

#include <cstdint>

#include "tierkv/policy.h"

namespace tierkv {

// Prompt phase: significance [tokens] -> tier [tokens]. The newest window_tokens and the first
// sink_tokens are kWindow (everything, where tokens <= window_tokens); token i, counted from 1, is
// high where sig_i >= alpha_high / i, else low where sig_i >= alpha_low / i, else pruned, compared
// in double. kInvalidArgument: nothing written.
StatusCode assign_tiers(const float* significance, int64_t tokens, const TierPolicy& policy,
                        Tier* tier);

}  // namespace tierkv
