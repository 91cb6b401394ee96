// SPDX-License-Identifier: Apache-2.0
// Block tables to rows of the page table, and ragged queries to the order and coordinates that
// attention takes, and back. A warp takes as many vectors of one head as it holds (lane_token.cuh).
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

// What the lanes of a vector work on: query j of an entry, of one head. Lanes that have no vector
// stand at the last one.
struct LaneQuery {
  int64_t vector;  // of what is packed
  int32_t entry, j, head;
  int64_t token;  // -1: there is none
  bool is_there;  // false: the lanes have no vector
};
template <int32_t kDim>
__device__ __forceinline__ LaneQuery lane_query(const EngineQueries& q) {
  LaneQuery w;
  const int64_t vector = int64_t{warp_of_grid()} * kWarpTokens<kDim> + token_of_lane<kDim>();
  w.is_there = vector < q.vectors();
  w.vector = w.is_there ? vector : q.vectors() - 1;
  const int64_t line = w.vector / q.num_q_heads;
  w.head = static_cast<int32_t>(w.vector - line * q.num_q_heads);
  w.entry = static_cast<int32_t>(line / q.queries());
  w.j = static_cast<int32_t>(line - static_cast<int64_t>(w.entry) * q.queries());
  w.token = w.is_there ? q.token_of(w.entry, w.j) : -1;
  return w;
}

template <int32_t kDim>
__device__ __forceinline__ void store_outputs(const LaneValues& x, DType dtype, uint16_t* row) {
  if (!has_dims<kDim>()) return;
  uint32_t words[4];
#pragma unroll
  for (int32_t i = 0; i < 4; ++i) {
    words[i] = pack_outputs(x[2 * i], x[2 * i + 1], dtype == DType::kBFloat16);
  }
  store_eight(row + lane_dim<kDim>(), words);
}

template <int32_t kDim>
__device__ __forceinline__ void load_query(const EngineQueries& q, const LaneQuery& w,
                                           LaneValues& x) {
  const int64_t first = w.token * q.q_strides.token + w.head * q.q_strides.head;
  load_lane_values<kDim>(static_cast<const uint16_t*>(q.q) + first, q.dtype, w.token >= 0, x);
}

// The decode kernel that follows begins when all work before this one has ended, and waits for this
// one's end before it reads queries.
template <int32_t kDim>
__global__ void __launch_bounds__(kEngineThreads)
    pack_queries_kernel(const __grid_constant__ EngineQueries q) {
  if (!q.is_settled) wait_for_previous_kernel();
  let_next_kernel_start();
  const LaneQuery w = lane_query<kDim>(q);
  LaneValues x, normal;
  load_query<kDim>(q, w, x);
  load_lane_floats<kDim>(q.reflection_of(w.head), normal);
  rotate<kDim>(q.rotation, x);
  if (q.key_reflection != nullptr) reflect<kDim>(normal, x);
  if (w.is_there) {
    store_outputs<kDim>(x, q.packed_dtype, static_cast<uint16_t*>(q.packed_q) + w.vector * kDim);
  }
  wait_for_previous_kernel();  // whoever waits for this kernel waits for that one
}

// In all lanes of a vector.
template <int32_t kDim>
__device__ __forceinline__ float mean_product(const EngineQueries& q, const LaneQuery& w) {
  if (q.key_mean == nullptr) return 0;
  LaneValues x, mean;
  load_query<kDim>(q, w, x);
  load_lane_floats<kDim>(q.key_mean + static_cast<int64_t>(q.kv_head_of(w.head)) * kDim, mean);
  float sum = 0;
#pragma unroll
  for (int32_t i = 0; i < kLaneDims; ++i) sum = fmaf(x[i], mean[i], sum);
  return sum_of_token<kDim>(sum);
}

