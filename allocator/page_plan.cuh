// SPDX-License-Identifier: Apache-2.0
// What the plan stage of an operation comes to: which row is at fault, and the decision.
#pragma once

#include "allocator/page_op.cuh"

namespace tierkv {

__device__ inline void fault(const PageAllocator& a, int32_t batch_row, StatusCode status) {
  atomicMin(reinterpret_cast<long long*>(&a.state->first_error),
            static_cast<long long>(error_key(batch_row, status)));
}

// As the host's name_sequence(); the order in which threads come does not matter. The batch row at
// fault, or -1.
__device__ inline int32_t name_sequence(const PageAllocator& a, const BatchRow& r) {
  const int64_t number = a.state->op_number;
  const auto before = static_cast<int64_t>(
      atomicMax(reinterpret_cast<long long*>(&a.sequences[r.sequence].last_named),
                static_cast<long long>(naming(number, r.entry))));
  const int32_t repeated = repeated_entry(before, number, r.entry);
  return repeated < 0 ? -1 : repeated * a.shape.table.rows_per_sequence;
}

// By one thread: all pages that are dropped return.
__device__ inline void return_all(const OpLaunch& x, int64_t pages) {
  const RingCursors cursors = *x.a.ring.cursors;
  x.a.ring.cursors->end = cursors.end + pages;
  x.op.report->pages_returned = pages;
  x.op.report->pages_free = free_pages(cursors) + pages;
}

// By one thread: `pages` are taken, or (keep, release) dropped.
__device__ inline void decide_op(const OpLaunch& x, PageOpKind kind, int64_t pages) {
  const PageAllocator& a = x.a;
  const auto first_error =
      static_cast<int64_t>(atomicExch(reinterpret_cast<unsigned long long*>(&a.state->first_error),
                                      static_cast<unsigned long long>(kNoError)));
  const bool takes = kind != PageOpKind::kKeep && kind != PageOpKind::kRelease;
  const bool is_truncate = kind == PageOpKind::kTruncate;
  const bool marks = is_truncate || (!takes && atomicExch(&a.state->shares, 0) != 0);
  const RingCursors cursors = *a.ring.cursors;
  const OpReport report = decide(cursors, first_error, takes ? pages : 0);
  *x.scratch.decision = {report.status,
                         ring_index(cursors.start, a.ring.num_pages),
                         ring_index(cursors.end, a.ring.num_pages),
                         pages,
                         marks,
                         is_truncate};
  a.state->op_number += 1;
  *x.op.report = report;
  if (report.status != StatusCode::kOk) return;
  if (takes) a.ring.cursors->start = cursors.start + pages;
  if (!takes && !marks) return_all(x, pages);
}

}  // namespace tierkv
