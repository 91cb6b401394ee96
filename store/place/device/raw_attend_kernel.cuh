// SPDX-License-Identifier: Apache-2.0
// Attention over what a row holds raw, its sinks and its ring, joined with the attention over its
// body: a CTA per row, its warps by tiles of 16 tokens, eight columns (query, head of the group) at
// once. With count_query, what the queries saw of the ring's tokens is added to their RawScores:
// the scores of the first items of a warp are kept for that, the others are computed again.
//
// Tiles of the ring lie in memory as operands of mma.m16n8k16: a lane's loads are registers of it.
// Bound: the bytes of the ring, 40 KB a row of head_dim 128 with 80 tokens.
#pragma once

#include "attention/core/online_softmax.h"
#include "codec/format/element.h"
#include "gpu/constants.h"
#include "gpu/math.cuh"
#include "gpu/mma.cuh"
#include "gpu/pdl.cuh"
#include "store/place/device/device_fault.cuh"
#include "store/place/device/device_kernels.h"

namespace tierkv::store {

inline constexpr int32_t kAttendThreads = 128;
inline constexpr int32_t kAttendWarps = kAttendThreads / 32;
inline constexpr int32_t kColumns = 8;           // of a round
inline constexpr int32_t kMostColumns = 16 * 8;  // heads of a group times queries
inline constexpr int32_t kKeptItems = 2;         // of a warp, whose scores a count finds again

template <int32_t kHeadDim>
struct RawAttendShared {
  static constexpr int32_t kStride = kHeadDim + 4;  // no bank conflicts between columns
  float out[kAttendWarps][kColumns][kStride];
  SoftmaxState states[kAttendWarps][kColumns];
  float weights[kAttendWarps + 1][kColumns];  // of the warps' parts and of the body
  float lse[kMostColumns];                    // in log2 units
  float seen[kAttendWarps][kColumns][kTileTokens];
  float largest[kAttendWarps][kMaxStepTokens][kTileTokens];
  float4 kept[kAttendWarps][kKeptItems][kWarpLanes];
};

// A row, and where its tokens lie.
struct RawRow {
  uint8_t* bytes;
  LayerTokens at;
  int32_t sequence, slot, kv_head;
  int32_t sinks, first;            // of the ring
  int32_t first_tile, ring_tiles;  // by position
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
  r.ring_tiles = r.first < r.at.tokens ? (r.at.tokens - 1) / kTileTokens - r.first_tile + 1 : 0;
  return r;
}

// Column `index`: query index / group, head index % group. Those behind the last are zeros.
struct Column {
  int32_t query, head;
  bool is_real;
};

// What a warp does of a row.
template <int32_t kHeadDim>
struct RawAttend {
  static constexpr int32_t kBlocks = kHeadDim / kDimBlock;
  const RawAttendCall& c;
  RawAttendShared<kHeadDim>& shared;
  const RawRow r = raw_row(c);
  const int32_t warp = static_cast<int32_t>(threadIdx.x) / 32;
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % 32, g = lane / 4, t = lane % 4;

  // Queries of eight columns as operands, and the factors of the lane's two columns' products.
  struct Queries {
    uint32_t words[kBlocks][2];
    float factor[2];
    int32_t position[2];
  };

  // The lane's two columns of what a warp has seen; sums are its own tokens'.
  struct WarpPart {
    float largest[2] = {-INFINITY, -INFINITY};
    float sum[2] = {};
    float out[kBlocks][4] = {};
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
    return r.at.tokens - c.q_len + query;
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
      // 2^-exponent and 2^exponent of the largest; both are normal numbers.
      const auto biased = static_cast<int32_t>(float_bits(most) >> 23 & 0xffu);
      const int32_t exponent = biased < 17 ? -110 : biased > 237 ? 110 : biased - 127;
      const float inverse = bits_float(static_cast<uint32_t>(127 - exponent) << 23);
      scale = bits_float(static_cast<uint32_t>(127 + exponent) << 23);
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

