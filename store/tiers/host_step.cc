#include <vector>

#include "store/tiers/host_store.h"
#include "store/tiers/step_plan.h"

namespace tierkv {
namespace {

void score_side(const StoreView& s, int32_t row, int32_t side, const CountSchedule& schedule,
                const ScoredQuery& query) {
  const int32_t tokens = s.allocator.tokens[row].of[side];
  for (int32_t page = 0; page < pages_for(tokens, s.page_tokens(side)); ++page) {
    if (is_frozen(s.allocator, s.page_id(row, side, page))) continue;
    const HostPage bytes = row_page(s, row, side, page);
    for (int32_t slot = 0; slot < s.page_used(side, page, tokens); ++slot) {
      const int32_t position = page_position(bytes, slot);
      if (position >= query.position) continue;
      set_page_score(bytes, slot,
                     scored(schedule, page_score(bytes, slot), position, query.position,
                            query.probabilities[position]));
    }
    if (side != kWindowSide) rescan_page(s, row, side, page);
  }
}

}  // namespace

void append_step_row(const StoreView& s, int32_t row, const SequenceInfo& info,
                     const AppendedTokens& tokens) {
  const int64_t bytes = tokens.stride * dtype_bytes(tokens.dtype);
  for (int32_t i = 0; i < tokens.count; ++i) {
    const int32_t position = tokens.first_position + i;
    const HostSlot at = row_slot(s, row, kWindowSide, window_index(s.policy, info, position));
    if (opens_window_index(s.policy, info, position)) open_at(at);
    const float score = 0;
    TokenBatch batch;
    batch.k = static_cast<const uint8_t*>(tokens.k) + i * bytes;
    batch.v = static_cast<const uint8_t*>(tokens.v) + i * bytes;
    batch.scores = &score;
    batch.positions = &position;
    batch.count = 1;
    batch.dtype = tokens.dtype;
    (void)overwrite_token(at.page, at.slot, batch);
  }
}

void apply_step_row(const StoreView& s, int32_t row, const SequenceInfo& before,
                    const std::vector<StepAction>& actions) {
  for (const StepAction& action : actions) {
    if (action.tier == Tier::kPruned) continue;
    const int32_t side = side_of(action.tier);
    const HostSlot to = row_slot(s, row, side, action.slot);
    if (action.victim_position == kNoPosition) {
      open_at(to);
    } else if (action.victim_tier == Tier::kLow) {
      const HostSlot demoted = row_slot(s, row, kLowSide, action.victim_slot);
      open_at(demoted);
      move_slot(to, demoted);
    }
    const int32_t index = window_index(s.policy, before, action.position);
    move_slot(row_slot(s, row, kWindowSide, index), to);
  }
  for (const StepAction& action : actions) {
    if (action.tier == Tier::kPruned) continue;
    const int32_t side = side_of(action.tier);
    rescan_page(s, row, side, action.slot / s.page_tokens(side));
    if (action.victim_position != kNoPosition && action.victim_tier == Tier::kLow) {
      rescan_page(s, row, kLowSide, action.victim_slot / s.page_tokens(kLowSide));
    }
  }
}

void score_row(const StoreView& s, int32_t row, const SequenceInfo& info, int32_t query,
               const float* probabilities) {
  const CountSchedule schedule = {info.prompt_tokens, s.score_interval};
  for (int32_t side = 0; side < kStoreSides; ++side) {
    score_side(s, row, side, schedule, {query, probabilities});
  }
}

Status HostStore::begin_step(SequenceList sequences, int32_t tokens) {
  const Result<Slots> slots = table_.admit_begin_step(sequences, tokens);
  if (!slots) return slots.status();
  const auto rows = static_cast<size_t>(view_.rows_per_sequence());
  std::vector<SideCounts> added(slots->size() * rows);
  std::vector<std::vector<StepAction>> actions(added.size());
  for (size_t i = 0; i < added.size(); ++i) {
    const int32_t slot = (*slots)[i / rows];
    actions[i].resize(leaving_tokens(view_.policy, table_.info(slot), tokens).count());
    const int32_t at = row(slot, static_cast<int32_t>(i % rows));
    const PlannedRow planned = planned_row(view_, page_tokens(view_), at, HostTeam());
    added[i] = plan_row_step<StepOverlay>(
        planned, table_.info(slot), tokens, HostTeam(),
        [&](int32_t round, const PlannedRound& decided) { actions[i][round] = decided.action; });
  }
  OpReport report;
  if (Status s = run(PageOp::append(batch(*slots), added.data(), &report)); !s) return s;
  for (size_t i = 0; i < added.size(); ++i) {
    const int32_t slot = (*slots)[i / rows];
    apply_step_row(view_, row(slot, static_cast<int32_t>(i % rows)), table_.info(slot), actions[i]);
  }
  for (const int32_t slot : *slots) {
    table_.set_info(slot, info_after_step(view_.policy, table_.info(slot), tokens));
  }
  return Status::ok();
}

Status HostStore::update_scores(const ScoreUpdate& update) {
  const Result<Slots> slots = table_.admit_update(update);
  if (!slots) return slots.status();
  const int32_t heads = config_.layout.num_kv_heads;
  const auto line = [&](size_t entry, int32_t head) {
    return update.probabilities + (static_cast<int64_t>(entry) * heads + head) * update.stride;
  };
  const auto query = [&](int32_t slot) { return table_.info(slot).num_tokens - 1 - update.back; };
  for (size_t i = 0; i < slots->size(); ++i) {
    for (int32_t h = 0; h < heads; ++h) {
      if (Status s = check_scores(line(i, h), query((*slots)[i])); !s) return s;
    }
  }
  for (size_t i = 0; i < slots->size(); ++i) {
    const int32_t slot = (*slots)[i];
    const CountSchedule schedule = {table_.info(slot).prompt_tokens, view_.score_interval};
    if (!schedule.is_counted(query(slot))) continue;
    for (int32_t h = 0; h < heads; ++h) {
      score_row(view_, view_.row_of(slot, update.layer, h), table_.info(slot), query(slot),
                line(i, h));
    }
  }
  return Status::ok();
}

}  // namespace tierkv
