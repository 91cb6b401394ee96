// Fork, truncate: the calls that meet shared pages.
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "store/tiers/host_store.h"
#include "store/tiers/truncate_plan.h"

namespace tierkv {
namespace {

Status invalid(std::string why) {
  return Status(StatusCode::kInvalidArgument, std::move(why));
}

void copy_page(const StoreView& s, int32_t source, int32_t target) {
  std::memcpy(s.page_bytes(target), s.page_bytes(source), s.pages.page_bytes);
}

// Fills the holes; tokens that were lifted are returned, in order.
std::vector<TokenCodes> lift_tokens(const StoreView& s, int32_t row, const RowCut& cut) {
  std::vector<TokenCodes> tokens(cut.lifted.size());
  for (size_t i = 0; i < tokens.size(); ++i) {
    const HostSlot at = row_slot(s, row, cut.lifted[i].side, cut.lifted[i].from);
    load_token(at.page, at.slot, &tokens[i]);
  }
  for (const HoleFill& fill : cut.fills) {
    move_slot(row_slot(s, row, fill.side, fill.from), row_slot(s, row, fill.side, fill.to));
  }
  return tokens;
}

void put_tokens(const StoreView& s, int32_t row, const RowCut& cut,
                const std::vector<TokenCodes>& tokens) {
  for (size_t i = 0; i < tokens.size(); ++i) {
    const HostSlot at = row_slot(s, row, cut.lifted[i].side, cut.lifted[i].to);
    if (cut.lifted[i].to >= cut.kept.of[cut.lifted[i].side]) open_at(at);
    store_token(at.page, at.slot, tokens[i]);
  }
  for (int32_t side = 0; side < kStoreSides; ++side) {
    if (cut.kept.of[side] == cut.target.of[side]) {
      clear_tail(s, row, side, cut.target.of[side], cut.before.of[side]);
    }
    if (side != kWindowSide && cut.target.of[side] != cut.before.of[side]) {
      rescan_side(s, row, side);
    }
  }
}

}  // namespace

Result<SequenceId> HostStore::fork(SequenceId source) {
  const Result<int32_t> from = table_.complete_live_slot_of(source);
  if (!from) return from.status();
  const Result<int32_t> to = table_.free_slot();
  if (!to) return to.status();

  // The allocator shares every full page; the window's, which are written in every step, are copied
  // all the same.
  const auto rows = static_cast<size_t>(view_.rows_per_sequence());
  std::vector<SideCounts> tokens(rows), shared(rows);
  int64_t needed = 0;
  for (size_t r = 0; r < rows; ++r) {
    tokens[r] = shared[r] = view_.allocator.tokens[row(*from, static_cast<int32_t>(r))];
    shared[r].of[kWindowSide] = 0;
    needed += pages_of(view_, tokens[r]).of[kWindowSide];
    for (const int32_t side : {kHighSide, kLowSide}) {
      needed += tokens[r].of[side] % view_.page_tokens(side) != 0;
    }
  }
  if (Status s = require_pages(needed); !s) return s;

  std::vector<PageCopy> copies(rows * kMaxSides);
  OpReport report;
  if (Status s = run(PageOp::fork({&*to, 1}, &*from, copies.data(), &report)); !s) return s;
  for (const PageCopy& copy : copies) {
    if (copy.source != kNoPage) copy_page(view_, copy.source, copy.target);
  }
  shrink_to(*to, shared);
  grow_to(*to, tokens);
  for (int32_t r = 0; r < view_.rows_per_sequence(); ++r) {
    const int32_t pages = pages_of(view_, tokens[r]).of[kWindowSide];
    for (int32_t i = 0; i < pages; ++i) {
      copy_page(view_, view_.page_id(row(*from, r), kWindowSide, i),
                view_.page_id(row(*to, r), kWindowSide, i));
    }
    for (const int32_t side : {kHighSide, kLowSide}) {  // full pages share their records, too
      const int32_t full = tokens[r].of[side] / view_.page_tokens(side);
      if (tokens[r].of[side] % view_.page_tokens(side) != 0) {
        rescan_page(view_, row(*to, r), side, full);
      }
    }
  }
  return table_.claim(*to, SequencePhase::kLive, table_.info(*from));
}

Status HostStore::truncate_prompt(int32_t slot, int32_t tokens) {
  std::vector<SideCounts> target(view_.rows_per_sequence());
  for (SideCounts& t : target) t.of[kWindowSide] = tokens;
  shrink_to(slot, target);
  for (int32_t w = 0; w < view_.rows_per_sequence(); ++w) {
    clear_tail(view_, row(slot, w), kWindowSide, tokens, table_.info(slot).num_tokens);
  }
  table_.set_info(slot, {tokens, 0, kInPrompt, 0});
  table_.set_complete(slot);
  return Status::ok();
}

Status HostStore::truncate(SequenceId sequence, int32_t tokens) {
  const Result<int32_t> slot = table_.complete_slot_of(sequence);
  if (!slot) return slot.status();
  const SequenceInfo before = table_.info(*slot);
  if (tokens < 0 || tokens > before.num_tokens) return invalid("tokens is out of range");
  if (tokens == before.num_tokens) return Status::ok();
  if (table_.phase(*slot) == SequencePhase::kPrompt) return truncate_prompt(*slot, tokens);

  const SequenceInfo after = info_after_truncate(view_.policy, before, tokens);
  const auto rows = static_cast<size_t>(view_.rows_per_sequence());
  std::vector<RowCut> cuts;
  std::vector<SideCounts> kept(rows), target(rows);
  int64_t needed = 0;
  for (size_t r = 0; r < rows; ++r) {
    cuts.push_back(plan_row_cut(view_, row(*slot, static_cast<int32_t>(r)), before, after));
    kept[r] = cuts[r].kept;
    target[r] = cuts[r].target;
    needed += total(pages_of(view_, target[r])) - total(pages_of(view_, kept[r]));
  }
  if (Status s = require_pages(needed); !s) return s;

  std::vector<std::vector<TokenCodes>> lifted;
  for (size_t r = 0; r < rows; ++r) {
    lifted.push_back(lift_tokens(view_, row(*slot, static_cast<int32_t>(r)), cuts[r]));
  }
  shrink_to(*slot, kept);
  grow_to(*slot, target);
  for (size_t r = 0; r < rows; ++r) {
    put_tokens(view_, row(*slot, static_cast<int32_t>(r)), cuts[r], lifted[r]);
  }
  table_.set_info(*slot, after);
  table_.set_complete(*slot);
  return Status::ok();
}

}  // namespace tierkv