  __device__ __forceinline__ Queries load_queries(int32_t first_column) {
    Queries q;
    const Column column = column_at(first_column + lane / 4);
    const uint16_t* from = c.q + line_of(column) * c.raw.head_dim + 2 * t;
    const uint32_t exponent = c.dtype == DType::kFloat16 ? 0x7c00u : 0x7f80u;
    bool is_finite = true;
#pragma unroll
    for (int32_t b = 0; b < kBlocks; ++b) {
#pragma unroll
      for (int32_t w = 0; w < 2; ++w) {
        uint32_t word = 0;
        if (column.is_real) word = *reinterpret_cast<const uint32_t*>(from + kDimBlock * b + 8 * w);
        is_finite &= (word & exponent) != exponent;
        is_finite &= (word >> 16 & exponent) != exponent;
        q.words[b][w] = word;
      }
    }
    if (!is_finite) report_fault(c.fault, {StatusCode::kNonFinite, r.slot, c.layer, r.kv_head});
    scale_queries(q);
    q.position[0] = position_of(column_at(first_column + 2 * t).query);
    q.position[1] = position_of(column_at(first_column + 2 * t + 1).query);
    return q;
  }

  // Operands of a tile of the ring: 16 bytes a lane for each block of dims.
  __device__ __forceinline__ void load_tile(Component comp, int32_t tile,
                                            uint32_t (&x)[kBlocks][4]) {
    const int32_t index = tile % (c.raw.ring_tokens / kTileTokens);
    const uint8_t* from = r.bytes + (comp == Component::kKey ? 0 : c.raw.value_ring) +
                          static_cast<int64_t>(index) * kBlocks * 512 + lane * 16;
#pragma unroll
    for (int32_t b = 0; b < kBlocks; ++b) {
      const uint4 word = *reinterpret_cast<const uint4*>(from + b * 512);
      x[b][0] = word.x, x[b][1] = word.y, x[b][2] = word.z, x[b][3] = word.w;
    }
  }

  // Loads the sinks, which lie token by token; tokens behind the last are its copies.
  __device__ __forceinline__ void load_sinks(Component comp, uint32_t (&x)[kBlocks][4]) {
    const auto half = [&](int32_t token, int32_t dim) -> uint32_t {
      const int32_t at = c.raw.sink_byte(comp, least(token, r.sinks - 1), dim);
      return *reinterpret_cast<const uint16_t*>(r.bytes + at);
    };
#pragma unroll
    for (int32_t b = 0; b < kBlocks; ++b) {
#pragma unroll
      for (int32_t w = 0; w < 4; ++w) {
        const int32_t row = g + 8 * (w % 2), column = 2 * t + 8 * (w / 2), dim = kDimBlock * b;
        x[b][w] = comp == Component::kKey
                      ? half(row, dim + column) | half(row, dim + column + 1) << 16
                      : half(column, dim + row) | half(column + 1, dim + row) << 16;
      }
    }
  }

  // Tile 0 of a row with sinks is theirs.
  __device__ __forceinline__ void load_item(Component comp, int32_t item,
                                            uint32_t (&x)[kBlocks][4]) {
    if (item < 0) {
      load_sinks(comp, x);
    } else {
      load_tile(comp, r.first_tile + item, x);
    }
  }

