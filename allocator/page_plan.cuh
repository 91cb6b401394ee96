// What the plan stage of an operation comes to: which row is at fault, and the decision.
#pragma once

#include "allocator/page_op.cuh"

namespace tierkv {

__device__ inline void fault(const PageAllocator& a, int32_t batch_row, StatusCode status) {
  atomicMin(reinterpret_cast<long long*>(&a.state->first_error),
            static_cast<long long>(error_key(batch_row, status)));
}

// As the host's name_sequence(); the order in which threads come does not matter.
__device__ inline void name_sequence(const PageAllocator& a, const BatchRow& r) {
  const int64_t number = a.state->op_number;
  const auto before = static_cast<int64_t>(
      atomicMax(reinterpret_cast<long long*>(&a.sequences[r.sequence].last_named),
                static_cast<long long>(naming(number, r.entry))));
  const int32_t repeated = repeated_entry(before, number, r.entry);
  if (repeated >= 0) {
    fault(a, repeated * a.shape.table.rows_per_sequence, StatusCode::kInvalidArgument);
  }
}

// By one thread: `pages` are taken, or (keep, release) dropped.
__device__ inline void decide_op(const OpLaunch& x, PageOpKind kind, int64_t pages) {
  const PageAllocator& a = x.a;
  const auto first_error =
      static_cast<int64_t>(atomicExch(reinterpret_cast<unsigned long long*>(&a.state->first_error),
                                      static_cast<unsigned long long>(kNoError)));
  const bool takes = kind != PageOpKind::kKeep && kind != PageOpKind::kRelease;
  const bool counts = kind == PageOpKind::kTruncate || atomicExch(&a.state->shares, 0) != 0;
  const RingCursors cursors = *a.ring.cursors;
  OpReport report = decide(cursors, first_error, takes ? pages : 0);
  *x.scratch.decision = {report.status, ring_index(cursors.start, a.ring.num_pages),
                         ring_index(cursors.end, a.ring.num_pages), counts};
  if (report.status == StatusCode::kOk && takes) a.ring.cursors->start = cursors.start + pages;
  if (report.status == StatusCode::kOk && !takes && !counts) {
    a.ring.cursors->end = cursors.end + pages;
    report.pages_returned = pages;
    report.pages_free += pages;
  }
  a.state->op_number += 1;
  *x.op.report = report;
}

}  // namespace tierkv
