// SPDX-License-Identifier: Apache-2.0
// Block tables to rows of the page table, and ragged queries to the order and coordinates that
// attention takes, and back. A warp takes a vector of one head.
//
// Bound: memory, a few microseconds a launch. Queries and outputs of a decode step are small beside
// the cache that is read for them.
#pragma once

#include "attention/core/online_softmax.h"
#include "attention/engine/engine.h"
#include "attention/tiers/shared_rows.cuh"
#include "codec/gpu/pages/lane_rotation.cuh"
#include "gpu/pdl.cuh"

namespace tierkv {

inline constexpr int32_t kEngineThreads = 128;
inline constexpr int32_t kEngineWarps = kEngineThreads / 32;

// Grid: entries, kv_heads.
__global__ void __launch_bounds__(kEngineThreads)
    block_rows_kernel(const __grid_constant__ BlockRows r) {
  const auto entry = static_cast<int32_t>(blockIdx.x), kv_head = static_cast<int32_t>(blockIdx.y);
  const auto thread = static_cast<int32_t>(threadIdx.x);
  const int64_t row = static_cast<int64_t>(entry) * r.num_kv_heads + kv_head;
  const int32_t length = r.length(entry), blocks = r.blocks(length);
  if (thread == 0) {
    SideCounts tokens;
    tokens.of[0] = length;
    r.tokens[row] = tokens;
  }
  for (int32_t i = thread; i < blocks; i += kEngineThreads) {
    r.slots[row * r.row_stride + i] = r.page(entry, i, kv_head);
  }
}

// What a warp works on: query j of an entry, of one head.
struct WarpQuery {
  int64_t vector;  // of what is packed
  int32_t entry, j, head;
  int64_t token;  // -1: there is none
};
__device__ __forceinline__ WarpQuery warp_query(const EngineQueries& q) {
  WarpQuery w;
  w.vector = static_cast<int64_t>(blockIdx.x) * kEngineWarps + threadIdx.x / 32;
  const int64_t line = w.vector / q.num_q_heads;
  w.head = static_cast<int32_t>(w.vector - line * q.num_q_heads);
  w.entry = static_cast<int32_t>(line / q.queries());
  w.j = static_cast<int32_t>(line - static_cast<int64_t>(w.entry) * q.queries());
  w.token = w.vector < q.vectors() ? q.token_of(w.entry, w.j) : -1;
  return w;
}

__device__ __forceinline__ void store_outputs(const LaneValues& x, DType dtype, int32_t head_dim,
                                              uint16_t* to) {
#pragma unroll
  for (int32_t i = 0; i < kLaneChunks; ++i) {
    if (!has_chunk(i, head_dim) || lane_dim(i) >= head_dim) continue;
#pragma unroll
    for (int32_t j = 0; j < 4; ++j) to[lane_dim(i) + 8 * j] = output_to_raw(dtype, x[i][j]);
  }
}

__device__ __forceinline__ void load_query(const EngineQueries& q, const WarpQuery& w,
                                           LaneValues& x) {
  const int64_t first = w.token * q.q_strides.token + w.head * q.q_strides.head;
  load_lane_values(static_cast<const uint16_t*>(q.q) + first, q.dtype, q.head_dim, x);
}

// The decode kernel that follows begins when all work before this one has ended, and waits for this
// one's end before it reads queries.
__global__ void __launch_bounds__(kEngineThreads)
    pack_queries_kernel(const __grid_constant__ EngineQueries q) {
  if (!q.is_settled) wait_for_previous_kernel();
  let_next_kernel_start();
  const WarpQuery w = warp_query(q);
  LaneValues x = {};
  if (w.token >= 0) {
    const float* reflection = q.reflection_of(w.head);
    LaneValues normal;
    load_query(q, w, x);
    load_normal(reflection, q.head_dim, normal);
    rotate(q.rotation, q.head_dim, x);
    if (reflection != nullptr) reflect(normal, q.head_dim, x);
  }
  if (w.vector < q.vectors()) {
    store_outputs(x, q.packed_dtype, q.head_dim,
                  static_cast<uint16_t*>(q.packed_q) + w.vector * q.head_dim);
  }
  wait_for_previous_kernel();  // whoever waits for this kernel waits for that one
}

// In all lanes.
__device__ __forceinline__ float mean_product(const EngineQueries& q, const WarpQuery& w) {
  if (q.key_mean == nullptr) return 0;
  LaneValues x;
  load_query(q, w, x);
  const float* mean = q.key_mean + static_cast<int64_t>(q.kv_head_of(w.head)) * q.head_dim;
  float sum = 0;
#pragma unroll
  for (int32_t i = 0; i < 4 * kLaneChunks; ++i) {
    const int32_t dim = lane_dim(i / 4) + 8 * (i % 4);
    if (dim < q.head_dim) sum += x[i / 4][i % 4] * mean[dim];
  }
#pragma unroll
  for (int32_t lanes = 1; lanes < 32; lanes *= 2) sum += __shfl_xor_sync(kFullWarp, sum, lanes);
  return sum;
}

// The output and the log-sum-exp of a shared row's column, joined from its parts.
__device__ __forceinline__ float join_parts(const JoinedParts& parts, int32_t head_dim,
                                            LaneValues& x) {
  constexpr int32_t kBatch = 4;  // parts in flight
  constexpr int32_t kValues = 4 * kLaneChunks;
  SoftmaxState whole;
#pragma unroll 1
  for (int32_t first = 0; first < parts.count; first += kBatch) {
    SoftmaxState state[kBatch];
    float y[kBatch][kValues];
    float reference = whole.reference;
#pragma unroll
    for (int32_t i = 0; i < kBatch; ++i) {
      if (first + i >= parts.count) continue;
      const float2 s = __ldcg(reinterpret_cast<const float2*>(parts.state(first + i)));
      state[i] = {s.x, s.y};
      const float* from = parts.accumulator(first + i);
#pragma unroll
      for (int32_t n = 0; n < kValues; ++n) {
        const int32_t dim = lane_dim(n / 4) + 8 * (n % 4);
        y[i][n] = dim < head_dim ? __ldcg(from + dim) : 0.0f;
      }
    }
#pragma unroll
    for (const SoftmaxState& s : state) {
      if (!s.is_empty()) reference = fmaxf(reference, s.reference);
    }
    const float factor = share(whole, {reference, 1.0f});
    whole = {reference, whole.sum * factor};
#pragma unroll
    for (int32_t n = 0; n < kValues; ++n) x[n / 4][n % 4] *= factor;
#pragma unroll
    for (int32_t i = 0; i < kBatch; ++i) {
      if (state[i].is_empty()) continue;  // its accumulator may be anything
      const float f = exp2_fast(state[i].reference - reference);
      whole.sum = fmaf(f, state[i].sum, whole.sum);
#pragma unroll
      for (int32_t n = 0; n < kValues; ++n) {
        x[n / 4][n % 4] = fmaf(f, y[i][n], x[n / 4][n % 4]);
      }
    }
  }
  const FinishedState finished = finish(whole, -INFINITY);
#pragma unroll
  for (int32_t n = 0; n < kValues; ++n) x[n / 4][n % 4] *= finished.scale;
  return finished.lse;
}

// What `out` holds of other tokens.
struct PriorValues {
  LaneValues x;
  SoftmaxState state;
};
// A body's output and its log-sum-exp, joined with them.
__device__ __forceinline__ float join_prior(const PriorValues& prior, float sink, float lse,
                                            LaneValues& x) {
  const SoftmaxState body = state_of_lse(lse), whole = join(body, prior.state);
  const FinishedState finished = finish(whole, sink);
  const float of_body = share(body, whole) * finished.scale,
              of_prior = share(prior.state, whole) * finished.scale;
#pragma unroll
  for (int32_t i = 0; i < 4 * kLaneChunks; ++i) {
    float& z = x[i / 4][i % 4];  // what has no share may hold anything
    z = of_body != 0.0f ? of_body * z : 0.0f;
    if (of_prior != 0.0f) z = fmaf(of_prior, prior.x[i / 4][i % 4], z);
  }
  return finished.lse;
}

// Counts a row whose pages or counts led outside their tables, once.
__device__ __forceinline__ void count_stray_row(const EngineQueries& q, const WarpQuery& w) {
  const int32_t group = q.num_q_heads / q.rows.num_kv_heads;
  if (q.errors == nullptr || q.row_status == nullptr || w.j != 0 || w.head % group != 0) return;
  const int32_t status = q.row_status[w.entry * q.rows.num_kv_heads + w.head / group];
  if (status == static_cast<int32_t>(StatusCode::kOk) || lane_index() != 0) return;
  atomicAdd(q.errors + static_cast<int32_t>(EngineError::kStrayBlocks), 1);
}

__global__ void __launch_bounds__(kEngineThreads)
    unpack_outputs_kernel(const __grid_constant__ EngineQueries q) {
  let_next_kernel_start();
  const WarpQuery w = warp_query(q);
  RowCtas ctas{0, 0};
  QueryColumns::Place place{0, 0};
  if (q.shared.items != nullptr && w.vector < q.vectors()) {
    place = q.shared.columns.of_query(w.entry, w.j, w.head);
    ctas = ctas_of_row(q.shared, place.row);
  }
  const bool has_lse = q.lse != nullptr || q.prior.lse != nullptr;
  // Queries were complete before attention began.
  const float of_mean = has_lse && w.token >= 0 ? q.sm_scale * mean_product(q, w) : 0.0f;
  wait_for_previous_kernel();
  if (w.vector >= q.vectors()) return;
  count_stray_row(q, w);
  if (w.token < 0) return;
  auto* const to =
      static_cast<uint16_t*>(q.out) + w.token * q.out_strides.token + w.head * q.out_strides.head;
  PriorValues prior = {};
  if (q.prior.lse != nullptr) {
    load_lane_values(to, q.dtype, q.head_dim, prior.x);
    prior.state = state_of_lse(q.prior.lse[w.vector]);
  }
  LaneValues x = {};
  float lse = 0.0f;
  if (ctas.count > 0) {
    lse = join_parts(parts_of_row(q.shared, ctas, q.head_dim, place.column, 0), q.head_dim, x);
  } else {
    load_lane_values(static_cast<const uint16_t*>(q.packed_out) + w.vector * q.head_dim,
                     q.packed_dtype, q.head_dim, x);
    if (has_lse) lse = q.packed_lse[w.vector];
  }
  rotate_back(q.out_rotation, q.head_dim, x);
  lse += of_mean;
  if (q.prior.lse != nullptr) lse = join_prior(prior, q.prior.sink(w.head), lse, x);
  store_outputs(x, q.dtype, q.head_dim, to);
  if (q.lse != nullptr && lane_index() == 0) {
    q.lse[w.token * q.lse_strides.token + w.head * q.lse_strides.head] = lse;
  }
}

}  // namespace tierkv