  // Logits in log2 units of the lane's tokens (g and g + 8) and columns, as mma lays them out;
  // -infinity where the query does not see the token.
  __device__ __forceinline__ void score_item(const Queries& q, int32_t item,
                                             const uint32_t (&k)[kBlocks][4], float (&s)[4]) {
#pragma unroll
    for (int32_t i = 0; i < 4; ++i) s[i] = 0;
#pragma unroll
    for (int32_t b = 0; b < kBlocks; ++b) mma_m16n8k16(s, k[b], q.words[b][0], q.words[b][1]);
    const bool sinks = item < 0;
    const int32_t base = sinks ? 0 : (r.first_tile + item) * kTileTokens;
    const int32_t first = sinks ? 0 : r.first, end = sinks ? r.sinks : r.at.tokens;
#pragma unroll
    for (int32_t half = 0; half < 2; ++half) {
      const int32_t position = base + g + 8 * half;
      bool is_there = position >= first && position < end;
      if (c.prunes && !sinks && is_there) {
        const auto* score = reinterpret_cast<const RawScore*>(r.bytes + c.raw.score_byte(position));
        is_there = score->count != RawScore::kPruned;
      }
#pragma unroll
      for (int32_t column = 0; column < 2; ++column) {
        float& x = s[2 * half + column];
        x = is_there && position <= q.position[column] ? x * q.factor[column] : -INFINITY;
      }
    }
  }

  __device__ __forceinline__ static float largest_of(float x, float y) {
    return fmaxf(x, y);
  }
  __device__ __forceinline__ static float sum_of(float x, float y) {
    return x + y;
  }
  // Over the tokens of a column.
  template <class Join>
  __device__ __forceinline__ static float of_tokens(float x, const Join& join) {
#pragma unroll
    for (int32_t lanes = 4; lanes < 32; lanes *= 2) {
      x = join(x, __shfl_xor_sync(kFullWarp, x, lanes));
    }
    return x;
  }

  __device__ __forceinline__ void add_item(WarpPart& part, float (&s)[4],
                                           const uint32_t (&v)[kBlocks][4]) {
#pragma unroll
    for (int32_t column = 0; column < 2; ++column) {
      const float before = part.largest[column];
      const float now = fmaxf(before, of_tokens(fmaxf(s[column], s[2 + column]), largest_of));
      const float reference = now == -INFINITY ? 0.0f : now;
      const float kept = exp2_fast(before - reference);
      part.largest[column] = now;
      s[column] = exp2_fast(s[column] - reference);
      s[2 + column] = exp2_fast(s[2 + column] - reference);
      part.sum[column] = part.sum[column] * kept + s[column] + s[2 + column];
#pragma unroll
      for (int32_t b = 0; b < kBlocks; ++b) {
        part.out[b][column] *= kept;
        part.out[b][2 + column] *= kept;
      }
    }
    const uint32_t p0 = transpose_8x8(pack_halves(s[0], s[1]));
    const uint32_t p1 = transpose_8x8(pack_halves(s[2], s[3]));
#pragma unroll
    for (int32_t b = 0; b < kBlocks; ++b) mma_m16n8k16(part.out[b], v[b], p0, p1);
  }

  __device__ __forceinline__ void store_part(const WarpPart& part) {
#pragma unroll
    for (int32_t column = 0; column < 2; ++column) {
      const float sum = of_tokens(part.sum[column], sum_of);
      if (g == 0) shared.states[warp][2 * t + column] = {part.largest[column], sum};
#pragma unroll
      for (int32_t b = 0; b < kHeadDim / kDimBlock; ++b) {
        shared.out[warp][2 * t + column][kDimBlock * b + g] = part.out[b][column];
        shared.out[warp][2 * t + column][kDimBlock * b + g + 8] = part.out[b][2 + column];
      }
    }
  }

  // By one thread a column: what the parts weigh in its output, and its lse.
  __device__ __forceinline__ void weigh_column(int32_t first_column, int32_t in_round) {
    const Column column = column_at(first_column + in_round);
    if (!column.is_real) return;
    const int64_t line = line_of(column);
    const SoftmaxState body =
        c.body_lse == nullptr ? SoftmaxState{} : state_of_lse(c.body_lse[line]);
    SoftmaxState whole = body;
    for (int32_t w = 0; w < kAttendWarps; ++w) whole = join(whole, shared.states[w][in_round]);
    const float sink = c.sinks == nullptr ? -INFINITY : c.sinks[r.kv_head * c.group + column.head];
    const FinishedState finished = finish(whole, sink);
    for (int32_t w = 0; w < kAttendWarps; ++w) {
      shared.weights[w][in_round] = share(shared.states[w][in_round], whole) * finished.scale;
    }
    shared.weights[kAttendWarps][in_round] = share(body, whole) * finished.scale;
    shared.lse[first_column + in_round] = finished.lse * kLog2E;
    if (c.lse != nullptr) c.lse[line] = finished.lse;
  }

