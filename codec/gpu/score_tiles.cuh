// SPDX-License-Identifier: Apache-2.0
// Tiles of q . k^T on the tensor cores: a stationary tile of rows against a stream of tiles of
// other rows. What significance and the log-sum-exp of a prompt have in common, by wgmma
// (score_wgmma.cuh) and by mma.sync (score_mma.cuh).
//
// Rows of the stream lie in shared memory as rows of 128 bytes (64 dims), 16-byte pieces swizzled
// by row % 8, a panel for every 64 dims.
//
// A streamed tile has 128 columns. For a group of query heads they are eight tokens of every head
// in turn, so that the scores of a token by all heads of the group lie in one thread:
//   column n: head n / 8 % heads, token 8 (n / (8 heads)) + n % 8.
#pragma once

#include <algorithm>
#include <cstdint>

#include "codec/format/token_sample.h"
#include "gpu/copies.cuh"
#include "gpu/pdl.cuh"
#include "gpu/warp.cuh"
#include "tierkv/significance.h"

namespace tierkv {

inline constexpr int32_t kColumns = 128;         // of a streamed tile
inline constexpr int32_t kScoresPerThread = 64;  // of 64 rows x 128 columns
inline constexpr int32_t kMathThreads = 256;     // two warpgroups, each with rows of its own

// How the keys of a tile of queries are shared out among CTAs: each takes one part. What part i
// finds of a query at position j goes to lse[j - i], the entry of a query that is not counted,
// until join_lse() makes one of them. So there are at most query_stride parts.
struct KeyParts {
  int32_t query_tiles = 0;  // of a sequence, at most
  int32_t count = 0;        // of the last tile, at most
  int32_t keys = 0;         // of a part
};
// For tiles of `rows` queries and heads. A sum's order depends on max_tokens, the
// numbers of heads, head_dim and query_stride.
inline KeyParts split_keys(const SignificanceCall& p, int32_t rows) {
  constexpr int64_t kWantedCtas = 256;  // of a sequence: a large GPU runs them in two rounds
  constexpr int64_t kMostParts = 16;
  const int32_t tokens = rows / (p.num_q_heads / p.num_kv_heads);
  const int32_t tiles = (sample_tokens(p.max_tokens, p.query_stride).count - 1) / tokens + 1;
  const int32_t key_tiles = (p.max_tokens - 1) / kColumns + 1;
  // All tiles together have about tiles * (parts + 1) / 2 parts.
  const int64_t wanted = 2 * kWantedCtas / (int64_t{p.num_kv_heads} * tiles) - 1;
  const auto parts = static_cast<int32_t>(
      std::clamp<int64_t>(wanted, 1, std::min<int64_t>(p.query_stride, kMostParts)));
  const int32_t part_tiles = (key_tiles - 1) / parts + 1;
  return {tiles, (key_tiles - 1) / part_tiles + 1, part_tiles * kColumns};
}

// One launch: stationary rows against the stream of a group.
struct ScoreTask {
  SignificanceCall p;
  const float* lse;  // significance: in
  float* out;
  KeyParts parts;  // log-sum-exp
};

// Stationary rows of a CTA.
template <int32_t kHeadDim>
struct StationaryRows {
  static constexpr int32_t kSubTiles = kHeadDim > 128 ? 1 : 2;  // of 64 rows, for each warpgroup
  static constexpr int32_t kRows = 128 * kSubTiles;
};

// Rows of a 16-bit type in global memory; those from num_tokens on read as zeros.
struct RowSource {
  const uint8_t* base;  // token 0 of head 0, 16-byte aligned
  int64_t token_bytes, head_bytes;
  int32_t num_tokens;

  __device__ const uint8_t* row(int32_t token, int32_t head) const {
    return base + static_cast<uint32_t>(token) * static_cast<uint64_t>(token_bytes) +
           static_cast<uint32_t>(head) * static_cast<uint64_t>(head_bytes);
  }
};
// The stream: tokens of a sample from index `begin` to before `end`, of heads first_head ..
// first_head + heads - 1, padded to a power of two, 2^log_heads, by repeating the last.
struct StreamShape {
  TokenSample tokens;
  int32_t begin, end;
  int32_t first_head, heads, log_heads;

