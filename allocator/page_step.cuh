// PageOp::append inside two kernels of a caller that plans its rows itself: what a row gains is
// known where it is planned, and the pages are taken where they are written. The same states and
// reports as by run_page_op_device(), two kernels and the reading of all counts fewer.
//
//   first kernel   survey_growth() for every row, then deal_pages() by whole CTAs. A CTA has
//                  consecutive rows of the batch, group g those of CTA g
//   second kernel  decide_step() and, where it says kOk, take_pages() for every row; finish_step()
//
// No kernel waits for its last CTA: what the rows take is added up where they are planned, and from
// the sum everyone decides alike. Few rows of a step get a page, so nothing is scanned either: such
// a row adds up the pages of the groups before its own.
#pragma once

#include "allocator/page_plan.cuh"

namespace tierkv {

// Beside the allocator's own state, in device memory. Sums of this operation and of the next, whose
// place is cleared while this one is read.
struct alignas(16) StepTotals {
  unsigned long long pages[2];
  long long error[2];   // the least error key; kNoError
  RingCursors cursors;  // before the operation
  int64_t steps;        // so far: that of the operation has its sums at [steps % 2]
  int64_t current;      // steps, for the second kernel, which moves it on
};
inline constexpr StepTotals kNoTotals = {{0, 0}, {kNoError, kNoError}, {0, 0}, 0, 0};
struct StepDeal {
  StepTotals* totals;
  int32_t* group_pages;  // padded to 4, aligned to 16 bytes
};

// ---- first kernel ----

__device__ inline void fault_step(StepTotals* totals, int32_t batch_row, StatusCode status) {
  atomicMin(&totals->error[totals->steps % 2],
            static_cast<long long>(error_key(batch_row, status)));
}

// By one thread of every sequence.
__device__ inline void enter_sequence(const OpLaunch& x, StepTotals* totals, const BatchRow& r) {
  const int32_t repeated = name_sequence(x.a, r);
  if (repeated >= 0) fault_step(totals, repeated, StatusCode::kInvalidArgument);
}

// By one thread per row, or several with one answer; `state` is that of its sequence. A failed plan
// is noted.
__device__ inline RowPlan survey_growth(const OpLaunch& x, StepTotals* totals, const BatchRow& r,
                                        const RowGrowth& growth, SequenceState state) {
  const StatusCode status = check_state(state, true, false);
  const RowPlan plan = status == StatusCode::kOk ? plan_growth(x.a, growth) : failed_plan(status);
  if (plan.status != StatusCode::kOk) fault_step(totals, r.batch_row, plan.status);
  return plan;
}

// Bit s: side s gets a new page.
__device__ inline uint32_t fresh_sides(const RowPlan& plan) {
  uint32_t sides = 0;
  for (int32_t s = 0; s < kMaxSides; ++s) sides |= static_cast<uint32_t>(plan.fresh.of[s]) << s;
  return sides;
}

// By the whole CTA, which is group `group`: `pages` of each thread, in the order of its rows.
// Returns those of the threads before it.
template <int kThreads>
__device__ int32_t deal_pages(const OpLaunch& x, const StepDeal& deal, int32_t group,
                              int32_t pages) {
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
  if (threadIdx.x != 0) return before;
  StepTotals* totals = deal.totals;
  deal.group_pages[group] = total;
  if (total > 0) {
    atomicAdd(&totals->pages[totals->steps % 2], static_cast<unsigned long long>(total));
  }
  if (group == 0) {
    totals->cursors = *x.a.ring.cursors;
    totals->current = totals->steps;
  }
  return before;
}

// ---- second kernel ----

__device__ inline OpReport decide_step(const StepTotals& totals) {
  const bool odd = totals.current % 2 != 0;
  return decide(totals.cursors, odd ? totals.error[1] : totals.error[0],
                static_cast<int64_t>(odd ? totals.pages[1] : totals.pages[0]));
}

// By one thread.
__device__ inline void finish_step(const OpLaunch& x, StepTotals* totals, const OpReport& report) {
  const int64_t next = totals->current + 1;
  totals->pages[next % 2] = 0;
  totals->error[next % 2] = kNoError;
  totals->steps = next;
  x.a.state->op_number += 1;
  *x.op.report = report;
  if (report.status == StatusCode::kOk) x.a.ring.cursors->start += report.pages_needed;
}

// By a warp: the pages of the groups before `group`.
__device__ inline int32_t pages_before(const StepDeal& deal, int32_t group) {
  int32_t sum = 0;
#pragma unroll 4
  for (int32_t first = 4 * lane_id(); first < group; first += 128) {
    const int4 four = *reinterpret_cast<const int4*>(deal.group_pages + first);
    sum += four.x + (first + 1 < group ? four.y : 0) + (first + 2 < group ? four.z : 0) +
           (first + 3 < group ? four.w : 0);
  }
  return warp_sum(sum);
}

// New pages of a row by side; kNoPage where it gets none.
struct NewPages {
  int32_t of[kMaxSides];
};

// By a warp: the row's tokens and pages become those of the plan.
__device__ inline NewPages take_pages(const OpLaunch& x, const StepDeal& deal, int32_t group,
                                      const PlannedGrowth& growth) {
  NewPages fresh = {{kNoPage, kNoPage, kNoPage, kNoPage}};
  const PageAllocator& a = x.a;
  if (lane_id() == 0) a.tokens[growth.row] = growth.tokens;
  if (growth.fresh == 0) return fresh;
  const FreeRing& ring = a.ring;
  int32_t offset = pages_before(deal, group) + growth.first_page;
  const int32_t start = ring_index(deal.totals->cursors.start, ring.num_pages);
  SideCounts pages = a.pages[growth.row];
#pragma unroll
  for (int32_t s = 0; s < kMaxSides; ++s) {
    if ((growth.fresh >> s & 1u) == 0) continue;
    fresh.of[s] = ring.ids[ring_advance(start, offset++, ring.num_pages)];
    if (lane_id() == 0) {
      write_record(a, fresh.of[s]);
      a.slots[line_start(a, growth.row) + a.shape.table.slot_of(s, pages.of[s])] = fresh.of[s];
    }
    pages.of[s] += 1;
  }
  __syncwarp();
  if (lane_id() == 0) a.pages[growth.row] = pages;
  __syncwarp();
  return fresh;
}

}  // namespace tierkv
