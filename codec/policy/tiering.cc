// SPDX-License-Identifier: Apache-2.0
#include "codec/policy/tiering.h"

#include <algorithm>
#include <string>
#include <utility>

namespace tierkv {
namespace {

Status invalid(std::string why) {
  return Status(StatusCode::kInvalidArgument, std::move(why));
}

struct Token {
  float score;
  int32_t count;
  int32_t position;
  uint8_t frozen;
};

Token token_at(const TokenSet& set, int32_t i) {
  return {set.scores[i], set.counts[i], set.positions[i], set.frozen[i]};
}
void put_token(TokenSet* set, int32_t i, const Token& t) {
  set->scores[i] = t.score;
  set->counts[i] = t.count;
  set->positions[i] = t.position;
  set->frozen[i] = t.frozen;
}
int32_t push_token(TokenSet* set, const Token& t) {
  put_token(set, set->size, t);
  return set->size++;
}

int32_t ring_index(const RowState& row, int32_t n) {
  return static_cast<int32_t>((static_cast<int64_t>(row.window_head) + n) % row.window.capacity);
}
void push_window(RowState* row, const Token& t) {
  put_token(&row->window, ring_index(*row, row->window.size), t);
  ++row->window.size;
}
Token pop_window(RowState* row) {
  const Token oldest = token_at(row->window, row->window_head);
  row->window_head = ring_index(*row, 1);
  --row->window.size;
  return oldest;
}

Status check_set(const TokenSet& set, const char* name) {
  if (set.size < 0 || set.capacity < 0 || set.size > set.capacity) {
    return invalid(std::string(name) + ": size is outside the capacity");
  }
  if (set.capacity > 0 && (!set.scores || !set.counts || !set.positions || !set.frozen)) {
    return invalid(std::string(name) + ": a null array");
  }
  return Status::ok();
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

// Index of the tier's victim among tokens that may be one; kNoSlot where there is none.
int32_t find_victim(const TokenSet& set) {
  int32_t best = kNoSlot;
  for (int32_t i = 0; i < set.size; ++i) {
    if (set.frozen[i]) continue;
    if (best == kNoSlot ||
        is_better_victim(set.scores[i], set.positions[i], set.scores[best], set.positions[best])) {
      best = i;
    }
  }
  return best;
}

// Algorithm 1 for one candidate, sinks apart.
StepAction place_candidate(const TierPolicy& policy, const Token& candidate, RowState* row) {
  const int32_t n = row->num_tokens;
  StepAction action{candidate.position,
                    significance_tier(policy, candidate.score, n),
                    kNoSlot,
                    kNoPosition,
                    Tier::kPruned,
                    kNoSlot};
  if (action.tier == Tier::kPruned) return action;
  TokenSet& tier = action.tier == Tier::kHigh ? row->high : row->low;
  // The candidate is at or above its tier's threshold: as its own victim it would stay, so it need
  // not be searched.
  const int32_t victim_index = find_victim(tier);
  const Tier to = victim_index == kNoSlot
                      ? action.tier
                      : victim_tier(policy, action.tier, tier.scores[victim_index], n);
  if (to == action.tier) {
    action.slot = push_token(&tier, candidate);
    return action;
  }
  const Token victim = token_at(tier, victim_index);
  put_token(&tier, victim_index, candidate);
  action.slot = victim_index;
  action.victim_position = victim.position;
  action.victim_tier = to;
  if (to == Tier::kLow) action.victim_slot = push_token(&row->low, victim);
  return action;
}

// Tokens of the window that leave it when the row has num_tokens: its oldest, then new ones.
int32_t count_leaving(const TierPolicy& policy, const RowState& row, int32_t new_tokens) {
  const int32_t num_tokens = row.num_tokens + new_tokens;
  int32_t leaving = 0;
  while (leaving < row.window.size &&
         !in_window(policy, row.window.positions[ring_index(row, leaving)], num_tokens)) {
    ++leaving;
  }
  return leaving + std::max(0, new_tokens - policy.window_tokens);
}

// How many of the next `leaving` tokens are sinks.
int32_t count_new_sinks(const TierPolicy& policy, const RowState& row, int32_t leaving) {
  int32_t sinks = 0;
  for (int32_t n = 0; n < leaving && n < row.window.size; ++n) {
    sinks += row.window.positions[ring_index(row, n)] < policy.sink_tokens;
  }
  const int32_t leaving_new = std::max(0, leaving - row.window.size);
  return sinks + std::clamp(policy.sink_tokens - row.num_tokens, 0, leaving_new);
}

}  // namespace

Status RowState::validate() const {
  if (Status s = check_set(window, "window"); !s) return s;
  if (Status s = check_set(sinks, "sinks"); !s) return s;
  if (Status s = check_set(high, "high"); !s) return s;
  if (Status s = check_set(low, "low"); !s) return s;
  if (window_head < 0 || (window_head > 0 && window_head >= window.capacity)) {
    return invalid("window_head is outside the window");
  }
  if (num_tokens < 0) return invalid("num_tokens is negative");
  return Status::ok();
}

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

Status start_row(const TierPolicy& policy, const float* significance, int32_t num_tokens,
                 RowState* row) {
  if (Status s = policy.validate(); !s) return s;
  if (Status s = check_significance(significance, num_tokens); !s) return s;
  if (row == nullptr) return invalid("row is null");
  if (Status s = row->validate(); !s) return s;
  TokenSet* sets[] = {&row->window, &row->sinks, &row->high, &row->low};
  for (const TokenSet* set : sets) {
    if (set->size != 0 || row->num_tokens != 0) return invalid("the row has tokens already");
  }
  const auto set_of = [&](int32_t position) {  // index into sets; 4: pruned
    if (in_window(policy, position, num_tokens)) return 0;
    if (position < policy.sink_tokens) return 1;
    const Tier tier = significance_tier(policy, significance[position], position + 1);
    return tier == Tier::kHigh ? 2 : tier == Tier::kLow ? 3 : 4;
  };
  int32_t needed[5] = {};
  for (int32_t i = 0; i < num_tokens; ++i) ++needed[set_of(i)];
  for (int s = 0; s < 4; ++s) {
    if (needed[s] > sets[s]->capacity) {
      return Status(StatusCode::kBufferTooSmall, "a set of the row is too small for its prompt");
    }
  }
  row->window_head = 0;
  row->num_tokens = num_tokens;
  for (int32_t i = 0; i < num_tokens; ++i) {
    if (const int s = set_of(i); s < 4)
      push_token(sets[s], {significance[i], num_tokens - 1 - i, i, 0});
  }
  return Status::ok();
}

Status generation_step(const TierPolicy& policy, int32_t new_tokens, RowState* row,
                       StepAction* actions, int32_t action_capacity, int32_t* num_actions) {
  if (Status s = policy.validate(); !s) return s;
  if (row == nullptr || num_actions == nullptr) return invalid("row or num_actions is null");
  if (Status s = row->validate(); !s) return s;
  if (new_tokens < 0 || new_tokens > INT32_MAX - row->num_tokens) {
    return invalid("new_tokens is negative or overflows the row");
  }
  const int32_t leaving = count_leaving(policy, *row, new_tokens);
  if (leaving > 0 && actions == nullptr) return invalid("actions is null");
  const auto lacks = [](const TokenSet& set, int32_t more) {
    return more > set.capacity - set.size;
  };
  if (leaving > action_capacity || lacks(row->window, new_tokens) || lacks(row->high, leaving) ||
      lacks(row->low, leaving)) {
    return Status(StatusCode::kBufferTooSmall,
                  "a set of the row or the actions cannot take the step");
  }
  if (lacks(row->sinks, count_new_sinks(policy, *row, leaving))) {
    return Status(StatusCode::kBufferTooSmall, "the sinks of the row cannot take the step");
  }

  for (int32_t i = 0; i < new_tokens; ++i) push_window(row, {0.0f, 0, row->num_tokens + i, 0});
  row->num_tokens += new_tokens;
  for (int32_t a = 0; a < leaving; ++a) {
    const Token candidate = pop_window(row);
    if (candidate.position < policy.sink_tokens) {
      const int32_t slot = push_token(&row->sinks, candidate);
      actions[a] = {candidate.position, Tier::kWindow, slot, kNoPosition, Tier::kPruned, kNoSlot};
    } else {
      actions[a] = place_candidate(policy, candidate, row);
    }
  }
  *num_actions = leaving;
  return Status::ok();
}

}  // namespace tierkv
