// SPDX-License-Identifier: Apache-2.0
#include "allocator/invariants.h"

#include <algorithm>
#include <string>

#include "allocator/free_ring.h"
#include "allocator/row_plan.h"

namespace tierkv {
namespace {

Status broken(const char* law, const char* what, int64_t which) {
  return {StatusCode::kCorrupt, std::string(law) + ": " + what + " " + std::to_string(which)};
}

bool is_page(const PageAllocator& a, int32_t page) {
  return page >= 0 && page < a.shape.num_pages;
}

bool is_state(SequenceState s) {
  return s == SequenceState::kFree || s == SequenceState::kLive || s == SequenceState::kReserved;
}

}  // namespace

Status InvariantChecker::check(const PageAllocator& a) {
  const auto pages = static_cast<size_t>(a.shape.num_pages);
  tables_.assign(pages, 0);
  holder_.assign(pages, Holder::kTables);
  if (Status s = check_ring(a); !s) return s;
  for (int32_t q = 0; q < a.shape.table.num_sequences; ++q) {
    const SequenceEntry& sequence = a.sequences[q];
    if (!is_state(sequence.state))
      return broken("a sequence has one of three states", "sequence", q);
    for (int32_t w = 0; w < a.shape.table.rows_per_sequence; ++w) {
      const int32_t row = q * a.shape.table.rows_per_sequence + w;
      if (Status s = check_row(a, row, sequence); !s) return s;
    }
  }
  if (Status s = check_references(a); !s) return s;
  if (a.state->first_error != kNoError || a.state->arrived != 0 || a.state->shares != 0) {
    return broken("nothing is left over from an operation", "arrived", a.state->arrived);
  }
  return Status::ok();
}

Status InvariantChecker::check_ring(const PageAllocator& a) {
  const RingCursors& c = *a.ring.cursors;
  if (c.start < 0 || c.end < c.start || free_pages(c) > a.shape.num_pages) {
    return broken("0 <= end - start <= num_pages", "start", c.start);
  }
  const int32_t base = ring_index(c.start, a.shape.num_pages);
  for (int32_t i = 0; i < free_pages(c); ++i) {
    const int32_t page = a.ring.ids[ring_advance(base, i, a.shape.num_pages)];
    if (!is_page(a, page)) return broken("the free ring holds page ids", "position", c.start + i);
    if (holder_[page] == Holder::kRing)
      return broken("a free page is in the ring once", "page", page);
    holder_[page] = Holder::kRing;
  }
  return Status::ok();
}

Status InvariantChecker::check_row(const PageAllocator& a, int32_t row,
                                   const SequenceEntry& sequence) {
  const PageTableShape& shape = a.shape.table;
  const SideCounts& pages = a.pages[row];
  const SideCounts& tokens = a.tokens[row];
  for (int32_t s = 0; s < kMaxSides; ++s) {
    if (pages.of[s] < 0 || tokens.of[s] < 0) return broken("counts are not negative", "row", row);
    if (s >= shape.num_sides && (pages.of[s] != 0 || tokens.of[s] != 0)) {
      return broken("a side that the shape lacks is empty", "row", row);
    }
  }
  if (sequence.state == SequenceState::kFree && (pages != SideCounts{} || tokens != SideCounts{})) {
    return broken("a free sequence holds nothing", "row", row);
  }
  int32_t used = 0;
  for (int32_t t = 0; t < kMaxTables; ++t) {
    const int64_t both = int64_t{pages.of[2 * t]} + pages.of[2 * t + 1];
    if (both > shape.table_slots[t]) return broken("left + right <= slots", "row", row);
    used += static_cast<int32_t>(both);
  }
  for (int32_t s = 0; s < shape.num_sides; ++s) {
    const int32_t reserved = sequence.reserved.of[s];
    if (reserved < 0 || reserved > pages.of[s] ||
        (reserved > 0 && sequence.state != SequenceState::kReserved)) {
      return broken("a reserved sequence holds what it reserved", "row", row);
    }
    if ((int64_t{pages.of[s]} - reserved) * shape.tokens_per_page[s] < tokens.of[s]) {
      return broken("the pages of a side hold its tokens", "row", row);
    }
    if (Status status = check_line(a, row, s, sequence); !status) return status;
  }
  int32_t filled = 0;
  for (int32_t i = 0; i < shape.row_stride(); ++i) {
    filled += a.slots[line_start(a, row) + i] != kNoPage;
  }
  return filled == used ? Status::ok() : broken("slots beyond the counts are empty", "row", row);
}

Status InvariantChecker::check_line(const PageAllocator& a, int32_t row, int32_t side,
                                    const SequenceEntry& sequence) {
  const int32_t reserved = sequence.reserved.of[side];
  const int32_t full = a.tokens[row].of[side] / a.shape.table.tokens_per_page[side];
  for (int32_t i = 0; i < a.pages[row].of[side]; ++i) {
    const int32_t page = page_at(a, row, side, i);
    if (!is_page(a, page)) return broken("the counts' slots hold page ids", "row", row);
    if (holder_[page] == Holder::kRing)
      return broken("a page of a table is not free", "page", page);
    if (i >= a.pages[row].of[side] - reserved) {
      if (holder_[page] == Holder::kReserve) return broken("a page is reserved once", "page", page);
      holder_[page] = Holder::kReserve;
      continue;
    }
    if (i >= full && is_frozen(a, page)) {
      return broken("only full pages are shared", "page", page);
    }
    if (sequence.shares == 0 && is_frozen(a, page)) {
      return broken("only sequences that were forked share pages", "page", page);
    }
    tables_[page] += 1;
  }
  return Status::ok();
}

Status InvariantChecker::check_references(const PageAllocator& a) const {
  for (int32_t p = 0; p < a.shape.num_pages; ++p) {
    if (a.references[p] != std::max(tables_[p], 1)) {
      return broken("a page is in as many tables as its reference count says", "page", p);
    }
    if ((tables_[p] > 0) != (holder_[p] == Holder::kTables)) {
      return broken("a page is in the ring, reserved, or in tables", "page", p);
    }
    if (a.drop_marks[p].last_row != 0 || a.drop_marks[p].count != 0)
      return broken("nothing is left over from an operation", "page", p);
  }
  return Status::ok();
}

}  // namespace tierkv
