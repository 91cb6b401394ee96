// SPDX-License-Identifier: Apache-2.0
// Append and the first half of truncate: a thread per row takes a page or two.

#include "allocator/page_op.cuh"

namespace tierkv {
namespace {

__device__ void append_row(const OpLaunch& x, const BatchRow& r, const RowPlan& plan,
                           int32_t offset) {
  const PageAllocator& a = x.a;
  for (int32_t s = 0; s < kMaxSides; ++s) {
    if (plan.fresh.of[s] == 0) continue;
    const int32_t slot = a.shape.table.slot_of(s, plan.pages.of[s] - 1);
    a.slots[line_start(a, r.row) + slot] = id_at(x, offset++);
  }
  a.tokens[r.row] = plan.tokens;
  if (plan.fresh_total > 0) a.pages[r.row] = plan.pages;
}

// The new pages enter the table when the old ones have been dropped.
__device__ void exchange_row(const OpLaunch& x, const BatchRow& r, const RowPlan& plan,
                             int32_t offset) {
  clear_copies(x.op, r.batch_row);
  for (int32_t s = 0; s < kMaxSides; ++s) {
    if (plan.fresh.of[s] == 0) continue;
    const int32_t source = page_at(x.a, r.row, s, plan.pages.of[s] - 1);
    copies_of(x.op, r.batch_row)[s] = {source, id_at(x, offset++)};
  }
}

// The plan stage changes nothing that a row's plan reads, so the plan is made again while that
// stage ends.
template <PageOpKind kKind>
__global__ void __launch_bounds__(kRowThreads) take_kernel(const __grid_constant__ OpLaunch x) {
  const PageOp op = op_of_kind<kKind>(x);
  if (kKind == PageOpKind::kTruncate) let_next_stage_start();
  const int32_t i = static_cast<int32_t>(blockIdx.x * kRowThreads + threadIdx.x);
  const BatchRow r = batch_row_at(x.a, op, i < x.rows ? i : 0);
  const bool is_real = i < x.rows && is_sequence(x.a, r.sequence);
  const RowPlan plan = is_real ? plan_row(x.a, op, r) : RowPlan{};
  const int32_t before = warp_exclusive_sum(plan.fresh_total);
  wait_for_stage();
  if (i >= x.rows || !goes_ahead(x)) return;
  if (!is_real) {
    if (kKind == PageOpKind::kTruncate) clear_copies(op, i);
    return;
  }
  const int32_t offset = x.scratch.group_offsets[i / kGroupRows] + before;
  if (kKind == PageOpKind::kTruncate) {
    exchange_row(x, r, plan, offset);
  } else {
    append_row(x, r, plan, offset);
  }
}

}  // namespace

cudaError_t launch_take(const OpLaunch& x, cudaStream_t stream) {
  const StageKernel kernel = x.op.kind == PageOpKind::kTruncate ? take_kernel<PageOpKind::kTruncate>
                                                                : take_kernel<PageOpKind::kAppend>;
  return launch_stage(kernel, (x.rows + kRowThreads - 1) / kRowThreads, kRowThreads, x, stream);
}

}  // namespace tierkv
