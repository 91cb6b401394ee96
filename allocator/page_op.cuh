// SPDX-License-Identifier: Apache-2.0
// What the kernels of an operation share: their launch record, the scratch between them, the scan
// with which the last CTA of a stage deals out the pages, and the list of a group's pages.
//
// Every operation starts with a plan stage: a thread per row says how many pages the row takes or
// gives back, a warp adds up its 32 rows (a group), and the CTA that finishes last scans the
// groups, decides, and moves the cursors and the sequences' states. The stages after it read the
// decision; a row finds its pages at the offset of its group plus the sum of the rows before it in
// the group. So all-or-nothing costs no barrier across the grid, and no kernel waits for another
// CTA.
//
// A row's new or dropped pages are runs of its line and of the ring, which a warp copies. Only a
// fork works off the pages of a group as one list.
#pragma once

#include <cub/block/block_scan.cuh>

#include "allocator/page_drop.h"
#include "allocator/page_op.h"
#include "tierkv/allocator.h"

namespace tierkv {

inline constexpr int32_t kGroupRows = 32;
inline constexpr int32_t kRowThreads = 256;  // a thread per row
inline constexpr int32_t kGroupThreads =
    128;  // a CTA per group: 32,768 rows are resident at once on an H100
inline constexpr int32_t kThreadItems = 8;  // pages of a group's list that a thread has in flight

struct OpDecision {
  StatusCode status;
  int32_t take_index;  // of the ring: where the pages it takes start
  int32_t give_index;  // where the pages it gives back go
  int64_t pages;       // keep and release: that are dropped
  bool marks;          // whether a dropped page may be shared, so that the stage mark looks at them
  bool counts;  // whether one is, so that the stage count says which pages return; else all that
                // are dropped do
};

struct OpScratch {
  OpDecision* decision = nullptr;
  SideCounts* reserved = nullptr;  // [batch.count] of the sequences, before the operation
  int32_t* group_offsets =
      nullptr;  // [groups] pages taken or given back by a group; after the stage, by all before it
};

struct OpLaunch {
  PageAllocator a;
  PageOp op;
  OpScratch scratch;
  int32_t rows = 0;
  int32_t groups = 0;
  bool overlaps = false;  // whether a stage may be launched before the stage it follows has ended
};

using StageKernel = void (*)(OpLaunch);

// Whether the device in use can launch a stage before the one before it has ended.
cudaError_t overlapping_launches(bool* supported);
// Launches a stage that comes to wait_for_stage() in every thread.
cudaError_t launch_stage(StageKernel kernel, int32_t ctas, int32_t threads, const OpLaunch& x,
                         cudaStream_t stream);
// What follows the plan of each kind.
cudaError_t launch_take(const OpLaunch& x, cudaStream_t stream);  // append, truncate: one kernel
cudaError_t launch_fill(const OpLaunch& x, cudaStream_t stream);  // grow, reserve, fork: one kernel
cudaError_t launch_drop(const OpLaunch& x,
                        cudaStream_t stream);  // keep, truncate, release: three kernels

// The kind as a constant, so that a kernel holds the plan of one operation.
template <PageOpKind kKind>
__device__ PageOp op_of_kind(const OpLaunch& x) {
  PageOp op = x.op;
  op.kind = kKind;
  return op;
}

__device__ inline int32_t lane_id() {
  return static_cast<int32_t>(threadIdx.x) & 31;
}

// A stage lets the next one start at once, which then waits for all that the stages before it
// wrote. Until then it may read only what no stage of its operation changes. Devices without
// overlapping launches have waited in the stream.
__device__ inline void let_next_stage_start() {
#if __CUDA_ARCH__ >= 900
  cudaTriggerProgrammaticLaunchCompletion();
#endif
}
__device__ inline void wait_for_stage() {
#if __CUDA_ARCH__ >= 900
  cudaGridDependencySynchronize();
#endif
}

// Kernels after the plan stage go ahead only when the operation does.
__device__ inline bool goes_ahead(const OpLaunch& x) {
  return x.scratch.decision->status == StatusCode::kOk;
}

// True in every thread of the CTA that arrives last of `ctas`; what other CTAs wrote before they
// arrived is then visible with
// __ldcg. Resets the counter for the next stage.
__device__ inline bool is_last_cta(uint32_t* arrived, uint32_t ctas) {
  __shared__ bool last;
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    last = atomicInc(arrived, ctas - 1) == ctas - 1;
  }
  __syncthreads();
  if (last) __threadfence();
  return last;
}

