// PageOp::append inside two kernels of a caller that plans its rows itself: what a row gains is
// known where it is planned, and the pages are taken where they are written. The same states and
// reports as by run_page_op_device(), two kernels and the reading of all counts fewer.
//
//   first kernel   survey_growth() for every row, then deal_pages() by whole CTAs. A CTA has
//                  consecutive rows of the batch, group g those of CTA g
//   second kernel  take_pages() for every row where goes_ahead()
//
// x.scratch.group_offsets has an entry for each CTA of the first kernel.
#pragma once

#include "allocator/page_plan.cuh"

namespace tierkv {

// By one thread per row, or several with one answer. A failed plan is noted.
__device__ inline RowPlan survey_growth(const OpLaunch& x, const BatchRow& r,
                                        const RowGrowth& growth) {
  const StatusCode status = check_sequence(x.a, x.op, r);
  const RowPlan plan = status == StatusCode::kOk ? plan_growth(x.a, growth) : failed_plan(status);
  if (plan.status != StatusCode::kOk) fault(x.a, r.batch_row, plan.status);
  return plan;
}

__device__ inline PlannedGrowth planned_growth(const RowPlan& plan) {
  PlannedGrowth growth = {plan.tokens, 0, 0, {0, 0}};
  for (int32_t s = 0; s < kMaxSides; ++s) {
    growth.fresh |= static_cast<uint32_t>(plan.fresh.of[s]) << s;
  }
  return growth;
}

// By the whole CTA: `pages` of each thread, in the order of its rows. Returns those of the threads
// before it. The CTA that comes last of the grid, or of all grids of the operation, decides.
template <int kThreads>
__device__ int32_t deal_pages(const OpLaunch& x, int32_t pages, int32_t group, int32_t groups) {
  __shared__ int32_t warp_pages[kThreads / 32];
  const int32_t warp = static_cast<int32_t>(threadIdx.x) / 32;
  int32_t before = warp_exclusive_sum(pages);
  if (lane_id() == 31) warp_pages[warp] = before + pages;
  __syncthreads();
  int32_t total = 0;
  for (int32_t w = 0; w < kThreads / 32; ++w) {
    before += w < warp ? warp_pages[w] : 0;
    total += warp_pages[w];
  }
  if (threadIdx.x == 0) x.scratch.group_offsets[group] = total;
  if (is_last_cta(&x.a.state->arrived, static_cast<uint32_t>(groups))) {
    const int64_t all = scan_groups<kThreads>(x.scratch.group_offsets, groups);
    if (threadIdx.x == 0) decide_op(x, x.op.kind, all);
  }
  return before;
}

// New pages of a row by side; kNoPage where it gets none.
struct NewPages {
  int32_t of[kMaxSides];
};

// By a warp: the row's tokens and pages become those of the plan.
__device__ inline NewPages take_pages(const OpLaunch& x, const BatchRow& r,
                                      const PlannedGrowth& growth, int32_t group) {
  NewPages fresh = {{kNoPage, kNoPage, kNoPage, kNoPage}};
  const PageAllocator& a = x.a;
  if (lane_id() == 0) a.tokens[r.row] = growth.tokens;
  if (growth.fresh == 0) return fresh;
  int32_t offset = x.scratch.group_offsets[group] + growth.first_page;
  SideCounts pages = a.pages[r.row];
#pragma unroll
  for (int32_t s = 0; s < kMaxSides; ++s) {
    if ((growth.fresh >> s & 1u) == 0) continue;
    fresh.of[s] = id_at(x, offset++);
    if (lane_id() == 0) {
      write_record(a, fresh.of[s]);
      a.slots[line_start(a, r.row) + a.shape.table.slot_of(s, pages.of[s])] = fresh.of[s];
    }
    pages.of[s] += 1;
  }
  __syncwarp();
  if (lane_id() == 0) a.pages[r.row] = pages;
  __syncwarp();
  return fresh;
}

}  // namespace tierkv
