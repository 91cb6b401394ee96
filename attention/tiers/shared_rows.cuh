// SPDX-License-Identifier: Apache-2.0
// The kernels of shared_rows.h. Where rows are fewer than the decode kernel's CTAs, so that many
// share each, a warp joins 32 dims of a column, all parts on their way at once. Otherwise each CTA
// of the decode kernel stands for the row that begins there and goes on behind it, and a warp joins
// 128 dims.
#pragma once

#include "attention/core/parts_join.cuh"
#include "attention/tiers/decode.h"
#include "attention/tiers/shared_rows.h"
#include "codec/format/head_dim.h"
#include "gpu/lanes.cuh"
#include "gpu/math.cuh"
#include "gpu/pdl.cuh"

namespace tierkv {

inline constexpr int32_t kSharedRowsThreads = 128;
inline constexpr int32_t kSharedRowsWarps = kSharedRowsThreads / 32;

// The CTAs that share a row: the first one where it begins, `count` in all; 0 where one CTA has it.
struct RowCtas {
  int32_t first, count;
};

// The CTAs of the row that begins in `cta` and goes on behind it. A whole warp calls this function
// and the next one.
__device__ __forceinline__ RowCtas ctas_from(const SharedRowsParams& p, int32_t cta, int32_t row) {
  int32_t count = 1;
  while (true) {
    const int32_t other = cta + count + static_cast<int32_t>(threadIdx.x % 32);
    const bool has_part = other < p.num_ctas && p.items[other * p.warps].row == row;
    const uint32_t without = ~__ballot_sync(kFullWarp, has_part);
    if (without != 0) return {cta, count + lowest_bit(without)};
    count += 32;
  }
}
__device__ __forceinline__ RowCtas ctas_of_row(const SharedRowsParams& p, int32_t row) {
  RowCtas ctas{0, 0};
#pragma unroll 4
  for (int32_t first = 0; first < p.num_ctas; first += 32) {
    const int32_t cta = first + static_cast<int32_t>(threadIdx.x % 32);
    const bool is_inside = cta < p.num_ctas;
    const WorkItem& item = p.items[(is_inside ? cta : 0) * p.warps];
    const uint32_t goes_on =
        __ballot_sync(kFullWarp, is_inside && item.row == row && item.tile > 0);
    if (goes_on == 0) continue;
    if (ctas.count == 0) ctas = {first + lowest_bit(goes_on) - 1, 1};
    ctas.count += __popc(goes_on);
  }
  return ctas;
}

// The parts of a row's column, accumulators from dim `first_dim` on.
__device__ __forceinline__ JoinedParts parts_of_row(const SharedRowsParams& p, const RowCtas& ctas,
                                                    int32_t head_dim, int32_t column,
                                                    int32_t first_dim) {
  const int32_t of_row = p.columns.of_row;
  const int64_t first = static_cast<int64_t>(part_index(ctas.first, false)) * of_row + column;
  const int64_t before = static_cast<int64_t>(part_index(ctas.first, true)) * of_row + column;
  const float* dims = p.parts + first_dim;
  return {p.part_states + first,
          p.part_states + before,
          dims + first * head_dim,
          dims + before * head_dim,
          2 * of_row,
          2 * of_row * head_dim,
          ctas.count};
}

// What a warp joins and where its result goes, all known before the parts are there.
template <int32_t kHeadDim, int32_t kDims, int32_t kBatch>
class SharedRowTask {
 public:
  static constexpr int32_t kSlices = slices_of(kHeadDim, kDims);

  // place: of the column; where it is negative, or ctas.count 0, there is nothing to run.
  __device__ __forceinline__ SharedRowTask(const SharedRowsParams& p, const RowCtas& ctas,
                                           int64_t place, int32_t column, int32_t slice)
      : dims_(kHeadDim - slice * kDims),
        parts_(parts_of_row(p, ctas, kHeadDim, column, slice * kDims)) {
    to_ = {static_cast<uint16_t*>(p.out) + place * kHeadDim + slice * kDims,
           p.lse != nullptr && slice == 0 ? p.lse + place : nullptr, p.is_bfloat16, -INFINITY};
  }

  // When the decode kernel has ended. sink: null for none.
  __device__ __forceinline__ void run(const float* sink) {
    if (sink != nullptr) to_.sink = *sink;
    Join join(dims_);
    join.join(parts_);
    join.write(to_);
  }