  // Two dims a thread.
  __device__ __forceinline__ void write_columns(int32_t first_column) {
    for (int32_t i = static_cast<int32_t>(threadIdx.x); i < kColumns * kHeadDim / 2;
         i += kAttendThreads) {
      const int32_t in_round = i / (kHeadDim / 2), dim = i % (kHeadDim / 2) * 2;
      const Column column = column_at(first_column + in_round);
      if (!column.is_real) continue;
      uint32_t* to = reinterpret_cast<uint32_t*>(c.out + line_of(column) * kHeadDim + dim);
      const float of_body = shared.weights[kAttendWarps][in_round];
      float low = 0, high = 0;
      if (of_body != 0) {  // otherwise there may be anything
        const uint32_t body = *to;
        low = of_body * raw_to_float(c.dtype, static_cast<uint16_t>(body));
        high = of_body * raw_to_float(c.dtype, static_cast<uint16_t>(body >> 16));
      }
#pragma unroll
      for (int32_t w = 0; w < kAttendWarps; ++w) {
        const float weight = shared.weights[w][in_round];
        low += weight * shared.out[w][in_round][dim];
        high += weight * shared.out[w][in_round][dim + 1];
      }
      *to = pack_outputs(low, high, c.dtype == DType::kBFloat16);
    }
  }

  // The first item of this warp; its others are kAttendWarps on.
  __device__ __forceinline__ int32_t first_item() const {
    return warp - (r.sinks > 0 ? 1 : 0);
  }
  // Whether shared memory has the scores of an item: those of all columns.
  __device__ __forceinline__ bool keeps(int32_t item) const {
    return c.group * c.q_len <= kColumns && item - first_item() < kKeptItems * kAttendWarps;
  }
  __device__ __forceinline__ float4& kept_scores(int32_t item) {
    return shared.kept[warp][(item - first_item()) / kAttendWarps][lane];
  }

  __device__ __forceinline__ void attend_columns(int32_t first_column) {
    const Queries q = load_queries(first_column);
    WarpPart part;
    for (int32_t item = first_item(); item < r.ring_tiles; item += kAttendWarps) {
      uint32_t x[kBlocks][4];
      float s[4];
      if constexpr (kHeadDim <= 128) {  // values are under way while keys are multiplied
        uint32_t v[kBlocks][4];
        load_item(Component::kKey, item, x);
        load_item(Component::kValue, item, v);
        score_item(q, item, x, s);
        if (c.count_query && keeps(item)) kept_scores(item) = {s[0], s[1], s[2], s[3]};
        add_item(part, s, v);
      } else {
        load_item(Component::kKey, item, x);
        score_item(q, item, x, s);
        if (c.count_query && keeps(item)) kept_scores(item) = {s[0], s[1], s[2], s[3]};
        load_item(Component::kValue, item, x);
        add_item(part, s, x);
      }
    }
    store_part(part);
    __syncthreads();
    if (threadIdx.x < kColumns) {
      weigh_column(first_column, static_cast<int32_t>(threadIdx.x));
    }
    __syncthreads();
    write_columns(first_column);
  }

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
      for (int32_t i = 0; i < kColumns; ++i) {
        const Column column = column_at(first_column + i);
        if (!column.is_real) break;
        float& largest = shared.largest[warp][column.query][lane];
        largest = fmaxf(largest, shared.seen[warp][i][lane]);
      }
    }
    __syncwarp();
  }

