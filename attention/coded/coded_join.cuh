// SPDX-License-Identifier: Apache-2.0
// The second kernel of coded attention: joins what warps left of each row and completes the
// lse. All that it reads but the partials is there before the first kernel ends; the order of
// joining is fixed.
#pragma once

#include "attention/coded/coded_items.cuh"
#include "attention/coded/coded_state.cuh"
#include "codec/format/element.h"
#include "gpu/constants.h"
#include "gpu/lanes.cuh"
#include "gpu/pdl.cuh"

namespace tierkv {

inline constexpr int32_t kMaxPartials = 4096;  // of a row: no device has as many warps

// A column of a row of a call: its partials, and what is written of it.
struct JoinedColumn {
  const CodedKernelParams& params;
  int32_t row, column;  // column: of this pass
  const float* first;   // partial
  int64_t stride;
  int32_t count;  // partials

  __device__ __forceinline__ JoinedColumn(const CodedKernelParams& params, int32_t row,
                                          int32_t column)
      : params(params), row(row), column(column), first(nullptr), stride(0), count(0) {
    const CodedAttention& call = params.call;
    const int32_t begin = call.rows[row].first_item;
    const ItemShares shares = item_shares(params, params.grid.warps);
    const int32_t end = row + 1 < call.num_rows ? call.rows[row + 1].first_item : shares.items;
    if (end <= begin) return;
    const int32_t warp = shares.warp_of(begin);
    stride = coded_partial_floats(call);
    first = static_cast<const float*>(call.workspace) + (int64_t{warp} + row) * stride;
    count = min(shares.warp_of(end - 1) - warp + 1, kMaxPartials);
  }

  // Reference and sum of partial i; without tokens where there is none.
  __device__ __forceinline__ float2 state(int32_t i) const {
    if (i >= count) return {kNoReference, 0.0f};
    return *reinterpret_cast<const float2*>(
        first + i * stride + params.call.columns * params.call.head_dim + 2 * column);
  }
  // Dims dim and dim + 1 of it, dim being even.
  __device__ __forceinline__ float2 values(int32_t i, int32_t dim) const {
    if (i >= count || dim >= params.call.head_dim) return {0.0f, 0.0f};
    return *reinterpret_cast<const float2*>(first + i * stride + column * params.call.head_dim +
                                            dim);
  }

  __device__ __forceinline__ int64_t place() const {
    return params.queries.place(row, params.first_column + column);
  }
  __device__ __forceinline__ bool is_left_out() const { return params.call.rows[row].step < 0; }
  __device__ __forceinline__ void write(int32_t dim, float2 x) const {
    const CodedAttention& call = params.call;
    if (dim >= call.head_dim || is_left_out()) return;
    auto* to = static_cast<uint16_t*>(call.out) + place() * call.head_dim + dim;
    *reinterpret_cast<uint32_t*>(to) = output_to_raw(call.dtype, x.x) |
                                       static_cast<uint32_t>(output_to_raw(call.dtype, x.y)) << 16;
  }
};

// What a column's partials amount to.
struct ColumnSum {
  float top, sum;
  bool corrupt;

