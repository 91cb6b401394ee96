// SPDX-License-Identifier: Apache-2.0
// What prompt_scores.cu makes of a tile of scores: significance adds up probabilities over queries,
// the log-sum-exp over keys. A taker is one thread's share of a warpgroup's rows.
#pragma once

#include <cmath>
#include <cstdint>

#include "codec/gpu/score_tiles.cuh"
#include "gpu/constants.h"
#include "gpu/math.cuh"

namespace tierkv {

// Tiles of the stream that a warpgroup needs; the others it lets pass.
struct ScoreTiles {
  int32_t begin, end;
};

// ---- significance ----

// Which of a tile's queries come after a thread's keys, `key` and key + 8.
struct QueryMask {
  int32_t key;
  int32_t first_query, stride;  // of the tile
  int32_t end;                  // queries are before it

  __device__ __forceinline__ bool counts(int32_t row, int32_t index) const {
    const int32_t query = first_query + stride * index;
    return query > key + 8 * row && query < end;
  }
};

// Adds to each of the thread's two rows (keys) the maximum over kHeads heads of the probability,
// over the thread's queries.
template <int32_t kHeads, bool kMasked>
__device__ __forceinline__ void add_probabilities(const float (&scores)[kScoresPerThread],
                                                  const float* lse, float scale,
                                                  const QueryMask& mask, float (&sum)[2]) {
#pragma unroll
  for (int32_t eight = 0; eight < kColumns / 8 / kHeads; ++eight) {
    float top[4];
#pragma unroll
    for (int32_t h = 0; h < kHeads; ++h) {
      const int32_t c = eight * kHeads + h;
      const float2 l = *reinterpret_cast<const float2*>(lse + 8 * c + thread_column());
#pragma unroll
      for (int32_t i = 0; i < 4; ++i) {
        const float x = __fmaf_rn(scores[4 * c + i], scale, i % 2 == 0 ? -l.x : -l.y);
        top[i] = h == 0 ? x : nan_max(top[i], x);
      }
    }
#pragma unroll
    for (int32_t i = 0; i < 4; ++i) {
      const float p = exp2_approx(top[i] * kLog2E);
      const bool counts = !kMasked || mask.counts(i / 2, 8 * eight + thread_column() + i % 2);
      sum[i / 2] += counts ? p : 0.0f;
    }
  }
}

template <int32_t kHeadDim>
struct SignificanceTaker {
  using Work = KeyWork;
  static constexpr bool kRowsAreQueries = false;
  static constexpr int32_t kDims = kHeadDim;
  static constexpr int32_t kSubTiles = StationaryRows<kHeadDim>::kSubTiles;
  StreamShape stream;
  int32_t first_key;  // of the warpgroup
  float scale;
  float sum[kSubTiles][2] = {};

