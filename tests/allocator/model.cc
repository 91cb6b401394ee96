// SPDX-License-Identifier: Apache-2.0
#include "tests/allocator/model.h"

#include <algorithm>

#include "tests/support/host_state.h"

namespace tierkv::testing {

Model::Model(const AllocatorShape& shape)
    : shape_(shape),
      references_(shape.num_pages, 0),
      states_(shape.table.num_sequences, SequenceState::kFree),
      rows_(shape.table.num_rows()) {
  for (int32_t p = 0; p < shape.num_pages; ++p) free_.push_back(p);
}

OpReport Model::run(const PageOp& op) {
  const int32_t per_sequence = shape_.table.rows_per_sequence;
  const auto available = static_cast<int64_t>(free_.size());
  Model next = *this;
  next.copies_.assign(static_cast<size_t>(op.batch.count) * per_sequence * kMaxSides,
                      {kNoPage, kNoPage});
  next.needed_ = next.returned_ = 0;
  next.drops_.clear();
  for (int32_t e = 0; e < op.batch.count; ++e) {
    const int32_t sequence = op.batch.sequences[e];
    if (sequence == kPaddingSequence) continue;
    const auto* begin = op.batch.sequences;
    const bool is_repeated = std::find(begin, begin + e, sequence) != begin + e;
    StatusCode status = is_repeated ? StatusCode::kInvalidArgument : admit(op, e);
    for (int32_t w = 0; w < per_sequence; ++w) {
      const int32_t i = e * per_sequence + w;
      if (status == StatusCode::kOk) {
        status = next.run_row(op, e, i, &next.rows_[sequence * per_sequence + w]);
      }
      if (status != StatusCode::kOk) return {status, i, 0, 0, 0, available};
    }
    const bool reserves = op.kind == PageOpKind::kReserve;
    next.states_[sequence] = op.kind == PageOpKind::kRelease ? SequenceState::kFree
                             : reserves                      ? SequenceState::kReserved
                                                             : SequenceState::kLive;
  }
  if (next.needed_ > available) {
    return {StatusCode::kOutOfPages, -1, next.needed_, next.needed_ - available, 0, available};
  }
  next.drop_all();
  *this = next;
  return {StatusCode::kOk, -1, needed_, 0, returned_, static_cast<int64_t>(free_.size())};
}

StatusCode Model::admit(const PageOp& op, int32_t entry) const {
  const auto known = [this](int32_t q) { return q >= 0 && q < shape_.table.num_sequences; };
  const int32_t sequence = op.batch.sequences[entry];
  if (!known(sequence)) return StatusCode::kOutOfRange;
  const SequenceState state = states_[sequence];
  if (op.kind == PageOpKind::kFork) {
    if (!known(op.sources[entry])) return StatusCode::kOutOfRange;
    const SequenceState source = states_[op.sources[entry]];
    if (source == SequenceState::kFree) return StatusCode::kStaleSequence;
    if (source == SequenceState::kReserved) return StatusCode::kInvalidArgument;
  }
  if (op.kind == PageOpKind::kFork || op.kind == PageOpKind::kOpen) {
    return state == SequenceState::kFree ? StatusCode::kOk : StatusCode::kInvalidArgument;
  }
  if (state == SequenceState::kFree) return StatusCode::kStaleSequence;
  if (op.kind == PageOpKind::kRelease) return StatusCode::kOk;
  const bool wants_reserved = op.kind == PageOpKind::kKeep;
  return wants_reserved == (state == SequenceState::kReserved) ? StatusCode::kOk
                                                               : StatusCode::kInvalidArgument;
}

StatusCode Model::run_row(const PageOp& op, int32_t entry, int32_t batch_row, Row* row) {
  switch (op.kind) {
    case PageOpKind::kOpen:
      return StatusCode::kOk;
    case PageOpKind::kAppend:
      return append(op.counts[batch_row], row);
    case PageOpKind::kGrow:
      return grow(op.counts[batch_row], row);
    case PageOpKind::kReserve:
      return reserve(op.counts[entry], row);
    case PageOpKind::kTruncate:
      return truncate(op.counts[batch_row], batch_row, row);
    case PageOpKind::kFork: {
      const int32_t per_sequence = shape_.table.rows_per_sequence;
      return fork(rows_[op.sources[entry] * per_sequence + batch_row % per_sequence], batch_row,
                  row);
    }
    case PageOpKind::kRelease:
      for (int32_t s = 0; s < kMaxSides; ++s) {
        const auto count = static_cast<int32_t>(row->pages[s].size());
        for (int32_t i = 0; i < count; ++i) drop_later(batch_row, s, i, row->pages[s][i]);
      }
      *row = {};
      return StatusCode::kOk;  // drop_all() forgets what was reserved
    case PageOpKind::kKeep:
      break;
  }
  // Everything that keep lets go lies between what stays on the left and what moves to the right.
  Row before = *row;
  const StatusCode status = keep(op.counts[batch_row], row);
  if (status != StatusCode::kOk) return status;
  for (int32_t left : {0, 2}) {
    const auto moved = row->pages[left + 1].size() - before.pages[left + 1].size();
    for (size_t i = row->pages[left].size(); i + moved < before.pages[left].size(); ++i) {
      drop_later(batch_row, left, static_cast<int32_t>(i), before.pages[left][i]);
    }
  }
  return StatusCode::kOk;
}

StatusCode Model::append(const SideCounts& added, Row* row) {
  for (int32_t s = 0; s < kMaxSides; ++s) {
    row->tokens[s] += added.of[s];
    if (row->tokens[s] < 0) return StatusCode::kInvalidArgument;
    const int32_t per_page = shape_.table.tokens_per_page[s];
    auto& pages = row->pages[s];
    if (row->tokens[s] > static_cast<int32_t>(pages.size()) * per_page) {
      if (row->tokens[s] > static_cast<int32_t>(pages.size() + 1) * per_page) {
        return StatusCode::kOutOfRange;
      }
      pages.push_back(take());
    }
    if (added.of[s] >= 0) continue;
    for (size_t i = row->tokens[s] / per_page; i < pages.size(); ++i) {
      if (is_shared(pages[i])) return StatusCode::kInvalidArgument;
    }
  }
  return tables_fit(*row) ? StatusCode::kOk : StatusCode::kOutOfRange;
}

StatusCode Model::grow(const SideCounts& tokens, Row* row) {
  for (int32_t s = 0; s < kMaxSides; ++s) {
    if (tokens.of[s] < 0) return StatusCode::kInvalidArgument;
    if (s >= shape_.table.num_sides && tokens.of[s] > 0) return StatusCode::kInvalidArgument;
    auto& pages = row->pages[s];
    if (tokens.of[s] < row->tokens[s]) {
      const int32_t full = tokens.of[s] / shape_.table.tokens_per_page[s];
      for (size_t i = full; i < pages.size(); ++i) {
        if (is_shared(pages[i])) return StatusCode::kInvalidArgument;
      }
      row->tokens[s] = tokens.of[s];
      continue;
    }
    for (; row->tokens[s] < tokens.of[s]; ++row->tokens[s]) {
      const auto held = static_cast<int32_t>(pages.size());
      if (row->tokens[s] < held * shape_.table.tokens_per_page[s]) continue;
      if (held == shape_.table.table_slots[s / 2]) return StatusCode::kOutOfRange;
      pages.push_back(take());
    }
  }
  return tables_fit(*row) ? StatusCode::kOk : StatusCode::kOutOfRange;
}

StatusCode Model::reserve(const SideCounts& more, Row* row) {
  for (int32_t s = 0; s < kMaxSides; ++s) {
    if (more.of[s] < 0) return StatusCode::kInvalidArgument;
    if (more.of[s] > shape_.table.table_slots[s / 2]) return StatusCode::kOutOfRange;
    if (more.of[s] > 0 && s >= shape_.table.num_sides) return StatusCode::kInvalidArgument;
    for (int32_t i = 0; i < more.of[s]; ++i) {
      row->pages[s].push_back(take());
      reserved_.insert(row->pages[s].back());
    }
  }
  return tables_fit(*row) ? StatusCode::kOk : StatusCode::kOutOfRange;
}

StatusCode Model::check_tokens(const SideCounts& tokens) const {
  for (int32_t s = 0; s < kMaxSides; ++s) {
    if (tokens.of[s] < 0) return StatusCode::kInvalidArgument;
    if (s >= shape_.table.num_sides && tokens.of[s] > 0) return StatusCode::kInvalidArgument;
  }
  return StatusCode::kOk;
}

StatusCode Model::keep(const SideCounts& tokens, Row* row) {
  if (const StatusCode s = check_tokens(tokens); s != StatusCode::kOk) return s;
  const auto pages_of = [&](int32_t side, int32_t n) -> int64_t {
    return n == 0 ? 0
                  : (int64_t{n} + shape_.table.tokens_per_page[side] - 1) /
                        shape_.table.tokens_per_page[side];
  };
  for (int32_t left : {0, 2}) {
    auto& from = row->pages[left];
    auto& to = row->pages[left + 1];
    const int64_t stay = pages_of(left, tokens.of[left]);
    const int64_t right = pages_of(left + 1, tokens.of[left + 1]);
    const auto moved = right - static_cast<int64_t>(to.size());
    const int64_t used = pages_of(left, row->tokens[left]);
    const auto held = static_cast<int64_t>(from.size());
    if (moved < 0) return StatusCode::kInvalidArgument;
    if (stay + moved > held || (moved > 0 && used + moved > held)) return StatusCode::kOutOfRange;
    for (int32_t s : {left, left + 1}) {
      const int32_t per_page = shape_.table.tokens_per_page[s];
      if (tokens.of[s] >= row->tokens[s] || tokens.of[s] % per_page == 0) continue;
      if (is_shared(row->pages[s][tokens.of[s] / per_page])) return StatusCode::kInvalidArgument;
    }
    for (int64_t i = 0; i < moved; ++i) {
      to.push_back(from.back());
      from.pop_back();
    }
    from.resize(stay);
  }
  for (int32_t s = 0; s < kMaxSides; ++s) {
    row->tokens[s] = tokens.of[s];
    for (const int32_t page : row->pages[s]) reserved_.erase(page);
  }
  return StatusCode::kOk;
}

StatusCode Model::truncate(const SideCounts& tokens, int32_t batch_row, Row* row) {
  if (const StatusCode s = check_tokens(tokens); s != StatusCode::kOk) return s;
  for (int32_t s = 0; s < kMaxSides; ++s) {
    if (tokens.of[s] > row->tokens[s]) return StatusCode::kInvalidArgument;
  }
  for (int32_t s = 0; s < shape_.table.num_sides; ++s) {
    auto& pages = row->pages[s];
    const int32_t per_page = shape_.table.tokens_per_page[s];
    const int32_t full = tokens.of[s] / per_page, partial = tokens.of[s] % per_page != 0 ? 1 : 0;
    while (static_cast<int32_t>(pages.size()) > full + partial) {
      drop_later(batch_row, s, static_cast<int32_t>(pages.size()) - 1, pages.back());
      pages.pop_back();
    }
    if (partial != 0 && is_shared(pages[full])) {
      drop_later(batch_row, s, full, pages[full]);
      const int32_t old = pages[full];
      pages[full] = take();
      copies_[static_cast<size_t>(batch_row) * kMaxSides + s] = {old, pages[full]};
    }
    row->tokens[s] = tokens.of[s];
  }
  return StatusCode::kOk;
}

StatusCode Model::fork(const Row& source, int32_t batch_row, Row* row) {
  for (int32_t s = 0; s < shape_.table.num_sides; ++s) {
    const int32_t per_page = shape_.table.tokens_per_page[s];
    for (int32_t first = 0; first < source.tokens[s]; first += per_page) {
      const int32_t page = source.pages[s][first / per_page];
      if (source.tokens[s] - first >= per_page) {
        references_[page] += 1;
        row->pages[s].push_back(page);
        continue;
      }
      row->pages[s].push_back(take());
      copies_[static_cast<size_t>(batch_row) * kMaxSides + s] = {page, row->pages[s].back()};
    }
    row->tokens[s] = source.tokens[s];
  }
  return StatusCode::kOk;
}

bool Model::tables_fit(const Row& row) const {
  return row.pages[0].size() + row.pages[1].size() <=
             static_cast<size_t>(shape_.table.table_slots[0]) &&
         row.pages[2].size() + row.pages[3].size() <=
             static_cast<size_t>(shape_.table.table_slots[1]);
}

// When the queue runs dry the operation fails in the end, whatever page stands in.
int32_t Model::take() {
  ++needed_;
  if (free_.empty()) return 0;
  const int32_t page = free_.front();
  free_.pop_front();
  references_[page] = 1;
  return page;
}

void Model::drop_later(int32_t batch_row, int32_t side, int32_t index, int32_t page) {
  const int32_t* slots = shape_.table.table_slots;
  const int32_t ends[kMaxSides] = {index, slots[0] - 1 - index, slots[0] + index,
                                   slots[0] + slots[1] - 1 - index};
  drops_.push_back({batch_row, ends[side], page});
}

void Model::drop_all() {
  std::sort(drops_.begin(), drops_.end(), [](const Drop& a, const Drop& b) {
    return a.batch_row != b.batch_row ? a.batch_row < b.batch_row : a.slot < b.slot;
  });
  for (const Drop& drop : drops_) {
    reserved_.erase(drop.page);
    if (--references_[drop.page] > 0) continue;
    free_.push_back(drop.page);
    ++returned_;
  }
}

std::string Model::difference(const PageAllocator& a) const {
  if (free_ids(a) != std::vector<int32_t>(free_.begin(), free_.end())) return "free ring";
  for (size_t p = 0; p < references_.size(); ++p) {
    const bool is_reserved = reserved_.count(static_cast<int32_t>(p)) > 0;
    if (a.references[p] != (is_reserved ? 1 : std::max(references_[p], 1))) {
      return "reference count of page " + std::to_string(p);
    }
  }
  for (size_t q = 0; q < states_.size(); ++q) {
    if (a.sequences[q].state != states_[q]) return "state of sequence " + std::to_string(q);
  }
  for (size_t r = 0; r < rows_.size(); ++r) {
    for (int32_t s = 0; s < shape_.table.num_sides; ++s) {
      const auto row = static_cast<int32_t>(r);
      if (side_ids(a, row, s) != rows_[r].pages[s] || a.tokens[r].of[s] != rows_[r].tokens[s]) {
        return "row " + std::to_string(r) + " side " + std::to_string(s);
      }
    }
  }
  return "";
}

}  // namespace tierkv::testing
