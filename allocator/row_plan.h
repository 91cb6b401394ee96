// SPDX-License-Identifier: Apache-2.0
// What an operation means for one row, decided from the state before it. Shared by the host
// reference, the CPU manager and the kernels, which differ only in how they deal out the pages.
#pragma once

#include <cstdint>

#include "tierkv/allocator.h"

namespace tierkv {

// The row of a batch that a thread or an iteration works on.
struct BatchRow {
  int32_t batch_row;
  int32_t entry;     // of the batch
  int32_t within;    // row within its sequence
  int32_t sequence;  // -1: padding
  int32_t row;       // of the table; only for a valid sequence
};

TKV_HD BatchRow batch_row_at(const PageAllocator& a, const PageOp& op, int32_t i) {
  const int32_t per_sequence = a.shape.table.rows_per_sequence;
  const int32_t entry = i / per_sequence, within = i - entry * per_sequence;
  const int32_t sequence = op.batch.sequences[entry];
  return {i, entry, within, sequence, sequence * per_sequence + within};
}

TKV_HD int32_t batch_rows(const PageAllocator& a, const PageOp& op) {
  return op.batch.count * a.shape.table.rows_per_sequence;
}

// A row after the operation, and the pages it takes from the ring first.
struct RowPlan {
  StatusCode status = StatusCode::kOk;
  int32_t fresh_total = 0;
  SideCounts fresh;  // new pages of each side (truncate: 1 where a shared page is exchanged)
  SideCounts tokens;
  SideCounts pages;
};

TKV_HD RowPlan failed_plan(StatusCode status) {
  RowPlan plan;
  plan.status = status;
  return plan;
}

// Errors of a batch are ordered by this key: the first row counts.
TKV_HD int64_t error_key(int32_t batch_row, StatusCode status) {
  return static_cast<int64_t>(batch_row) << 8 | static_cast<int64_t>(status);
}
TKV_HD StatusCode error_status(int64_t key) {
  return static_cast<StatusCode>(key & 0xff);
}
TKV_HD int32_t error_row(int64_t key) {
  return static_cast<int32_t>(key >> 8);
}

// SequenceEntry::last_named of a sequence at place `entry` of the batch. Within an operation the
// first place is the greatest value, and any value of an earlier operation is less than all of
// them.
TKV_HD int64_t naming(int64_t op_number, int32_t entry) {
  return op_number * kMaxSequences + (kMaxSequences - 1 - entry);
}
// The place at fault when `entry` finds that this operation has named the sequence before; -1 when
// it has not. Whatever the order in which places are visited, the least place at fault is the
// second one that names the sequence.
TKV_HD int32_t repeated_entry(int64_t last_named, int64_t op_number, int32_t entry) {
  if (last_named / kMaxSequences != op_number) return -1;
  const auto other = static_cast<int32_t>(kMaxSequences - 1 - last_named % kMaxSequences);
  return other > entry ? other : entry;
}

TKV_HD StatusCode check_state(SequenceState state, bool allow_live, bool allow_reserved) {
  if (state == SequenceState::kFree) return StatusCode::kStaleSequence;
  const bool allowed = state == SequenceState::kLive ? allow_live : allow_reserved;
  return allowed ? StatusCode::kOk : StatusCode::kInvalidArgument;
}

TKV_HD bool is_sequence(const PageAllocator& a, int32_t sequence) {
  return sequence >= 0 && sequence < a.shape.table.num_sequences;
}

// Whether the sequence, which is one, may undergo the operation; repetition aside.
TKV_HD StatusCode check_sequence(const PageAllocator& a, const PageOp& op, const BatchRow& r) {
  const SequenceState state = a.sequences[r.sequence].state;
  switch (op.kind) {
    case PageOpKind::kFork: {
      const int32_t source = op.sources[r.entry];
      if (!is_sequence(a, source)) return StatusCode::kOutOfRange;
      const StatusCode ok = check_state(a.sequences[source].state, true, false);
      if (ok != StatusCode::kOk) return ok;
      return state == SequenceState::kFree ? StatusCode::kOk : StatusCode::kInvalidArgument;
    }
    case PageOpKind::kOpen:
      return state == SequenceState::kFree ? StatusCode::kOk : StatusCode::kInvalidArgument;
    case PageOpKind::kKeep:
      return check_state(state, false, true);
    case PageOpKind::kRelease:
      return check_state(state, true, true);
    default:
      return check_state(state, true, false);
  }
}

TKV_HD SequenceState state_after(PageOpKind kind) {
  switch (kind) {
    case PageOpKind::kRelease:
      return SequenceState::kFree;
    case PageOpKind::kReserve:
      return SequenceState::kReserved;
    default:
      return SequenceState::kLive;
  }
}

// The last thing an operation does to entry `entry` of its batch.
TKV_HD void close_sequence(const PageAllocator& a, const PageOp& op, int32_t entry) {
  const int32_t sequence = op.batch.sequences[entry];
  if (sequence == kPaddingSequence) return;
  a.sequences[sequence].state = state_after(op.kind);
  if (op.kind == PageOpKind::kRelease) a.sequences[sequence].shares = 0;
  if (op.kind == PageOpKind::kFork) {
    a.sequences[sequence].shares = 1;
    a.sequences[op.sources[entry]].shares = 1;
  }
  a.sequences[sequence].reserved =
      op.kind == PageOpKind::kReserve ? op.counts[entry] : SideCounts{};
}

TKV_HD int64_t line_start(const PageAllocator& a, int32_t row) {
  return static_cast<int64_t>(row) * a.shape.table.row_stride();
}

TKV_HD int32_t page_at(const PageAllocator& a, int32_t row, int32_t side, int32_t index) {
  return a.slots[line_start(a, row) + a.shape.table.slot_of(side, index)];
}

// Fills in fresh_total; kOutOfRange where left and right would meet.
TKV_HD void finish_growth(const PageAllocator& a, RowPlan* plan) {
  const int32_t* pages = plan->pages.of;
  if (pages[0] + pages[1] > a.shape.table.table_slots[0] ||
      pages[2] + pages[3] > a.shape.table.table_slots[1]) {
    *plan = failed_plan(StatusCode::kOutOfRange);
    return;
  }
  const int32_t* fresh = plan->fresh.of;
  plan->fresh_total = fresh[0] + fresh[1] + fresh[2] + fresh[3];
}

// The pages that a row's next tokens go to: none may be shared.
TKV_HD bool is_writable_from(const PageAllocator& a, int32_t row, int32_t side, int32_t tokens) {
  for (int32_t i = tokens / a.shape.table.tokens_per_page[side]; i < a.pages[row].of[side]; ++i) {
    if (is_frozen(a, page_at(a, row, side, i))) return false;
  }
  return true;
}

// A row as it is and what it gains.
struct RowGrowth {
  int32_t row;
  SideCounts tokens, pages, added;
};

TKV_HD RowPlan plan_growth(const PageAllocator& a, const RowGrowth& r) {
  RowPlan plan;
  const SideCounts &tokens = r.tokens, &added = r.added;
  plan.pages = r.pages;
  for (int32_t s = 0; s < kMaxSides; ++s) {
    const int64_t after = static_cast<int64_t>(tokens.of[s]) + added.of[s];
    if (after < 0) return failed_plan(StatusCode::kInvalidArgument);
    const int64_t per_page = a.shape.table.tokens_per_page[s];
    const int64_t room = plan.pages.of[s] * per_page;
    if (after > room) {
      if (after > room + per_page) return failed_plan(StatusCode::kOutOfRange);
      plan.fresh.of[s] = 1;
      plan.pages.of[s] += 1;
    }
    plan.tokens.of[s] = static_cast<int32_t>(after);
    if (added.of[s] < 0 && !is_writable_from(a, r.row, s, plan.tokens.of[s])) {
      return failed_plan(StatusCode::kInvalidArgument);
    }
  }
  finish_growth(a, &plan);
  return plan;
}
TKV_HD RowPlan plan_append(const PageAllocator& a, const PageOp& op, const BatchRow& r) {
  return plan_growth(a, {r.row, a.tokens[r.row], a.pages[r.row], op.counts[r.batch_row]});
}

TKV_HD RowPlan plan_grow(const PageAllocator& a, const PageOp& op, const BatchRow& r) {
  RowPlan plan;
  plan.tokens = op.counts[r.batch_row];
  plan.pages = a.pages[r.row];
  for (int32_t s = 0; s < kMaxSides; ++s) {
    const int32_t tokens = plan.tokens.of[s], before = a.tokens[r.row].of[s];
    if (tokens < 0) return failed_plan(StatusCode::kInvalidArgument);
    if (tokens < before && !is_writable_from(a, r.row, s, tokens)) {
      return failed_plan(StatusCode::kInvalidArgument);
    }
    if (s >= a.shape.table.num_sides) {
      if (tokens != 0) return failed_plan(StatusCode::kInvalidArgument);
      continue;
    }
    const int32_t pages = pages_for(tokens, a.shape.table.tokens_per_page[s]);
    if (pages > a.shape.table.table_slots[s >> 1]) return failed_plan(StatusCode::kOutOfRange);
    if (pages <= plan.pages.of[s]) continue;
    plan.fresh.of[s] = pages - plan.pages.of[s];
    plan.pages.of[s] = pages;
  }
  finish_growth(a, &plan);
  return plan;
}

TKV_HD RowPlan plan_reserve(const PageAllocator& a, const PageOp& op, const BatchRow& r) {
  RowPlan plan;
  plan.tokens = a.tokens[r.row];
  plan.pages = a.pages[r.row];
  plan.fresh = op.counts[r.entry];
  for (int32_t s = 0; s < kMaxSides; ++s) {
    if (plan.fresh.of[s] < 0) return failed_plan(StatusCode::kInvalidArgument);
    if (plan.fresh.of[s] > a.shape.table.table_slots[s >> 1]) {
      return failed_plan(StatusCode::kOutOfRange);
    }
    if (s >= a.shape.table.num_sides && plan.fresh.of[s] > 0) {
      return failed_plan(StatusCode::kInvalidArgument);
    }
    plan.pages.of[s] += plan.fresh.of[s];
  }
  finish_growth(a, &plan);
  return plan;
}

// Pages that hold exactly plan->tokens, or a status.
TKV_HD StatusCode fit_pages(const PageAllocator& a, RowPlan* plan) {
  for (int32_t s = 0; s < kMaxSides; ++s) {
    const int32_t tokens = plan->tokens.of[s];
    if (tokens < 0) return StatusCode::kInvalidArgument;
    if (s >= a.shape.table.num_sides) {
      if (tokens != 0) return StatusCode::kInvalidArgument;
      continue;
    }
    plan->pages.of[s] = pages_for(tokens, a.shape.table.tokens_per_page[s]);
  }
  return StatusCode::kOk;
}

// Keep must not leave a shared page partly filled: only truncate exchanges pages.
TKV_HD bool opens_shared_page(const PageAllocator& a, int32_t row, int32_t side, int32_t tokens) {
  if (tokens >= a.tokens[row].of[side]) return false;
  const int32_t per_page = a.shape.table.tokens_per_page[side];
  return tokens % per_page != 0 && is_frozen(a, page_at(a, row, side, tokens / per_page));
}

TKV_HD RowPlan plan_keep(const PageAllocator& a, const PageOp& op, const BatchRow& r) {
  RowPlan plan;
  plan.tokens = op.counts[r.batch_row];
  const StatusCode status = fit_pages(a, &plan);
  if (status != StatusCode::kOk) return failed_plan(status);
  const SideCounts held = a.pages[r.row], tokens = a.tokens[r.row];
  for (int32_t left = 0; left < kMaxSides; left += 2) {
    const int32_t moved = plan.pages.of[left + 1] - held.of[left + 1];
    if (moved < 0) return failed_plan(StatusCode::kInvalidArgument);
    // Pages move only from those that no token of the left side has used.
    const int32_t used =
        tokens.of[left] == 0 ? 0 : pages_for(tokens.of[left], a.shape.table.tokens_per_page[left]);
    const int32_t stay = plan.pages.of[left] > used || moved == 0 ? plan.pages.of[left] : used;
    if (static_cast<int64_t>(stay) + moved > held.of[left]) {
      return failed_plan(StatusCode::kOutOfRange);
    }
    if (opens_shared_page(a, r.row, left, plan.tokens.of[left]) ||
        opens_shared_page(a, r.row, left + 1, plan.tokens.of[left + 1])) {
      return failed_plan(StatusCode::kInvalidArgument);
    }
  }
  return plan;
}

TKV_HD RowPlan plan_truncate(const PageAllocator& a, const PageOp& op, const BatchRow& r) {
  RowPlan plan;
  plan.tokens = op.counts[r.batch_row];
  const StatusCode status = fit_pages(a, &plan);
  if (status != StatusCode::kOk) return failed_plan(status);
  const SideCounts tokens = a.tokens[r.row];
  for (int32_t s = 0; s < kMaxSides; ++s) {
    if (plan.tokens.of[s] > tokens.of[s]) return failed_plan(StatusCode::kInvalidArgument);
    if (s >= a.shape.table.num_sides) continue;
    const bool partial = plan.tokens.of[s] % a.shape.table.tokens_per_page[s] != 0;
    plan.fresh.of[s] = partial && is_frozen(a, page_at(a, r.row, s, plan.pages.of[s] - 1)) ? 1 : 0;
    plan.fresh_total += plan.fresh.of[s];
  }
  return plan;
}

TKV_HD RowPlan plan_fork(const PageAllocator& a, const PageOp& op, const BatchRow& r) {
  RowPlan plan;
  const int32_t source_row = op.sources[r.entry] * a.shape.table.rows_per_sequence + r.within;
  plan.tokens = a.tokens[source_row];
  for (int32_t s = 0; s < kMaxSides; ++s) {
    if (s >= a.shape.table.num_sides) continue;
    const int32_t per_page = a.shape.table.tokens_per_page[s];
    plan.pages.of[s] = pages_for(plan.tokens.of[s], per_page);
    plan.fresh.of[s] = plan.tokens.of[s] % per_page != 0 ? 1 : 0;
    plan.fresh_total += plan.fresh.of[s];
  }
  return plan;
}

// The row's plan; its sequence has passed check_sequence(). Reads the state of the row (fork: of
// the source row), which the operation has not touched yet.
TKV_HD RowPlan plan_row(const PageAllocator& a, const PageOp& op, const BatchRow& r) {
  switch (op.kind) {
    case PageOpKind::kAppend:
      return plan_append(a, op, r);
    case PageOpKind::kGrow:
      return plan_grow(a, op, r);
    case PageOpKind::kReserve:
      return plan_reserve(a, op, r);
    case PageOpKind::kKeep:
      return plan_keep(a, op, r);
    case PageOpKind::kTruncate:
      return plan_truncate(a, op, r);
    case PageOpKind::kFork:
      return plan_fork(a, op, r);
    default:
      return {};  // open, release: an empty row
  }
}

}  // namespace tierkv
