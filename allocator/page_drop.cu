// Giving pages back in the canonical order, in three stages, a CTA per group of 32 rows:
//   mark   a dropped page that several tables hold remembers how many rows drop it and which is the
//   last; its slot says
//          so. Nobody changes a reference count, so that all see whether it is one
//   count  a page that nobody else holds returns here, a shared one at its last row and if no
//   holder is left; the slots
//          keep the ids of those that return. Groups are added up
//   give   the ids that are left go to the ring, kept pages are settled and rows get their new
//   counts

#include "allocator/page_op.cuh"

namespace tierkv {
namespace {

// In a dropped slot between mark and count: a page that other tables hold.
__device__ int32_t shared_slot(int32_t page) {
  return -2 - page;
}

struct GroupDrops {
  GroupItems items;
  RowDrop rows[kGroupRows];
};

__device__ int32_t group_row(int32_t row_in_group) {
  return static_cast<int32_t>(blockIdx.x) * kGroupRows + row_in_group;
}

// By the whole CTA; a row that is padding or beyond the batch drops nothing.
__device__ void load_drops(const OpLaunch& x, GroupDrops* group) {
  if (threadIdx.x < kGroupRows) {
    const int32_t i = group_row(lane_id());
    RowDrop drop = {};
    drop.row = -1;
    if (i < x.rows) {
      const BatchRow r = batch_row_at(x.a, x.op, i);
      if (r.sequence != kPaddingSequence) drop = drop_row(x.a, x.op, r);
    }
    group->items.set(drop.total);
    group->rows[lane_id()] = drop;
  }
  __syncthreads();
}

__global__ void __launch_bounds__(kThreads) mark_kernel(const __grid_constant__ OpLaunch x) {
  __shared__ GroupDrops group;
  let_next_stage_start();
  wait_for_stage();
  if (!goes_ahead(x)) return;
  load_drops(x, &group);
  for (int32_t item = threadIdx.x; item < group.items.total(); item += kThreads) {
    const int32_t row = group.items.row_of(item);
    const RowDrop& drop = group.rows[row];
    const DroppedPage dropped = dropped_page(x.a, drop, item - group.items.first[row]);
    if (!dropped.is_recorded) continue;
    int32_t& slot = x.a.slots[line_start(x.a, drop.row) + dropped.slot];
    if (!is_frozen(x.a, slot)) continue;
    atomicMax(&x.a.drop_marks[slot].last_row, group_row(row) + 1);
    atomicAdd(&x.a.drop_marks[slot].count, 1);
    slot = shared_slot(slot);
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

__device__ bool drop_item(const OpLaunch& x, const GroupDrops& group, int32_t item) {
  const int32_t row = group.items.row_of(item);
  const RowDrop& drop = group.rows[row];
  const DroppedPage dropped = dropped_page(x.a, drop, item - group.items.first[row]);
  if (!dropped.is_recorded) return true;
  int32_t& slot = x.a.slots[line_start(x.a, drop.row) + dropped.slot];
  if (slot >= 0) {
    x.a.records[slot].reference_count = 0;
    return true;
  }
  const int32_t page = shared_slot(slot);  // its own inverse
  const bool returns = drop_shared(x.a, page, group_row(row));
  slot = returns ? page : kNoPage;
  return returns;
}

__global__ void __launch_bounds__(kThreads) count_kernel(const __grid_constant__ OpLaunch x) {
  __shared__ GroupDrops group;
  __shared__ int32_t group_pages;
  let_next_stage_start();
  wait_for_stage();
  if (!goes_ahead(x)) return;
  if (threadIdx.x == 0) group_pages = 0;
  load_drops(x, &group);
  int32_t pages = 0;
  for (int32_t item = threadIdx.x; item < group.items.total(); item += kThreads) {
    pages += drop_item(x, group, item) ? 1 : 0;
  }
  pages = warp_sum(pages);
  if (lane_id() == 0) atomicAdd(&group_pages, pages);
  __syncthreads();
  if (threadIdx.x == 0) x.scratch.group_offsets[blockIdx.x] = group_pages;
  if (!is_last_cta(&x.a.state->arrived)) return;
  const int64_t returned = scan_groups(x.scratch.group_offsets, x.groups);
  if (threadIdx.x != 0) return;
  x.a.ring.cursors->end += returned;
  x.op.report->pages_returned = returned;
  x.op.report->pages_free = free_pages(*x.a.ring.cursors);
}

// The ids that are left in dropped slots go to the ring in order; the slots are empty then.
__device__ void give_items(const OpLaunch& x, const GroupDrops& group) {
  constexpr int32_t kWarps = kThreads / 32;
  __shared__ int32_t warp_pages[kWarps];
  const FreeRing& ring = x.a.ring;
  const int32_t warp = static_cast<int32_t>(threadIdx.x) / 32;
  int32_t offset = x.scratch.group_offsets[blockIdx.x];
  for (int32_t first = 0; first < group.items.total(); first += kThreads) {
    const int32_t item = first + static_cast<int32_t>(threadIdx.x);
    int32_t page = kNoPage;
    if (item < group.items.total()) {
      const int32_t row = group.items.row_of(item);
      const RowDrop& drop = group.rows[row];
      const DroppedPage dropped = dropped_page(x.a, drop, item - group.items.first[row]);
      int32_t& slot = x.a.slots[line_start(x.a, drop.row) + dropped.slot];
      page = slot;
      slot = kNoPage;
    }
    const uint32_t returning = __ballot_sync(~0u, page != kNoPage);
    if (lane_id() == 0) warp_pages[warp] = __popc(returning);
    __syncthreads();
    int32_t before = __popc(returning & ((1u << lane_id()) - 1));
    for (int32_t w = 0; w < kWarps; ++w) {
      before += w < warp ? warp_pages[w] : 0;
    }
    if (page != kNoPage) {
      ring.ids[ring_advance(x.scratch.decision->give_index, offset + before, ring.num_pages)] =
          page;
    }
    for (int32_t w = 0; w < kWarps; ++w) offset += warp_pages[w];
    __syncthreads();
  }
}

// Keep: reserved pages that stay on a side get their records.
__device__ void settle_side(const OpLaunch& x, const GroupDrops& group, int32_t side,
                            GroupItems* items) {
  if (threadIdx.x < kGroupRows) {
    const RowDrop& drop = group.rows[lane_id()];
    const int32_t count = settled_end(drop, side) - drop.recorded[side];
    items->set(count > 0 ? count : 0);
  }
  __syncthreads();
  for (int32_t item = threadIdx.x; item < items->total(); item += kThreads) {
    const int32_t row = items->row_of(item);
    const RowDrop& drop = group.rows[row];
    const int32_t index = drop.recorded[side] + item - items->first[row];
    write_record(x.a, page_at(x.a, drop.row, side, index));
  }
  __syncthreads();
}

// Keep: as the host's move_pages(). The target of a page lies at or right of its source, and a
// row's pages go last to first: no round of the loop writes where a later one reads, and within a
// round all read before any writes.
__device__ void move_items(const OpLaunch& x, const GroupDrops& group, int32_t left,
                           GroupItems* items) {
  const PageTableShape& shape = x.a.shape.table;
  if (threadIdx.x < kGroupRows) items->set(group.rows[lane_id()].moved[left >> 1]);
  __syncthreads();
  for (int32_t first = 0; first < items->total(); first += kThreads) {
    const int32_t item = first + static_cast<int32_t>(threadIdx.x);
    const bool is_real = item < items->total();
    const int32_t row = is_real ? items->row_of(item) : 0;
    const RowDrop& drop = group.rows[row];
    const int32_t k = item - items->first[row];
    int32_t* line = is_real ? x.a.slots + line_start(x.a, drop.row) : nullptr;
    int32_t* source = is_real ? line + shape.slot_of(left, drop.held.of[left] - 1 - k) : nullptr;
    const int32_t page = is_real ? *source : kNoPage;
    __syncthreads();
    if (is_real) *source = kNoPage;
    __syncthreads();
    if (!is_real) continue;
    line[shape.slot_of(left + 1, drop.held.of[left + 1] + k)] = page;
    write_record(x.a, page);
  }
  __syncthreads();
}

__device__ void finish_row(const OpLaunch& x, const RowDrop& drop, int32_t batch_row) {
  for (int32_t s = 0; s < kMaxSides; ++s) {
    if (drop.exchanged[s] == 0) continue;
    const PageCopy& copy = x.op.copies[static_cast<int64_t>(batch_row) * kMaxSides + s];
    x.a.slots[line_start(x.a, drop.row) + exchanged_slot(x.a, drop, s)] = copy.target;
  }
  x.a.tokens[drop.row] = drop.tokens;
  x.a.pages[drop.row] = drop.pages;
}

__global__ void __launch_bounds__(kThreads, 4) give_kernel(const __grid_constant__ OpLaunch x) {
  __shared__ GroupDrops group;
  __shared__ GroupItems items;
  wait_for_stage();
  if (!goes_ahead(x)) return;
  load_drops(x, &group);
  give_items(x, group);
  if (x.op.kind == PageOpKind::kKeep) {
    for (int32_t s = 0; s < x.a.shape.table.num_sides; ++s) settle_side(x, group, s, &items);
    move_items(x, group, 0, &items);
    if (x.a.shape.table.num_sides > 3) move_items(x, group, 2, &items);
  }
  if (threadIdx.x < kGroupRows && group.rows[lane_id()].row >= 0) {
    finish_row(x, group.rows[lane_id()], group_row(lane_id()));
  }
  // Rows of one sequence lie in several groups: it changes when all are done.
  if (!is_last_cta(&x.a.state->arrived)) return;
  for (int32_t e = threadIdx.x; e < x.op.batch.count; e += kThreads) close_sequence(x.a, x.op, e);
}

}  // namespace

cudaError_t launch_drop(const OpLaunch& x, cudaStream_t stream) {
  for (const auto kernel : {mark_kernel, count_kernel, give_kernel}) {
    const cudaError_t status = launch_stage(kernel, x.groups, x, stream);
    if (status != cudaSuccess) return status;
  }
  return cudaSuccess;
}

}  // namespace tierkv
