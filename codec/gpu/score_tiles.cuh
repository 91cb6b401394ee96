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

// How a sequence's log-sum-exps are shared out among CTAs. All tiles of queries, one after the
// other and kv_head by kv_head, stand for a line. A tile takes as much of it as its last query sees
// keys, and kStart before them for what it takes to begin a tile. A CTA takes `share` of the line,
// so it may end one tile and begin another. It begins with a multiple of kColumns keys. What part i
// of a tile finds of a query at position j goes to lse[j - i], the entry of a query that is not
// counted, until join_lse() makes one of them. So there are at most query_stride parts.
struct QueryLine {
  static constexpr int32_t kStart = kColumns;
  int32_t tile_tokens = 0;  // from one tile of queries to the next
  int32_t ctas = 0;         // blockIdx.z: of a kv_head where there is no share, else of a sequence
  int64_t share = 0;        // 0: a CTA takes a tile

  // Where tile i of a kv_head begins, from the kv_head's begin, and where its first key is.
  TKV_HD int64_t begin_of(int64_t tile) const {
    return tile_tokens * (tile * (tile + 1) / 2) + kStart * tile;
  }
  TKV_HD int64_t keys_of(int64_t tile) const { return begin_of(tile) + kStart; }
  // Which part has the key, of a tile whose first one is at `keys`.
  TKV_HD int32_t part_of(int64_t keys, int32_t key) const {
    if (share == 0) return 0;
    return static_cast<int32_t>((keys + key / kColumns * kColumns) / share - keys / share);
  }
};
TKV_HD int32_t tiles_of_queries(int32_t queries, int32_t tile_queries) {
  return (queries - 1) / tile_queries + 1;
}
// For tiles of `rows` queries and heads, on so many SMs. One sequence gets a CTA an SM; several,
// which may differ in length, get about twice as many together. So a sum's order depends on the
// numbers of SMs, sequences and heads, and on max_tokens, head_dim and query_stride.
inline QueryLine share_out(const SignificanceCall& p, int32_t rows, int32_t sms) {
  constexpr int64_t kLeastShare = 4 * kColumns;
  const int64_t wanted_ctas = p.num_sequences == 1 ? sms : 2 * sms / p.num_sequences + 1;
  const int32_t counted = sample_tokens(p.max_tokens, p.query_stride).count;
  const int32_t queries = std::min(rows / (p.num_q_heads / p.num_kv_heads), counted);
  const int32_t tiles = tiles_of_queries(counted, queries);
  QueryLine line = {queries * p.query_stride, tiles, 0};
  if (p.query_stride == 1) return line;
  const int64_t all = p.num_kv_heads * line.begin_of(tiles);
  const int64_t for_stride = p.max_tokens / (p.query_stride - 1) + 1;
  line.share = std::max({(all - 1) / wanted_ctas + 1, kLeastShare, for_stride});
  line.ctas = static_cast<int32_t>((all - 1) / line.share + 1);
  return line;
}

// One launch: stationary rows against the stream of a group.
struct ScoreTask {
  SignificanceCall p;
  const float* lse;  // significance: in
  float* out;
  QueryLine line;  // log-sum-exp
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
  int32_t part;               // of a tile of queries: which part of its keys (QueryLine)

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

// The sequence of this CTA, blockIdx.y, with every stride-th of its tokens; take_tile() says which
// are in the tile.
__device__ inline CtaTile find_sequence(const SignificanceCall& p, int32_t stride, int32_t heads) {
  CtaTile tile;
  tile.start = p.starts == nullptr ? 0 : p.starts[blockIdx.y];
  tile.num_tokens = (p.starts == nullptr ? p.total_tokens : p.starts[blockIdx.y + 1]) - tile.start;
  tile.tokens = sample_tokens(tile.num_tokens, stride);
  tile.heads = heads;
  tile.inverse = 65536 / heads + 1;
  return tile;
}
// The tile has `tokens` tokens of a kv_head; count is not positive where there is no such tile.
__device__ __forceinline__ void take_tile(int32_t kv_head, int32_t index, int32_t tokens,
                                          CtaTile* tile) {
  tile->first = index * tokens;
  tile->count = min(tokens, tile->tokens.count - tile->first);
  tile->first_head = kv_head * tile->heads;
}

// What a CTA takes for significance: keys, and the queries that meet them. Heavy tiles first.
struct KeyWork {
  CtaTile tile;
  StreamShape queries;

  __device__ __forceinline__ KeyWork(const ScoreTask& task, int32_t rows) {
    const SignificanceCall& p = task.p;
    const int32_t heads = p.num_q_heads / p.num_kv_heads;
    wait_for_previous_kernel();
    tile = find_sequence(p, 1, 1);
    take_tile(static_cast<int32_t>(blockIdx.x), static_cast<int32_t>(blockIdx.z), rows, &tile);
    const TokenSample counted = sample_tokens(tile.num_tokens, p.query_stride);
    queries = {counted,       counted.index_from(tile.first),
               counted.count, tile.first_head * heads,
               heads,         log_heads(heads)};
  }
  __device__ __forceinline__ bool is_empty() const { return tile.count <= 0; }
  template <class Take>
  __device__ __forceinline__ void each(Take&& take) const {
    take(tile, queries);
  }
};

// What a CTA takes of the line for log-sum-exps: each(take) calls take(tile, keys) for queries of a
// group and the part of the keys that they meet. Without a share, blockIdx.x is the kv_head and
// blockIdx.z the tile, the one with most keys first; with one, blockIdx.z is the place in the line.
struct QueryWork {
  const ScoreTask& task;
  int32_t rows;