// Exclusive prefix sum of sums[0 .. groups) in place, by one CTA; returns the total. A prefix
// beyond 2^31 is cut: then the total exceeds every pool and nobody reads the prefixes.
template <int kThreads>
__device__ int64_t scan_groups(int32_t* sums, int32_t groups) {
  constexpr int kItems = 1024 / kThreads;
  using Scan = cub::BlockScan<int64_t, kThreads, cub::BLOCK_SCAN_WARP_SCANS>;
  __shared__ typename Scan::TempStorage storage;
  int64_t total = 0;
  for (int32_t first = 0; first < groups; first += kThreads * kItems) {
    const int32_t mine = first + static_cast<int32_t>(threadIdx.x) * kItems;
    int64_t items[kItems], chunk = 0;
    for (int k = 0; k < kItems; ++k) items[k] = mine + k < groups ? __ldcg(sums + mine + k) : 0;
    Scan(storage).ExclusiveSum(items, items, chunk);
    for (int k = 0; k < kItems; ++k) {
      if (mine + k < groups) sums[mine + k] = static_cast<int32_t>(total + items[k]);
    }
    total += chunk;
    __syncthreads();
  }
  return total;
}

// Eight lanes copy the runs of a row, four rows in a warp: rows of few pages keep their loads in
// flight together. Rows of one warp may differ in length, so only their own lanes wait for each
// other.
inline constexpr int32_t kRunLanes = 8;
inline constexpr int32_t kRunStep = kRunLanes * kThreadItems;  // pages of a run in flight
__device__ inline int32_t run_lane() {
  return static_cast<int32_t>(threadIdx.x) % kRunLanes;
}
__device__ inline uint32_t run_mask() {
  return ((1u << kRunLanes) - 1) << (lane_id() - run_lane());
}
__device__ inline void sync_run() {
  __syncwarp(run_mask());
}
// Rows of the group that these lanes work on: first_row(), then every kRunRows-th.
inline constexpr int32_t kRunRows = kGroupThreads / kRunLanes;
__device__ inline int32_t first_row() {
  return static_cast<int32_t>(threadIdx.x) / kRunLanes;
}

__device__ inline int32_t warp_sum(int32_t x) {
  for (int d = 16; d > 0; d >>= 1) x += __shfl_xor_sync(~0u, x, d);
  return x;
}

__device__ inline int32_t warp_exclusive_sum(int32_t x) {
  int32_t sum = x;
  for (int d = 1; d < 32; d <<= 1) {
    const int32_t left = __shfl_up_sync(~0u, sum, d);
    if (lane_id() >= d) sum += left;
  }
  return sum - x;
}

// Batch row `row_in_group` of the CTA's group.
__device__ inline int32_t group_row(int32_t row_in_group) {
  return static_cast<int32_t>(blockIdx.x) * kGroupRows + row_in_group;
}

// The items of the group's rows, one row after the other: item first[row] + j is item j of the row.
struct GroupItems {
  int32_t first[kGroupRows + 1];

  __device__ int32_t total() const { return first[kGroupRows]; }
  // By the whole first warp, whose lane is the row.
  __device__ void set(int32_t row_items) {
    const int32_t before = warp_exclusive_sum(row_items);
    first[lane_id()] = before;
    if (lane_id() == kGroupRows - 1) first[kGroupRows] = before + row_items;
  }
  __device__ int32_t row_of(int32_t item) const {
    int32_t row = 0;
    for (int32_t step = kGroupRows / 2; step > 0; step /= 2) {
      if (first[row + step] <= item) row += step;
    }
    return row;
  }
};

// Page `offset` of those that the operation takes.
__device__ inline int32_t id_at(const OpLaunch& x, int32_t offset) {
  const FreeRing& ring = x.a.ring;
  return ring.ids[ring_advance(x.scratch.decision->take_index, offset, ring.num_pages)];
}

__device__ inline PageCopy* copies_of(const PageOp& op, int32_t batch_row) {
  return op.copies + static_cast<int64_t>(batch_row) * kMaxSides;
}
__device__ inline void clear_copies(const PageOp& op, int32_t batch_row) {
  for (int32_t s = 0; s < kMaxSides; ++s) copies_of(op, batch_row)[s] = {kNoPage, kNoPage};
}

}  // namespace tierkv
