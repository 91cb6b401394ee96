// SPDX-License-Identifier: Apache-2.0
// Attention over tokens of one sequence that the place has decoded to fp16, and its probabilities.
// A CTA has columns (query, head of the group) of a kv_head, 8 or 16 a warp, and takes the tokens
// of a piece tile by tile through shared memory. By count it reads 512 bytes of shared memory for a
// product of 16 tokens, 16 dims and the columns of a warp.
#pragma once

#include "store/place/device/raw_attend_kernel.cuh"

namespace tierkv::store {

inline constexpr int32_t kDecodedWarps = 8, kDecodedThreads = 32 * kDecodedWarps;
inline constexpr int32_t kDecodedTokens = 32;  // of a tile
inline constexpr int64_t kMostGridRows = 65535;

// Attention: sets of eight columns of a warp, those that registers hold, and columns of a CTA.
TKV_HD constexpr int32_t decoded_sets(int32_t head_dim) {
  return head_dim <= 128 ? 2 : 1;
}
TKV_HD constexpr int32_t decoded_columns(int32_t head_dim) {
  return decoded_sets(head_dim) * kRawColumns * kDecodedWarps;
}
// Probabilities: columns of a CTA, which takes whole groups.
inline constexpr int32_t kProbableColumns = kRawColumns * kDecodedWarps;
TKV_HD constexpr int32_t grouped_columns(int32_t group) {
  return kProbableColumns / group * group;
}
// Floats of a lane's sums of a set.
TKV_HD constexpr int32_t decoded_sums(int32_t head_dim) {
  return head_dim / kDimBlock * 4 + 4;
}

// One sequence, whose slot and counts are slots[0] and at[0], and a piece of its tokens.
struct DecodedAttendCall : RawAttendCall {
  int32_t first = 0, end = 0;  // positions
  uint16_t* k = nullptr;       // fp16 [end - first, num_kv_heads, head_dim], 16-byte aligned
  uint16_t* v = nullptr;       // likewise
  uint8_t* pruned = nullptr;   // [num_kv_heads, end - first], not 0: nobody sees the token
  float* sums = nullptr;       // [ctas, warps, sets, decoded_sums(), 32], from piece to piece
  bool is_last = false;
  // Query j's for position p of a kv_head: at j * query_stride + kv_head * stride + p.
  float* probabilities = nullptr;
  int64_t query_stride = 0, stride = 0;
};

template <int32_t kHeadDim>
struct DecodedShared {
  static constexpr int32_t kStride = kHeadDim + 8;  // ldmatrix meets no bank twice
  __align__(16) uint16_t k[kDecodedTokens][kStride];
  __align__(16) uint16_t v[kDecodedTokens][kStride];
  bool pruned[kDecodedTokens];
};
struct DecodedLargest {
  int32_t bits[kProbableColumns][kDecodedTokens];  // of floats, none negative; by query of the CTA
};

template <int32_t kHeadDim>
struct DecodedWarp : RawWarp<kHeadDim> {
  using Base = RawWarp<kHeadDim>;
  using Base::r, Base::lane, Base::g, Base::t, Base::kBlocks;
  using typename Base::Queries;
  using Sums = WarpColumns<kBlocks>;
  static constexpr int32_t kSets = decoded_sets(kHeadDim);
  const DecodedAttendCall& d;
  DecodedShared<kHeadDim>& shared;

