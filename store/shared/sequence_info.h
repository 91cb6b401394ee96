// Where the tokens of a sequence lie: the same in all of its rows, so it is kept once per sequence.
//
//   side 0   high tokens
//   side 1   low tokens
//   side 2   sinks, then the window as a ring; during the prompt all tokens, in order
//
// A window token at position p is at index sinks + (p - window_origin) % window_tokens of its side.
// Law: the tokens of side 2 fill its indices 0 .. window_side_tokens() - 1, so a new token takes
// the index of the one that leaves, and none is ever moved to close a hole.
#pragma once

#include <cstdint>

#include "codec/policy/tiering.h"
#include "tierkv/half.h"
#include "tierkv/policy.h"

namespace tierkv {

inline constexpr int32_t kHighSide = 0;
inline constexpr int32_t kLowSide = 1;
inline constexpr int32_t kWindowSide = 2;
inline constexpr int32_t kStoreSides = 3;

TKV_HD constexpr int32_t side_of(Tier tier) {
  return tier == Tier::kHigh ? kHighSide : tier == Tier::kLow ? kLowSide : kWindowSide;
}

// SequenceInfo::window_origin of a sequence in its prompt; then num_tokens alone counts.
inline constexpr int32_t kInPrompt = -1;

struct alignas(16) SequenceInfo {
  int32_t num_tokens = 0;             // N, pruned tokens included
  int32_t window_first = 0;           // the tokens at this position and after it are in the window
  int32_t window_origin = kInPrompt;  // at or above the sinks; at or below window_first once that
                                      // is
  int32_t prompt_tokens = 0;          // of the count schedule
};

TKV_HD int32_t smaller_of(int32_t a, int32_t b) {
  return a < b ? a : b;
}
TKV_HD int32_t larger_of(int32_t a, int32_t b) {
  return a > b ? a : b;
}

// Sinks that the sequence has.
TKV_HD int32_t sink_count(const TierPolicy& policy, const SequenceInfo& info) {
  return smaller_of(policy.sink_tokens, info.num_tokens);
}
// The oldest token of the window that is no sink.
TKV_HD int32_t ring_first(const TierPolicy& policy, const SequenceInfo& info) {
  return larger_of(info.window_first, policy.sink_tokens);
}
TKV_HD int32_t window_side_tokens(const TierPolicy& policy, const SequenceInfo& info) {
  return sink_count(policy, info) + larger_of(0, info.num_tokens - ring_first(policy, info));
}
// Index in side 2 of a sink or a window token.
TKV_HD int32_t window_index(const TierPolicy& policy, const SequenceInfo& info, int32_t position) {
  if (position < policy.sink_tokens) return position;
  return policy.sink_tokens + (position - info.window_origin) % policy.window_tokens;
}
// Whether the index of a new token has had no token since the ring began.
TKV_HD bool opens_window_index(const TierPolicy& policy, const SequenceInfo& info,
                               int32_t position) {
  return position < policy.sink_tokens || position - policy.window_tokens < info.window_origin;
}
// Index in side 2 of the newest token, in a prompt or after it.
TKV_HD int32_t newest_index(const TierPolicy& policy, const SequenceInfo& info) {
  const int32_t newest = info.num_tokens - 1;
  return info.window_origin == kInPrompt ? newest : window_index(policy, info, newest);
}
// Whether the newest `tokens` tokens are all in side 2; what a truncation has left may not be.
TKV_HD bool window_holds_newest(const TierPolicy& policy, const SequenceInfo& info,
                                int32_t tokens) {
  const int32_t first = larger_of(info.num_tokens - tokens, policy.sink_tokens);
  return first >= smaller_of(info.window_first, info.num_tokens);
}
// Of a sink or window token's index the position: the inverse of the above.
TKV_HD int32_t window_position(const TierPolicy& policy, const SequenceInfo& info, int32_t index) {
  if (index < policy.sink_tokens) return index;
  const int32_t first = ring_first(policy, info), window = policy.window_tokens;
  const int32_t at_first = (first - info.window_origin) % window;
  return first + (index - policy.sink_tokens - at_first + window) % window;
}

// A sequence at the end of a prompt of `tokens` tokens.
TKV_HD SequenceInfo info_after_prompt(const TierPolicy& policy, int32_t tokens) {
  const int32_t first = larger_of(0, tokens - policy.window_tokens);
  return {tokens, first, larger_of(first, policy.sink_tokens), tokens};
}
// After a step of `tokens` more.
TKV_HD SequenceInfo info_after_step(const TierPolicy& policy, SequenceInfo info, int32_t tokens) {
  info.num_tokens += tokens;
  info.window_first = larger_of(info.window_first, info.num_tokens - policy.window_tokens);
  return info;
}
// Truncated to `tokens` <= num_tokens: the ring starts anew at its oldest token.
TKV_HD SequenceInfo info_after_truncate(const TierPolicy& policy, SequenceInfo info,
                                        int32_t tokens) {
  info.num_tokens = tokens;
  info.window_first = smaller_of(info.window_first, tokens);
  info.window_origin = ring_first(policy, info);
  info.prompt_tokens = smaller_of(info.prompt_tokens, tokens);
  return info;
}

// The candidates of a step are the positions first .. end - 1, at most `tokens` many.
struct LeavingTokens {
  int32_t first, end;
  TKV_HD int32_t count() const { return larger_of(0, end - first); }
};
TKV_HD LeavingTokens leaving_tokens(const TierPolicy& policy, const SequenceInfo& info,
                                    int32_t tokens) {
  return {ring_first(policy, info), info.num_tokens + tokens - policy.window_tokens};
}

}  // namespace tierkv
