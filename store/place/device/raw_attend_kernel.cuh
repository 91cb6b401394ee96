// SPDX-License-Identifier: Apache-2.0
// Attention over what a row holds raw: its sinks and its ring. A CTA takes a row; its warps take
// tiles of 16 tokens and eight columns (query, head) at once. Attention over bodies follows.
//
// A lane loads 16 bytes of a token as its part of an operand of mma.m16n8k16. An operand may have
// any dims if queries and outputs have the same. Bound: 40 KB a row of 128 dims with 80 tokens.
#pragma once

#include "attention/core/parts_join.cuh"
#include "attention/core/query_unit.h"
#include "attention/core/warp_columns.cuh"
#include "codec/format/element.h"
#include "gpu/constants.h"
#include "gpu/copies.cuh"
#include "gpu/math.cuh"
#include "gpu/mma.cuh"
#include "gpu/pdl.cuh"
#include "store/place/device/device_kernels.h"
#include "store/place/device/device_reports.cuh"

namespace tierkv::store {

inline constexpr int32_t kAttendThreads = 128;
inline constexpr int32_t kAttendWarps = kAttendThreads / 32;
inline constexpr int32_t kMostColumns = 16 * 8;  // heads of a group times queries
inline constexpr float kHeadroom = 8.0f;         // of references: probabilities reach 2^8

template <int32_t kHeadDim>
struct RawAttendShared {
  static constexpr int32_t kStride = kHeadDim + 8;  // neighbours begin in different banks
  alignas(16) float out[kAttendWarps][kRawColumns][kStride];
  SoftmaxState states[kAttendWarps][kRawColumns];
};
struct RawCountShared {
  float lse[kMostColumns];  // in log2 units
  float seen[kAttendWarps][kRawColumns][kTileTokens];
  float largest[kAttendWarps][kMaxStepTokens][kTileTokens];
};

// A row, and where its tokens lie.
struct RawRow {
  uint8_t* bytes;
  LayerTokens at;
  int32_t sequence, slot, kv_head;
  int32_t sinks, first;            // of the ring
  int32_t first_tile, ring_tiles;  // by position
  int32_t first_place;             // of first_tile in the ring
};

__device__ __forceinline__ RawRow raw_row(const RawAttendCall& c) {
  RawRow r;
  const auto row = static_cast<int32_t>(blockIdx.x);
  r.sequence = row / c.num_kv_heads;
  r.kv_head = row - r.sequence * c.num_kv_heads;
  r.slot = c.slots[r.sequence];
  r.at = c.at[r.sequence];
  r.bytes = c.memory.raw(r.slot, c.layer) + static_cast<int64_t>(r.kv_head) * c.raw.row_bytes;
  r.sinks = sink_count(c.laws, r.at);
  r.first = ring_first(c.laws, r.at);
  r.first_tile = r.first / kTileTokens;
  r.first_place = r.first_tile * kTileTokens % c.raw.ring_tokens;
  r.ring_tiles = r.first < r.at.tokens ? (r.at.tokens - 1) / kTileTokens - r.first_tile + 1 : 0;
  return r;
}

// Column i: query i / group, head i % group. Those behind the last are zeros.
struct Column {
  int32_t query, head;
  bool is_real;
};

// What a warp does of a row.
template <int32_t kHeadDim>
struct RawWarp {
  static constexpr int32_t kBlocks = kHeadDim / kDimBlock, kTokenBytes = 2 * kHeadDim;
  const RawAttendCall& c;
  const RawRow r = raw_row(c);
  const int32_t warp = static_cast<int32_t>(threadIdx.x) / 32;
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % 32, g = lane / 4, t = lane % 4;

  // Queries of eight columns as operands, and the factors of the lane's two columns' products.
  struct Queries {
    uint32_t words[kBlocks][2];
    float factor[2];
    int32_t position[2];
  };