  __device__ __forceinline__ SignificanceTaker(const ScoreTask& task, const CtaTile& tile,
                                               const StreamShape& queries)
      : stream(queries),
        first_key(tile.first + warpgroup_index() * 64 * kSubTiles),
        scale(static_cast<float>(task.p.sm_scale)) {}
  __device__ __forceinline__ int32_t first_query(int32_t tile) const {
    return stream.tokens.position(stream.begin + tile * stream.tokens_per_tile());
  }
  // From the first tile with a query after the first key.
  __device__ __forceinline__ ScoreTiles needed(const CtaTile&) const {
    const int32_t begin =
        (stream.tokens.index_from(first_key + 1) - stream.begin) / stream.tokens_per_tile();
    return {min(begin, stream.tiles()), stream.tiles()};
  }
  template <bool kMasked>
  __device__ __forceinline__ void add(int32_t sub, int32_t tile,
                                      const float (&scores)[kScoresPerThread], const float* lse) {
    const QueryMask mask = {first_key + 64 * sub + thread_row(), first_query(tile),
                            stream.tokens.stride, stream.tokens.position(stream.end)};
    switch (stream.log_heads) {
      case 0:
        return add_probabilities<1, kMasked>(scores, lse, scale, mask, sum[sub]);
      case 1:
        return add_probabilities<2, kMasked>(scores, lse, scale, mask, sum[sub]);
      case 2:
        return add_probabilities<4, kMasked>(scores, lse, scale, mask, sum[sub]);
      case 3:
        return add_probabilities<8, kMasked>(scores, lse, scale, mask, sum[sub]);
      default:
        return add_probabilities<16, kMasked>(scores, lse, scale, mask, sum[sub]);
    }
  }
  __device__ __forceinline__ void take(int32_t sub, int32_t tile,
                                       const float (&scores)[kScoresPerThread], const float* lse) {
    const int32_t end = stream.begin + (tile + 1) * stream.tokens_per_tile();
    if (first_query(tile) <= first_key + 64 * sub + 63 || end > stream.end) {
      add<true>(sub, tile, scores, lse);
    } else {
      add<false>(sub, tile, scores, lse);
    }
  }
  // Joins the four lanes of a row and writes the means.
  __device__ void finish(const CtaTile& tile, int32_t total_tokens, float* out) const {
#pragma unroll
    for (int32_t i = 0; i < 2 * kSubTiles; ++i) {
      float total = sum[i / 2][i % 2];
      total += __shfl_xor_sync(kFullWarp, total, 1);
      total += __shfl_xor_sync(kFullWarp, total, 2);
      const int32_t key = first_key + 64 * (i / 2) + thread_row() + 8 * (i % 2);
      if (key >= tile.num_tokens || lane_index() % 4 != 0) continue;
      const auto later = static_cast<float>(stream.tokens.behind(key));
      out[tile.scalar(tile.first_head, key, total_tokens)] = later == 0.0f ? 0.0f : total / later;
    }
  }
};

// ---- log-sum-exp ----

template <int32_t kHeadDim>
struct LseTaker {
  using Work = QueryWork;
  static constexpr bool kRowsAreQueries = true;
  static constexpr int32_t kDims = kHeadDim;
  static constexpr int32_t kSubTiles = StationaryRows<kHeadDim>::kSubTiles;
  int32_t first_row;           // of the warpgroup in its tile
  int32_t begin, end;          // keys of the CTA's part
  int32_t entry;               // of a query's lse: so many before its own
  int32_t last[kSubTiles][2];  // the position of a row's query, and so the last key that it sees
  int32_t first[kSubTiles];    // that of the first row of all
  float scale;                 // to base 2
  float top[kSubTiles][2], sum[kSubTiles][2];

