// What a step does to one row, decided before any page is taken: DiffKV Algorithm 1 on pages.
//
// The plan reads scores of window tokens, the records of the row's pages (least score of each) and
// nothing else of the cache, so it costs a visit per page, not per token. Rounds of one step see
// the rounds before them through an overlay of the few tokens that those placed; a page with such a
// token is scanned. Shared by the host, where a team is one thread, and the kernel, where it is a
// warp. codec/tiering.h, generation_step(), is the reference of the decisions: the same actions.
#pragma once

#include <cstdint>
#include <limits>

#include "codec/tiering.h"
#include "store/store_shape.h"

namespace tierkv {

struct RankedToken {
  float score;
  int32_t position;
  int32_t index;  // of its side; kNoSlot: no token
};
TKV_HD constexpr RankedToken no_token() {
  return {std::numeric_limits<float>::infinity(), kNoPosition, kNoSlot};
}
TKV_HD RankedToken better_victim(const RankedToken& a, const RankedToken& b) {
  if (a.index == kNoSlot) return b;
  if (b.index == kNoSlot) return a;
  return is_better_victim(a.score, a.position, b.score, b.position) ? a : b;
}

// The threads that work on a row together: all get the same arguments and make the same decisions,
// loops over pages are dealt out by rank.
struct HostTeam {
  static int32_t rank() { return 0; }
  static int32_t size() { return 1; }
  static RankedToken best(const RankedToken& mine) { return mine; }
};

// Tokens that earlier rounds of the step placed and that no page holds yet.
class StepOverlay {
 public:
  TKV_HD void put(int32_t side, const RankedToken& token) {
    for (int32_t i = 0; i < size_; ++i) {
      if (sides_[i] == side && tokens_[i].index == token.index) {
        tokens_[i] = token;
        return;
      }
    }
    sides_[size_] = side;
    tokens_[size_++] = token;
  }
  TKV_HD bool covers(int32_t side, int32_t first, int32_t end) const {
    for (int32_t i = 0; i < size_; ++i) {
      if (sides_[i] == side && tokens_[i].index >= first && tokens_[i].index < end) return true;
    }
    return false;
  }
  TKV_HD RankedToken best(int32_t side) const {
    RankedToken best = no_token();
    for (int32_t i = 0; i < size_; ++i) {
      if (sides_[i] == side) best = better_victim(best, tokens_[i]);
    }
    return best;
  }

 private:
  int32_t size_ = 0;
  int32_t sides_[2 * kMaxStepTokens];
  RankedToken tokens_[2 * kMaxStepTokens];
};

// The victim among the tokens of one page that the overlay does not replace.
TKV_HD RankedToken page_victim(const StoreView& s, int32_t row, int32_t side, int32_t page_index,
                               const StepOverlay& overlay) {
  const int32_t page = s.page_id(row, side, page_index), first = page_index * s.page_tokens(side);
  const PageRecord record = s.allocator.records[page];
  if (record.reference_count > 1 || record.min_slot == kNoSlot) return no_token();
  const int32_t used = s.page_used(side, page_index, s.allocator.tokens[row].of[side]);
  if (!overlay.covers(side, first, first + used)) {
    return {record.min_score, record.min_position, first + record.min_slot};
  }
  RankedToken best = no_token();
  for (int32_t slot = 0; slot < used; ++slot) {
    if (overlay.covers(side, first + slot, first + slot + 1)) continue;
    const TokenPlace at = {s.page_bytes(page), slot};
    best = better_victim(best, {score_at(s, side, at), position_at(s, side, at), first + slot});
  }
  return best;
}

template <class Team>
TKV_HD RankedToken find_victim(const StoreView& s, int32_t row, int32_t side,
                               const StepOverlay& overlay, const Team& team) {
  const int32_t pages = pages_for(s.allocator.tokens[row].of[side], s.page_tokens(side));
  RankedToken mine = no_token();
  for (int32_t i = team.rank(); i < pages; i += team.size()) {
    mine = better_victim(mine, page_victim(s, row, side, i, overlay));
  }
  return better_victim(team.best(mine), overlay.best(side));
}

// The sides' tokens as the rounds of a step leave them.
struct StepCounts {
  int32_t high, low;
};

// One round; `counts` and the overlay move on.
template <class Team>
TKV_HD StepAction plan_round(const StoreView& s, int32_t row, const RankedToken& candidate,
                             int32_t num_tokens, StepCounts* counts, StepOverlay* overlay,
                             const Team& team) {
  StepAction action = {candidate.position,
                       significance_tier(s.policy, candidate.score, num_tokens),
                       kNoSlot,
                       kNoPosition,
                       Tier::kPruned,
                       kNoSlot};
  if (action.tier == Tier::kPruned) return action;
  const int32_t side = side_of(action.tier);
  const RankedToken victim = find_victim(s, row, side, *overlay, team);
  const Tier to = victim.index == kNoSlot
                      ? action.tier
                      : victim_tier(s.policy, action.tier, victim.score, num_tokens);
  if (to == action.tier) {
    action.slot = side == kHighSide ? counts->high++ : counts->low++;
  } else {
    action.slot = victim.index;
    action.victim_position = victim.position;
    action.victim_tier = to;
    if (to == Tier::kLow) {
      action.victim_slot = counts->low++;
      overlay->put(kLowSide, {victim.score, victim.position, action.victim_slot});
    }
  }
  overlay->put(side, {candidate.score, candidate.position, action.slot});
  return action;
}

// The step of one row: leaving_tokens() actions, oldest first, and what each side gains.
template <class Team>
TKV_HD SideCounts plan_row_step(const StoreView& s, int32_t row, const SequenceInfo& info,
                                int32_t tokens, StepAction* actions, const Team& team) {
  const LeavingTokens leaving = leaving_tokens(s.policy, info, tokens);
  const SideCounts held = s.allocator.tokens[row];
  StepCounts counts = {held.of[kHighSide], held.of[kLowSide]};
  StepOverlay overlay;
  for (int32_t p = leaving.first; p < leaving.end; ++p) {
    const TokenPlace at = place_of(s, row, kWindowSide, window_index(s.policy, info, p));
    const RankedToken candidate = {score_at(s, kWindowSide, at), p, 0};
    const StepAction action =
        plan_round(s, row, candidate, info.num_tokens + tokens, &counts, &overlay, team);
    if (team.rank() == 0) actions[p - leaving.first] = action;
  }
  return {{counts.high - held.of[kHighSide], counts.low - held.of[kLowSide],
           tokens - leaving.count(), 0}};
}

}  // namespace tierkv