  __device__ __forceinline__ Column column_at(int32_t index) {
    const int32_t query = index / c.group;
    return {query, index - query * c.group, query < c.q_len};
  }
  __device__ __forceinline__ int64_t line_of(const Column& column) {
    const int64_t query = static_cast<int64_t>(r.sequence) * c.q_len + column.query;
    return query * c.num_kv_heads * c.group + r.kv_head * c.group + column.head;
  }
  // The position of a query.
  __device__ __forceinline__ int32_t position_of(int32_t query) {
    return r.at.tokens - c.newer - c.q_len + query;
  }

  // bfloat16 is brought into the range of fp16 by a power of two a column.
  __device__ __forceinline__ void scale_queries(Queries& q) {
    float scale = 1;
    if (c.dtype == DType::kBFloat16) {
      float most = 0;
#pragma unroll
      for (int32_t b = 0; b < kBlocks; ++b) {
#pragma unroll
        for (int32_t w = 0; w < 2; ++w) {
          const float2 x = unpack_bfloats(q.words[b][w]);
          most = fmaxf(most, fmaxf(fabsf(x.x), fabsf(x.y)));
        }
      }
      most = fmaxf(most, __shfl_xor_sync(kFullWarp, most, 1));
      most = fmaxf(most, __shfl_xor_sync(kFullWarp, most, 2));
      scale = query_unit(most, 0, 0);
      const float inverse = 1.0f / scale;
#pragma unroll
      for (int32_t b = 0; b < kBlocks; ++b) {
#pragma unroll
        for (int32_t w = 0; w < 2; ++w) {
          const float2 x = unpack_bfloats(q.words[b][w]);
          q.words[b][w] = pack_halves(x.x * inverse, x.y * inverse);
        }
      }
    }
    q.factor[0] = c.sm_scale * kLog2E * __shfl_sync(kFullWarp, scale, 8 * t);
    q.factor[1] = c.sm_scale * kLog2E * __shfl_sync(kFullWarp, scale, 8 * t + 4);
  }

  // load(column, words) loads a column's operands.
  template <class Load>
  __device__ __forceinline__ Queries load_queries(int32_t first_column, const Load& load) {
    Queries q;
    const Column column = column_at(first_column + lane / 4);
#pragma unroll
    for (int32_t b = 0; b < kBlocks; ++b) q.words[b][0] = q.words[b][1] = 0;
    if (column.is_real) load(c.q + line_of(column) * kHeadDim, q.words);
    const uint32_t exponent = c.dtype == DType::kFloat16 ? 0x7c00u : 0x7f80u;
    bool is_finite = true;
#pragma unroll
    for (int32_t b = 0; b < kBlocks; ++b) {
#pragma unroll
      for (int32_t w = 0; w < 2; ++w) {
        const uint32_t word = q.words[b][w];
        is_finite &= (word & exponent) != exponent;
        is_finite &= (word >> 16 & exponent) != exponent;
      }
    }
    if (!is_finite) report_fault(c.fault, {StatusCode::kNonFinite, r.slot, c.layer, r.kv_head});
    scale_queries(q);
    q.position[0] = position_of(column_at(first_column + 2 * t).query);
    q.position[1] = position_of(column_at(first_column + 2 * t + 1).query);
    return q;
  }
  __device__ __forceinline__ Queries load_queries(int32_t first_column) {
    return load_queries(first_column, [this](const uint16_t* q, uint32_t(&x)[kBlocks][2]) {
#pragma unroll
      for (int32_t b = 0; b < kBlocks; b += 2) {
        const uint4 word = *reinterpret_cast<const uint4*>(q + b * kDimBlock + 8 * t);
        x[b][0] = word.x, x[b][1] = word.y, x[b + 1][0] = word.z, x[b + 1][1] = word.w;
      }
    });
  }

  // The place of an item's first token. Item -1 of a row with sinks is theirs; others are tiles of
  // the ring. Behind the tokens of an item may lie anything finite, whose weight is zero.
  __device__ __forceinline__ int32_t place_of(int32_t item) const {
    if (item < 0) return 0;
    const int32_t place = r.first_place + item * kTileTokens;
    return c.raw.sink_tokens + (place < c.raw.ring_tokens ? place : place - c.raw.ring_tokens);
  }

