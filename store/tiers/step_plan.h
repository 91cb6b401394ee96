// What a step does to one row, decided before any page is taken: DiffKV Algorithm 1 on pages.
//
// The plan reads scores of window tokens, the records of the row's pages (least score of each) and
// nothing else of the cache, so it costs a visit per page, not per token. Rounds of one step see
// the rounds before them through an overlay of the few tokens that those placed; a page with such a
// token is scanned. Shared by the host, where a team is one thread, and the kernel, where it is a
// warp. codec/policy/tiering.h, generation_step(), is the reference of the decisions: the same
// actions.
#pragma once

#include <cstdint>
#include <limits>

#include "codec/policy/tiering.h"
#include "store/tiers/store_shape.h"

namespace tierkv {

struct RankedToken {
  float score;
  int32_t position;
  int32_t index;  // of its side; kNoSlot: no token
};
TKV_HD constexpr RankedToken no_token() {
  return {std::numeric_limits<float>::infinity(), kNoPosition, kNoSlot};
}
// (Without branches: the kernels that plan steps are no longer than their code is short.)
TKV_HD RankedToken better_victim(const RankedToken& a, const RankedToken& b) {
  const bool is_b =
      static_cast<int>(b.score < a.score) |
      (static_cast<int>(b.score == a.score) & static_cast<int>(b.position < a.position));
  const bool takes_b = static_cast<int>(a.index == kNoSlot) |
                       (static_cast<int>(b.index != kNoSlot) & static_cast<int>(is_b));
  return {takes_b ? b.score : a.score, takes_b ? b.position : a.position,
          takes_b ? b.index : a.index};
}

// The threads that work on a row together: all get the same arguments and make the same decisions,
// loops over pages are dealt out by rank. Teams that share a warp stay together: most() is the
// greatest of all of them, and every one of them comes to best().
struct HostTeam {
  static int32_t rank() { return 0; }
  static int32_t size() { return 1; }
  static int32_t most(int32_t mine) { return mine; }
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

// Of a step of one round: nothing was placed before it.
struct NoOverlay {
  TKV_HD void put(int32_t, const RankedToken&) {}
  TKV_HD bool covers(int32_t, int32_t, int32_t) const { return false; }
  TKV_HD RankedToken best(int32_t) const { return no_token(); }
};

// Of a row. On the device one access, in program order: the compiler puts others off until their
// values are needed.
TKV_HD SideCounts load_counts(const SideCounts* counts) {
#if defined(__CUDA_ARCH__)
  SideCounts x;
  asm volatile("ld.global.v4.s32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.of[0]), "=r"(x.of[1]), "=r"(x.of[2]), "=r"(x.of[3])
               : "l"(counts));
  return x;
#else
  return *counts;
#endif
}
// One access of the device; a copy of the struct would be four.
TKV_HD PageRecord load_record(const PageAllocator& a, int32_t page) {
#if defined(__CUDA_ARCH__)
  const int4 words = *reinterpret_cast<const int4*>(a.records + page);
  return {words.x, __int_as_float(words.y), words.z, words.w};
#else
  return a.records[page];
#endif
}

// Tokens of a page by side: for kernels that know them beforehand, constants.
struct PageTokens {
  int32_t high, low, window;
  TKV_HD int32_t at(int32_t side) const {
    return side == kHighSide ? high : side == kLowSide ? low : window;
  }
};
TKV_HD PageTokens page_tokens(const StoreView& s) {
  return {s.page_tokens(kHighSide), s.page_tokens(kLowSide), s.page_tokens(kWindowSide)};
}

// Ids of the pages first + rank + v * size of a side, v < kVisits: what a thread has in flight.
// Slots beyond the side's pages may be among them: it is read before their number is known.
inline constexpr int32_t kVisits = 4;
struct PageVisits {
  int32_t page[kVisits];
};
template <class Team>
TKV_HD PageVisits visited_pages(const StoreView& s, int32_t row, int32_t side, int32_t first,
                                const Team& team) {
  PageVisits visits;
  for (int32_t v = 0; v < kVisits; ++v) {
    const int32_t i = first + team.rank() + v * team.size();
    const bool is_slot = i < s.allocator.shape.table.table_slots[0];
    visits.page[v] = is_slot ? s.page_id(row, side, i) : kNoPage;
  }
  return visits;
}

// A row and what its step is planned from.
struct PlannedRow {
  const StoreView& s;
  PageTokens page_tokens;
  int32_t row;
  SideCounts tokens, pages;
  PageVisits high, low;  // the team's first visits: asked for early
};
template <class Team>
TKV_HD PlannedRow planned_row(const StoreView& s, const PageTokens& per_page, int32_t row,
                              const Team& team) {
  return {s,
          per_page,
          row,
          load_counts(s.allocator.tokens + row),
          load_counts(s.allocator.pages + row),
          visited_pages(s, row, kHighSide, 0, team),
          visited_pages(s, row, kLowSide, 0, team)};
}

// The victim among the tokens of one page that the overlay does not replace.
struct VisitedPage {
  int32_t index;  // in its side
  int32_t id;
  PageRecord record;
};
template <class Overlay>
TKV_HD RankedToken page_victim(const PlannedRow& r, int32_t side, const VisitedPage& page,
                               const Overlay& overlay) {
  const int32_t per_page = r.page_tokens.at(side), first = page.index * per_page;
  const PageRecord& record = page.record;
  if (record.reference_count > 1 || record.min_slot == kNoSlot) return no_token();
  const int32_t used = smaller_of(per_page, r.tokens.of[side] - first);
  if (!overlay.covers(side, first, first + used)) {
    return {record.min_score, record.min_position, first + record.min_slot};
  }
  RankedToken best = no_token();
  for (int32_t slot = 0; slot < used; ++slot) {
    if (overlay.covers(side, first + slot, first + slot + 1)) continue;
    const TokenPlace at = {r.s.page_bytes(page.id), slot};
    best = better_victim(best, {score_at(r.s, side, at), position_at(r.s, side, at), first + slot});
  }
  return best;
}

// Among the tokens of `pages` pages of a side, those of earlier rounds included.
template <class Overlay, class Team>
TKV_HD RankedToken find_victim(const PlannedRow& r, int32_t side, int32_t pages,
                               const Overlay& overlay, const Team& team) {
  RankedToken mine = no_token();
  PageVisits visits = side == kHighSide ? r.high : r.low;
  const int32_t end = team.most(pages), step = kVisits * team.size();
  for (int32_t first = 0; first < end; first += step) {
    if (first > 0) visits = visited_pages(r.s, r.row, side, first, team);
    VisitedPage visited[kVisits];
    for (int32_t v = 0; v < kVisits; ++v) {
      const int32_t i = first + team.rank() + v * team.size();
      const bool is_page = i < pages;
      visited[v] = {i, visits.page[v],
                    is_page ? load_record(r.s.allocator, visits.page[v]) : kEmptyPageRecord};
    }
    for (int32_t v = 0; v < kVisits; ++v) {
      mine = better_victim(mine, page_victim(r, side, visited[v], overlay));
    }
  }
  return better_victim(team.best(mine), overlay.best(side));
}

// The sides' tokens as the rounds of a step leave them.
struct StepCounts {
  int32_t high, low;
};

// What a round decided and about which tokens.
struct PlannedRound {
  StepAction action;
  RankedToken candidate;  // its index is in the window's side
  RankedToken victim;     // as far as action names one
};

// One round; `counts` and the overlay move on.
template <class Overlay, class Team>
TKV_HD PlannedRound plan_round(const PlannedRow& r, const TierThresholds& thresholds,
                               const RankedToken& candidate, StepCounts* counts, Overlay* overlay,
                               const Team& team) {
  PlannedRound round = {{candidate.position, significance_tier(thresholds, candidate.score),
                         kNoSlot, kNoPosition, Tier::kPruned, kNoSlot},
                        candidate,
                        no_token()};
  StepAction& action = round.action;
  const bool stays = action.tier != Tier::kPruned;
  const int32_t side = action.tier == Tier::kHigh ? kHighSide : kLowSide;
  const int32_t pages = side == kHighSide ? r.pages.of[kHighSide] : r.pages.of[kLowSide];
  round.victim = find_victim(r, side, stays ? pages : 0, *overlay, team);
  if (!stays) return round;
  const RankedToken& victim = round.victim;
  const Tier to =
      victim.index == kNoSlot ? action.tier : victim_tier(thresholds, action.tier, victim.score);
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
  return round;
}

// The step of one row: emit(i, round) for each of its leaving_tokens(), oldest first; returns what
// each side gains. Overlay: StepOverlay, or NoOverlay where at most one token leaves.
template <class Overlay, class Team, class Emit>
TKV_HD SideCounts plan_row_step(const PlannedRow& r, const SequenceInfo& info, int32_t tokens,
                                const Team& team, Emit&& emit) {
  const LeavingTokens leaving = leaving_tokens(r.s.policy, info, tokens);
  const TierThresholds thresholds = thresholds_at(r.s.policy, info.num_tokens + tokens);
  StepCounts counts = {r.tokens.of[kHighSide], r.tokens.of[kLowSide]};
  Overlay overlay;
  for (int32_t p = leaving.first; p < leaving.end; ++p) {
    const int32_t index = window_index(r.s.policy, info, p), per_page = r.page_tokens.window;
    const int32_t page = r.s.page_id(r.row, kWindowSide, index / per_page);
    const float score = score_at(r.s, kWindowSide, {r.s.page_bytes(page), index % per_page});
    emit(p - leaving.first, plan_round(r, thresholds, {score, p, index}, &counts, &overlay, team));
  }
  return {{counts.high - r.tokens.of[kHighSide], counts.low - r.tokens.of[kLowSide],
           tokens - leaving.count(), 0}};
}

}  // namespace tierkv