  // The same for a single query and an item whose scores are there: lanes t = 0 and 1 have a token
  // each.
  __device__ __forceinline__ void count_one_query(int32_t item, const float (&lse)[2]) {
    const int32_t position = (r.first_tile + item) * kTileTokens + g + 8 * t;
    const bool counts =
        t < 2 && position >= r.first && position < least(r.at.tokens, position_of(0));
    auto* const score = reinterpret_cast<RawScore*>(r.bytes + c.raw.score_byte(position));
    RawScore sum;
    if (counts) sum = *score;
    const float4 x = kept_scores(item);
    float seen[2] = {fmaxf(probability(x.x, lse[0]), probability(x.y, lse[1])),
                     fmaxf(probability(x.z, lse[0]), probability(x.w, lse[1]))};
#pragma unroll
    for (int32_t lanes = 1; lanes < 4; lanes *= 2) {
      for (float& y : seen) y = fmaxf(y, __shfl_xor_sync(kFullWarp, y, lanes));
    }
    if (!counts || sum.count < 0) return;
    sum.sum = fminf(sum.sum + (t == 0 ? seen[0] : seen[1]), 3.402823466e38f);
    sum.count = least(sum.count + 1, kMostCounted);
    *score = sum;
  }

  // As HostPlace::count_query(): a query counts for the ring's tokens before its own.
  __device__ __forceinline__ void count_seen() {
    float lse[2];
#pragma unroll
    for (int32_t i = 0; i < 2; ++i) {
      lse[i] = column_at(2 * t + i).is_real ? shared.lse[2 * t + i] : -INFINITY;
    }
    for (int32_t item = first_item(); item < r.ring_tiles; item += kAttendWarps) {
      if (item < 0) continue;
      if (c.q_len == 1 && keeps(item)) {
        count_one_query(item, lse);
        continue;
      }
      for (int32_t j = 0; lane < kTileTokens && j < c.q_len; ++j) shared.largest[warp][j][lane] = 0;
      __syncwarp();
      if (keeps(item)) {
        const float4 x = kept_scores(item);
        const float s[4] = {x.x, x.y, x.z, x.w};
        see_columns(0, s);
      } else {
        uint32_t k[kBlocks][4];
        load_tile(Component::kKey, r.first_tile + item, k);
        for (int32_t first = 0; first < c.group * c.q_len; first += kColumns) {
          const Queries q = load_queries(first);
          float s[4];
          score_item(q, item, k, s);
          see_columns(first, s);
        }
      }
      const int32_t position = (r.first_tile + item) * kTileTokens + lane;
      if (lane < kTileTokens && position >= r.first && position < r.at.tokens) {
        auto* score = reinterpret_cast<RawScore*>(r.bytes + c.raw.score_byte(position));
        RawScore sum = *score;
        for (int32_t j = 0; j < c.q_len && sum.count >= 0; ++j) {
          if (position >= position_of(j)) continue;
          sum.sum = fminf(sum.sum + shared.largest[warp][j][lane], 3.402823466e38f);
          sum.count = least(sum.count + 1, kMostCounted);
        }
        *score = sum;
      }
      __syncwarp();
    }
  }
};

template <int32_t kHeadDim>
__global__ void __launch_bounds__(kAttendThreads)
    raw_attend_kernel(const __grid_constant__ RawAttendCall c) {
  extern __shared__ __align__(16) uint8_t attend_shared_bytes[];
  wait_for_previous_kernel();
  RawAttend<kHeadDim> row{c, *reinterpret_cast<RawAttendShared<kHeadDim>*>(attend_shared_bytes)};
  const int32_t columns = c.group * c.q_len;
  for (int32_t first = 0; first < columns; first += kColumns) {
    row.attend_columns(first);
    __syncthreads();  // what the round has used is free, lse[] is there
  }
  if (c.count_query) row.count_seen();
}

}  // namespace tierkv::store