  // Keys as operands, of the dims that queries have.
  __device__ __forceinline__ void load_keys(int32_t item, uint32_t (&x)[kBlocks][4]) const {
    const uint8_t* from = r.bytes + (place_of(item) + g) * kTokenBytes + 16 * t;
#pragma unroll
    for (int32_t half = 0; half < 2; ++half) {
#pragma unroll
      for (int32_t b = 0; b < kBlocks; b += 2) {
        const uint4 word = load_of_line(from + 8 * half * kTokenBytes + b * kDimBlock * 2);
        x[b][half] = word.x, x[b][half + 2] = word.y;
        x[b + 1][half] = word.z, x[b + 1][half + 2] = word.w;
      }
    }
  }
  // Values for value_fragments(): of tokens 2t, 2t + 1, 2t + 8 and 2t + 9, two dims each, in x[f].
  __device__ __forceinline__ void load_values(int32_t item, uint32_t (&x)[kBlocks][4]) const {
    const uint8_t* from = r.bytes + c.raw.values + (place_of(item) + 2 * t) * kTokenBytes;
#pragma unroll
    for (int32_t i = 0; i < 4; ++i) {
      const uint8_t* const token = from + (i % 2 + i / 2 * 8) * kTokenBytes;
#pragma unroll
      for (int32_t b = 0; b + 4 <= kBlocks; b += 4) {
        const uint4 word = load_of_line(token + b * kDimBlock * 2 + 16 * g);
        x[b][i] = word.x, x[b + 1][i] = word.y, x[b + 2][i] = word.z, x[b + 3][i] = word.w;
      }
      if constexpr (kBlocks % 4 == 2) {
        const uint2 word =
            *reinterpret_cast<const uint2*>(token + (kBlocks - 2) * kDimBlock * 2 + 8 * g);
        x[kBlocks - 2][i] = word.x, x[kBlocks - 1][i] = word.y;
      }
    }
  }

  // Loaded keys and values, for score_tile() and add_tile().
  __device__ __forceinline__ static auto key_fragments(const uint32_t (&x)[kBlocks][4]) {
    return [&x](int b, uint32_t(&a)[4]) {
#pragma unroll
      for (int i = 0; i < 4; ++i) a[i] = x[b][i];
    };
  }
  __device__ __forceinline__ static auto value_fragments(const uint32_t (&x)[kBlocks][4]) {
    return [&x](int b, uint32_t(&a)[4]) {
#pragma unroll
      for (int i = 0; i < 4; i += 2) {
        a[i] = low_halves(x[b][i], x[b][i + 1]), a[i + 1] = high_halves(x[b][i], x[b][i + 1]);
      }
    };
  }

  // Logits in log2 units of the lane's tokens (g and g + 8) and columns, as mma lays them out;
  // -infinity where the query does not see the token.
  __device__ __forceinline__ void score_item(const Queries& q, int32_t item,
                                             const uint32_t (&k)[kBlocks][4], float (&s)[4]) {
#pragma unroll
    for (int32_t i = 0; i < 4; ++i) s[i] = 0;
    score_tile(q.words, key_fragments(k), s);
    const bool sinks = item < 0;
    const int32_t base = sinks ? 0 : (r.first_tile + item) * kTileTokens;
    const int32_t first = sinks ? 0 : r.first, end = sinks ? r.sinks : r.at.tokens;
#pragma unroll
    for (int32_t half = 0; half < 2; ++half) {
      const int32_t position = base + g + 8 * half;
      const bool is_there = position >= first && position < end;
#pragma unroll
      for (int32_t column = 0; column < 2; ++column) {
        float& x = s[2 * half + column];
        x = is_there && position <= q.position[column] ? x * q.factor[column] : -INFINITY;
      }
    }
  }

  // The logits of 16 tokens into p, their weights as add_tile() takes them.
  __device__ __forceinline__ static void weigh(WarpColumns<kBlocks>& part, float (&s)[4],
                                               uint32_t (&p)[2]) {
    float top[2] = {fmaxf(s[0], s[2]), fmaxf(s[1], s[3])};
    part.raise(top, kHeadroom);
#pragma unroll
    for (int32_t i = 0; i < 4; ++i) {
      s[i] = exp2_fast(s[i] - part.reference[i % 2]);
      part.sum[i % 2] += s[i];
    }
    p[0] = transpose_8x8(pack_halves(s[0], s[1]));
    p[1] = transpose_8x8(pack_halves(s[2], s[3]));
  }
  // Adds an item with the logits of score_item().
  __device__ __forceinline__ static void add_item(WarpColumns<kBlocks>& part, float (&s)[4],
                                                  const uint32_t (&v)[kBlocks][4]) {
    uint32_t p[2];
    weigh(part, s, p);
    part.add_tile(value_fragments(v), p);
  }

