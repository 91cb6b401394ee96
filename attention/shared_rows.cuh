// The kernel of shared_rows.h. Of every CTA of the decode kernel the row that begins there and goes
// on behind it; a warp a slice of a column.
#pragma once

#include "attention/decode.h"
#include "attention/few_rows.cuh"
#include "attention/parts_join.cuh"
#include "attention/shared_rows.h"

namespace tierkv {

inline constexpr int32_t kSharedRowsThreads = 128;
inline constexpr int32_t kSharedRowsWarps = kSharedRowsThreads / 32;
inline constexpr int32_t kSharedRowsBatch = 16;

// CTAs for each of the decode kernel's.
TKV_HD constexpr int32_t shared_rows_depth(int32_t head_dim, int32_t of_row) {
  return ceil_div(of_row * slices_of(head_dim), kSharedRowsWarps);
}

// The CTAs that share a row that begins in `cta` and goes on behind it. By a whole warp.
__device__ __forceinline__ int32_t ctas_of_row(const SharedRowsParams& p, int32_t cta,
                                               int32_t row) {
  int32_t count = 1;
  while (true) {
    const int32_t other = cta + count + static_cast<int32_t>(threadIdx.x % 32);
    const bool has_part = other < p.num_ctas && p.items[other * kDecodeWarps].row == row;
    const uint32_t without = ~__ballot_sync(kFullWarp, has_part);
    if (without != 0) return count + lowest_bit(without);
    count += 32;
  }
}

// What a warp joins and where its result goes, all known before the parts are there.
template <int32_t kHeadDim>
struct SharedRowTask {
  JoinedParts parts;
  PartsJoin<kSharedRowsBatch, true>::Output to;
  int32_t q_head;
  bool has_dims;

  // to.slice is null where there is nothing to do.
  __device__ __forceinline__ SharedRowTask(const SharedRowsParams& p, int32_t cta, int32_t row,
                                           int32_t task) {
    const int32_t of_row = p.columns.of_row;
    const int32_t column = task / slices_of(kHeadDim), slice = task % slices_of(kHeadDim);
    const int64_t place = p.columns.place(row, column);
    to = {nullptr, nullptr, p.is_bfloat16, -INFINITY};
    if (place < 0) return;
    const int64_t first = static_cast<int64_t>(part_index(cta, false)) * of_row + column;
    const int64_t before = static_cast<int64_t>(part_index(cta, true)) * of_row + column;
    const float* dims = p.parts + slice * kJoinDims;
    parts = {p.part_states + first,
             p.part_states + before,
             dims + first * kHeadDim,
             dims + before * kHeadDim,
             2 * of_row,
             2 * of_row * kHeadDim,
             ctas_of_row(p, cta, row)};
    to.slice = static_cast<uint16_t*>(p.out) + place * kHeadDim + slice * kJoinDims;
    if (p.lse != nullptr && slice == 0) to.lse = p.lse + place;
    q_head = p.columns.head(row, column);
    has_dims = slice * kJoinDims + 4 * static_cast<int32_t>(threadIdx.x % 32) < kHeadDim;
  }
};

template <int32_t kHeadDim>
__global__ void __launch_bounds__(kSharedRowsThreads)
    shared_rows_kernel(const __grid_constant__ SharedRowsParams p) {
  touch_parameters(p, static_cast<int32_t>(threadIdx.x) / 32);
  let_next_kernel_start();
  const int32_t depth = shared_rows_depth(kHeadDim, p.columns.of_row);
  const int32_t cta = static_cast<int32_t>(blockIdx.x) / depth;
  const WorkItem here = p.items[cta * kDecodeWarps], behind = p.items[(cta + 1) * kDecodeWarps];
  const bool begins_here = behind.tile > 0 && (here.row != behind.row || here.tile == 0);
  if (!begins_here) {
    // Whoever follows waits for the end of this kernel, and must not see it before that of the
    // decode kernel.
    if (cta == 0) wait_for_previous_kernel();
    return;
  }
  const int32_t warp = static_cast<int32_t>(threadIdx.x) / 32;
  SharedRowTask<kHeadDim> task(
      p, cta, behind.row,
      (static_cast<int32_t>(blockIdx.x) - cta * depth) * kSharedRowsWarps + warp);
  wait_for_previous_kernel();
  if (task.to.slice == nullptr) return;
  if (p.sinks != nullptr) task.to.sink = p.sinks[task.q_head];
  PartsJoin<kSharedRowsBatch, true> join;
  join.add(task.parts, task.has_dims);
  join.write(task.to, task.has_dims);
}

// A kernel, null where there is none, and its CTAs.
struct SharedRowsLaunch {
  void (*kernel)(SharedRowsParams) = nullptr;
  int32_t ctas = 0, threads = 0;
};
template <int32_t kHeadDim>
SharedRowsLaunch shared_rows_launch_for(const SharedRowsParams& p) {
  if (p.num_rows < p.num_ctas) {
    const int32_t warps = few_rows_warps(p.num_rows, p.columns.of_row, kHeadDim);
    return {few_rows_kernel<kHeadDim>, ceil_div(warps, kFewRowsWarps), kFewRowsThreads};
  }
  return {shared_rows_kernel<kHeadDim>, p.num_ctas * shared_rows_depth(kHeadDim, p.columns.of_row),
          kSharedRowsThreads};
}
inline SharedRowsLaunch shared_rows_launch(const SharedRowsParams& p, int32_t head_dim) {
  switch (head_dim) {
    case 64:
      return shared_rows_launch_for<64>(p);
    case 96:
      return shared_rows_launch_for<96>(p);
    case 128:
      return shared_rows_launch_for<128>(p);
    case 256:
      return shared_rows_launch_for<256>(p);
    default:
      return {};
  }
}

}  // namespace tierkv
