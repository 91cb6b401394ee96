// Where tokens begin, prompts and steps, and the calls that meet shared pages: fork and truncate.
#include <algorithm>
#include <cstring>
#include <vector>

#include "store/channel/channel_host.h"
#include "store/shared/host_pages.h"

namespace tierkv {
namespace {

constexpr Component kComponents[] = {Component::kKey, Component::kValue};

void copy_page(const ChannelView& s, int32_t source, int32_t target) {
  std::memcpy(s.page_bytes(target), s.page_bytes(source), s.pages.page_bytes);
}

// Tokens first .. end - 1 of a block as raw values, [tokens][2][head_dim].
std::vector<uint16_t> cut_tokens(const ChannelView& s, int32_t row, int32_t first, int32_t end) {
  std::vector<uint16_t> values;
  for (int32_t p = first; p < end; ++p) {
    for (const Component c : kComponents) {
      for (int32_t d = 0; d < s.head_dim(); ++d) values.push_back(raw_of_block(s, row, c, p, d));
    }
  }
  return values;
}

}  // namespace

Status ChannelHostStore::begin_prompt(SequenceList sequences, int32_t tokens) {
  const Result<Slots> slots = table_.admit_begin_prompt(sequences, tokens);
  if (!slots) return slots.status();
  if (Status s = check_channel_prompt(config_, tokens); !s) return s;
  const PageAllocator& a = view_.allocator;
  std::vector<SideCounts> pages(slots->size()), target;
  for (size_t i = 0; i < slots->size(); ++i) {
    const SequenceInfo after = after_begin((*slots)[i], tokens);
    // All rows of a sequence hold as much.
    const SideCounts held = a.tokens[row((*slots)[i], 0)];
    const SideCounts counts = view_.counts_after(held, after);
    for (const int32_t side : {kBlockSide, kResidualSide}) {
      const int32_t per_page = a.shape.table.tokens_per_page[side];
      pages[i].of[side] = pages_for(counts.of[side], per_page) - pages_for(held.of[side], per_page);
    }
    target.insert(target.end(), rows(), counts);
  }
  OpReport report;
  if (Status s = run_page_op(a, PageOp::reserve(batch(*slots), pages.data(), &report)); !s) {
    return s;
  }
  if (Status s = run_page_op(a, PageOp::keep(batch(*slots), target.data(), &report)); !s) return s;
  for (const int32_t slot : *slots) table_.set_info(slot, after_begin(slot, tokens));
  return Status::ok();
}

// Blocks are there already: the tokens that stay raw may now be forked, and steps follow.
Status ChannelHostStore::end_prompt(SequenceList sequences) {
  const Result<Slots> slots = table_.admit_end_prompt(sequences);
  if (!slots) return slots.status();
  for (const int32_t slot : *slots) {
    table_.set_info(slot, channel_info_after_prompt(table_.info(slot)));
    table_.set_phase(slot, SequencePhase::kLive);
  }
  return Status::ok();
}

Status ChannelHostStore::begin_step(SequenceList sequences, int32_t tokens) {
  const Result<Slots> slots = table_.admit_begin_step(sequences, tokens);
  if (!slots) return slots.status();
  const PageAllocator& a = view_.allocator;
  std::vector<SideCounts> added;
  for (const int32_t slot : *slots) {
    const SideCounts held = a.tokens[row(slot, 0)];
    SideCounts counts = view_.counts_after(held, after_begin(slot, tokens));
    for (const int32_t side : {kBlockSide, kResidualSide}) counts.of[side] -= held.of[side];
    added.insert(added.end(), rows(), counts);
  }
  OpReport report;
  if (Status s = run_page_op(a, PageOp::append(batch(*slots), added.data(), &report)); !s) return s;
  for (const int32_t slot : *slots) {
    const SequenceInfo before = table_.info(slot), after = after_begin(slot, tokens);
    const int32_t first = view_.blocks_of(before), end = view_.blocks_of(after);
    for (int32_t r = 0; r < rows() && first < end; ++r) {
      const int32_t at = row(slot, r);
      encode_blocks({{&view_, at, before.window_first}, {nullptr, nullptr}}, first, end);
      rotate_left(view_.page_ids(at, kResidualSide), a.pages[at].of[kResidualSide],
                  view_.pages_of_blocks(end - first));
    }
    table_.set_info(slot, after);
  }
  return Status::ok();
}

void ChannelHostStore::copy_open_pages(const std::vector<PageCopy>& copies) {
  for (int32_t r = 0; r < rows(); ++r) {
    const PageCopy& open = copies[static_cast<size_t>(r) * kMaxSides + kBlockSide];
    if (open.source != kNoPage) copy_page(view_, open.source, open.target);
  }
}

Result<SequenceId> ChannelHostStore::fork(SequenceId source) {
  const Result<int32_t> from = table_.complete_live_slot_of(source);
  if (!from) return from.status();
  const Result<int32_t> to = table_.free_slot();
  if (!to) return to.status();
  // The allocator shares every full page; raw ones, which steps write to, are copied all the same.
  const PageAllocator& a = view_.allocator;
  const SequenceInfo info = table_.info(*from);
  const SideCounts held = a.tokens[row(*from, 0)];
  std::vector<SideCounts> shared(rows(), held), target(rows(), held);
  const int32_t raw_pages = pages_for(ChannelView::raw_tokens(info), view_.raw_page_tokens);
  for (int32_t r = 0; r < rows(); ++r) {
    shared[r].of[kResidualSide] = 0;
    target[r].of[kResidualSide] = ChannelView::raw_tokens(info);
  }
  // As the allocator counts: an open page is copied, a raw one too, if only for a moment.
  const bool open_block = held.of[kBlockSide] % view_.blocks_per_page != 0;
  const bool open_raw = held.of[kResidualSide] % view_.raw_page_tokens != 0;
  const int64_t of_row = open_block + std::max<int64_t>(raw_pages, open_raw);
  if (Status s = require_pages(a, rows() * of_row); !s) return s;
  std::vector<PageCopy> copies(static_cast<size_t>(rows()) * kMaxSides);
  OpReport report;
  if (Status s = run_page_op(a, PageOp::fork({&*to, 1}, &*from, copies.data(), &report)); !s) {
    return s;
  }
  (void)shrink_sides(a, *to, shared);
  grow_sides(a, *to, target);
  copy_open_pages(copies);
  for (int32_t r = 0; r < rows(); ++r) {
    for (int32_t i = 0; i < raw_pages; ++i) {
      copy_page(view_, view_.page_ids(row(*from, r), kResidualSide)[i],
                view_.page_ids(row(*to, r), kResidualSide)[i]);
    }
  }
  return table_.claim(*to, SequencePhase::kLive, info);
}

Status ChannelHostStore::truncate(SequenceId sequence, int32_t tokens) {
  const Result<int32_t> slot = table_.complete_slot_of(sequence);
  if (!slot) return slot.status();
  const SequenceInfo before = table_.info(*slot);
  if (tokens < 0 || tokens > before.num_tokens) {
    return Status(StatusCode::kInvalidArgument, "tokens is out of range");
  }
  if (tokens == before.num_tokens) return Status::ok();
  const PageAllocator& a = view_.allocator;
  const SequenceInfo after = channel_info_after_truncate(before, tokens, view_.layout.tokens);
  const SideCounts held = a.tokens[row(*slot, 0)];
  SideCounts kept;
  kept.of[kBlockSide] = view_.blocks_of(after);
  kept.of[kResidualSide] = ChannelView::raw_tokens(after);
  SideCounts shrunk = kept;
  shrunk.of[kResidualSide] = std::min(held.of[kResidualSide], kept.of[kResidualSide]);
  const int32_t open = kept.of[kBlockSide] / view_.blocks_per_page;
  int64_t needed = 0;
  std::vector<std::vector<uint16_t>> cut;  // [rows]
  for (int32_t r = 0; r < rows(); ++r) {
    const int32_t at = row(*slot, r);
    needed += pages_for(kept.of[kResidualSide], view_.raw_page_tokens) -
              pages_for(shrunk.of[kResidualSide], view_.raw_page_tokens);
    needed += kept.of[kBlockSide] % view_.blocks_per_page != 0 &&
              is_frozen(a, view_.page_ids(at, kBlockSide)[open]);
    cut.push_back(cut_tokens(view_, at, after.window_first, std::min(tokens, before.window_first)));
  }
  if (Status s = require_pages(a, needed); !s) return s;
  copy_open_pages(shrink_sides(a, *slot, std::vector<SideCounts>(rows(), shrunk)));
  grow_sides(a, *slot, std::vector<SideCounts>(rows(), kept));
  for (int32_t r = 0; r < rows(); ++r) {
    const RawSide raw = {&view_, row(*slot, r), after.window_first};
    const uint16_t* x = cut[r].data();
    for (int32_t p = after.window_first; p < std::min(tokens, before.window_first); ++p) {
      for (const Component c : kComponents) raw.put(c, p, x), x += view_.head_dim();
    }
    raw.clear_tail(tokens);
  }
  table_.set_info(*slot, after);
  table_.set_complete(*slot);
  return Status::ok();
}

}  // namespace tierkv
