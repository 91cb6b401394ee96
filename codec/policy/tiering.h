// SPDX-License-Identifier: Apache-2.0
// Which tier a token goes to: once for a whole prompt, then token by token as a state machine over
// a row.
//
// The rules and their edge cases are written out in docs/internals/policies.md. The decisions are
// inline functions that host and device share; generation_step() applies them to a row held in
// plain arrays, without pages, and is the reference of every manager that does the same on pages.
// Source: DiffKV section 4 and Algorithm 1.
#pragma once

#include <cstdint>

#include "codec/policy/significance.h"
#include "tierkv/half.h"
#include "tierkv/page.h"
#include "tierkv/policy.h"
#include "tierkv/status.h"

namespace tierkv {

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
// is compared over (the token's own 1-based index in the prompt phase, the sequence length in the
// generation phase).
TKV_HD Tier significance_tier(const TierPolicy& policy, float significance, int32_t n) {
  return significance_tier(thresholds_at(policy, n), significance);
}

// The significance of a token that nobody has scored, n counted from 1: 1 / n rounded up, so that
// with alpha <= 1 it is never below its threshold alpha / n.
TKV_HD float neutral_significance(int32_t n) {
  const double exact = 1.0 / static_cast<double>(n);
  const auto rounded = static_cast<float>(exact);
  return rounded < exact ? bits_float(float_bits(rounded) + 1) : rounded;
}

// The newest window_tokens of num_tokens, at positions counted from 0.
TKV_HD bool in_window(const TierPolicy& policy, int32_t position, int32_t num_tokens) {
  return position >= num_tokens - policy.window_tokens;
}

// Prompt phase: window and sinks are Tier::kWindow, the others go by their significance.
TKV_HD Tier prompt_tier(const TierPolicy& policy, float significance, int32_t position,
                        int32_t num_tokens) {
  if (position < policy.sink_tokens || in_window(policy, position, num_tokens))
    return Tier::kWindow;
  return significance_tier(policy, significance, position + 1);
}

// The order of victims: least score first, of equal scores the lowest position.
TKV_HD bool is_better_victim(float score, int32_t position, float than_score,
                             int32_t than_position) {
  return score < than_score || (score == than_score && position < than_position);
}

// Where the victim of a tier (kHigh or kLow) goes: the tier itself where it stays. A token never
// moves up.
TKV_HD Tier victim_tier(const TierThresholds& thresholds, Tier from, float score) {
  const Tier by_score = significance_tier(thresholds, score);
  return by_score < from ? from : by_score;
}
TKV_HD Tier victim_tier(const TierPolicy& policy, Tier from, float score, int32_t num_tokens) {
  return victim_tier(thresholds_at(policy, num_tokens), from, score);
}

// tiers: [num_tokens]; counts: [kNumTiers], tokens per Tier, or null. kNonFinite, kInvalidArgument
// (nothing written) for significances that are not finite or are negative, or a bad policy.
Status assign_prompt_tiers(const TierPolicy& policy, const float* significance, int32_t num_tokens,
                           Tier* tiers, int32_t* counts);

// Tokens of one tier of a row, in caller-owned arrays of `capacity`. Index i is slot i % T of the
// tier's page i / T.
struct TokenSet {
  float* scores = nullptr;
  int32_t* counts = nullptr;  // queries behind the score
  int32_t* positions = nullptr;
  uint8_t* frozen = nullptr;  // 1: in a shared page, neither scored nor a victim
  int32_t size = 0;
  int32_t capacity = 0;
};

struct RowState {
  TokenSet window;            // a ring, oldest token at window_head, positions ascending
  TokenSet sinks, high, low;  // in no order
  int32_t window_head = 0;
  int32_t num_tokens = 0;  // N: tokens appended so far, pruned ones included

  // kInvalidArgument: null arrays, sizes outside their capacity, a head outside the ring.
  Status validate() const;
};

// What happened to one token that left the window. Where there is a victim it was in the tier the
// candidate entered, and the candidate took its place there.
struct StepAction {
  int32_t position;         // of the candidate
  Tier tier;                // where it went: kHigh, kLow, kPruned, or kWindow for a sink
  int32_t slot;             // its index in that set; kNoSlot when pruned
  int32_t victim_position;  // kNoPosition: no token was moved
  Tier victim_tier;         // where it went: kLow or kPruned
  int32_t victim_slot;      // its index in `low`; kNoSlot when pruned
};

// Fills an empty row from a prompt: tokens in position order, counts N - i. kBufferTooSmall
// (nothing changed) where a set is too small for its tokens.
Status start_row(const TierPolicy& policy, const float* significance, int32_t num_tokens,
                 RowState* row);

// Appends new_tokens tokens (score 0, count 0), then places every token that is no longer among the
// newest window_tokens, oldest first, with at most one victim each; all with the same N, the new
// tokens included. Writes one action per placed token to actions [action_capacity] and their number
// to num_actions. kBufferTooSmall (nothing changed): window, sinks, high, low or actions cannot
// take the worst case. No allocation.
Status generation_step(const TierPolicy& policy, int32_t new_tokens, RowState* row,
                       StepAction* actions, int32_t action_capacity, int32_t* num_actions);

// One counted query: probability(position) is its max over the heads of the group. Every token
// older than the query is observed, window and sinks included, frozen ones left alone.
template <class Probability>
void observe_query(RowState* row, int32_t query_position, Probability&& probability) {
  for (TokenSet* set : {&row->window, &row->sinks, &row->high, &row->low}) {
    for (int32_t n = 0; n < set->size; ++n) {
      const int64_t i = set == &row->window ? (int64_t{row->window_head} + n) % set->capacity : n;
      if (set->positions[i] >= query_position || set->frozen[i]) continue;
      set->scores[i] = running_mean(set->scores[i], set->counts[i], probability(set->positions[i]));
      ++set->counts[i];
    }
  }
}

}  // namespace tierkv
