// SPDX-License-Identifier: Apache-2.0
// The second kernel of coded attention: joins what warps left of each row. All that it reads but
// the partials is there before the first kernel ends; the order of joining is fixed.
#pragma once

#include <cmath>

#include "attention/coded/coded_items.cuh"
#include "attention/coded/coded_state.cuh"
#include "attention/core/parts_join.cuh"
#include "gpu/lanes.cuh"
#include "gpu/pdl.cuh"

namespace tierkv {

inline constexpr int32_t kMaxPartials = 4096;  // of a row: no device has as many warps

// A slice of kDims dims of a column of a row: its partials, and what is written of it. Tasks are
// numbered row by row and column by column.
template <int32_t kDims>
struct JoinTask {
  const CodedKernelParams& params;
  int32_t row, column, dim;  // column: of this pass; dim: the slice's first one
  const float* first;        // partial
  int32_t stride, count;     // of partials

  __device__ __forceinline__ JoinTask(const CodedKernelParams& params, int32_t index)
      : params(params), first(static_cast<const float*>(params.call.workspace)), count(0) {
    const CodedAttention& call = params.call;
    const int32_t slices = slices_of(call.head_dim, kDims), of_row = call.columns * slices;
    row = index / of_row;
    column = index % of_row / slices;
    dim = index % slices * kDims;
    stride = static_cast<int32_t>(coded_partial_floats(call));
    if (row >= call.num_rows) return;
    const int32_t begin = call.rows[row].first_item;
    const ItemShares shares = item_shares(params);
    const int32_t end = row + 1 < call.num_rows ? call.rows[row + 1].first_item : shares.items;
    if (end <= begin) return;
    const int32_t warp = shares.warp_of(begin);
    first += (int64_t{warp} + row) * stride;
    count = min(shares.warp_of(end - 1) - warp + 1, kMaxPartials);
  }

  __device__ __forceinline__ int32_t dims() const { return params.call.head_dim - dim; }
  // Every `step`-th partial from partial `from` on.
  __device__ __forceinline__ JoinedParts parts(int32_t from, int32_t step) const {
    const CodedAttention& call = params.call;
    const float* partial = first + from * stride;
    return even_parts(
        reinterpret_cast<const SoftmaxState*>(partial + call.columns * call.head_dim) + column,
        partial + column * call.head_dim + dim, step * stride / 2, step * stride,
        ceil_div(max(count - from, 0), step));
  }

  // By the warp that has joined the task.
  template <class Join>
  __device__ __forceinline__ void write(Join join) const {
    const CodedAttention& call = params.call;
    if (row >= call.num_rows || call.rows[row].step < 0) return;
    const bool is_corrupt = std::isnan(join.state().sum);
    if (is_corrupt) join = Join(dims());
    const int64_t place = params.queries.place(row, params.first_column + column);
    join.write_joined({static_cast<uint16_t*>(call.out) + place * call.head_dim + dim,
                       call.lse == nullptr || dim != 0 ? nullptr : call.lse + place,
                       call.dtype == DType::kBFloat16},
                      call.prior, place, params.queries.head(row, params.first_column + column));
    if (column != 0 || dim != 0 || !is_first_lane()) return;
    const StatusCode found = is_corrupt ? StatusCode::kCorrupt : StatusCode::kOk;
    if (call.status_stride != 0) {
      call.row_status[int64_t{row} * call.status_stride] = found;
    } else if (is_corrupt) {
      atomicCAS(reinterpret_cast<int32_t*>(call.row_status), 0, static_cast<int32_t>(found));
    }
  }
};

// For many rows: a warp for a task. So few warps are all resident when the first kernel ends.
inline constexpr int32_t kJoinWarps = 4;  // of a CTA
inline constexpr int32_t kJoinCtas = 6;   // that an SM has registers for, at least
inline constexpr int32_t kJoinDims = 128;
inline __global__ void __launch_bounds__(kJoinWarps * 32, kJoinCtas)
    join_kernel(const __grid_constant__ CodedKernelParams params) {
  const JoinTask<kJoinDims> task(params,
                                 static_cast<int32_t>(blockIdx.x * kJoinWarps + threadIdx.x / 32));
  let_next_kernel_start();
  wait_for_previous_kernel();
  PartsJoin<kJoinDims, 8, true> join(task.dims());
  join.join(task.parts(0, 1));
  task.write(join);
}

// For rows of many partials: a CTA for a task, each of its warps joins every so many-th partial,
// all on their way at once, and one joins what they have.
inline constexpr int32_t kMostJoinWarps = 32;
inline constexpr int32_t kManyDims = 64;
inline constexpr int32_t kJoinAhead = 10;  // partials of a warp on their way at a time
inline __global__ void __launch_bounds__(kMostJoinWarps * 32)
    join_many_kernel(const __grid_constant__ CodedKernelParams params) {
  extern __shared__ __align__(1024) uint8_t shared[];
  const auto warp = static_cast<int32_t>(threadIdx.x / 32),
             warps = static_cast<int32_t>(blockDim.x / 32);
  auto* states = reinterpret_cast<SoftmaxState*>(shared);
  auto* accumulators = reinterpret_cast<float*>(states + warps);
  const JoinTask<kManyDims> task(params, static_cast<int32_t>(blockIdx.x));
  let_next_kernel_start();
  wait_for_previous_kernel();
  PartsJoin<kManyDims, kJoinAhead / 2, true> part(task.dims());
  part.join(task.parts(warp, warps));
  part.store(states + warp, accumulators + warp * kManyDims);
  __syncthreads();
  if (warp > 0) return;
  PartsJoin<kManyDims, 4, false> join(task.dims());
  join.join(even_parts(states, accumulators, 1, kManyDims, warps));
  task.write(join);
}

struct JoinLaunch {
  void (*kernel)(CodedKernelParams);
  int32_t ctas, warps, shared_bytes;
};
// call: of a pass. partials: of a row, about.
inline JoinLaunch join_launch(const CodedAttention& call, int32_t partials) {
  const int32_t columns = call.num_rows * call.columns;
  if (partials <= 12) {
    const int32_t tasks = columns * slices_of(call.head_dim, kJoinDims);
    return {join_kernel, ceil_div(tasks, kJoinWarps), kJoinWarps, 0};
  }
  const int32_t warps = partials <= 4 * kJoinAhead ? 4 : partials <= 8 * kJoinAhead ? 8 : 32;
  return {join_many_kernel, columns * slices_of(call.head_dim, kManyDims), warps,
          warps * (static_cast<int32_t>(sizeof(SoftmaxState)) + 4 * kManyDims)};
}

}  // namespace tierkv