  // The first item of this warp; its others are kAttendWarps on.
  __device__ __forceinline__ int32_t first_item() const {
    return warp - (r.sinks > 0 ? 1 : 0);
  }
  // Whether the scores of a tile, those of all columns, stay for the count.
  __device__ __forceinline__ bool keeps(int32_t item) const {
    return c.kept != nullptr && item >= 0 && item < kKeptTiles;
  }
  __device__ __forceinline__ float4& kept_scores(int32_t item) {
    const int64_t tile = int64_t{blockIdx.x} * kKeptTiles + item;
    return reinterpret_cast<float4*>(c.kept)[tile * kWarpLanes + lane];
  }
};

template <int32_t kHeadDim>
struct RawAttend : RawWarp<kHeadDim> {
  using Base = RawWarp<kHeadDim>;
  using Base::c, Base::r, Base::warp, Base::kBlocks, Base::keeps, Base::kept_scores;
  using typename Base::Queries;
  static constexpr int32_t kJoinDims = 128, kSlices = slices_of(kHeadDim, kJoinDims);
  RawAttendShared<kHeadDim>& shared;

  // A lane has dims that follow each other: 8 of each 64, of a rest of 32 four.
  __device__ __forceinline__ void store_columns(const WarpColumns<kBlocks>& part,
                                                int32_t first_column) {
#pragma unroll
    for (int32_t i = 0; i < 2; ++i) {
      const int32_t column = 2 * Base::t + i;
      if (!Base::column_at(first_column + column).is_real) break;
      float* const to = shared.out[warp][column];
#pragma unroll
      for (int32_t b = 0; b < kBlocks; b += 2) {
        const bool is_rest = b / 4 * 4 + 4 > kBlocks;
        const int32_t dim = b / 4 * 64 + (is_rest ? 4 * Base::g : 8 * Base::g + b % 4 * 2);
        *reinterpret_cast<float4*>(to + dim) = {part.out[b][i], part.out[b][i + 2],
                                                part.out[b + 1][i], part.out[b + 1][i + 2]};
      }
      if (Base::g == 0) shared.states[warp][column] = {part.reference[i], part.sum[i]};
    }
  }

  // What the warps have of a round's columns.
  __device__ __forceinline__ void join_columns(int32_t first_column) {
    for (int32_t task = warp; task < kRawColumns * kSlices; task += kAttendWarps) {
      const int32_t in_round = task / kSlices, dim = task % kSlices * kJoinDims;
      const Column column = Base::column_at(first_column + in_round);
      if (!column.is_real) break;
      const int64_t line = Base::line_of(column);
      PartsJoin<kJoinDims, kAttendWarps, false> sum(kHeadDim - dim);
      sum.join(even_parts(&shared.states[0][in_round], &shared.out[0][in_round][dim], kRawColumns,
                          kRawColumns * shared.kStride, kAttendWarps));
      sum.write({c.out + line * kHeadDim + dim,
                 c.lse == nullptr || dim != 0 ? nullptr : c.lse + line, c.dtype == DType::kBFloat16,
                 c.sinks == nullptr ? -INFINITY : c.sinks[r.kv_head * c.group + column.head]});
    }
  }

