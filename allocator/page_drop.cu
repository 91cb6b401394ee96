// SPDX-License-Identifier: Apache-2.0
// Giving pages back in the canonical order, in three stages, a CTA per group of 32 rows and eight
// lanes per row:
//   mark   a dropped page that nobody else holds is free. One that several tables hold remembers
//          how many rows drop it and which is the last; its slot says so. Nobody changes a
//          reference count above one, so that all see whether it is
//   count  a shared page returns at its last row and if no holder is left; the slots keep the ids
//          of those that return. Groups are added up
//   give   the ids that are left go to the ring, kept pages get their counts and rows their new
//          counts
// When no dropped page can be shared, as after a prompt, mark has nothing to do, and when none is,
// count has not: then all that the plan has counted return.
//
// A row's dropped pages are one run of slots per side, and so are those that it keeps.

#include "allocator/page_plan.cuh"

namespace tierkv {
namespace {

// In a dropped slot between mark and count: a page that other tables hold.
__device__ int32_t shared_slot(int32_t page) {
  return -2 - page;
}

struct GroupDrops {
  int32_t before[kGroupRows];  // dropped pages of the group's rows before it
  RowDrop rows[kGroupRows];    // row -1: padding, or beyond the batch
};

// What a thread of the first warp knows of its row before the stages before this one have ended.
struct EarlyRow {
  BatchRow r;
  DropInput input;
  bool is_real;
};

__device__ EarlyRow load_early(const OpLaunch& x) {
  EarlyRow early = {};
  const int32_t i = group_row(lane_id());
  if (threadIdx.x >= kGroupRows || i >= x.rows) return early;
  early.r = batch_row_at(x.a, x.op, i);
  early.is_real = is_sequence(x.a, early.r.sequence);
  if (!early.is_real) return early;
  early.input.held = x.a.pages[early.r.row];
  if (x.op.kind != PageOpKind::kRelease) early.input.tokens = x.op.counts[i];
  return early;
}

// By the whole CTA.
__device__ void load_drops(const OpLaunch& x, EarlyRow early, GroupDrops* group) {
  if (threadIdx.x < kGroupRows) {
    RowDrop drop = {};
    drop.row = -1;
    if (early.is_real) {
      early.input.reserved = x.scratch.reserved[early.r.entry];
      drop = drop_row(x.a, x.op, early.r, early.input, x.op.kind == PageOpKind::kTruncate);
    }
    group->before[lane_id()] = warp_exclusive_sum(drop.total);
    group->rows[lane_id()] = drop;
  }
  __syncthreads();
}

// The slots first + lane, first + 8 + lane, .. of a run, kThreadItems of them; kNoPage beyond it.
struct RunPages {
  int32_t id[kThreadItems];
};
__device__ RunPages load_run(const int32_t* run, int32_t first, int32_t length) {
  RunPages pages;
#pragma unroll
  for (int32_t q = 0; q < kThreadItems; ++q) {
    const int32_t i = first + kRunLanes * q + run_lane();
    pages.id[q] = i < length ? run[i] : kNoPage;
  }
  return pages;
}

// ---- mark ----

__device__ void mark_shared(const PageAllocator& a, int32_t page, int32_t batch_row) {
  atomicMax(&a.drop_marks[page].last_row, batch_row + 1);
  atomicAdd(&a.drop_marks[page].count, 1);
}

// Whether it has met a shared page.
__device__ bool mark_run(const PageAllocator& a, int32_t* run, int32_t length, int32_t batch_row) {
  bool shares = false;
  for (int32_t first = 0; first < length; first += kRunStep) {
    const RunPages pages = load_run(run, first, length);
    int32_t references[kThreadItems];
#pragma unroll
    for (int32_t q = 0; q < kThreadItems; ++q) {
      references[q] = pages.id[q] == kNoPage ? 0 : a.references[pages.id[q]];
    }
#pragma unroll
    for (int32_t q = 0; q < kThreadItems; ++q) {
      if (references[q] <= 1) continue;
      mark_shared(a, pages.id[q], batch_row);
      run[first + kRunLanes * q + run_lane()] = shared_slot(pages.id[q]);
      shares = true;
    }
  }
  return shares;
}

__global__ void __launch_bounds__(kGroupThreads, 8)
    mark_kernel(const __grid_constant__ OpLaunch x) {
  __shared__ GroupDrops group;
  let_next_stage_start();
  const EarlyRow early = load_early(x);
  wait_for_stage();
  if (!goes_ahead(x) || !x.scratch.decision->marks) return;
  load_drops(x, early, &group);
  bool shares = false;
  for (int32_t row = first_row(); row < kGroupRows; row += kRunRows) {
    const RowDrop& drop = group.rows[row];
    for (int32_t s = 0; drop.total > 0 && s < kMaxSides; ++s) {
      const SlotRun run = recorded_run(x.a, drop, s);
      int32_t* slots = x.a.slots + line_start(x.a, drop.row) + run.first;
      shares |= mark_run(x.a, slots, run.length, group_row(row));
    }
  }
  if (shares) x.a.state->shares = 1;
  if (!is_last_cta(&x.a.state->arrived, gridDim.x) || threadIdx.x != 0) return;
  OpDecision* decision = x.scratch.decision;
  decision->counts |= atomicExch(&x.a.state->shares, 0) != 0;
  if (!decision->counts) return_all(x, decision->pages);
}

// ---- count ----

// Whether the page that batch row i drops from a marked slot returns there. Only the last row
// changes the page's mark and count; the others read its mark before or after that, and it is
// theirs in neither case.
__device__ bool drop_shared(const PageAllocator& a, int32_t page, int32_t i) {
  DropMark& mark = a.drop_marks[page];
  if (mark.last_row != i + 1) return false;
  const int32_t left = a.references[page] - mark.count;
  a.references[page] = max(left, 1);
  mark = {0, 0};
  return left == 0;
}

// Counts the lane's pages in the run that do not return.
__device__ int32_t count_run(const PageAllocator& a, int32_t* run, int32_t length,
                             int32_t batch_row) {
  int32_t stay = 0;
  for (int32_t i = run_lane(); i < length; i += kRunLanes) {
    const int32_t slot = run[i];
    if (slot >= 0) continue;
    const int32_t page = shared_slot(slot);  // its own inverse
    const bool returns = drop_shared(a, page, batch_row);
    run[i] = returns ? page : kNoPage;
    stay += returns ? 0 : 1;
  }
  return stay;
}

__global__ void __launch_bounds__(kGroupThreads, 8)
    count_kernel(const __grid_constant__ OpLaunch x) {
  __shared__ GroupDrops group;
  __shared__ int32_t group_pages;
  let_next_stage_start();
  const EarlyRow early = load_early(x);
  wait_for_stage();
  if (!goes_ahead(x) || !x.scratch.decision->counts) return;
  if (threadIdx.x == 0) group_pages = 0;
  load_drops(x, early, &group);
  int32_t pages = 0;
  for (int32_t row = first_row(); row < kGroupRows; row += kRunRows) {
    const RowDrop& drop = group.rows[row];
    pages += run_lane() == 0 ? drop.total : 0;
    for (int32_t s = 0; drop.total > 0 && s < kMaxSides; ++s) {
      const SlotRun run = recorded_run(x.a, drop, s);
      int32_t* slots = x.a.slots + line_start(x.a, drop.row) + run.first;
      pages -= count_run(x.a, slots, run.length, group_row(row));
    }
  }
  pages = warp_sum(pages);
  if (lane_id() == 0) atomicAdd(&group_pages, pages);
  __syncthreads();
  if (threadIdx.x == 0) x.scratch.group_offsets[blockIdx.x] = group_pages;
  if (!is_last_cta(&x.a.state->arrived, gridDim.x)) return;
  const int64_t returned = scan_groups<kGroupThreads>(x.scratch.group_offsets, x.groups);
  if (threadIdx.x == 0) return_all(x, returned);
}

// ---- give ----

__device__ int32_t* ring_slot(const OpLaunch& x, int32_t give_index, int32_t offset) {
  return x.a.ring.ids + ring_advance(give_index, offset, x.a.ring.num_pages);
}

// All pages of a run, to the ring from `offset` on.
__device__ void give_run(const OpLaunch& x, int32_t* run, int32_t length, int32_t offset) {
  const int32_t give_index = x.scratch.decision->give_index;
  for (int32_t first = 0; first < length; first += kRunStep) {
    const RunPages pages = load_run(run, first, length);
#pragma unroll
    for (int32_t q = 0; q < kThreadItems; ++q) {
      const int32_t i = first + kRunLanes * q + run_lane();
      if (i >= length) continue;
      *ring_slot(x, give_index, offset + i) = pages.id[q];
      run[i] = kNoPage;
    }
  }
}

// Those of a run that the stage count has left; returns how many.
__device__ int32_t give_counted(const OpLaunch& x, int32_t* run, int32_t length, int32_t offset) {
  const int32_t give_index = x.scratch.decision->give_index;
  int32_t given = 0;
  for (int32_t first = 0; first < length; first += kRunLanes) {
    const int32_t i = first + run_lane(), page = i < length ? run[i] : kNoPage;
    const uint32_t returning = __ballot_sync(run_mask(), page != kNoPage) & run_mask();
    if (page != kNoPage) {
      const int32_t before = __popc(returning & ((1u << lane_id()) - 1));
      *ring_slot(x, give_index, offset + given + before) = page;
      run[i] = kNoPage;
    }
    given += __popc(returning);
  }
  sync_run();
  return given;
}

__device__ void give_row(const OpLaunch& x, const RowDrop& drop, int32_t offset, bool counts) {
  int32_t* line = x.a.slots + line_start(x.a, drop.row);
  for (int32_t s = 0; s < kMaxSides; ++s) {
    const SlotRun run = dropped_run(x.a, drop, s);
    if (counts) {
      offset += give_counted(x, line + run.first, run.length, offset);
    } else {
      give_run(x, line + run.first, run.length, offset);
      offset += run.length;
    }
  }
}

// What is left in the row's dropped slots; the lane's part.
__device__ int32_t returning_pages(const OpLaunch& x, const RowDrop& drop) {
  const int32_t* line = x.a.slots + line_start(x.a, drop.row);
  int32_t pages = 0;
  for (int32_t s = 0; drop.total > 0 && s < kMaxSides; ++s) {
    const SlotRun run = dropped_run(x.a, drop, s);
    for (int32_t i = run_lane(); i < run.length; i += kRunLanes) {
      pages += line[run.first + i] != kNoPage;
    }
  }
  return pages;
}

// By the whole CTA, where not all that is dropped returns: what the rows before each one return.
__device__ void recount(const OpLaunch& x, GroupDrops* group) {
  if (threadIdx.x < kGroupRows) group->before[threadIdx.x] = 0;
  __syncthreads();
  for (int32_t row = first_row(); row < kGroupRows; row += kRunRows) {
    atomicAdd(&group->before[row], returning_pages(x, group->rows[row]));
  }
  __syncthreads();
  if (threadIdx.x < kGroupRows) {
    group->before[lane_id()] = warp_exclusive_sum(group->before[lane_id()]);
  }
  __syncthreads();
}

// The left side of a table from `first` on: reserved pages that are dropped, then pages that move
// `shift` slots to the right.
struct LeftRun {
  int32_t first, moves, end;  // indices
  int32_t shift;
  int32_t offset;  // in the ring, of the first that is dropped; -1: stage give has been there
};
__device__ void keep_page(const OpLaunch& x, const LeftRun& left, int32_t* side, int32_t i,
                          int32_t page) {
  const bool is_target = i - left.shift >= left.moves;  // of a page that moves: not to be emptied
  if (!is_target) side[i] = kNoPage;
  if (i >= left.moves) {
    side[i + left.shift] = page;
  } else if (left.offset >= 0) {
    *ring_slot(x, x.scratch.decision->give_index, left.offset + i - left.first) = page;
  }
}

// Last to first: no step writes where a later one reads, and within a step all read before any
// writes.
__device__ void keep_left(const OpLaunch& x, const LeftRun& left, int32_t* side) {
  for (int32_t end = left.end; end > left.first; end -= kRunStep) {
    const int32_t first = max(end - kRunStep, left.first);
    const RunPages pages = load_run(side, first, end);
    sync_run();
#pragma unroll
    for (int32_t q = 0; q < kThreadItems; ++q) {
      const int32_t i = first + kRunLanes * q + run_lane();
      if (i < end) keep_page(x, left, side, i, pages.id[q]);
    }
    sync_run();
  }
}

// Keep, as the host's drop_pages() and move_pages(). Recorded pages that are dropped come before
// the reserved ones and are given back on their own; what stays is not visited.
__device__ void keep_row(const OpLaunch& x, const RowDrop& drop, int32_t offset, bool counts) {
  const PageTableShape& shape = x.a.shape.table;
  int32_t* line = x.a.slots + line_start(x.a, drop.row);
  if (counts) give_row(x, drop, offset, true);
  for (int32_t s = 0; s < kMaxSides; s += 2) {
    const int32_t held = drop.held.of[s], moved = max(drop.moved[s >> 1], 0);
    const int32_t recorded = max(min(drop.recorded[s] - drop.first[s], drop.length[s]), 0);
    int32_t* side = line + shape.slot_of(s, 0);
    if (!counts) give_run(x, side + drop.first[s], recorded, offset);
    LeftRun left;
    left.moves = held - moved;
    // Pages that lost their tokens may move too.
    left.first = min(max(drop.first[s], drop.recorded[s]), left.moves);
    left.end = held;
    left.shift = shape.slot_of(s + 1, drop.held.of[s + 1]) - shape.slot_of(s, held - 1);
    left.offset = counts ? -1 : offset + recorded;
    keep_left(x, left, side);
    offset += drop.length[s];
  }
}

__device__ void finish_row(const OpLaunch& x, const RowDrop& drop, int32_t batch_row) {
  for (int32_t s = 0; s < kMaxSides; ++s) {
    if (drop.exchanged[s] == 0) continue;
    x.a.slots[line_start(x.a, drop.row) + exchanged_slot(x.a, drop, s)] =
        copies_of(x.op, batch_row)[s].target;
  }
  x.a.tokens[drop.row] = drop.tokens;
  x.a.pages[drop.row] = drop.pages;
}

__global__ void __launch_bounds__(kGroupThreads, 8)
    give_kernel(const __grid_constant__ OpLaunch x) {
  __shared__ GroupDrops group;
  const EarlyRow early = load_early(x);
  wait_for_stage();
  if (!goes_ahead(x)) return;
  load_drops(x, early, &group);
  const int32_t offset = x.scratch.group_offsets[blockIdx.x];
  const bool counts = x.scratch.decision->counts;
  if (counts) recount(x, &group);
  for (int32_t row = first_row(); row < kGroupRows; row += kRunRows) {
    const RowDrop& drop = group.rows[row];
    if (drop.row < 0) continue;
    if (x.op.kind == PageOpKind::kKeep) {
      keep_row(x, drop, offset + group.before[row], counts);
    } else if (drop.total > 0) {
      give_row(x, drop, offset + group.before[row], counts);
    }
  }
  __syncthreads();
  if (threadIdx.x < kGroupRows && group.rows[lane_id()].row >= 0) {
    finish_row(x, group.rows[lane_id()], group_row(lane_id()));
  }
}

}  // namespace

cudaError_t launch_drop(const OpLaunch& x, cudaStream_t stream) {
  for (const StageKernel kernel : {mark_kernel, count_kernel, give_kernel}) {
    const cudaError_t status = launch_stage(kernel, x.groups, kGroupThreads, x, stream);
    if (status != cudaSuccess) return status;
  }
  return cudaSuccess;
}

}  // namespace tierkv
