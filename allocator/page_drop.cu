// Giving pages back in the canonical order, in three stages with a warp per row:
//   mark   every dropped reference is subtracted, and the page remembers the last batch row that
//   dropped it count  a dropped slot keeps its page id only if the page returns, and returns here;
//   rows and groups are added up give   the ids that are left go to the ring, and the row gets its
//   new counts

#include "allocator/page_op.cuh"

namespace tierkv {
namespace {

__device__ int32_t lane_id() {
  return static_cast<int32_t>(threadIdx.x) & 31;
}

__global__ void __launch_bounds__(kWarpRowThreads, 4)
    mark_kernel(const __grid_constant__ OpLaunch x) {
  if (!goes_ahead(x)) return;
  const int32_t i = static_cast<int32_t>((blockIdx.x * kWarpRowThreads + threadIdx.x) / 32);
  if (i >= x.rows) return;
  const BatchRow r = batch_row_at(x.a, x.op, i);
  if (r.sequence == kPaddingSequence) return;
  const RowDrop drop = drop_row(x.a, x.op, r);
  const int32_t* line = x.a.slots + line_start(x.a, r.row);
  for (int32_t j = lane_id(); j < drop.total; j += 32) {
    const int32_t page = line[dropped_slot(drop, j)];
    atomicMax(x.a.drop_marks + page, i + 1);
    atomicSub(&x.a.records[page].reference_count, 1);
  }
}

// Pages of batch row i that return, with their ids left in the slots.
__device__ int32_t count_row(const OpLaunch& x, int32_t i) {
  const BatchRow r = batch_row_at(x.a, x.op, i);
  if (r.sequence == kPaddingSequence) return 0;
  const RowDrop drop = drop_row(x.a, x.op, r);
  int32_t* line = x.a.slots + line_start(x.a, r.row);
  int32_t returned = 0;
  for (int32_t j = lane_id(); j < drop.total; j += 32) {
    int32_t& slot = line[dropped_slot(drop, j)];
    const int32_t page = slot;
    // Rows that are not the last to drop the page read its mark before or after the last one clears
    // it: theirs it is not.
    const bool is_last = x.a.drop_marks[page] == i + 1;
    const bool returns = is_last && x.a.records[page].reference_count == 0;
    if (is_last) x.a.drop_marks[page] = 0;
    if (!returns) slot = kNoPage;
    returned += returns ? 1 : 0;
  }
  return warp_sum(returned);
}

__global__ void __launch_bounds__(kCountThreads) count_kernel(const __grid_constant__ OpLaunch x) {
  if (!goes_ahead(x)) return;
  __shared__ int32_t group_pages;
  if (threadIdx.x == 0) group_pages = 0;
  __syncthreads();
  const int32_t i = static_cast<int32_t>(blockIdx.x * kGroupRows + threadIdx.x / 32);
  if (i < x.rows) {
    const int32_t pages = count_row(x, i);
    if (lane_id() == 0) {
      x.scratch.row_pages[i] = pages;
      atomicAdd(&group_pages, pages);
    }
  }
  __syncthreads();
  if (threadIdx.x == 0) x.scratch.group_offsets[blockIdx.x] = group_pages;
  if (!is_last_cta(&x.a.state->arrived)) return;
  const int64_t returned = scan_groups<kCountThreads>(x.scratch.group_offsets, x.groups);
  if (threadIdx.x != 0) return;
  x.a.ring.cursors->end += returned;
  x.op.report->pages_returned = returned;
  x.op.report->pages_free = free_pages(*x.a.ring.cursors);
}

__device__ void give_slots(const OpLaunch& x, const RowDrop& drop, int32_t* line, int32_t offset) {
  const FreeRing& ring = x.a.ring;
  const int32_t lane = lane_id(), base = x.scratch.decision->give_index;
  for (int32_t first = 0; first < drop.total; first += 32) {
    const int32_t j = first + lane;
    const int32_t slot = dropped_slot(drop, j);
    const int32_t page = j < drop.total ? line[slot] : kNoPage;
    const uint32_t returning = __ballot_sync(~0u, page != kNoPage);
    if (page != kNoPage) {
      const int32_t before = __popc(returning & ((1u << lane) - 1));
      ring.ids[ring_advance(base, offset + before, ring.num_pages)] = page;
      line[slot] = kNoPage;
    }
    offset += __popc(returning);
  }
}

// Keep: as the host's move_pages(). The target of a page lies at or right of its source, and pages
// go last to first, so no chunk writes where a later one reads.
__device__ void move_slots(const OpLaunch& x, const RowDrop& drop, int32_t* line, int32_t left) {
  const PageTableShape& shape = x.a.shape.table;
  const int32_t moved = drop.moved[left >> 1];
  for (int32_t first = 0; first < moved; first += 32) {
    const int32_t k = first + lane_id();
    const int32_t from = shape.slot_of(left, drop.held.of[left] - 1 - k);
    const int32_t page = k < moved ? line[from] : kNoPage;
    __syncwarp();
    if (k < moved) line[from] = kNoPage;
    __syncwarp();
    if (k < moved) line[shape.slot_of(left + 1, drop.held.of[left + 1] + k)] = page;
    __syncwarp();
  }
}

__global__ void __launch_bounds__(kWarpRowThreads, 4)
    give_kernel(const __grid_constant__ OpLaunch x) {
  if (!goes_ahead(x)) return;
  const int32_t i = static_cast<int32_t>((blockIdx.x * kWarpRowThreads + threadIdx.x) / 32);
  if (i >= x.rows) return;
  const int32_t offset = row_offset(x, i);
  const BatchRow r = batch_row_at(x.a, x.op, i);
  if (r.sequence == kPaddingSequence) return;
  const RowDrop drop = drop_row(x.a, x.op, r);
  int32_t* line = x.a.slots + line_start(x.a, r.row);
  give_slots(x, drop, line, offset);
  __syncwarp();
  move_slots(x, drop, line, 0);
  move_slots(x, drop, line, 2);
  if (lane_id() != 0) return;
  for (int32_t s = 0; s < kMaxSides; ++s) {
    if (drop.exchanged[s] == 0) continue;
    const PageCopy& copy = x.op.copies[static_cast<int64_t>(i) * kMaxSides + s];
    line[exchanged_slot(x.a, drop, s)] = copy.target;
  }
  x.a.tokens[r.row] = drop.tokens;
  x.a.pages[r.row] = drop.pages;
  if (r.within == 0) x.a.sequences[r.sequence].state = state_after(x.op.kind);
}

}  // namespace

cudaError_t launch_drop(const OpLaunch& x, cudaStream_t stream) {
  const auto ctas =
      static_cast<uint32_t>((int64_t{x.rows} * 32 + kWarpRowThreads - 1) / kWarpRowThreads);
  mark_kernel<<<ctas, kWarpRowThreads, 0, stream>>>(x);
  cudaError_t status = cudaGetLastError();
  if (status != cudaSuccess) return status;
  count_kernel<<<static_cast<uint32_t>(x.groups), kCountThreads, 0, stream>>>(x);
  status = cudaGetLastError();
  if (status != cudaSuccess) return status;
  give_kernel<<<ctas, kWarpRowThreads, 0, stream>>>(x);
  return cudaGetLastError();
}

}  // namespace tierkv