  __device__ __forceinline__ void attend_columns(int32_t first_column) {
    const Queries q = Base::load_queries(first_column);
    WarpColumns<kBlocks> part;
    part.begin();
    for (int32_t item = Base::first_item(); item < r.ring_tiles; item += kAttendWarps) {
      uint32_t x[kBlocks][4];
      float s[4];
      if constexpr (kHeadDim <= 128) {  // values are under way while keys are multiplied
        uint32_t v[kBlocks][4];
        Base::load_keys(item, x);
        Base::load_values(item, v);
        Base::score_item(q, item, x, s);
        if (keeps(item)) kept_scores(item) = {s[0], s[1], s[2], s[3]};
        Base::add_item(part, s, v);
      } else {
        Base::load_keys(item, x);
        Base::score_item(q, item, x, s);
        if (keeps(item)) kept_scores(item) = {s[0], s[1], s[2], s[3]};
        Base::load_values(item, x);
        Base::add_item(part, s, x);
      }
    }
    part.add_lanes();
    store_columns(part, first_column);
    __syncthreads();
    join_columns(first_column);
  }
};

// Adds to the RawScores of a row's ring what the queries saw. Scores of the first tiles are kept
// for that, those of the others are computed again. c.lse: of all tokens.
template <int32_t kHeadDim>
struct RawCount : RawWarp<kHeadDim> {
  using Base = RawWarp<kHeadDim>;
  using Base::c, Base::r, Base::warp, Base::lane, Base::g, Base::t, Base::kBlocks;
  using Base::column_at, Base::position_of, Base::keeps, Base::kept_scores;
  using typename Base::Queries;
  RawCountShared& shared;

  __device__ __forceinline__ static float probability(float score, float lse) {
    return lse == -INFINITY ? 0.0f : exp2_fast(score - lse);
  }

  // By a warp: the largest probabilities of a round's columns join those of their queries.
  __device__ __forceinline__ void see_columns(int32_t first_column, const float (&s)[4]) {
#pragma unroll
    for (int32_t i = 0; i < 4; ++i) {
      const int32_t in_round = 2 * t + i % 2;
      const bool is_real = column_at(first_column + in_round).is_real;
      const float lse = is_real ? shared.lse[first_column + in_round] : -INFINITY;
      shared.seen[warp][in_round][g + 8 * (i / 2)] = probability(s[i], lse);
    }
    __syncwarp();
    if (lane < kTileTokens) {
      for (int32_t i = 0; i < kRawColumns; ++i) {
        const Column column = column_at(first_column + i);
        if (!column.is_real) break;
        float& largest = shared.largest[warp][column.query][lane];
        largest = fmaxf(largest, shared.seen[warp][i][lane]);
      }
    }
    __syncwarp();
  }

  // The log-sum-exp of a column, in log2 units; that of one that is not real lets nothing through.
  __device__ __forceinline__ float lse_of(const Column& column) {
    return column.is_real ? c.lse[Base::line_of(column)] * kLog2E : -INFINITY;
  }

  // For a single query and kept scores. Lanes t = 0 and 1 have a token each, of kItems at once.
  __device__ __forceinline__ void count_one_query() {
    constexpr int32_t kItems = 2;
    const float lse[2] = {lse_of(column_at(2 * t)), lse_of(column_at(2 * t + 1))};
    for (int32_t first = Base::first_item(); first < r.ring_tiles; first += kItems * kAttendWarps) {
      float4 x[kItems];
      RawScore* to[kItems];
      RawScore sum[kItems];
#pragma unroll
      for (int32_t i = 0; i < kItems; ++i) {
        const int32_t item = first + i * kAttendWarps;
        const bool is_there = item >= 0 && item < r.ring_tiles;
        const int32_t position = (r.first_tile + item) * kTileTokens + g + 8 * t;
        const bool counts = is_there && t < 2 && position >= r.first &&
                            position < least(r.at.tokens, position_of(0));
        to[i] =
            counts ? reinterpret_cast<RawScore*>(r.bytes + c.raw.score_byte(position)) : nullptr;
        if (counts) sum[i] = *to[i];
        x[i] = is_there ? kept_scores(item) : float4{};
      }
#pragma unroll
      for (int32_t i = 0; i < kItems; ++i) {
        float seen[2] = {fmaxf(probability(x[i].x, lse[0]), probability(x[i].y, lse[1])),
                         fmaxf(probability(x[i].z, lse[0]), probability(x[i].w, lse[1]))};
#pragma unroll
        for (int32_t lanes = 1; lanes < 4; lanes *= 2) {
          for (float& y : seen) y = fmaxf(y, __shfl_xor_sync(kFullWarp, y, lanes));
        }
        if (to[i] == nullptr || sum[i].count < 0) continue;
        sum[i].sum = fminf(sum[i].sum + (t == 0 ? seen[0] : seen[1]), kMostSum);
        sum[i].count = least(sum[i].count + 1, kMostCounted);
        *to[i] = sum[i];
      }
    }
  }

