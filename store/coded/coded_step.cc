// Steps, and the calls that meet shared pages: fork and truncate.
#include <algorithm>
#include <cstring>
#include <string>

#include "store/coded/coded_fixed.h"
#include "store/coded/coded_host.h"
#include "store/coded/coded_values.h"

namespace tierkv {
namespace {

constexpr Component kComponents[] = {Component::kKey, Component::kValue};

void copy_page(const CodedView& s, int32_t source, int32_t target) {
  std::memcpy(s.page_bytes(target), s.page_bytes(source), s.pages.page_bytes);
}

// Of `tokens` tokens that a row keeps, behind the last one: the rest of its tile is empty.
void clear_raw_tail(const CodedView& s, int32_t row, const SequenceInfo& info) {
  const std::vector<uint16_t> none(s.head_dim);
  for (const Component c : kComponents) {
    for (int32_t p = info.num_tokens; p % kTileTokens != 0; ++p) {
      // In the page of the last token.
      uint8_t* page = s.raw_page(row, info, info.num_tokens - 1);
      for (int32_t d = 0; d < s.head_dim; ++d) {
        std::memset(page + raw_value_byte(s.head_dim, c, p % kBlockTokens, d), 0, 2);
      }
    }
  }
}

// The tokens of a block that is cut, as raw values, which a step may code one day: those of a
// fixed-rate block can lie beyond the last code.
std::vector<uint16_t> cut_tokens(const CodedView& s, const CodedBooks& books, int32_t row,
                                 Component c, int32_t block) {
  std::vector<uint16_t> values(static_cast<size_t>(kBlockTokens) * s.head_dim);
  (void)read_block_values(s, books, row, c, block, values.data());  // of our own making
  for (uint16_t& y : values) y = recodable(y, s.step(c, row));
  return values;
}

}  // namespace

Status CodedHostStore::begin_step(SequenceList sequences, int32_t tokens) {
  const Result<Slots> slots = table_.admit_begin_step(sequences, tokens);
  if (!slots) return slots.status();
  CodingPlan plan;
  for (const int32_t slot : *slots) {
    const SequenceInfo& info = table_.info(slot);
    const bool fills = coded_step_fills_block(info, tokens, view_.window_tokens);
    plan.ranges.push_back({slot, info.window_first / kBlockTokens, fills ? 1 : 0});
  }
  if (Status s = plan_blocks(&plan); !s) return s;
  std::vector<SideCounts> added(plan.rows.size()), before;
  for (size_t i = 0; i < added.size(); ++i) {
    const BlockRange& range = plan.ranges[i / rows()];
    before.push_back(view_.allocator.tokens[row(range.slot, static_cast<int32_t>(i % rows()))]);
    const int32_t end = before[i].of[kCodedSide];
    added[i].of[kCodedSide] = end_of_blocks(view_, end, plan.rows[i]) - end;
    added[i].of[kRawSide] = tokens - kBlockTokens * range.count;
  }
  OpReport report;
  if (Status s = run_page_op(view_.allocator, PageOp::append(batch(*slots), added.data(), &report));
      !s) {
    return s;
  }
  for (size_t i = 0; i < added.size(); ++i) {
    const BlockRange& range = plan.ranges[i / rows()];
    const int32_t at = row(range.slot, static_cast<int32_t>(i % rows()));
    write_blocks(view_, at, range.first_block, before[i].of[kCodedSide], plan.rows[i]);
    if (range.count > 0) {
      rotate_raw_pages(view_.page_ids(at, kRawSide), view_.allocator.pages[at].of[kRawSide]);
    }
  }
  books_ = std::move(plan.books);
  for (const int32_t slot : *slots) {
    table_.set_info(slot, coded_info_after_step(table_.info(slot), tokens, view_.window_tokens));
  }
  return Status::ok();
}

Result<SequenceId> CodedHostStore::fork(SequenceId source) {
  const Result<int32_t> from = table_.complete_live_slot_of(source);
  if (!from) return from.status();
  const Result<int32_t> to = table_.free_slot();
  if (!to) return to.status();
  // The allocator shares every full page; raw ones, which steps write to, are copied all the same.
  const PageAllocator& a = view_.allocator;
  std::vector<SideCounts> tokens(rows()), shared(rows());
  int64_t needed = 0;
  for (int32_t r = 0; r < rows(); ++r) {
    tokens[r] = shared[r] = a.tokens[row(*from, r)];
    shared[r].of[kRawSide] = 0;
    needed += pages_for(tokens[r].of[kRawSide], kBlockTokens);
    needed += tokens[r].of[kCodedSide] % view_.page_units() != 0;
  }
  if (Status s = require_pages(a, needed); !s) return s;
  std::vector<PageCopy> copies(static_cast<size_t>(rows()) * kMaxSides);
  OpReport report;
  if (Status s = run_page_op(a, PageOp::fork({&*to, 1}, &*from, copies.data(), &report)); !s) {
    return s;
  }
  (void)shrink_sides(a, *to, shared);
  grow_sides(a, *to, tokens);
  const SequenceInfo& info = table_.info(*from);
  const int32_t blocks = info.window_first / kBlockTokens;
  for (int32_t r = 0; r < rows(); ++r) {
    const int32_t old_row = row(*from, r), new_row = row(*to, r);
    for (const Component c : kComponents) {
      std::copy_n(view_.blocks(c, old_row), blocks, view_.blocks(c, new_row));
      std::copy_n(view_.means(c, old_row), view_.head_dim, view_.means(c, new_row));
      view_.step(c, new_row) = view_.step(c, old_row);
    }
    const PageCopy& open = copies[static_cast<size_t>(r) * kMaxSides + kCodedSide];
    if (open.source != kNoPage) {
      copy_page(view_, open.source, open.target);
      move_blocks(view_, new_row, blocks, open.source, open.target);
    }
    for (int32_t i = 0; i < pages_for(tokens[r].of[kRawSide], kBlockTokens); ++i) {
      copy_page(view_, view_.page_id(old_row, kRawSide, i), view_.page_id(new_row, kRawSide, i));
    }
  }
  return table_.claim(*to, SequencePhase::kLive, info);
}

Status CodedHostStore::truncate(SequenceId sequence, int32_t tokens) {
  const Result<int32_t> slot = table_.complete_slot_of(sequence);
  if (!slot) return slot.status();
  const SequenceInfo before = table_.info(*slot);
  if (tokens < 0 || tokens > before.num_tokens) {
    return Status(StatusCode::kInvalidArgument, "tokens is out of range");
  }
  if (tokens == before.num_tokens) return Status::ok();
  const bool prompt = table_.phase(*slot) == SequencePhase::kPrompt;
  const SequenceInfo after =
      prompt ? SequenceInfo{tokens, 0, kInPrompt, 0} : coded_info_after_truncate(before, tokens);
  const int32_t kept = after.window_first / kBlockTokens;
  const bool cuts = after.window_first < before.window_first && tokens % kBlockTokens != 0;
  std::vector<SideCounts> shrunk(rows()), target(rows());
  std::vector<std::vector<uint16_t>> cut;  // [rows][2]
  int64_t needed = 0;
  for (int32_t r = 0; r < rows(); ++r) {
    const int32_t at = row(*slot, r), units = units_of_blocks(view_, at, kept);
    shrunk[r].of[kCodedSide] = target[r].of[kCodedSide] = units;
    target[r].of[kRawSide] = CodedView::raw_tokens(after);
    shrunk[r].of[kRawSide] = std::min(CodedView::raw_tokens(after), CodedView::raw_tokens(before));
    needed += pages_for(target[r].of[kRawSide], kBlockTokens) -
              pages_for(shrunk[r].of[kRawSide], kBlockTokens);
    const int32_t open = units / view_.page_units();
    needed += units % view_.page_units() != 0 &&
              is_frozen(view_.allocator, view_.page_id(at, kCodedSide, open));
    for (const Component c : kComponents) {
      if (cuts) cut.push_back(cut_tokens(view_, books_, at, c, kept));
    }
  }
  if (Status s = require_pages(view_.allocator, needed); !s) return s;
  const std::vector<PageCopy> copies = shrink_sides(view_.allocator, *slot, shrunk);
  grow_sides(view_.allocator, *slot, target);
  for (int32_t r = 0; r < rows(); ++r) {
    const PageCopy& open = copies[static_cast<size_t>(r) * kMaxSides + kCodedSide];
    if (open.source != kNoPage) {
      copy_page(view_, open.source, open.target);
      move_blocks(view_, row(*slot, r), kept, open.source, open.target);
    }
    for (int32_t p = after.window_first; cuts && p < tokens; ++p) {
      const int64_t at = int64_t{p % kBlockTokens} * view_.head_dim;
      put_raw_token(view_, row(*slot, r), after, Component::kKey, p, &cut[2 * r][at]);
      put_raw_token(view_, row(*slot, r), after, Component::kValue, p, &cut[2 * r + 1][at]);
    }
    if (tokens % kTileTokens != 0) clear_raw_tail(view_, row(*slot, r), after);
  }
  table_.set_info(*slot, after);
  table_.set_complete(*slot);
  return Status::ok();
}

}  // namespace tierkv
