// SPDX-License-Identifier: Apache-2.0
// The checks of an operation's call, and its decision; shared by host reference, CPU manager and
// kernels.
#pragma once

#include "allocator/free_ring.h"
#include "allocator/row_plan.h"

namespace tierkv {

// kInvalidArgument naming what is null, misaligned or out of bounds.
Status validate_op(const PageAllocator& a, const PageOp& op);

// The report of an operation whose rows need `needed` pages together; first_error is kNoError or
// the least error key.
TKV_HD OpReport decide(const RingCursors& cursors, int64_t first_error, int64_t needed) {
  const int64_t free = free_pages(cursors);
  OpReport report = {StatusCode::kOk, -1, needed, 0, 0, free};
  if (first_error != kNoError) {
    report.status = error_status(first_error);
    report.batch_row = error_row(first_error);
    report.pages_needed = 0;
  } else if (needed > free) {
    report.status = StatusCode::kOutOfPages;
    report.pages_missing = needed - free;
  } else {
    report.pages_free = free - needed;
  }
  return report;
}

}  // namespace tierkv
