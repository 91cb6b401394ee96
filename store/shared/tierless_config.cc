#include "store/shared/tierless_config.h"

#include <string>
#include <utility>

namespace tierkv {
namespace {

Status invalid(std::string why) {
  return Status(StatusCode::kInvalidArgument, std::move(why));
}
Status unsupported(std::string why) {
  return Status(StatusCode::kUnsupported, std::move(why));
}

}  // namespace

Status validate_tierless(const KvStoreConfig& c, const char* cache, bool keeps_important) {
  const KvStoreConfig standard;
  const auto refuse = [cache](const char* field) {
    return unsupported(std::string(field) + ": " + cache + " has no tiers");
  };
  if (c.window_format != standard.window_format) return refuse("window_format");
  if (c.high_format != standard.high_format) return refuse("high_format");
  if (c.low_format != standard.low_format) return refuse("low_format");
  if (!keeps_important && c.policy.alpha_high != standard.policy.alpha_high) {
    return refuse("policy.alpha_high");
  }
  if (c.policy.alpha_low != standard.policy.alpha_low) return refuse("policy.alpha_low");
  if (c.score_interval != standard.score_interval) return refuse("score_interval");
  if (keeps_important || c.policy.sink_tokens == 0) return Status::ok();
  return unsupported(std::string("policy.sink_tokens: ") + cache + " keeps no sinks apart");
}

Status validate_tierless_counts(const KvStoreConfig& c) {
  if (c.policy.window_tokens < kMaxStepTokens || c.policy.window_tokens > 4096) {
    return invalid("policy.window_tokens must be " + std::to_string(kMaxStepTokens) + " to 4096");
  }
  if (c.num_pages < 1) return invalid("num_pages must be positive");
  if (c.max_sequences < 1 || c.max_sequences > kMaxSequences) {
    return invalid("max_sequences must be 1 to 1048576");
  }
  if (c.max_tokens < 1 || c.max_tokens > (1 << 22)) return invalid("max_tokens must be 1 to 2^22");
  return Status::ok();
}

Status no_scores(const char* cache) {
  return unsupported(std::string(cache) + " keeps no scores: it has no tiers");
}

}  // namespace tierkv