  // As HostPlace::count_query(): a query counts for the ring's tokens before its own. By a CTA.
  __device__ __forceinline__ void count_seen() {
    if (c.q_len == 1 && keeps(r.ring_tiles - 1)) return count_one_query();
    const int32_t columns = c.group * c.q_len;
    for (auto i = static_cast<int32_t>(threadIdx.x); i < columns; i += kAttendThreads) {
      shared.lse[i] = lse_of(column_at(i));
    }
    __syncthreads();
    for (int32_t item = Base::first_item(); item < r.ring_tiles; item += kAttendWarps) {
      if (item < 0) continue;
      for (int32_t j = 0; lane < kTileTokens && j < c.q_len; ++j) shared.largest[warp][j][lane] = 0;
      __syncwarp();
      if (keeps(item)) {
        const float4 x = kept_scores(item);
        const float s[4] = {x.x, x.y, x.z, x.w};
        see_columns(0, s);
      } else {
        uint32_t k[kBlocks][4];
        Base::load_keys(item, k);
        for (int32_t first = 0; first < columns; first += kRawColumns) {
          const Queries q = Base::load_queries(first);
          float s[4];
          Base::score_item(q, item, k, s);
          see_columns(first, s);
        }
      }
      const int32_t position = (r.first_tile + item) * kTileTokens + lane;
      if (lane < kTileTokens && position >= r.first && position < r.at.tokens) {
        auto* score = reinterpret_cast<RawScore*>(r.bytes + c.raw.score_byte(position));
        RawScore sum = *score;
        for (int32_t j = 0; j < c.q_len && sum.count >= 0; ++j) {
          if (position >= position_of(j)) continue;
          sum.sum = fminf(sum.sum + shared.largest[warp][j][lane], kMostSum);
          sum.count = least(sum.count + 1, kMostCounted);
        }
        *score = sum;
      }
      __syncwarp();
    }
  }
};

template <int32_t kHeadDim>
__global__ void __launch_bounds__(kAttendThreads, kHeadDim <= 128 ? 4 : 1)
    raw_attend_kernel(const __grid_constant__ RawAttendCall c) {
  extern __shared__ __align__(16) uint8_t attend_shared_bytes[];
  if (!c.is_settled) wait_for_previous_kernel();
  RawAttend<kHeadDim> row{{c}, *reinterpret_cast<RawAttendShared<kHeadDim>*>(attend_shared_bytes)};
  if (threadIdx.x == 0) prefetch_bytes(row.r.bytes, static_cast<uint32_t>(c.raw.row_bytes));
  wait_for_previous_kernel();
  let_next_kernel_start();
  // Attention over bodies lets every query see all of them: refused, but for captured calls, here.
  const RawRow& r = row.r;
  if (threadIdx.x == 0 && r.at.body_end > 0 && row.position_of(0) + 1 < r.at.body_end) {
    report_fault(c.fault, {StatusCode::kInvalidArgument, r.slot, c.layer, r.kv_head});
  }
  const int32_t columns = c.group * c.q_len;
  for (int32_t first = 0; first < columns; first += kRawColumns) {
    row.attend_columns(first);
    __syncthreads();  // what the round has used is free
  }
}

template <int32_t kHeadDim>
__global__ void __launch_bounds__(kAttendThreads)
    raw_count_kernel(const __grid_constant__ RawAttendCall c) {
  extern __shared__ __align__(16) uint8_t attend_shared_bytes[];
  // Where rows lie was known before the attention began.
  RawCount<kHeadDim> row{{c}, *reinterpret_cast<RawCountShared*>(attend_shared_bytes)};
  wait_for_previous_kernel();
  row.count_seen();
}

}  // namespace tierkv::store
