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

#include <cstdint>

#include "codec/format/token_sample.h"
#include "gpu/copies.cuh"
#include "gpu/warp.cuh"
#include "tierkv/significance.h"

namespace tierkv {

inline constexpr int32_t kColumns = 128;         // of a streamed tile
inline constexpr int32_t kScoresPerThread = 64;  // of 64 rows x 128 columns
inline constexpr int32_t kMathThreads = 256;     // two warpgroups, each with rows of its own

// One launch: `stationary` rows of one head against the stream of a group.
struct ScoreTask {
  SignificanceCall p;
  const float* lse;  // significance: in
  float* out;
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
  __device__ int32_t token_of(int32_t tile, int32_t column) const {
    return tokens.position(begin + tile * tokens_per_tile() + (column >> (3 + log_heads)) * 8 +
                           column % 8);
  }
  __device__ int32_t head_of(int32_t column) const {
    return first_head + min(column / 8 & ((1 << log_heads) - 1), heads - 1);
  }
};

// A tile of one sequence, as all warps of the CTA see it.
struct CtaTile {
  int32_t start, num_tokens;  // of the sequence
  TokenSample rows;           // all stationary rows of the sequence
  int32_t first_row;          // of the tile: an index of `rows`
  int32_t head;               // of the stationary rows

  __device__ int64_t scalar(int32_t head_index, int32_t token, int32_t total_tokens) const {
    return static_cast<int64_t>(head_index) * total_tokens + start + token;
  }
};

// Known to the compiler to be the same in all lanes: products may not run across divergent
// branches.
__device__ __forceinline__ int32_t warpgroup_index() {
  return __shfl_sync(kFullWarp, static_cast<int32_t>(threadIdx.x) / 128, 0);
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

// Tile, head and sequence of this CTA; false where the sequence has no such tile. Stationary are
// the counted queries, or all keys. Heavy tiles first.
__device__ inline bool find_tile(const SignificanceCall& p, int32_t rows, bool is_query,
                                 CtaTile* tile) {
  tile->start = p.starts[blockIdx.y];
  tile->num_tokens = p.starts[blockIdx.y + 1] - tile->start;
  tile->rows = sample_tokens(tile->num_tokens, is_query ? p.query_stride : 1);
  tile->head = static_cast<int32_t>(blockIdx.x);
  const auto index = static_cast<int32_t>(is_query ? gridDim.z - 1 - blockIdx.z : blockIdx.z);
  tile->first_row = index * rows;
  return tile->first_row < tile->rows.count;
}

// The queries that keys from the tile's first on meet.
__device__ inline StreamShape query_stream(const SignificanceCall& p, const CtaTile& tile) {
  const int32_t heads = p.num_q_heads / p.num_kv_heads;
  const TokenSample queries = sample_tokens(tile.num_tokens, p.query_stride);
  return {queries,       queries.index_from(tile.first_row),
          queries.count, tile.head * heads,
          heads,         log_heads(heads)};
}
// The keys that the tile's queries meet.
__device__ inline StreamShape key_stream(const SignificanceCall& p, const CtaTile& tile,
                                         int32_t rows) {
  const int32_t last = min(tile.first_row + rows, tile.rows.count) - 1;
  return {sample_tokens(tile.num_tokens, 1),
          0,
          tile.rows.position(last) + 1,
          tile.head / (p.num_q_heads / p.num_kv_heads),
          1,
          0};
}

// ---- copies ----

// kDims dims of a tile of kRows rows, by kThreads threads: find(row) names token and head.
template <int32_t kDims, int32_t kRows, int32_t kThreads, class Find>
__device__ __forceinline__ void copy_rows(const RowSource& from, uint8_t* to, Find&& find) {
  constexpr int32_t kPieces = kDims / 8;
  const int32_t thread = static_cast<int32_t>(threadIdx.x) % kThreads;
#pragma unroll 8
  for (int32_t n = 0; n < kRows * kPieces / kThreads; ++n) {
    const int32_t i = n * kThreads + thread, row = i / kPieces, piece = i % kPieces;
    const int2 at = find(row);
    const bool present = at.x < from.num_tokens;
    const int64_t offset = at.x * from.token_bytes + at.y * from.head_bytes + 16 * piece;
    copy_async_16(to + piece / 8 * kRows * 128 + row * 128 + (piece % 8 ^ row % 8) * 16,
                  from.base + (present ? offset : 0), present);
  }
}

}  // namespace tierkv
