// What the kernels of an operation share: their launch record, the scratch between them, and the
// scan with which the last CTA of a stage deals out the pages.
//
// Every operation starts with a plan stage: a thread per row says how many pages the row takes, a
// warp adds up its 32 rows (a group), and the CTA that finishes last scans the groups, decides, and
// advances the cursor. The stages after it read the decision; a row finds its pages at the offset
// of its group plus the sum of the rows before it in the group. So all-or-nothing costs no barrier
// across the grid, and no kernel waits for another CTA.
#pragma once

#include <cub/block/block_scan.cuh>

#include "allocator/page_drop.h"
#include "allocator/page_op.h"
#include "tierkv/allocator.h"

namespace tierkv {

inline constexpr int32_t kGroupRows = 32;
inline constexpr int32_t kPlanThreads = 256;     // a thread per row
inline constexpr int32_t kWarpRowThreads = 256;  // a warp per row
inline constexpr int32_t kCountThreads = 1024;   // a warp per row, a group per CTA

struct OpDecision {
  StatusCode status;
  int32_t take_index;  // of the ring: where the pages it takes start
  int32_t give_index;  // where the pages it gives back go
  int32_t reserved;
};

struct OpScratch {
  OpDecision* decision = nullptr;
  int32_t* row_pages = nullptr;      // [batch rows] taken or given back
  int32_t* group_offsets = nullptr;  // [groups] their sum; after the stage, of all groups before
};

struct OpLaunch {
  PageAllocator a;
  PageOp op;
  OpScratch scratch;
  int32_t rows = 0;
  int32_t groups = 0;
};

// True in every thread of the CTA that arrives last; what other CTAs wrote before they arrived is
// then visible with
// __ldcg. Resets the counter for the next stage.
__device__ inline bool is_last_cta(uint32_t* arrived) {
  __shared__ bool last;
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    last = atomicInc(arrived, gridDim.x - 1) == gridDim.x - 1;
  }
  __syncthreads();
  if (last) __threadfence();
  return last;
}

// Exclusive prefix sum of sums[0 .. groups) in place, by one CTA; returns the total. A prefix
// beyond 2^31 is cut: then the total exceeds every pool and nobody reads the prefixes.
template <int kThreads>
__device__ int64_t scan_groups(int32_t* sums, int32_t groups) {
  constexpr int kItems = 4;
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

__device__ inline int32_t warp_sum(int32_t x) {
  for (int d = 16; d > 0; d >>= 1) x += __shfl_xor_sync(~0u, x, d);
  return x;
}

__device__ inline int32_t warp_exclusive_sum(int32_t x) {
  const int32_t lane = static_cast<int32_t>(threadIdx.x) & 31;
  int32_t sum = x;
  for (int d = 1; d < 32; d <<= 1) {
    const int32_t left = __shfl_up_sync(~0u, sum, d);
    if (lane >= d) sum += left;
  }
  return sum - x;
}

// For a warp that works on one row: where the row's pages start among those of the operation.
__device__ inline int32_t row_offset(const OpLaunch& x, int32_t row) {
  const int32_t lane = static_cast<int32_t>(threadIdx.x) & 31, group = row / kGroupRows;
  const int32_t neighbour = group * kGroupRows + lane;
  const int32_t before =
      warp_exclusive_sum(neighbour < x.rows ? x.scratch.row_pages[neighbour] : 0);
  return x.scratch.group_offsets[group] + __shfl_sync(~0u, before, row % kGroupRows);
}

// Kernels after the plan stage go ahead only when the operation does.
__device__ inline bool goes_ahead(const OpLaunch& x) {
  return x.scratch.decision->status == StatusCode::kOk;
}

// Keep, truncate, release, after their plan (and the exchange of truncate). Launches three kernels.
cudaError_t launch_drop(const OpLaunch& x, cudaStream_t stream);

}  // namespace tierkv