  __device__ int32_t tokens_per_tile() const { return kColumns >> log_heads; }
  __device__ int32_t tiles() const {
    return end <= begin ? 0 : (end - begin - 1) / tokens_per_tile() + 1;
  }
  __device__ int32_t token_of(int32_t tile, uint32_t column) const {
    return tokens.position(begin + tile * tokens_per_tile() + (column >> (3 + log_heads)) * 8 +
                           column % 8);
  }
  __device__ int32_t head_of(uint32_t column) const {
    const auto head = static_cast<int32_t>(column / 8 & ((1u << log_heads) - 1));
    return first_head + min(head, heads - 1);
  }
};

// Stationary rows of one sequence, as all warps of the CTA see them: row r is head r % heads of
// token r / heads.
struct CtaTile {
  int32_t start, num_tokens;  // of the sequence
  TokenSample tokens;         // those of the sequence that are stationary in some tile
  int32_t first, count;       // of the tile: indices of `tokens`
  int32_t first_head, heads;  // 1 to kMaxScoreGroup
  int32_t inverse;            // 65536 / heads + 1: exact for the rows of a tile

  __device__ int32_t index(int32_t row) const { return row * inverse >> 16; }
  __device__ int32_t token(int32_t row) const { return tokens.position(first + index(row)); }
  __device__ int32_t head(int32_t row) const { return first_head + row - index(row) * heads; }
  __device__ int64_t scalar(int32_t head_index, int32_t token, int32_t total_tokens) const {
    return static_cast<int64_t>(head_index) * total_tokens + start + token;
  }
};

// Known to the compiler to be the same in all lanes: products may not run across divergent
// branches.
__device__ __forceinline__ int32_t warpgroup_index() {
  return __shfl_sync(kFullWarp, static_cast<int32_t>(threadIdx.x) / 128, 0);
}

// Rows of a thread in the 64 x 128 scores of a sub-tile: g and g + 8; columns 8 c + 2 t + {0, 1}.
__device__ __forceinline__ int32_t thread_row() {
  return static_cast<int32_t>(threadIdx.x) % 128 / 32 * 16 + lane_index() / 4;
}
__device__ __forceinline__ int32_t thread_column() {
  return lane_index() % 4 * 2;
}

__device__ inline RowSource source_of(const SignificanceCall& p, bool is_query, int32_t start,
                                      int32_t num_tokens) {
  const int64_t token = is_query ? p.q_token_stride : p.k_token_stride;
  const int64_t head = is_query ? p.q_head_stride : p.k_head_stride;
  const auto* base = static_cast<const uint8_t*>(is_query ? p.q : p.k);
  return {base + 2 * token * start, 2 * token, 2 * head, num_tokens};
}

// 2^log_heads is at least heads.
__device__ inline int32_t log_heads(int32_t heads) {
  return 32 - __clz(heads - 1);
}

// The tile of this CTA, of `tokens` tokens and `heads` heads for each kv_head; count is not
// positive where the sequence, blockIdx.y, has no such tile. Waits first for the kernel before.
__device__ inline CtaTile find_tile(const SignificanceCall& p, int32_t stride, int32_t heads,
                                    int32_t index, int32_t tokens) {
  wait_for_previous_kernel();
  CtaTile tile;
  tile.start = p.starts == nullptr ? 0 : p.starts[blockIdx.y];
  tile.num_tokens = (p.starts == nullptr ? p.total_tokens : p.starts[blockIdx.y + 1]) - tile.start;
  tile.tokens = sample_tokens(tile.num_tokens, stride);
  tile.first = index * tokens;
  tile.count = min(tokens, tile.tokens.count - tile.first);
  tile.first_head = static_cast<int32_t>(blockIdx.x) * heads;
  tile.heads = heads;
  tile.inverse = 65536 / heads + 1;
  return tile;
}

// Keys and the queries that meet them, for significance; false where there are no such keys. Heavy
// tiles first.
__device__ inline bool find_keys(const SignificanceCall& p, int32_t rows, CtaTile* tile,
                                 StreamShape* queries) {
  const int32_t heads = p.num_q_heads / p.num_kv_heads;
  *tile = find_tile(p, 1, 1, static_cast<int32_t>(blockIdx.z), rows);
  const TokenSample counted = sample_tokens(tile->num_tokens, p.query_stride);
  *queries = {counted,       counted.index_from(tile->first),
              counted.count, tile->first_head * heads,
              heads,         log_heads(heads)};
  return tile->count > 0;
}
// Queries of a group and a part of the keys that they meet, for the log-sum-exp; false where there
// are none. The tiles with most keys first.
__device__ inline bool find_queries(const ScoreTask& task, int32_t rows, CtaTile* tile,
                                    StreamShape* keys) {
  const SignificanceCall& p = task.p;
  const int32_t heads = p.num_q_heads / p.num_kv_heads;
  const auto item = static_cast<int32_t>(blockIdx.z);
  const int32_t index = task.parts.query_tiles - 1 - item / task.parts.count;
  *tile = find_tile(p, p.query_stride, heads, index, rows / heads);
  const int32_t begin = item % task.parts.count * task.parts.keys;
  const int32_t seen = tile->tokens.position(tile->first + tile->count - 1) + 1;
  *keys = {sample_tokens(tile->num_tokens, 1), begin, min(begin + task.parts.keys, seen),
           static_cast<int32_t>(blockIdx.x),   1,     0};
  return tile->count > 0 && begin < keys->end;
}

// ---- copies ----

// A warp's stationary rows as A operands, 16 rows of each sub-tile; rows behind the sequence are
// zeros.
template <int32_t kHeadDim>
__device__ __forceinline__ void load_stationary(
    const RowSource& from, const CtaTile& tile,
    uint32_t (&a)[StationaryRows<kHeadDim>::kSubTiles][kHeadDim / 16][4]) {
  constexpr int32_t kSubTiles = StationaryRows<kHeadDim>::kSubTiles;
#pragma unroll
  for (int32_t i = 0; i < 2 * kSubTiles; ++i) {
    const int32_t row =
        warpgroup_index() * 64 * kSubTiles + 64 * (i / 2) + thread_row() + 8 * (i % 2);
    const int32_t token = tile.token(row);
    const bool present = token < from.num_tokens;
    const uint8_t* at = from.row(present ? token : 0, tile.head(row)) + 2 * thread_column();
#pragma unroll
    for (int32_t step = 0; step < kHeadDim / 16; ++step) {
#pragma unroll
      for (int32_t half = 0; half < 2; ++half) {
        const auto* pair = reinterpret_cast<const uint32_t*>(at + 32 * step + 16 * half);
        a[i / 2][step][i % 2 + 2 * half] = present ? *pair : 0;
      }
    }
  }
}

// kDims dims of a tile of kRows rows, by kThreads threads: find(row) names token and head.
template <int32_t kDims, int32_t kRows, int32_t kThreads, class Find>
__device__ __forceinline__ void copy_rows(const RowSource& from, uint8_t* to, Find&& find) {
  constexpr uint32_t kPieces = kDims / 8;
  const uint32_t thread = threadIdx.x % kThreads;
#pragma unroll 8
  for (uint32_t n = 0; n < kRows * kPieces / kThreads; ++n) {
    const uint32_t i = n * kThreads + thread, row = i / kPieces, piece = i % kPieces;
    const int2 at = find(row);
    const bool present = at.x < from.num_tokens;
    copy_async_16(to + piece / 8 * kRows * 128 + row * 128 + (piece % 8 ^ row % 8) * 16,
                  from.row(present ? at.x : 0, at.y) + 16 * piece, present);
  }
}

}  // namespace tierkv