  __device__ __forceinline__ QueryWork(const ScoreTask& of, int32_t of_tile)
      : task(of), rows(of_tile) {}
  __device__ __forceinline__ bool is_empty() const { return false; }
  template <class Take>
  __device__ __forceinline__ void each(Take&& take) const {
    const SignificanceCall& p = task.p;
    const QueryLine& line = task.line;
    const int32_t heads = p.num_q_heads / p.num_kv_heads, queries = rows / heads;
    const auto sequence = [&] { return find_sequence(p, p.query_stride, heads); };
    const auto tiles_of = [&](const CtaTile& tile) {
      return tiles_of_queries(tile.tokens.count, queries);
    };
    wait_for_previous_kernel();
    auto kv_head = static_cast<int32_t>(blockIdx.x);
    auto index = static_cast<int32_t>(gridDim.z - 1 - blockIdx.z);
    if (line.share > 0) {
      const int64_t at = blockIdx.z * line.share, of_head = line.begin_of(tiles_of(sequence()));
      kv_head = static_cast<int32_t>(at / of_head);
      index = 0;
      while (kv_head * of_head + line.begin_of(index + 1) <= at) ++index;
    }
    if (kv_head >= p.num_kv_heads || index >= tiles_of(sequence())) return;
#pragma unroll 1
    for (bool is_last = false; !is_last;) {
      CtaTile tile = sequence();  // anew, so that it takes no registers meanwhile
      const int32_t tiles = tiles_of(tile);
      const int64_t keys = kv_head * line.begin_of(tiles) + line.keys_of(index);
      const int64_t length = line.tile_tokens * (index + int64_t{1});
      int64_t from = 0, to = length;
      if (line.share > 0) {
        from = max(from, blockIdx.z * line.share - keys);
        to = min(to, (blockIdx.z + int64_t{1}) * line.share - keys);
      }
      take_tile(kv_head, index, queries, &tile);
      const int32_t seen = tile.tokens.position(tile.first + tile.count - 1) + 1;
      const int32_t first = static_cast<int32_t>(from + kColumns - 1) / kColumns * kColumns;
      const int32_t behind = static_cast<int32_t>(to + kColumns - 1) / kColumns * kColumns;
      tile.part = line.part_of(keys, first);
      const StreamShape stream = {
          sample_tokens(tile.num_tokens, 1), first, min(behind, seen), kv_head, 1, 0};
      if (++index == tiles) index = 0, ++kv_head;
      is_last = line.share == 0 || to < length || kv_head == p.num_kv_heads;
      if (first < stream.end) take(tile, stream);
    }
  }
};

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

// kDims dims of a tile of the stream, by kThreads threads. Eight columns at a time, which are one
// head's: where they are in memory is the same for all threads but for what each adds once.
template <int32_t kDims, int32_t kThreads>
__device__ __forceinline__ void copy_columns(const RowSource& from, const StreamShape& stream,
                                             int32_t tile, uint8_t* to) {
  constexpr int32_t kPieces = kDims / 8;              // of 16 bytes, of a column
  constexpr int32_t kTurns = 8 * kPieces / kThreads;  // for eight columns
  constexpr int32_t kEights = kTurns > 1 ? 1 : kThreads / (8 * kPieces);  // in a turn
  constexpr int32_t kColumnsOfTurn = kTurns > 1 ? kThreads / kPieces : 8;
  const int32_t thread = static_cast<int32_t>(threadIdx.x) % kThreads;
  const int32_t own_eight = thread / (kColumnsOfTurn * kPieces);
  const int32_t own_column = thread / kPieces % kColumnsOfTurn, piece = thread % kPieces;
  if (own_eight >= kEights) return;
#pragma unroll
  for (int32_t turn = 0; turn < (kTurns > 1 ? kTurns : 1); ++turn) {
    const int32_t column = own_column + turn * kColumnsOfTurn;
    const int32_t first = stream.token_of(tile, column);
    const uint8_t* const source = from.row(first, stream.first_head) + 16 * piece;
    uint8_t* const target =
        to + piece / 8 * kColumns * 128 + column * 128 + (piece % 8 ^ column) * 16;
#pragma unroll
    for (int32_t i = 0; i < kColumns / 8 / kEights; ++i) {
      const int32_t eight = i * kEights + own_eight;
      const int32_t tokens_on = (eight >> stream.log_heads) * 8 * stream.tokens.stride;
      const int32_t heads_on = stream.head_of(8 * eight) - stream.first_head;
      copy_async_16(target + eight * 1024,
                    source + static_cast<uint32_t>(tokens_on) * from.token_bytes +
                        static_cast<uint32_t>(heads_on) * from.head_bytes,
                    first + tokens_on < from.num_tokens);
    }
  }
}

}  // namespace tierkv
