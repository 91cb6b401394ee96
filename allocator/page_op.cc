// SPDX-License-Identifier: Apache-2.0
#include "allocator/page_op.h"

#include <string>

#include "allocator/host_rows.h"

namespace tierkv {
namespace {

Status invalid(const char* what) {
  return {StatusCode::kInvalidArgument, what};
}

bool is_aligned(const void* p, size_t alignment) {
  return reinterpret_cast<uintptr_t>(p) % alignment == 0;
}

// Rows at fault, and pages needed by the others.
struct Survey {
  int64_t first_error = kNoError;
  int64_t needed = 0;

  void fault(int32_t batch_row, StatusCode status) {
    const int64_t key = error_key(batch_row, status);
    if (key < first_error) first_error = key;
  }
};

// Names the sequence of `r`, the first row of its entry, and finds out whether the batch repeats
// it.
void name_sequence(const PageAllocator& a, const BatchRow& r, Survey* survey) {
  SequenceEntry& entry = a.sequences[r.sequence];
  const int64_t number = a.state->op_number;
  const int32_t repeated = repeated_entry(entry.last_named, number, r.entry);
  if (repeated >= 0) {
    survey->fault(repeated * a.shape.table.rows_per_sequence, StatusCode::kInvalidArgument);
  }
  const int64_t name = naming(number, r.entry);
  if (name > entry.last_named) entry.last_named = name;
}

Survey survey_rows(const PageAllocator& a, const PageOp& op) {
  Survey survey;
  for (int32_t i = 0; i < batch_rows(a, op); ++i) {
    const BatchRow r = batch_row_at(a, op, i);
    if (r.sequence == kPaddingSequence) continue;
    if (!is_sequence(a, r.sequence)) {
      survey.fault(i, StatusCode::kOutOfRange);
      continue;
    }
    if (r.within == 0) name_sequence(a, r, &survey);
    if (const StatusCode s = check_sequence(a, op, r); s != StatusCode::kOk) {
      survey.fault(i, s);
      continue;
    }
    const RowPlan plan = plan_row(a, op, r);
    if (plan.status != StatusCode::kOk) survey.fault(i, plan.status);
    survey.needed += plan.fresh_total;
  }
  return survey;
}

void fork_row(const PageAllocator& a, const PageOp& op, const BatchRow& r, const RowPlan& plan) {
  const int32_t source_row = op.sources[r.entry] * a.shape.table.rows_per_sequence + r.within;
  const int32_t* source = a.slots + line_start(a, source_row);
  int32_t* line = a.slots + line_start(a, r.row);
  for (int32_t s = 0; s < kMaxSides; ++s) {
    const int32_t shared = plan.pages.of[s] - plan.fresh.of[s];
    for (int32_t i = 0; i < shared; ++i) {
      const int32_t slot = a.shape.table.slot_of(s, i);
      line[slot] = source[slot];
      a.references[line[slot]] += 1;
    }
    PageCopy& copy = op.copies[int64_t{r.batch_row} * kMaxSides + s];
    copy = {kNoPage, kNoPage};
    if (plan.fresh.of[s] == 0) continue;
    const int32_t slot = a.shape.table.slot_of(s, shared);
    line[slot] = take_page(a.ring);
    copy = {source[slot], line[slot]};
  }
  a.tokens[r.row] = plan.tokens;
  a.pages[r.row] = plan.pages;
}

// Truncate, before anything is dropped: the new pages. They enter the table in drop_pages().
void exchange_row(const PageAllocator& a, const PageOp& op, const BatchRow& r,
                  const RowPlan& plan) {
  for (int32_t s = 0; s < kMaxSides; ++s) {
    PageCopy& copy = op.copies[int64_t{r.batch_row} * kMaxSides + s];
    copy = {kNoPage, kNoPage};
    if (plan.fresh.of[s] == 0) continue;
    copy.source = page_at(a, r.row, s, plan.pages.of[s] - 1);
    copy.target = take_page(a.ring);
  }
}

void take_rows(const PageAllocator& a, const PageOp& op) {
  for (int32_t i = 0; i < batch_rows(a, op); ++i) {
    const BatchRow r = batch_row_at(a, op, i);
    if (r.sequence == kPaddingSequence) {
      if (op.copies == nullptr) continue;
      for (int32_t s = 0; s < kMaxSides; ++s) {
        op.copies[int64_t{i} * kMaxSides + s] = {kNoPage, kNoPage};
      }
      continue;
    }
    const RowPlan plan = plan_row(a, op, r);
    if (op.kind == PageOpKind::kFork) {
      fork_row(a, op, r, plan);
    } else if (op.kind == PageOpKind::kTruncate) {
      exchange_row(a, op, r, plan);
    } else if (!drops_pages(op.kind)) {
      grow_row(a, r, plan, [&] { return take_page(a.ring); });
    }
  }
}

int32_t drop_pages(const PageAllocator& a, const PageOp& op, const BatchRow& r) {
  const RowDrop drop = drop_row(a, op, r);
  int32_t* line = a.slots + line_start(a, r.row);
  int32_t returned = 0;
  for (int32_t j = 0; j < drop.total; ++j) {
    const DroppedPage dropped = dropped_page(a, drop, j);
    const int32_t page = line[dropped.slot];
    line[dropped.slot] = kNoPage;
    if (dropped.is_recorded && is_frozen(a, page)) {
      a.references[page] -= 1;
      continue;
    }
    give_page(a.ring, page);
    ++returned;
  }
  finish_drop(a, op, r, drop);
  return returned;
}

}  // namespace

Status validate_op(const PageAllocator& a, const PageOp& op) {
  if (a.state == nullptr || a.slots == nullptr) return invalid("allocator has no memory");
  if (op.report == nullptr) return invalid("report is null");
  if (!is_aligned(op.report, alignof(OpReport))) return invalid("report is misaligned");
  if (op.batch.count < 1) return invalid("batch is empty");
  if (op.batch.count > a.shape.table.num_sequences) return invalid("batch exceeds num_sequences");
  if (op.batch.sequences == nullptr) return invalid("batch.sequences is null");
  if (!is_aligned(op.batch.sequences, 4)) return invalid("batch.sequences is misaligned");
  const bool is_fork = op.kind == PageOpKind::kFork, is_truncate = op.kind == PageOpKind::kTruncate;
  if (is_fork && op.sources == nullptr) return invalid("sources is null");
  if (is_fork && !is_aligned(op.sources, 4)) return invalid("sources is misaligned");
  const bool has_counts =
      !is_fork && op.kind != PageOpKind::kOpen && op.kind != PageOpKind::kRelease;
  if (has_counts && op.counts == nullptr) return invalid("counts is null");
  if (has_counts && !is_aligned(op.counts, alignof(SideCounts))) {
    return invalid("counts is not aligned to 16 bytes");
  }
  if ((is_fork || is_truncate) && op.copies == nullptr) return invalid("copies is null");
  if ((is_fork || is_truncate) && !is_aligned(op.copies, 8)) {
    return invalid("copies is not aligned to 8 bytes");
  }
  return Status::ok();
}

Status run_page_op_host(const PageAllocator& a, const PageOp& op) {
  if (Status s = validate_op(a, op); !s) return s;
  const Survey survey = survey_rows(a, op);
  OpReport report = decide(*a.ring.cursors, survey.first_error, survey.needed);
  a.state->op_number += 1;
  if (report.status == StatusCode::kOk) {
    take_rows(a, op);
    for (int32_t i = 0; drops_pages(op.kind) && i < batch_rows(a, op); ++i) {
      const BatchRow r = batch_row_at(a, op, i);
      if (r.sequence != kPaddingSequence) report.pages_returned += drop_pages(a, op, r);
    }
    for (int32_t e = 0; e < op.batch.count; ++e) close_sequence(a, op, e);
    report.pages_free = free_pages(*a.ring.cursors);
  }
  *op.report = report;
  return Status::ok();
}

PageOp PageOp::open(SequenceBatch batch, OpReport* report) {
  return {PageOpKind::kOpen, batch, nullptr, nullptr, nullptr, report};
}
PageOp PageOp::reserve(SequenceBatch batch, const SideCounts* pages, OpReport* report) {
  return {PageOpKind::kReserve, batch, nullptr, pages, nullptr, report};
}
PageOp PageOp::keep(SequenceBatch batch, const SideCounts* tokens, OpReport* report) {
  return {PageOpKind::kKeep, batch, nullptr, tokens, nullptr, report};
}
PageOp PageOp::append(SequenceBatch batch, const SideCounts* added, OpReport* report) {
  return {PageOpKind::kAppend, batch, nullptr, added, nullptr, report};
}
PageOp PageOp::grow(SequenceBatch batch, const SideCounts* tokens, OpReport* report) {
  return {PageOpKind::kGrow, batch, nullptr, tokens, nullptr, report};
}
PageOp PageOp::truncate(SequenceBatch batch, const SideCounts* tokens, PageCopy* copies,
                        OpReport* report) {
  return {PageOpKind::kTruncate, batch, nullptr, tokens, copies, report};
}
PageOp PageOp::release(SequenceBatch batch, OpReport* report) {
  return {PageOpKind::kRelease, batch, nullptr, nullptr, nullptr, report};
}
PageOp PageOp::fork(SequenceBatch batch, const int32_t* sources, PageCopy* copies,
                    OpReport* report) {
  return {PageOpKind::kFork, batch, sources, nullptr, copies, report};
}

}  // namespace tierkv
