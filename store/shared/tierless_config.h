// What the configs of stores without tiers have in common.
#pragma once

#include "tierkv/store.h"

namespace tierkv {

// kUnsupported unless the fields that only speak of tiers are as they are by default; `cache` names
// the store, as in "a coded cache". One that keeps important tokens apart has an alpha_high and
// sinks.
Status validate_tierless(const KvStoreConfig& config, const char* cache,
                         bool keeps_important = false);
// policy.window_tokens, num_pages, max_sequences, max_tokens.
Status validate_tierless_counts(const KvStoreConfig& config);

// For score_prompt() and update_scores(). kUnsupported.
Status no_scores(const char* cache);

}  // namespace tierkv