  // A thread's vectors of a tile on their way to shared memory. Tokens behind the piece are zeros.
  static constexpr int32_t kVectors = (kDecodedTokens * kHeadDim / 8 - 1) / kDecodedThreads + 1;
  struct Rows {
    uint4 x[kVectors];
  };
  __device__ __forceinline__ static int2 token_dim(int32_t i) {
    const int32_t vector = i * kDecodedThreads + static_cast<int32_t>(threadIdx.x);
    return {vector / (kHeadDim / 8), vector % (kHeadDim / 8) * 8};
  }
  __device__ __forceinline__ Rows load_rows(const uint16_t* from, int32_t first) {
    Rows rows;
#pragma unroll
    for (int32_t i = 0; i < kVectors; ++i) {
      const auto [token, dim] = token_dim(i);
      rows.x[i] = {0, 0, 0, 0};
      if (token >= kDecodedTokens || first + token >= d.end) continue;
      const int64_t row = int64_t{first - d.first + token} * d.num_kv_heads + r.kv_head;
      rows.x[i] = *reinterpret_cast<const uint4*>(from + row * kHeadDim + dim);
    }
    return rows;
  }
  __device__ __forceinline__ static void store_rows(
      const Rows& rows, uint16_t (*to)[DecodedShared<kHeadDim>::kStride]) {
#pragma unroll
    for (int32_t i = 0; i < kVectors; ++i) {
      const auto [token, dim] = token_dim(i);
      if (token < kDecodedTokens) *reinterpret_cast<uint4*>(&to[token][dim]) = rows.x[i];
    }
  }
  __device__ __forceinline__ void copy_pruned(int32_t first) {
    const auto token = static_cast<int32_t>(threadIdx.x);
    if (token >= kDecodedTokens || first + token >= d.end) return;
    const int64_t row = int64_t{r.kv_head} * (d.end - d.first);
    shared.pruned[token] = d.pruned[row + first - d.first + token] != 0;
  }

  // In the order in which ldmatrix loads keys.
  __device__ __forceinline__ Queries load_queries(int32_t first_column) {
    return Base::load_queries(first_column, [this](const uint16_t* q, uint32_t(&x)[kBlocks][2]) {
#pragma unroll
      for (int32_t i = 0; i < 2 * kBlocks; ++i) {
        x[i / 2][i % 2] = *reinterpret_cast<const uint32_t*>(q + 8 * i + 2 * t);
      }
    });
  }

  // Logits of 16 tokens, `token` of the tile at position `first` on, as score_item() has them, for
  // kCount sets of columns.
  template <int kCount>
  __device__ __forceinline__ void score(const Queries (&q)[kCount], int32_t first, int32_t token,
                                        float (&s)[kCount][4]) {
#pragma unroll
    for (auto& of_set : s) {
#pragma unroll
      for (float& x : of_set) x = 0;
    }
    const int32_t row = token + lane % 16, dim = lane / 16 * 8;
#pragma unroll
    for (int32_t f = 0; f < kBlocks; ++f) {
      uint32_t a[4];
      load_matrices(a, &shared.k[row][kDimBlock * f + dim]);
#pragma unroll
      for (int32_t n = 0; n < kCount; ++n) {
        mma_m16n8k16(s[n], a, q[n].words[f][0], q[n].words[f][1]);
      }
    }
#pragma unroll
    for (int32_t i = 0; i < 4; ++i) {
      const int32_t at = token + g + 8 * (i / 2), position = first + at;
      const bool is_token = position < d.end && !shared.pruned[at];
#pragma unroll
      for (int32_t n = 0; n < kCount; ++n) {
        const bool is_seen = is_token && position <= q[n].position[i % 2];
        s[n][i] = is_seen ? s[n][i] * q[n].factor[i % 2] : -INFINITY;
      }
    }
  }
  __device__ __forceinline__ void add(Sums (&sums)[kSets], int32_t token, float (&s)[kSets][4]) {
    const int32_t row = token + lane / 16 * 8 + lane % 8, dim = lane / 8 % 2 * 8;
    uint32_t p[kSets][2];
#pragma unroll
    for (int32_t n = 0; n < kSets; ++n) Base::weigh(sums[n], s[n], p[n]);
#pragma unroll
    for (int32_t f = 0; f < kBlocks; ++f) {
      uint32_t a[4];
      load_matrices_transposed(a, &shared.v[row][kDimBlock * f + dim]);
#pragma unroll
      for (int32_t n = 0; n < kSets; ++n) mma_m16n8k16(sums[n].out[f], a, p[n][0], p[n][1]);
    }
  }

