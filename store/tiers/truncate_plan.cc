#include "store/tiers/truncate_plan.h"

namespace tierkv {
namespace {

// Indices of the side whose tokens lie before position `end`, ascending.
std::vector<int32_t> survivors_of(const StoreView& s, int32_t row, int32_t side, int32_t end) {
  std::vector<int32_t> survivors;
  for (int32_t i = 0; i < s.allocator.tokens[row].of[side]; ++i) {
    const HostSlot at = row_slot(s, row, side, i);
    if (page_position(at.page, at.slot) < end) survivors.push_back(i);
  }
  return survivors;
}

// The last survivors into the first holes.
std::vector<HoleFill> fills_of(int32_t side, const std::vector<int32_t>& survivors) {
  const auto count = static_cast<int32_t>(survivors.size());
  std::vector<HoleFill> fills;
  int32_t next = count - 1, seen = 0;
  for (int32_t i = 0; i < count; ++i) {
    if (survivors[seen] == i) {
      ++seen;
    } else {
      fills.push_back({side, survivors[next--], i});
    }
  }
  return fills;
}

// Whether closing the holes in place would write to a shared page or leave one partly filled.
bool touches_shared(const StoreView& s, int32_t row, int32_t side, int32_t count,
                    const std::vector<HoleFill>& fills) {
  const int32_t per_page = s.page_tokens(side);
  const auto shared = [&](int32_t index) {
    return is_frozen(s.allocator, s.page_id(row, side, index / per_page));
  };
  for (const HoleFill& fill : fills) {
    if (shared(fill.to)) return true;
  }
  return count % per_page != 0 && shared(count);
}

void cut_tier(const StoreView& s, int32_t row, int32_t side, int32_t end, RowCut* cut) {
  const std::vector<int32_t> survivors = survivors_of(s, row, side, end);
  const auto count = static_cast<int32_t>(survivors.size());
  cut->target.of[side] = cut->kept.of[side] = count;
  if (count == cut->before.of[side]) return;
  const std::vector<HoleFill> fills = fills_of(side, survivors);
  if (!touches_shared(s, row, side, count, fills)) {
    cut->fills.insert(cut->fills.end(), fills.begin(), fills.end());
    return;
  }
  int32_t whole = 0;
  while (whole < count && survivors[whole] == whole) ++whole;
  whole -= whole % s.page_tokens(side);
  cut->kept.of[side] = whole;
  for (int32_t i = whole; i < count; ++i) cut->lifted.push_back({side, survivors[i], i});
}

void cut_window(const StoreView& s, const SequenceInfo& before, const SequenceInfo& after,
                RowCut* cut) {
  const int32_t count = window_side_tokens(s.policy, after);
  cut->target.of[kWindowSide] = cut->kept.of[kWindowSide] = count;
  for (int32_t p = ring_first(s.policy, after); p < after.num_tokens; ++p) {
    const int32_t from = window_index(s.policy, before, p), to = window_index(s.policy, after, p);
    if (from != to) cut->lifted.push_back({kWindowSide, from, to});
  }
}

}  // namespace

RowCut plan_row_cut(const StoreView& s, int32_t row, const SequenceInfo& before,
                    const SequenceInfo& after) {
  RowCut cut;
  cut.before = s.allocator.tokens[row];
  cut_tier(s, row, kHighSide, after.num_tokens, &cut);
  cut_tier(s, row, kLowSide, after.num_tokens, &cut);
  cut_window(s, before, after, &cut);
  return cut;
}

}  // namespace tierkv