  __device__ __forceinline__ bool present() const { return sum > 0.0f && !corrupt; }
  // By one thread.
  __device__ __forceinline__ void finish(const JoinedColumn& c) const {
    const CodedAttention& call = c.params.call;
    if (c.is_left_out()) return;
    if (call.lse != nullptr) {
      call.lse[c.place()] = present() ? kLn2 * (top + log2_fast(sum)) : -INFINITY;
    }
    if (c.column == 0) call.row_status[c.row] = corrupt ? StatusCode::kCorrupt : StatusCode::kOk;
  }
};
// A partial whose warp found no token to score has no reference.
__device__ __forceinline__ float partial_share(float2 state, float top) {
  return state.y <= 0.0f ? 0.0f : exp2_fast(state.x - top);
}
__device__ __forceinline__ float warp_sum(float x) {
  for (int32_t i = 16; i > 0; i /= 2) x += __shfl_xor_sync(kFullWarp, x, i);
  return x;
}
__device__ __forceinline__ float warp_max(float x) {
  for (int32_t i = 16; i > 0; i /= 2) x = fmaxf(x, __shfl_xor_sync(kFullWarp, x, i));
  return x;
}
// share: 0 where there is nothing to add, whatever x holds.
__device__ __forceinline__ void add_share(float share, float2 x, float2* total) {
  if (share <= 0.0f) return;
  total->x = fmaf(share, x.x, total->x);
  total->y = fmaf(share, x.y, total->y);
}
__device__ __forceinline__ float2 joined_output(const ColumnSum& found, float2 total) {
  if (!found.present()) return {0.0f, 0.0f};
  return {total.x / found.sum, total.y / found.sum};
}

// For many rows: a warp for a column, whose lanes have kPairs pairs of dims each. So few warps are
// all resident when the first kernel ends.
inline constexpr int32_t kJoinWarps = 4;  // of a CTA
template <int kPairs>
__global__ void __launch_bounds__(kJoinWarps * 32)
    join_kernel(const __grid_constant__ CodedKernelParams params) {
  constexpr int32_t kAhead = 16 / kPairs;  // partials on their way at a time
  const CodedAttention& call = params.call;
  const auto lane = static_cast<int32_t>(threadIdx.x % 32);
  const int32_t index =
      static_cast<int32_t>(blockIdx.x) * kJoinWarps + static_cast<int32_t>(threadIdx.x / 32);
  if (index >= call.num_rows * call.columns) return;
  const JoinedColumn c(params, index / call.columns, index % call.columns);
  float2 total[kPairs] = {}, x[kAhead][kPairs];
  wait_for_previous_kernel();
  let_next_kernel_start();

  const auto load = [&](int32_t first) {
#pragma unroll
    for (int32_t k = 0; k < kAhead; ++k) {
#pragma unroll
      for (int32_t p = 0; p < kPairs; ++p) x[k][p] = c.values(first + k, 2 * lane + 64 * p);
    }
  };
  load(0);
  float2 state = c.state(lane);
  ColumnSum found{state.x, 0.0f, state.y < 0.0f};
  for (int32_t i = lane + 32; i < c.count; i += 32) {
    const float2 other = c.state(i);
    found.top = fmaxf(found.top, other.x);
    found.corrupt |= other.y < 0.0f;
  }
  found.top = warp_max(found.top);
  found.corrupt = __any_sync(kFullWarp, found.corrupt);
  float share = 0.0f;
#pragma unroll 1
  for (int32_t i = 0; i < c.count; i += kAhead) {
    static_assert(32 % kAhead == 0);
    if (i > 0) load(i);
    if (i % 32 == 0) {
      if (i > 0) state = c.state(i + lane);
      share = partial_share(state, found.top);
      found.sum += share * state.y;
    }
#pragma unroll
    for (int32_t k = 0; k < kAhead; ++k) {
      const float share_of_k = __shfl_sync(kFullWarp, share, i % 32 + k);
#pragma unroll
      for (int32_t p = 0; p < kPairs; ++p) add_share(share_of_k, x[k][p], &total[p]);
    }
  }
  found.sum = warp_sum(found.sum);
#pragma unroll
  for (int32_t p = 0; p < kPairs; ++p) {
    c.write(2 * lane + 64 * p, joined_output(found, total[p]));
  }
  if (lane == 0) found.finish(c);
}

// For rows of many partials: 64 dims of a column a CTA, each of its warps adds every kParts-th
// partial. A thread reads one state, then its values side by side, so that a row waits for memory
// twice.
inline constexpr int32_t kJoinAhead = 9;  // partials of a warp on their way at a time
template <int kParts>
__global__ void __launch_bounds__(kParts * 32)
    join_many_kernel(const __grid_constant__ CodedKernelParams params) {
  constexpr int32_t kThreads = kParts * 32, kAhead = kJoinAhead;
  __shared__ float shares[kThreads], sums[32];
  __shared__ float2 totals[kParts][32];
  const auto thread = static_cast<int32_t>(threadIdx.x);
  const int32_t lane = thread % 32, part = thread / 32;
  const JoinedColumn c(params, static_cast<int32_t>(blockIdx.x), static_cast<int32_t>(blockIdx.y));
  const int32_t dim = static_cast<int32_t>(blockIdx.z) * 64 + 2 * lane;
  wait_for_previous_kernel();
  let_next_kernel_start();

  float2 x[kAhead], total = {0.0f, 0.0f};
  const auto load = [&](int32_t first) {
#pragma unroll
    for (int32_t k = 0; k < kAhead; ++k) x[k] = c.values(first + part + k * kParts, dim);
  };
  load(0);
  float2 state = c.state(thread);
  ColumnSum found{state.x, 0.0f, state.y < 0.0f};
  for (int32_t i = thread + kThreads; i < c.count; i += kThreads) {
    const float2 other = c.state(i);
    found.top = fmaxf(found.top, other.x);
    found.corrupt |= other.y < 0.0f;
  }
  found.top = warp_max(found.top);
  if (lane == 0) sums[part] = found.top;
  found.corrupt = __syncthreads_or(static_cast<int>(found.corrupt)) != 0;
  found.top = warp_max(lane < kParts ? sums[lane] : kNoReference);
  // A batch is a part of what there are shares of.
  constexpr int32_t kBatch = kAhead * kParts, kShared = kThreads / kBatch * kBatch;
#pragma unroll 1
  for (int32_t i = 0; i < c.count; i += kBatch) {
    if (i > 0) load(i);
    if (i % kShared == 0) {
      if (i > 0) state = c.state(i + thread);
      const float share = partial_share(state, found.top);
      if (thread < kShared) found.sum += share * state.y;
      __syncthreads();
      shares[thread] = share;
      __syncthreads();
    }
#pragma unroll
    for (int32_t k = 0; k < kAhead; ++k) {
      add_share(shares[i % kShared + part + k * kParts], x[k], &total);
    }
  }
  found.sum = warp_sum(found.sum);
  totals[part][lane] = total;
  __syncthreads();
  if (lane == 0) sums[part] = found.sum;
  __syncthreads();
  if (part > 0) return;
  found.sum = warp_sum(lane < kParts ? sums[lane] : 0.0f);
  for (int32_t i = 1; i < kParts; ++i) {
    total.x += totals[i][lane].x;
    total.y += totals[i][lane].y;
  }
  c.write(dim, joined_output(found, total));
  if (thread == 0 && blockIdx.z == 0) found.finish(c);
}

struct JoinLaunch {
  void (*kernel)(CodedKernelParams);
  dim3 ctas;
  int32_t threads;
};
// call: of a pass.
inline JoinLaunch join_launch(const CodedAttention& call, const CodedAttentionGrid& grid) {
  const int32_t partials = grid.num_ctas * grid.warps / call.num_rows;
  const auto rows = static_cast<unsigned>(call.num_rows);
  const auto columns = static_cast<unsigned>(call.columns);
  if (partials <= 12) {
    const dim3 ctas((rows * columns + kJoinWarps - 1) / kJoinWarps);
    return {call.head_dim <= kSliceDims ? join_kernel<2> : join_kernel<4>, ctas, kJoinWarps * 32};
  }
  const dim3 ctas(rows, columns, static_cast<unsigned>((call.head_dim + 63) / 64));
  if (partials <= 4 * kJoinAhead) return {join_many_kernel<4>, ctas, 4 * 32};
  if (partials <= 8 * kJoinAhead) return {join_many_kernel<8>, ctas, 8 * 32};
  return {join_many_kernel<32>, ctas, 32 * 32};
}

}  // namespace tierkv