  // The place of this lane's sum i of a set between pieces.
  __device__ __forceinline__ float& kept_sum(int32_t set, int32_t i) {
    const int64_t cta = int64_t{blockIdx.y} * gridDim.x + blockIdx.x;
    const int64_t of_set = (cta * kDecodedWarps + Base::warp) * kSets + set;
    return d.sums[(of_set * decoded_sums(kHeadDim) + i) * 32 + lane];
  }
  template <class Move>
  __device__ __forceinline__ void each_sum(Sums (&sums)[kSets], const Move& move) {
#pragma unroll
    for (int32_t n = 0; n < kSets; ++n) {
#pragma unroll
      for (int32_t i = 0; i < 4 * kBlocks; ++i) move(kept_sum(n, i), sums[n].out[i / 4][i % 4]);
#pragma unroll
      for (int32_t i = 0; i < 2; ++i) {
        move(kept_sum(n, 4 * kBlocks + i), sums[n].reference[i]);
        move(kept_sum(n, 4 * kBlocks + 2 + i), sums[n].sum[i]);
      }
    }
  }

  __device__ __forceinline__ void write(Sums& sums, int32_t first_column) {
    sums.add_lanes();
#pragma unroll
    for (int32_t i = 0; i < 2; ++i) {
      const Column column = Base::column_at(first_column + 2 * t + i);
      if (!column.is_real) continue;
      const int64_t line = Base::line_of(column);
      const float sink =
          d.sinks == nullptr ? -INFINITY : d.sinks[r.kv_head * d.group + column.head];
      const FinishedState finished = finish({sums.reference[i], sums.sum[i]}, sink);
      if (d.lse != nullptr && g == 0) d.lse[line] = finished.lse;
      uint16_t* const to = d.out + line * kHeadDim + g;
#pragma unroll
      for (int32_t f = 0; f < kBlocks; ++f) {
        const uint32_t x =
            pack_outputs(sums.out[f][i] * finished.scale, sums.out[f][i + 2] * finished.scale,
                         d.dtype == DType::kBFloat16);
        to[kDimBlock * f] = static_cast<uint16_t>(x);
        to[kDimBlock * f + 8] = static_cast<uint16_t>(x >> 16);
      }
    }
  }
};

// Grid: kv_heads, then columns by decoded_columns().
template <int32_t kHeadDim>
__global__ void __launch_bounds__(kDecodedThreads)
    decoded_attend_kernel(const __grid_constant__ DecodedAttendCall c) {
  extern __shared__ __align__(16) uint8_t attend_shared_bytes[];
  wait_for_previous_kernel();
  using Warp = DecodedWarp<kHeadDim>;
  constexpr int32_t kSets = Warp::kSets, kColumns = decoded_columns(kHeadDim);
  Warp w{{c}, c, *reinterpret_cast<DecodedShared<kHeadDim>*>(attend_shared_bytes)};
  const auto of_cta = static_cast<int32_t>(blockIdx.y) * kColumns;
  const int32_t last = least(of_cta + kColumns, c.group * c.q_len) - 1;
  const int32_t end = least(c.end, w.position_of(w.column_at(last).query) + 1);
  const int32_t first_column = of_cta + w.warp * kSets * kRawColumns;
  typename Warp::Queries q[kSets];
  typename Warp::Sums sums[kSets];
#pragma unroll
  for (int32_t n = 0; n < kSets; ++n) {
    q[n] = w.load_queries(first_column + n * kRawColumns);
    sums[n].begin();
  }
  if (c.first > 0) {
    w.each_sum(sums, [](const float& kept, float& x) { x = kept; });
  }
  auto k = w.load_rows(c.k, c.first), v = w.load_rows(c.v, c.first);
  for (int32_t first = c.first; first < end; first += kDecodedTokens) {
    w.store_rows(k, w.shared.k);
    w.store_rows(v, w.shared.v);
    w.copy_pruned(first);
    __syncthreads();
    k = w.load_rows(c.k, first + kDecodedTokens), v = w.load_rows(c.v, first + kDecodedTokens);
#pragma unroll 1
    for (int32_t token = 0; token < kDecodedTokens; token += kTileTokens) {
      float s[kSets][4];
      w.score(q, first, token, s);
      w.add(sums, token, s);
    }
    __syncthreads();  // nobody reads the tile any more
  }
  if (c.is_last) {
#pragma unroll
    for (int32_t n = 0; n < kSets; ++n) w.write(sums[n], first_column + n * kRawColumns);
  } else {
    w.each_sum(sums, [](float& kept, const float& x) { kept = x; });
  }
}

// The largest probability that a query's heads gave each position of the piece. c.lse: of all
// tokens. Grid: kv_heads, then columns by grouped_columns().
template <int32_t kHeadDim>
__global__ void __launch_bounds__(kDecodedThreads)
    decoded_probabilities_kernel(const __grid_constant__ DecodedAttendCall c) {
  extern __shared__ __align__(16) uint8_t attend_shared_bytes[];
  wait_for_previous_kernel();
  DecodedWarp<kHeadDim> w{{c}, c, *reinterpret_cast<DecodedShared<kHeadDim>*>(attend_shared_bytes)};
  auto& largest =
      *reinterpret_cast<DecodedLargest*>(attend_shared_bytes + sizeof(DecodedShared<kHeadDim>));
  const int32_t columns = grouped_columns(c.group), of_cta = blockIdx.y * columns;
  const int32_t end = least(of_cta + columns, c.group * c.q_len);
  const int32_t first_column = of_cta + w.warp * kRawColumns;
  const typename DecodedWarp<kHeadDim>::Queries q[1] = {w.load_queries(first_column)};
  float lse[2];
  int32_t query[2];  // of the CTA
#pragma unroll
  for (int32_t i = 0; i < 2; ++i) {
    const int32_t index = first_column + 2 * w.t + i;
    const Column column = w.column_at(index);
    lse[i] = index < end ? c.lse[w.line_of(column)] * kLog2E : -INFINITY;
    query[i] = column.query - of_cta / c.group;
  }
  for (int32_t first = c.first; first < c.end; first += kDecodedTokens) {
    w.store_rows(w.load_rows(c.k, first), w.shared.k);
    w.copy_pruned(first);
    for (auto i = static_cast<int32_t>(threadIdx.x); i < kProbableColumns * kDecodedTokens;
         i += kDecodedThreads) {
      largest.bits[i / kDecodedTokens][i % kDecodedTokens] = 0;
    }
    __syncthreads();
#pragma unroll 1
    for (int32_t token = 0; token < kDecodedTokens; token += kTileTokens) {
      float s[1][4];
      w.score(q, first, token, s);
#pragma unroll
      for (int32_t i = 0; i < 4; ++i) {
        if (lse[i % 2] == -INFINITY || s[0][i] == -INFINITY) continue;
        const float p = exp2_fast(s[0][i] - lse[i % 2]);
        atomicMax(&largest.bits[query[i % 2]][token + w.g + 8 * (i / 2)],
                  static_cast<int32_t>(float_bits(p)));
      }
    }
    __syncthreads();
    const int32_t queries = (end - of_cta) / c.group, tokens = least(kDecodedTokens, c.end - first);
    for (auto i = static_cast<int32_t>(threadIdx.x); i < queries * kDecodedTokens;
         i += kDecodedThreads) {
      const int32_t j = i / kDecodedTokens, token = i % kDecodedTokens;
      if (token >= tokens) continue;
      const int64_t line = (of_cta / c.group + j) * c.query_stride + w.r.kv_head * c.stride;
      c.probabilities[line + first + token] =
          bits_float(static_cast<uint32_t>(largest.bits[j][token]));
    }
    __syncthreads();
  }
}

}  // namespace tierkv::store
