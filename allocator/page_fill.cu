// SPDX-License-Identifier: Apache-2.0
// Grow, reserve and fork: a CTA per group of 32 rows fills their tables. New pages are runs of the
// ring and of the line, which eight lanes copy; those of a fork are worked off as one list.

#include "allocator/page_op.cuh"

namespace tierkv {
namespace {

// The plans of a group and the list of their pages.
struct GroupPlans {
  GroupItems items;         // fork: all pages, shared and new
  int32_t row[kGroupRows];  // of the table; -1: padding, or beyond the batch
  int32_t source_row[kGroupRows];
  int32_t before[kGroupRows];  // new pages of the rows before it in the group
  RowPlan plans[kGroupRows];
};

// By the whole CTA. Reads what no stage of the operation changes.
template <PageOpKind kKind>
__device__ void load_plans(const OpLaunch& x, GroupPlans* group) {
  const PageOp op = op_of_kind<kKind>(x);
  if (threadIdx.x < kGroupRows) {
    const int32_t lane = lane_id(), i = group_row(lane);
    const BatchRow r = batch_row_at(x.a, op, i < x.rows ? i : 0);
    const bool is_fork = kKind == PageOpKind::kFork;
    const bool is_real = i < x.rows && is_sequence(x.a, r.sequence) &&
                         (!is_fork || is_sequence(x.a, op.sources[r.entry]));
    const RowPlan plan = is_real ? plan_row(x.a, op, r) : RowPlan{};
    const int32_t* pages = plan.pages.of;
    group->items.set(is_fork ? pages[0] + pages[1] + pages[2] + pages[3] : 0);
    group->before[lane] = warp_exclusive_sum(plan.fresh_total);
    group->plans[lane] = plan;
    group->row[lane] = is_real ? r.row : -1;
    group->source_row[lane] =
        is_real && is_fork ? op.sources[r.entry] * x.a.shape.table.rows_per_sequence + r.within
                           : -1;
  }
  __syncthreads();
}

// New pages of one side of a row, from `offset` of what the operation takes on: `step` is 1 from
// the left and -1 from the right.
__device__ void take_run(const OpLaunch& x, int32_t* slot, int32_t step, int32_t length,
                         int32_t offset) {
  for (int32_t first = run_lane(); first < length; first += kRunStep) {
    int32_t pages[kThreadItems];
#pragma unroll
    for (int32_t q = 0; q < kThreadItems; ++q) {
      const int32_t i = first + kRunLanes * q;
      if (i < length) pages[q] = id_at(x, offset + i);
    }
#pragma unroll
    for (int32_t q = 0; q < kThreadItems; ++q) {
      const int32_t i = first + kRunLanes * q;
      if (i < length) slot[step * i] = pages[q];
    }
  }
}

// Eight lanes per row: its pages lie one after the other in the ring, side by side, and in its line
// each side's from its end on.
__device__ void take_rows(const OpLaunch& x, const GroupPlans& group) {
  const PageTableShape& shape = x.a.shape.table;
  const int32_t base = x.scratch.group_offsets[blockIdx.x];
  for (int32_t row = first_row(); row < kGroupRows; row += kRunRows) {
    if (group.row[row] < 0) continue;
    const RowPlan& plan = group.plans[row];
    int32_t* line = x.a.slots + line_start(x.a, group.row[row]);
    int32_t offset = base + group.before[row];
    for (int32_t s = 0; s < kMaxSides; ++s) {
      const int32_t fresh = plan.fresh.of[s];
      if (fresh == 0) continue;
      int32_t* slot = line + shape.slot_of(s, plan.pages.of[s] - fresh);
      take_run(x, slot, (s & 1) == 0 ? 1 : -1, fresh, offset);
      offset += fresh;
    }
  }
}

// Page j of the new row: shared, or the new page for an open one.
__device__ void fork_item(const OpLaunch& x, const GroupPlans& group, int32_t row, int32_t j) {
  const RowPlan& plan = group.plans[row];
  const int32_t* source = x.a.slots + line_start(x.a, group.source_row[row]);
  int32_t* line = x.a.slots + line_start(x.a, group.row[row]);
  int32_t offset = x.scratch.group_offsets[blockIdx.x] + group.before[row];
  for (int32_t s = 0; s < kMaxSides; ++s) {
    if (j >= 0 && j < plan.pages.of[s]) {
      const int32_t slot = x.a.shape.table.slot_of(s, j), page = source[slot];
      const bool is_open = plan.fresh.of[s] != 0 && j == plan.pages.of[s] - 1;
      line[slot] = is_open ? id_at(x, offset) : page;
      if (is_open) {
        copies_of(x.op, group_row(row))[s] = {page, line[slot]};
      } else {
        atomicAdd(&x.a.references[page], 1);
      }
    }
    j -= plan.pages.of[s];
    offset += plan.fresh.of[s];
  }
}

__device__ void fork_items(const OpLaunch& x, const GroupPlans& group) {
  const int32_t i = group_row(lane_id());
  if (threadIdx.x < kGroupRows && i < x.rows) clear_copies(x.op, i);
  __syncthreads();
  for (int32_t item = threadIdx.x; item < group.items.total(); item += kGroupThreads) {
    const int32_t row = group.items.row_of(item);
    fork_item(x, group, row, item - group.items.first[row]);
  }
}

// The kernel behind it can start once every CTA of this one has started, and they started when all
// work before the operation had ended.
template <PageOpKind kKind>
__global__ void __launch_bounds__(kGroupThreads, 8)
    fill_kernel(const __grid_constant__ OpLaunch x) {
  __shared__ GroupPlans group;
  let_next_stage_start();
  load_plans<kKind>(x, &group);
  wait_for_stage();
  if (!goes_ahead(x)) return;
  if (kKind == PageOpKind::kFork) {
    fork_items(x, group);
  } else {
    take_rows(x, group);
  }
  if (threadIdx.x >= kGroupRows || group.row[lane_id()] < 0) return;
  x.a.tokens[group.row[lane_id()]] = group.plans[lane_id()].tokens;
  x.a.pages[group.row[lane_id()]] = group.plans[lane_id()].pages;
}

}  // namespace

cudaError_t launch_fill(const OpLaunch& x, cudaStream_t stream) {
  const StageKernel kernel = x.op.kind == PageOpKind::kFork   ? fill_kernel<PageOpKind::kFork>
                             : x.op.kind == PageOpKind::kGrow ? fill_kernel<PageOpKind::kGrow>
                                                              : fill_kernel<PageOpKind::kReserve>;
  return launch_stage(kernel, x.groups, kGroupThreads, x, stream);
}

}  // namespace tierkv
