#include <algorithm>
#include <vector>

#include "store/host_store.h"

namespace tierkv {
namespace {

// Sides 0 and 1 while both are still reserved on the left: low page j is the j-th from the end.
HostSlot reserved_slot(const StoreView& s, int32_t row, int32_t side, int32_t index) {
  if (side == kHighSide) return row_slot(s, row, kHighSide, index);
  const int32_t per_page = s.page_tokens(kLowSide), held = s.allocator.pages[row].of[kHighSide];
  const int32_t page = s.page_id(row, kHighSide, held - 1 - index / per_page);
  return {page_of_id(s, kLowSide, page), index % per_page};
}

}  // namespace

void append_prompt_row(const StoreView& s, int32_t row, const AppendedTokens& tokens) {
  const int32_t per_page = s.page_tokens(kWindowSide);
  std::vector<float> scores(tokens.count);
  std::vector<int32_t> positions(tokens.count), rows(tokens.count);
  for (int32_t i = 0; i < tokens.count; ++i) {
    positions[i] = tokens.first_position + i;
    scores[i] = neutral_significance(positions[i] + 1);
    rows[i] = i;
  }
  TokenBatch batch;
  batch.k = tokens.k;
  batch.v = tokens.v;
  batch.scores = scores.data();
  batch.positions = positions.data();
  batch.row_stride = tokens.stride;
  batch.dtype = tokens.dtype;
  for (int32_t done = 0; done < tokens.count; done += batch.count) {
    const HostSlot at = row_slot(s, row, kWindowSide, tokens.first_position + done);
    batch.rows = rows.data() + done;
    batch.count = std::min(tokens.count - done, per_page - at.slot);
    (void)append_tokens(at.page, at.slot, batch);
  }
}

SideCounts place_prompt_row(const StoreView& s, int32_t row, const SequenceInfo& after) {
  SideCounts counts;
  for (int32_t position = 0; position < after.num_tokens; ++position) {
    const HostSlot from = row_slot(s, row, kWindowSide, position);
    const Tier tier =
        prompt_tier(s.policy, page_score(from.page, from.slot), position, after.num_tokens);
    if (tier == Tier::kPruned) continue;
    if (tier == Tier::kWindow) {
      // Never behind a token that still has to move: the window's indices are at most positions.
      const int32_t index = window_index(s.policy, after, position);
      if (index != position) move_slot(from, row_slot(s, row, kWindowSide, index));
      continue;
    }
    const int32_t side = side_of(tier);
    const HostSlot to = reserved_slot(s, row, side, counts.of[side]++);
    open_at(to);
    move_slot(from, to);
  }
  counts.of[kWindowSide] = window_side_tokens(s.policy, after);
  clear_tail(s, row, kWindowSide, counts.of[kWindowSide], after.num_tokens);
  return counts;
}

Status HostStore::begin_prompt(SequenceList sequences, int32_t tokens) {
  const Result<Slots> slots = table_.admit_begin_prompt(sequences, tokens);
  if (!slots) return slots.status();
  const auto rows = static_cast<size_t>(view_.rows_per_sequence());
  std::vector<SideCounts> pages(slots->size()), target(slots->size() * rows);
  for (size_t i = 0; i < slots->size(); ++i) {
    const int32_t held = table_.info((*slots)[i]).num_tokens;
    const int32_t per_page = view_.page_tokens(kWindowSide);
    pages[i].of[kWindowSide] = pages_for(held + tokens, per_page) - pages_for(held, per_page);
    for (size_t r = 0; r < rows; ++r) target[i * rows + r].of[kWindowSide] = held + tokens;
  }
  OpReport report;
  if (Status s = run(PageOp::reserve(batch(*slots), pages.data(), &report)); !s) return s;
  if (Status s = run(PageOp::keep(batch(*slots), target.data(), &report)); !s) return s;
  for (const int32_t slot : *slots) {
    table_.set_info(slot, {table_.info(slot).num_tokens + tokens, 0, kInPrompt, 0});
  }
  return Status::ok();
}

Status HostStore::score_prompt(const PromptScores& scores) {
  const Result<Slots> slots = table_.admit_scores(scores);
  if (!slots) return slots.status();
  const int32_t heads = config_.layout.num_kv_heads;
  const auto line = [&](size_t entry, int32_t head) {
    return scores.significance + (static_cast<int64_t>(entry) * heads + head) * scores.stride;
  };
  for (size_t i = 0; i < slots->size(); ++i) {
    for (int32_t h = 0; h < heads; ++h) {
      if (Status s = check_scores(line(i, h), table_.info((*slots)[i]).num_tokens); !s) return s;
    }
  }
  for (size_t i = 0; i < slots->size(); ++i) {
    for (int32_t h = 0; h < heads; ++h) {
      const int32_t at = view_.row_of((*slots)[i], scores.layer, h);
      for (int32_t p = 0; p < table_.info((*slots)[i]).num_tokens; ++p) {
        const HostSlot to = row_slot(view_, at, kWindowSide, p);
        set_page_score(to.page, to.slot, line(i, h)[p]);
      }
    }
  }
  return Status::ok();
}

Status HostStore::end_prompt(SequenceList sequences) {
  const Result<Slots> slots = table_.admit_end_prompt(sequences);
  if (!slots) return slots.status();
  const auto rows = static_cast<size_t>(view_.rows_per_sequence());
  std::vector<SideCounts> pages(slots->size()), kept(slots->size() * rows);
  for (size_t i = 0; i < slots->size(); ++i) {
    pages[i].of[kHighSide] = prompt_pages(view_, table_.info((*slots)[i]).num_tokens);
  }
  OpReport report;
  if (Status s = run(PageOp::reserve(batch(*slots), pages.data(), &report)); !s) return s;
  for (size_t i = 0; i < slots->size(); ++i) {
    const int32_t slot = (*slots)[i];
    const SequenceInfo info = info_after_prompt(view_.policy, table_.info(slot).num_tokens);
    table_.set_info(slot, info);
    for (size_t r = 0; r < rows; ++r) {
      kept[i * rows + r] = place_prompt_row(view_, row(slot, static_cast<int32_t>(r)), info);
    }
  }
  if (Status s = run(PageOp::keep(batch(*slots), kept.data(), &report)); !s) return s;
  for (const int32_t slot : *slots) {
    for (int32_t w = 0; w < view_.rows_per_sequence(); ++w) {
      rescan_side(view_, row(slot, w), kHighSide);
      rescan_side(view_, row(slot, w), kLowSide);
    }
    table_.set_phase(slot, SequencePhase::kLive);
  }
  return Status::ok();
}

}  // namespace tierkv