  __device__ __forceinline__ LseTaker(const ScoreTask& task, const CtaTile& tile,
                                      const StreamShape& keys)
      : first_row(warpgroup_index() * 64 * kSubTiles),
        begin(keys.begin),
        end(keys.end),
        entry(tile.part),
        scale(static_cast<float>(task.p.sm_scale) * kLog2E) {
#pragma unroll
    for (int32_t i = 0; i < 2 * kSubTiles; ++i) {
      const int32_t sub_row = first_row + 64 * (i / 2);
      first[i / 2] = tile.token(sub_row);
      last[i / 2][i % 2] = tile.token(sub_row + thread_row() + 8 * (i % 2));
      top[i / 2][i % 2] = -INFINITY;
      sum[i / 2][i % 2] = 0.0f;
    }
  }
  // Up to the last tile with a key that the last query sees.
  __device__ __forceinline__ ScoreTiles needed(const CtaTile& tile) const {
    if (tile.index(first_row) >= tile.count) return {0, 0};
    const int32_t seen = min(tile.token(first_row + 64 * kSubTiles - 1) + 1, end) - begin;
    return {0, (max(seen, 0) + kColumns - 1) / kColumns};
  }
  __device__ __forceinline__ void take(int32_t sub, int32_t tile, float (&scores)[kScoresPerThread],
                                       const float*) {
    const int32_t first_key = begin + tile * kColumns;
    if (first_key + kColumns > first[sub]) {  // keys after a query: masked
#pragma unroll
      for (int32_t i = 0; i < kScoresPerThread; ++i) {
        const int32_t key = first_key + i / 4 * 8 + thread_column() + i % 2;
        if (key > last[sub][i % 4 / 2]) scores[i] = -INFINITY;
      }
    }
    // Sums are relative to a score that was seen, as long as they do not grow far beyond it.
    // Without one, or with a NaN, they are not below the bound.
    constexpr float kMostSum = 0x1p64f;
    float total[2] = {sum[sub][0], sum[sub][1]};
#pragma unroll
    for (int32_t i = 0; i < kScoresPerThread; ++i) {
      const int32_t r = i % 4 / 2;
      total[r] += exp2_approx(__fmaf_rn(scores[i], scale, -top[sub][r] * scale));
    }
    if (total[0] < kMostSum && total[1] < kMostSum) {
      sum[sub][0] = total[0], sum[sub][1] = total[1];
    } else {
      move_top(sub, scores);
    }
  }
  // The same relative to the largest score so far.
  __device__ __forceinline__ void move_top(int32_t sub, const float (&scores)[kScoresPerThread]) {
#pragma unroll
    for (int32_t r = 0; r < 2; ++r) {
      float highest = top[sub][r];
#pragma unroll
      for (int32_t i = 2 * r; i < kScoresPerThread; i += 4) {
        highest = nan_max(highest, nan_max(scores[i], scores[i + 1]));
      }
      const float shift = highest == -INFINITY ? 0.0f : highest * scale;
      float total = sum[sub][r] * exp2_approx(__fmaf_rn(top[sub][r], scale, -shift));
#pragma unroll
      for (int32_t i = 2 * r; i < kScoresPerThread; i += 4) {
        total += exp2_approx(__fmaf_rn(scores[i], scale, -shift)) +
                 exp2_approx(__fmaf_rn(scores[i + 1], scale, -shift));
      }
      top[sub][r] = highest;
      sum[sub][r] = total;
    }
  }
  __device__ void finish(const CtaTile& tile, int32_t total_tokens, float* out) const {
#pragma unroll
    for (int32_t i = 0; i < 2 * kSubTiles; ++i) {
      float highest = top[i / 2][i % 2], total = sum[i / 2][i % 2];
#pragma unroll
      for (int32_t lanes = 1; lanes <= 2; lanes *= 2) {
        const float other = __shfl_xor_sync(kFullWarp, highest, lanes);
        const float other_total = __shfl_xor_sync(kFullWarp, total, lanes);
        const float both = nan_max(highest, other);
        const float shift = both == -INFINITY ? 0.0f : both * scale;
        total = total * exp2_approx(__fmaf_rn(highest, scale, -shift)) +
                other_total * exp2_approx(__fmaf_rn(other, scale, -shift));
        highest = both;
      }
      const int32_t row = first_row + 64 * (i / 2) + thread_row() + 8 * (i % 2);
      const int32_t query = last[i / 2][i % 2];
      if (tile.index(row) >= tile.count || query < begin || lane_index() % 4 != 0) continue;
      out[tile.scalar(tile.head(row), query - entry, total_tokens)] =
          (highest * scale + log2f(total)) * kLn2;
    }
  }
};

inline constexpr int32_t kJoinThreads = 128;

// A thread for each counted query, blockIdx.z for each q head: joins what the parts of its keys
// left. Their entries, which belong to queries that are not counted, become NaN.
__global__ void __launch_bounds__(kJoinThreads) join_lse(const __grid_constant__ ScoreTask task) {
  constexpr int32_t kAtOnce = 8;
  const SignificanceCall& p = task.p;
  const QueryLine& line = task.line;
  const auto index = static_cast<int32_t>(blockIdx.x * kJoinThreads + threadIdx.x);
  const auto head = static_cast<int32_t>(blockIdx.z);
  wait_for_previous_kernel();
  const CtaTile sequence = find_sequence(p, p.query_stride, 1);
  if (index >= sequence.tokens.count) return;
  const int32_t query = sequence.tokens.position(index);
  const int32_t queries = line.tile_tokens / p.query_stride;
  const int32_t kv_head = head / (p.num_q_heads / p.num_kv_heads);
  const int64_t of_head = line.begin_of(tiles_of_queries(sequence.tokens.count, queries));
  const int32_t parts = line.part_of(kv_head * of_head + line.keys_of(index / queries), query) + 1;
  if (parts == 1) return;
  float* const found = task.out + sequence.scalar(head, query, p.total_tokens);
  float top = -INFINITY, sum = 0.0f;
#pragma unroll 1
  for (int32_t first = 0; first < parts; first += kAtOnce) {
    float x[kAtOnce], highest = top;
#pragma unroll
    for (int32_t i = 0; i < kAtOnce; ++i) {
      x[i] = first + i < parts ? found[-(first + i)] : -INFINITY;
    }
#pragma unroll
    for (const float y : x) highest = nan_max(highest, y);
    const float shift = highest == -INFINITY ? 0.0f : highest;
    sum *= exp2_approx((top - shift) * kLog2E);
#pragma unroll
    for (int32_t i = 0; i < kAtOnce; ++i) {
      sum += exp2_approx((x[i] - shift) * kLog2E);
      if (first + i < parts) found[-(first + i)] = NAN;
    }
    top = highest;
  }
  found[0] = (top == -INFINITY ? 0.0f : top) + log2f(sum) * kLn2;
}

}  // namespace tierkv