 private:
  using Join = PartsJoin<kDims, kBatch, true>;
  int32_t dims_;
  JoinedParts parts_;
  typename Join::Output to_;
};

template <int32_t kHeadDim>
using FewRowsTask = SharedRowTask<kHeadDim, 32, 5>;
template <int32_t kHeadDim>
using ManyRowsTask = SharedRowTask<kHeadDim, 128, 8>;

__device__ __forceinline__ const float* sink_of(const SharedRowsParams& p, int32_t row,
                                                int32_t column) {
  return p.sinks == nullptr ? nullptr : p.sinks + p.columns.head(row, column);
}

// Every warp waits for the kernel before, also without a task: whoever follows waits for the end of
// this kernel, and must not see it before that of the decode kernel.
template <int32_t kHeadDim>
__global__ void __launch_bounds__(kSharedRowsThreads)
    few_rows_kernel(const __grid_constant__ SharedRowsParams p) {
  using Task = FewRowsTask<kHeadDim>;
  touch_parameters(p, static_cast<int32_t>(threadIdx.x) / 32);
  let_next_kernel_start();
  const auto warp = static_cast<int32_t>(blockIdx.x * kSharedRowsWarps + threadIdx.x / 32);
  const int32_t index = warp / Task::kSlices, slice = warp - index * Task::kSlices;
  const int32_t row = index / p.columns.of_row, column = index - row * p.columns.of_row;
  const int64_t place = row < p.num_rows ? p.columns.place(row, column) : -1;
  RowCtas ctas{0, 0};
  if (place >= 0) ctas = ctas_of_row(p, row);
  Task task(p, ctas, place, column, slice);
  const float* sink = sink_of(p, row, column);
  wait_for_previous_kernel();
  if (ctas.count > 0) task.run(sink);
}

// CTAs for each of the decode kernel's.
TKV_HD constexpr int32_t many_rows_depth(int32_t head_dim, int32_t of_row) {
  return ceil_div(of_row * slices_of(head_dim, 128), kSharedRowsWarps);
}

template <int32_t kHeadDim>
__global__ void __launch_bounds__(kSharedRowsThreads)
    many_rows_kernel(const __grid_constant__ SharedRowsParams p) {
  using Task = ManyRowsTask<kHeadDim>;
  touch_parameters(p, static_cast<int32_t>(threadIdx.x) / 32);
  let_next_kernel_start();
  const int32_t depth = many_rows_depth(kHeadDim, p.columns.of_row);
  const int32_t cta = static_cast<int32_t>(blockIdx.x) / depth;
  const WorkItem here = p.items[cta * p.warps], behind = p.items[(cta + 1) * p.warps];
  const bool begins_here = behind.tile > 0 && (here.row != behind.row || here.tile == 0);
  if (!begins_here) {
    if (cta == 0) wait_for_previous_kernel();  // as few_rows_kernel; one CTA does
    return;
  }
  const auto warp = static_cast<int32_t>(threadIdx.x) / 32;
  const int32_t index = (static_cast<int32_t>(blockIdx.x) - cta * depth) * kSharedRowsWarps + warp;
  const int32_t column = index / Task::kSlices, slice = index - column * Task::kSlices;
  const int64_t place = p.columns.place(behind.row, column);
  Task task(p, ctas_from(p, cta, behind.row), place, column, slice);
  const float* sink = sink_of(p, behind.row, column);
  wait_for_previous_kernel();
  if (place >= 0) task.run(sink);
}

// A kernel, null where there is none, and its CTAs.
struct SharedRowsLaunch {
  void (*kernel)(SharedRowsParams) = nullptr;
  int32_t ctas = 0;
};
template <int32_t kHeadDim>
SharedRowsLaunch shared_rows_launch_for(const SharedRowsParams& p) {
  const int32_t of_row = p.columns.of_row;
  if (p.num_rows >= p.num_ctas) {
    return {many_rows_kernel<kHeadDim>, p.num_ctas * many_rows_depth(kHeadDim, of_row)};
  }
  const int32_t warps = p.num_rows * of_row * FewRowsTask<kHeadDim>::kSlices;
  return {few_rows_kernel<kHeadDim>, ceil_div(warps, kSharedRowsWarps)};
}
inline SharedRowsLaunch shared_rows_launch(const SharedRowsParams& p, int32_t head_dim) {
  if (!is_known_head_dim(head_dim)) return {};
  return with_head_dim(head_dim, [&](auto dim) { return shared_rows_launch_for<dim>(p); });
}

}  // namespace tierkv
