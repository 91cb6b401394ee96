// Giving pages back in the canonical order, in three stages, a CTA per group of 32 rows:
//   mark   a dropped page that several tables hold remembers how many rows drop it and which is the
//   last; its slot says
//          so. Nobody changes a reference count, so that all see whether it is one
//   count  a page that nobody else holds returns here, a shared one at its last row and if no
//   holder is left; the slots
//          keep the ids of those that return. Groups are added up
//   give   the ids that are left go to the ring, kept pages get their records and rows their new
//   counts
// When no dropped page can be shared, as after a prompt, the plan has counted already: mark and
// count do nothing.

#include "allocator/page_op.cuh"

namespace tierkv {
namespace {

// In a dropped slot between mark and count: a page that other tables hold.
__device__ int32_t shared_slot(int32_t page) {
  return -2 - page;
}

struct GroupDrops {
  GroupItems items;
  RowDrop rows[kGroupRows];  // row -1: padding, or beyond the batch
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
    group->items.set(drop.total);
    group->rows[lane_id()] = drop;
  }
  __syncthreads();
}

struct DroppedItem {
  int32_t row;   // in the group
  int64_t slot;  // in the whole table
  bool is_recorded;
};

__device__ DroppedItem dropped_item(const OpLaunch& x, const GroupDrops& group, int32_t item) {
  const int32_t row = group.items.row_of(item);
  const RowDrop& drop = group.rows[row];
  const DroppedPage dropped = dropped_page(x.a, drop, item - group.items.first[row]);
  return {row, line_start(x.a, drop.row) + dropped.slot, dropped.is_recorded};
}

__device__ bool counts(const OpLaunch& x) {
  return goes_ahead(x) && x.scratch.decision->counts;
}

__global__ void __launch_bounds__(kGroupThreads, 8)
    mark_kernel(const __grid_constant__ OpLaunch x) {
  __shared__ GroupDrops group;
  let_next_stage_start();
  const EarlyRow early = load_early(x);
  wait_for_stage();
  if (!counts(x)) return;
  load_drops(x, early, &group);
  for (int32_t item = threadIdx.x; item < group.items.total(); item += kGroupThreads) {
    const DroppedItem dropped = dropped_item(x, group, item);
    if (!dropped.is_recorded) continue;
    const int32_t page = x.a.slots[dropped.slot];
    if (!is_frozen(x.a, page)) continue;
    atomicMax(&x.a.drop_marks[page].last_row, group_row(dropped.row) + 1);
    atomicAdd(&x.a.drop_marks[page].count, 1);
    x.a.slots[dropped.slot] = shared_slot(page);
  }
}

// Whether the page that batch row i drops from a marked slot returns there. Only the last row
// changes the page's mark and count; the others read its mark before or after that, and it is
// theirs in neither case.
__device__ bool drop_shared(const PageAllocator& a, int32_t page, int32_t i) {
  DropMark& mark = a.drop_marks[page];
  if (mark.last_row != i + 1) return false;
  const int32_t left = a.records[page].reference_count - mark.count;
  a.records[page].reference_count = left;
  mark = {0, 0};
  return left == 0;
}

__device__ bool drop_item(const OpLaunch& x, const DroppedItem& dropped) {
  if (!dropped.is_recorded) return true;
  const int32_t slot = x.a.slots[dropped.slot];
  if (slot >= 0) {
    x.a.records[slot].reference_count = 0;
    return true;
  }
  const int32_t page = shared_slot(slot);  // its own inverse
  const bool returns = drop_shared(x.a, page, group_row(dropped.row));
  x.a.slots[dropped.slot] = returns ? page : kNoPage;
  return returns;
}

__global__ void __launch_bounds__(kGroupThreads, 8)
    count_kernel(const __grid_constant__ OpLaunch x) {
  __shared__ GroupDrops group;
  __shared__ int32_t group_pages;
  let_next_stage_start();
  const EarlyRow early = load_early(x);
  wait_for_stage();
  if (!counts(x)) return;
  if (threadIdx.x == 0) group_pages = 0;
  load_drops(x, early, &group);
  int32_t pages = 0;
  for (int32_t item = threadIdx.x; item < group.items.total(); item += kGroupThreads) {
    pages += drop_item(x, dropped_item(x, group, item)) ? 1 : 0;
  }
  pages = warp_sum(pages);
  if (lane_id() == 0) atomicAdd(&group_pages, pages);
  __syncthreads();
  if (threadIdx.x == 0) x.scratch.group_offsets[blockIdx.x] = group_pages;
  if (!is_last_cta(&x.a.state->arrived, gridDim.x)) return;
  const int64_t returned = scan_groups<kGroupThreads>(x.scratch.group_offsets, x.groups);
  if (threadIdx.x != 0) return;
  x.a.ring.cursors->end += returned;
  x.op.report->pages_returned = returned;
  x.op.report->pages_free = free_pages(*x.a.ring.cursors);
}

// The ids that are left in dropped slots go to the ring in order; the slots are empty then. A round
// of the loop covers kThreadItems stretches of kGroupThreads items.
__device__ void give_items(const OpLaunch& x, const GroupDrops& group) {
  constexpr int32_t kWarps = kGroupThreads / 32;
  __shared__ int32_t warp_pages[kThreadItems * kWarps];
  const FreeRing& ring = x.a.ring;
  const int32_t warp = static_cast<int32_t>(threadIdx.x) / 32, total = group.items.total();
  int32_t offset = x.scratch.group_offsets[blockIdx.x];
  for (int32_t first = 0; first < total; first += kGroupThreads * kThreadItems) {
    int32_t pages[kThreadItems];
    uint32_t returning[kThreadItems];
#pragma unroll
    for (int32_t q = 0; q < kThreadItems; ++q) {
      const int32_t item = first + q * kGroupThreads + static_cast<int32_t>(threadIdx.x);
      pages[q] = kNoPage;
      if (item >= total) continue;
      int32_t& slot = x.a.slots[dropped_item(x, group, item).slot];
      pages[q] = slot;
      slot = kNoPage;
    }
#pragma unroll
    for (int32_t q = 0; q < kThreadItems; ++q) {
      returning[q] = __ballot_sync(~0u, pages[q] != kNoPage);
      if (lane_id() == 0) warp_pages[q * kWarps + warp] = __popc(returning[q]);
    }
    __syncthreads();
    for (int32_t q = 0; q < kThreadItems; ++q) {
      int32_t before = offset + __popc(returning[q] & ((1u << lane_id()) - 1));
      for (int32_t w = 0; w < kWarps; ++w) {
        before += w < warp ? warp_pages[q * kWarps + w] : 0;
        offset += warp_pages[q * kWarps + w];
      }
      if (pages[q] == kNoPage) continue;
      ring.ids[ring_advance(x.scratch.decision->give_index, before, ring.num_pages)] = pages[q];
    }
    __syncthreads();
  }
}

// Keep: page j of those of the row that now get their records, and where it goes. Reserved pages
// that stay, side by side, then those that move from the last on.
struct KeptPage {
  int32_t source;
  int32_t target;
};

__device__ int32_t kept_pages(const RowDrop& drop) {
  int32_t count = drop.moved[0] + drop.moved[1];
  for (int32_t s = 0; s < kMaxSides; ++s) {
    count += max(0, settled_end(drop, s) - drop.recorded[s]);
  }
  return count;
}

__device__ KeptPage kept_page(const PageTableShape& shape, const RowDrop& drop, int32_t j) {
  KeptPage kept = {0, 0};
  for (int32_t s = 0; s < kMaxSides; ++s) {
    const int32_t settled = max(0, settled_end(drop, s) - drop.recorded[s]);
    if (j >= 0 && j < settled) {
      kept.source = kept.target = shape.slot_of(s, drop.recorded[s] + j);
    }
    j -= settled;
  }
  for (int32_t left = 0; left < kMaxSides; left += 2) {
    const int32_t moved = drop.moved[left >> 1];
    if (j >= 0 && j < moved) {
      kept.source = shape.slot_of(left, drop.held.of[left] - 1 - j);
      kept.target = shape.slot_of(left + 1, drop.held.of[left + 1] + j);
    }
    j -= moved;
  }
  return kept;
}

// As the host's settle_pages() and move_pages(). The target of a page that moves lies at or right
// of its source, and a row's pages go last to first: no round of the loop writes where a later one
// reads, and within a round all read before any writes.
__device__ void keep_items(const OpLaunch& x, const GroupDrops& group, GroupItems* items) {
  if (threadIdx.x < kGroupRows) {
    const RowDrop& drop = group.rows[lane_id()];
    items->set(drop.row >= 0 ? kept_pages(drop) : 0);
  }
  __syncthreads();
  for (int32_t first = 0; first < items->total(); first += kGroupThreads * kThreadItems) {
    int32_t pages[kThreadItems];
    int32_t* targets[kThreadItems];
#pragma unroll
    for (int32_t q = 0; q < kThreadItems; ++q) {
      const int32_t item = first + q * kGroupThreads + static_cast<int32_t>(threadIdx.x);
      targets[q] = nullptr;
      if (item >= items->total()) continue;
      const int32_t row = items->row_of(item);
      const RowDrop& drop = group.rows[row];
      const KeptPage kept = kept_page(x.a.shape.table, drop, item - items->first[row]);
      int32_t* line = x.a.slots + line_start(x.a, drop.row);
      pages[q] = line[kept.source];
      targets[q] = line + kept.target;
      if (kept.source != kept.target) line[kept.source] = kNoPage;
    }
    __syncthreads();
#pragma unroll
    for (int32_t q = 0; q < kThreadItems; ++q) {
      if (targets[q] == nullptr) continue;
      *targets[q] = pages[q];
      write_record(x.a, pages[q]);
    }
    __syncthreads();
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
  __shared__ GroupItems kept;
  const EarlyRow early = load_early(x);
  wait_for_stage();
  if (!goes_ahead(x)) return;
  load_drops(x, early, &group);
  give_items(x, group);
  if (x.op.kind == PageOpKind::kKeep) keep_items(x, group, &kept);
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