// The output and the log-sum-exp of a shared row's column, joined from its parts. Lanes without
// dims join the first ones, for nobody.
template <int32_t kDim>
__device__ __forceinline__ float join_parts(const JoinedParts& parts, LaneValues& x) {
  constexpr int32_t kBatch = 4;  // parts in flight
  SoftmaxState whole;
#pragma unroll 1
  for (int32_t first = 0; first < parts.count; first += kBatch) {
    SoftmaxState state[kBatch];
    float4 y[kBatch][2];
    float reference = whole.reference;
#pragma unroll
    for (int32_t i = 0; i < kBatch; ++i) {
      if (first + i >= parts.count) continue;
      const float2 s = __ldcg(reinterpret_cast<const float2*>(parts.state(first + i)));
      state[i] = {s.x, s.y};
      const float* from = parts.accumulator(first + i) + (has_dims<kDim>() ? lane_dim<kDim>() : 0);
      y[i][0] = __ldcg(reinterpret_cast<const float4*>(from));
      y[i][1] = __ldcg(reinterpret_cast<const float4*>(from + 4));
    }
#pragma unroll
    for (const SoftmaxState& s : state) {
      if (!s.is_empty()) reference = fmaxf(reference, s.reference);
    }
    const float factor = share(whole, {reference, 1.0f});
    whole = {reference, whole.sum * factor};
#pragma unroll
    for (float& value : x) value *= factor;
#pragma unroll
    for (int32_t i = 0; i < kBatch; ++i) {
      if (state[i].is_empty()) continue;  // its accumulator may be anything
      const float f = exp2_fast(state[i].reference - reference);
      whole.sum = fmaf(f, state[i].sum, whole.sum);
      const float z[kLaneDims] = {y[i][0].x, y[i][0].y, y[i][0].z, y[i][0].w,
                                  y[i][1].x, y[i][1].y, y[i][1].z, y[i][1].w};
#pragma unroll
      for (int32_t n = 0; n < kLaneDims; ++n) x[n] = fmaf(f, z[n], x[n]);
    }
  }
  const FinishedState finished = finish(whole, -INFINITY);
#pragma unroll
  for (float& value : x) value *= finished.scale;
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
  for (int32_t i = 0; i < kLaneDims; ++i) {
    float& z = x[i];  // what has no share may hold anything
    z = of_body != 0.0f ? of_body * z : 0.0f;
    if (of_prior != 0.0f) z = fmaf(of_prior, prior.x[i], z);
  }
  return finished.lse;
}

// Counts a row whose pages or counts led outside their tables, once.
__device__ __forceinline__ void count_stray_row(const EngineQueries& q, const LaneQuery& w) {
  const int32_t group = q.num_q_heads / q.rows.num_kv_heads;
  if (q.errors == nullptr || q.row_status == nullptr || w.j != 0 || w.head % group != 0) return;
  const int32_t status = q.row_status[w.entry * q.rows.num_kv_heads + w.head / group];
  if (status == static_cast<int32_t>(StatusCode::kOk)) return;
  atomicAdd(q.errors + static_cast<int32_t>(EngineError::kStrayBlocks), 1);
}

// ctas_of_row() of the lane's row: the warp looks for one row after the other.
__device__ __forceinline__ RowCtas ctas_of_lane_row(const SharedRowsParams& p, int32_t row) {
  RowCtas ctas{0, 0};
#pragma unroll 1
  for (uint32_t left = kFullWarp; left != 0;) {
    const int32_t asked = __shfl_sync(kFullWarp, row, lowest_bit(left));
    const RowCtas found = ctas_of_row(p, asked);
    if (row == asked) ctas = found;
    left &= ~__ballot_sync(kFullWarp, row == asked);
  }
  return ctas;
}

template <int32_t kDim>
__global__ void __launch_bounds__(kEngineThreads)
    unpack_outputs_kernel(const __grid_constant__ EngineQueries q) {
  let_next_kernel_start();
  const LaneQuery w = lane_query<kDim>(q);
  const bool is_first = lane_of_token<kDim>() == 0, is_asked = w.token >= 0;
  RowCtas ctas{0, 0};
  QueryColumns::Place place{0, 0};
  if (q.shared.items != nullptr) {
    place = q.shared.columns.of_query(w.entry, w.j, w.head);
    ctas = ctas_of_lane_row(q.shared, place.row);
  }
  const bool has_lse = q.lse != nullptr || q.prior.lse != nullptr;
  // Queries were complete before attention began.
  const float of_mean = has_lse ? q.sm_scale * mean_product<kDim>(q, w) : 0.0f;
  wait_for_previous_kernel();
  if (w.is_there && is_first) count_stray_row(q, w);
  auto* const to = static_cast<uint16_t*>(q.out) + (is_asked ? w.token : 0) * q.out_strides.token +
                   w.head * q.out_strides.head;
  PriorValues prior = {};
  if (q.prior.lse != nullptr) {
    load_lane_values<kDim>(to, q.dtype, is_asked, prior.x);
    prior.state = state_of_lse(q.prior.lse[w.vector]);
  }
  LaneValues x = {};
  float lse = 0.0f;
  if (is_asked && ctas.count > 0) {
    lse = join_parts<kDim>(parts_of_row(q.shared, ctas, kDim, place.column, 0), x);
  } else {
    load_lane_values<kDim>(static_cast<const uint16_t*>(q.packed_out) + w.vector * kDim,
                           q.packed_dtype, is_asked, x);
    if (has_lse) lse = q.packed_lse[w.vector];
  }
  rotate_back<kDim>(q.out_rotation, x);
  if (!is_asked) return;
  lse += of_mean;
  if (q.prior.lse != nullptr) lse = join_prior(prior, q.prior.sink(w.head), lse, x);
  store_outputs<kDim>(x, q.dtype, to);
  if (q.lse != nullptr && is_first) {
    q.lse[w.token * q.lse_strides.token + w.head * q.lse_strides.head] = lse;
  }
}

}  // namespace tierkv
